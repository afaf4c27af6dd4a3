// Sixteen numbers of a weight as a file stores them -> fp32, and a transposition of sixteen such sixteens.
//
// The rule that keeps bits fixed: a code of FP8 or FP4 times its scale is one multiplication whose result torch gives
// too. e4m3 (NaN: 0x7F) is read as the bits of an fp32 that is 2^120 too small, subnormal numbers included.
#pragma once
#include <cstring>
#include <utility>

#include "lanes.h"

namespace kernels {

constexpr float E4M3_BIAS = 0x1p120f;
// Magnitudes of e2m1, then their negatives.
alignas(64) constexpr float E2M1[LANES] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                           -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// 2^(byte - 127); 255 is NaN.
inline float e8m0(uint8_t byte) {
    if (byte == 0xFF) return std::numeric_limits<float>::quiet_NaN();
    return float_of_bits(byte ? static_cast<uint32_t>(byte) << 23 : 0x00400000u);
}

#if defined(__AVX512F__)

inline Lanes fp32_numbers(const uint8_t* p) { return {_mm512_castsi512_ps(_mm512_loadu_si512(p))}; }
inline Lanes bf16_numbers(const uint8_t* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_maskz_slli_epi32(ALL, _mm512_maskz_cvtepu16_epi32(ALL, half), 16))};
}
inline Lanes e4m3_numbers(const uint8_t* p) {
    const __m512i code = _mm512_maskz_cvtepu8_epi32(ALL, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m512i size = _mm512_set1_epi32(0x07F00000);
    const __m512i bits = _mm512_maskz_srai_epi32(ALL, _mm512_maskz_slli_epi32(ALL, code, 24), 4);
    const __m512i kept = _mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0x87F00000u)));
    const __mmask16 nan = _mm512_cmpeq_epi32_mask(_mm512_and_si512(bits, size), size);
    const __m512 value = _mm512_mul_ps(_mm512_castsi512_ps(kept), _mm512_set1_ps(E4M3_BIAS));
    return {_mm512_mask_blend_ps(nan, value, _mm512_set1_ps(std::numeric_limits<float>::quiet_NaN()))};
}
inline __m128i nibbles(const uint8_t* p) {
    const __m128i both = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), low = _mm_set1_epi8(15);
    return _mm_unpacklo_epi8(_mm_and_si128(both, low), _mm_and_si128(_mm_srli_epi16(both, 4), low));
}
inline Lanes e2m1_numbers(const uint8_t* p) {
    return {_mm512_maskz_permutexvar_ps(ALL, _mm512_maskz_cvtepu8_epi32(ALL, nibbles(p)), _mm512_load_ps(E2M1))};
}

inline __m512 two_low(__m512 a, __m512 b) { return _mm512_maskz_unpacklo_ps(ALL, a, b); }
inline __m512 two_high(__m512 a, __m512 b) { return _mm512_maskz_unpackhi_ps(ALL, a, b); }
inline __m512 four_low(__m512 a, __m512 b) {
    return _mm512_castpd_ps(_mm512_maskz_unpacklo_pd(0xFF, _mm512_castps_pd(a), _mm512_castps_pd(b)));
}
inline __m512 four_high(__m512 a, __m512 b) {
    return _mm512_castpd_ps(_mm512_maskz_unpackhi_pd(0xFF, _mm512_castps_pd(a), _mm512_castps_pd(b)));
}
template <int QUARTERS>
inline __m512 quarters(__m512 a, __m512 b) {
    return _mm512_maskz_shuffle_f32x4(ALL, a, b, QUARTERS);
}
inline void transpose(Lanes (&rows)[LANES]) {
    __m512 a[LANES], b[LANES];
    for (int i = 0; i < LANES; i += 2) {
        a[i] = two_low(rows[i].v, rows[i + 1].v);
        a[i + 1] = two_high(rows[i].v, rows[i + 1].v);
    }
    for (int i = 0; i < LANES; i += 4) {
        b[i] = four_low(a[i], a[i + 2]);
        b[i + 1] = four_high(a[i], a[i + 2]);
        b[i + 2] = four_low(a[i + 1], a[i + 3]);
        b[i + 3] = four_high(a[i + 1], a[i + 3]);
    }
    for (int j = 0; j < 4; j++) {  // quarter q of b[4 i + j] is column 4 q + j of rows 4 i .. 4 i + 3
        const __m512 even = quarters<0x88>(b[j], b[4 + j]), odd = quarters<0xDD>(b[j], b[4 + j]);
        const __m512 even2 = quarters<0x88>(b[8 + j], b[12 + j]), odd2 = quarters<0xDD>(b[8 + j], b[12 + j]);
        rows[j].v = quarters<0x88>(even, even2);
        rows[4 + j].v = quarters<0x88>(odd, odd2);
        rows[8 + j].v = quarters<0xDD>(even, even2);
        rows[12 + j].v = quarters<0xDD>(odd, odd2);
    }
}

#elif defined(__AVX2__) && defined(__FMA__)

inline __m256i eight_bytes(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline Lanes fp32_numbers(const uint8_t* p) {
    return {_mm256_loadu_ps(reinterpret_cast<const float*>(p)), _mm256_loadu_ps(reinterpret_cast<const float*>(p + 32))};
}
inline Lanes bf16_numbers(const uint8_t* p) {
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(low), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(high), 16))};
}
inline __m256 eight_e4m3(__m256i code) {
    const __m256i size = _mm256_set1_epi32(0x07F00000);
    const __m256i bits = _mm256_srai_epi32(_mm256_slli_epi32(code, 24), 4);
    const __m256i kept = _mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int>(0x87F00000u)));
    const __m256i nan = _mm256_cmpeq_epi32(_mm256_and_si256(bits, size), size);
    const __m256 value = _mm256_mul_ps(_mm256_castsi256_ps(kept), _mm256_set1_ps(E4M3_BIAS));
    return _mm256_blendv_ps(value, _mm256_set1_ps(std::numeric_limits<float>::quiet_NaN()), _mm256_castsi256_ps(nan));
}
inline Lanes e4m3_numbers(const uint8_t* p) { return {eight_e4m3(eight_bytes(p)), eight_e4m3(eight_bytes(p + 8))}; }
inline __m256 eight_e2m1(__m128i codes) {
    const __m256i code = _mm256_cvtepu8_epi32(codes);
    const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(code, 3), 31);
    return _mm256_xor_ps(_mm256_permutevar8x32_ps(_mm256_load_ps(E2M1), code), _mm256_castsi256_ps(sign));
}
inline Lanes e2m1_numbers(const uint8_t* p) {
    const __m128i both = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), low = _mm_set1_epi8(15);
    const __m128i codes = _mm_unpacklo_epi8(_mm_and_si128(both, low), _mm_and_si128(_mm_srli_epi16(both, 4), low));
    return {eight_e2m1(codes), eight_e2m1(_mm_srli_si128(codes, 8))};
}

inline void transpose_eight(__m256 (&r)[8]) {
    __m256 a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
        b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xEE);
        b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
        b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xEE);
    }
    for (int j = 0; j < 4; j++) {
        r[j] = _mm256_permute2f128_ps(b[j], b[4 + j], 0x20);
        r[4 + j] = _mm256_permute2f128_ps(b[j], b[4 + j], 0x31);
    }
}
inline void transpose(Lanes (&rows)[LANES]) {
    __m256 block[2][2][8];  // [half of the rows][half of the columns]
    for (int i = 0; i < LANES; i++) {
        block[i / 8][0][i % 8] = rows[i].low;
        block[i / 8][1][i % 8] = rows[i].high;
    }
    for (auto& half : block)
        for (auto& eight : half) transpose_eight(eight);
    for (int i = 0; i < LANES; i++) rows[i] = {block[0][i / 8][i % 8], block[1][i / 8][i % 8]};
}

#else

inline Lanes fp32_numbers(const uint8_t* p) {
    Lanes out;
    std::memcpy(out.v, p, sizeof out.v);
    return out;
}
inline Lanes bf16_numbers(const uint8_t* p) {
    return each_lane([=](int i) { return float_of_bits(static_cast<uint32_t>(p[2 * i] | p[2 * i + 1] << 8) << 16); });
}
inline Lanes e4m3_numbers(const uint8_t* p) {
    return each_lane([=](int i) {
        const uint32_t code = p[i];
        if ((code & 0x7Fu) == 0x7Fu) return std::numeric_limits<float>::quiet_NaN();
        return float_of_bits((code & 0x80u) << 24 | (code & 0x7Fu) << 20) * E4M3_BIAS;
    });
}
inline Lanes e2m1_numbers(const uint8_t* p) {
    return each_lane([=](int i) { return E2M1[p[i / 2] >> i % 2 * 4 & 15]; });
}
inline void transpose(Lanes (&rows)[LANES]) {
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < i; j++) std::swap(rows[i].v[j], rows[j].v[i]);
}

#endif

// To bf16 and back.
inline Lanes rounded_to_bf16(Lanes a) {
    float v[LANES];
    store(v, a);
    for (float& x : v) x = bf16_to_float(float_to_bf16(x));
    return load(v);
}

}  // namespace kernels
