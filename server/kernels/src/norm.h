// What many kernels share about one row: RMS norm, rope, and numbers in the dtype of a pool.
//
// The rule that keeps bits fixed: a sum of products is 64 chains of fused multiply-adds (element i belongs to chain
// i % 64), the four sixteens are added as (0 + 1) + (2 + 3), and then lane by lane (`sum`). All else is one operation
// an element.
#pragma once
#include "kernels.h"
#include "lanes.h"

namespace kernels {

inline float dot(const float* a, const float* b, int64_t n) {
    Lanes sums[4] = {zeros(), zeros(), zeros(), zeros()};
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (int k = 0; k < 4; k++) sums[k] = fma(load(a + i + k * LANES), load(b + i + k * LANES), sums[k]);
    for (int k = 0; i < n; k++, i += LANES) sums[k] = fma(load_first(a + i, n - i), load_first(b + i, n - i), sums[k]);
    return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// 1 / sqrt(mean(x^2) + eps)
inline float inverse_rms(const float* x, int64_t n, float eps) {
    return 1.0f / std::sqrt(dot(x, x, n) / static_cast<float>(n) + eps);
}

// out = weight * x / rms(x); without a weight only x / rms(x). out may be x.
inline void rms_norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
    const float inverse = inverse_rms(x, n, eps);
    if (weight)
        for (int64_t i = 0; i < n; i++) out[i] = x[i] * inverse * weight[i];
    else
        for (int64_t i = 0; i < n; i++) out[i] = x[i] * inverse;
}

// cos and sin of a position, [rope_dim / 2, 2].
inline const float* rope_at(const RopeTable& table, int64_t position, int rope_dim) {
    return table.blocks[position / table.block] + position % table.block * rope_dim;
}

// Rotates the pairs (2i, 2i + 1) of x [rope_dim] in place; `rotate_back` undoes it. Fused on purpose: GCC 12.2 fuses
// a * c - b * s where it vectorizes a pair, and nowhere else, whatever -ffp-contract says.
inline void rotate(float* x, const float* cos_sin, int rope_dim) {
    for (int i = 0; i < rope_dim; i += 2) {
        const float c = cos_sin[i], s = cos_sin[i + 1], a = x[i], b = x[i + 1];
        x[i] = std::fma(a, c, -(b * s));
        x[i + 1] = std::fma(a, s, b * c);
    }
}
inline void rotate_back(float* x, const float* cos_sin, int rope_dim) {
    for (int i = 0; i < rope_dim; i += 2) {
        const float c = cos_sin[i], s = cos_sin[i + 1], a = x[i], b = x[i + 1];
        x[i] = std::fma(a, c, b * s);
        x[i + 1] = std::fma(b, c, -(a * s));
    }
}

inline int64_t dtype_nbytes(int32_t dtype) { return dtype == BF16 ? 2 : 4; }

// The number that `dtype` keeps of each x, again in fp32: what is read back later is the same.
inline void round_to(int32_t dtype, float* x, int64_t n) {
    if (dtype == BF16)
        for (int64_t i = 0; i < n; i++) x[i] = bf16_to_float(float_to_bf16(x[i]));
}

inline void to_dtype(const float* x, int64_t n, int32_t dtype, void* out) {
    if (dtype == BF16)
        for (int64_t i = 0; i < n; i++) static_cast<Bf16*>(out)[i] = float_to_bf16(x[i]);
    else
        std::memcpy(out, x, static_cast<size_t>(n) * sizeof(float));
}

inline void from_dtype(const void* x, int64_t n, int32_t dtype, float* out) {
    if (dtype == BF16)
        for (int64_t i = 0; i < n; i++) out[i] = bf16_to_float(static_cast<const Bf16*>(x)[i]);
    else
        std::memcpy(out, x, static_cast<size_t>(n) * sizeof(float));
}

}  // namespace kernels
