// The weight of a token: what its probability is before all are divided by their sum. A whole number.
//
//   x = (logit - best) scale, not below -32          scale = log2(e) / temperature
//   weight = round(2^30 2^x)                         2^x by the polynomial below, every step in fp32, nothing fused
//
// Whole numbers can be added in any order, so the sum of any set of tokens is one number on every machine, in every form
// (server/engine/sampler.py computes the same bits in numpy). What is below 2^-31 of the best token's weight is 0.
#pragma once
#include <cmath>
#include <cstdint>

#include "lanes.h"

namespace kernels {

constexpr float LOWEST_EXPONENT = -32.0f;
constexpr int32_t BEST_WEIGHT = 1 << 30;

inline float exponent_of(float value, float best, float scale) {
    const float x = (value - best) * scale;
    return x < LOWEST_EXPONENT ? LOWEST_EXPONENT : x;
}

// `x` is an exponent_of.
inline int32_t weight_of(float x) {
    const float n = std::rint(x);
    const float f = x - n;  // -0.5 .. 0.5
    float p = 0.0013264735462144017f;  // 2^f within 1.6e-7: the best polynomial of degree 5 that is 1 at 0
    p = p * f + 0.00967151764780283f;
    p = p * f + 0.05550733953714371f;
    p = p * f + 0.24022242426872253f;
    p = p * f + 0.6931470036506653f;
    p = p * f + 1.0f;
    const uint32_t power = static_cast<uint32_t>(static_cast<int32_t>(n) + 30) << 23;
    return static_cast<int32_t>(std::rint(float_of_bits(bits_of_float(p) + power)));
}

}  // namespace kernels
