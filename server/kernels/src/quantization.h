// Blocks of small numbers with one scale: what is stored, and the values that it stands for. server/model/quantization.py
// defines the same, bit for bit.
//
//   fp8 (E4M3): 3 bits of fraction, at most 448            fp4 (E2M1): 0, 0.5, 1, 1.5, 2, 3, 4, 6, two in a byte
//   scale (E8M0): one byte, 2^(byte - 127), 255 is NaN; the smallest power with which the block's largest number fits
//
// Rounded to the nearest, ties to even. A block that holds a NaN or an infinity is NaN throughout.
//
// The rule that keeps bits fixed: the largest magnitude of a block is a maximum of whole numbers, which has no order;
// the scale is made of its bits; everything else is one operation an element, each exact or rounded once.
#pragma once
#include <algorithm>
#include <cstdint>

#include "lanes.h"

namespace kernels {

constexpr int ACTIVATION_BLOCK = 128;  // channels that share a scale before a quantized matrix; the last may be fewer

// Channels that share a scale in a row of keys and values (`width` without the rotated ones), and in an index key: 64
// and 32, or what divides a smaller width.
inline int lowest_bit(int n, int most) { return n ? std::min(n & -n, most) : most; }
inline int kv_block(int width) { return lowest_bit(width, 64); }
inline int index_block(int width) { return lowest_bit(width, 32); }

constexpr uint8_t NAN_SCALE = 255;

inline float scale_value(uint8_t byte) {
    if (byte == NAN_SCALE) return std::numeric_limits<float>::quiet_NaN();
    return float_of_bits(byte ? static_cast<uint32_t>(byte) << 23 : 0x00400000u);
}

// Codes [n] and scales [n / block, rounded up] of x [n], and back.
void encode_fp8(const float* x, int64_t n, int block, uint8_t* codes, uint8_t* scales);
void decode_fp8(const uint8_t* codes, const uint8_t* scales, int64_t n, int block, float* x);
void decode_fp8(const uint8_t* codes, const uint8_t* scales, int64_t n, int block, Bf16* x);

// The same with codes [n / 2], the lower half of a byte first; n and block are even.
void encode_fp4(const float* x, int64_t n, int block, uint8_t* codes, uint8_t* scales);
void decode_fp4(const uint8_t* codes, const uint8_t* scales, int64_t n, int block, float* x);

// One scale for all, which is no power of two: the largest magnitude (at least 1e-4) / 448. Returns it.
float encode_fp8_row(const float* x, int64_t n, uint8_t* codes);
void decode_fp8_row(const uint8_t* codes, float scale, int64_t n, float* x);

// x [n] as fp8 or fp4 would store it; out may be x.
void simulate_fp8(const float* x, int64_t n, int block, float* out);
void simulate_fp4(const float* x, int64_t n, int block, float* out);

// x [n] times the Hadamard matrix in Sylvester's order, divided by sqrt(n); n is a power of two.
void hadamard(float* x, int n);

}  // namespace kernels
