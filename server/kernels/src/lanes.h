// Sixteen fp32 numbers that are computed at once, and the few functions that the kernels need of them.
//
// Three forms: one AVX-512 register, a pair of AVX2 registers, or a plain array for any other machine.
// The rule that keeps bits fixed: all three give the same bits. So every operation here rounds as IEEE 754 says
// (+ - * / sqrt and fma, one rounding each), a sum over the lanes is one fixed tree, and exp and log are our own
// polynomials (libm differs between machines). Build with -ffp-contract=off: a fused operation is written as `fma`.
// NaN comes through everywhere, also through `min` and `max`; only the payload of a NaN may differ between the forms.
// A plain loop over elements (no sum across them) is as safe as these functions, however the compiler vectorizes it.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#include <immintrin.h>
#endif

namespace kernels {

constexpr int LANES = 16;
constexpr float INF = std::numeric_limits<float>::infinity();
using Bf16 = uint16_t;  // the upper half of an fp32

inline float float_of_bits(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

inline uint32_t bits_of_float(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float bf16_to_float(Bf16 x) { return float_of_bits(static_cast<uint32_t>(x) << 16); }

// Rounds to the nearest, ties to even, as torch does.
inline Bf16 float_to_bf16(float x) {
    const uint32_t bits = bits_of_float(x);
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<Bf16>(x == x ? rounded : 0x7FC0u);
}

#if defined(__AVX512F__)

// Some intrinsics are taken in their masked form with all bits set, which is the same instruction: in the plain form
// GCC 12 warns of a variable of its own header (bug 105593).
constexpr __mmask16 ALL = 0xFFFF;

struct Lanes {
    __m512 v;
};

inline Lanes splat(float x) { return {_mm512_set1_ps(x)}; }
inline Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Lanes a) { _mm512_storeu_ps(p, a.v); }
inline Lanes operator+(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Lanes operator-(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Lanes operator*(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Lanes operator/(Lanes a, Lanes b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Lanes sqrt(Lanes a) { return {_mm512_maskz_sqrt_ps(ALL, a.v)}; }

// Bit i: whether lane i of a is below lane i of b; false where one is NaN.
inline uint32_t less(Lanes a, Lanes b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ); }
inline uint32_t is_nan(Lanes a) { return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q); }
// Lane i of `yes` where bit i is set, else of `no`.
inline Lanes select(uint32_t bits, Lanes yes, Lanes no) {
    return {_mm512_mask_blend_ps(static_cast<__mmask16>(bits), no.v, yes.v)};
}

// Two bf16 a lane, as a matrix is packed: first the numbers in the lower halves, then those in the upper ones.
struct PairOfLanes {
    Lanes first, second;
};
inline PairOfLanes load_pairs(const Bf16* p) {
    const __m512i both = _mm512_loadu_si512(p);
    return {{_mm512_castsi512_ps(_mm512_maskz_slli_epi32(ALL, both, 16))},
            {_mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))))}};
}
inline Lanes load(const Bf16* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_maskz_slli_epi32(ALL, _mm512_maskz_cvtepu16_epi32(ALL, half), 16))};
}

// p 2^n, rounded once; n integral.
inline Lanes scale_by_power(Lanes p, Lanes n) { return {_mm512_maskz_scalef_ps(ALL, p.v, n.v)}; }
// Of positive normal numbers: floor(log2 x), and x / 2^that.
inline Lanes exponent(Lanes x) { return {_mm512_maskz_getexp_ps(ALL, x.v)}; }
inline Lanes mantissa(Lanes x) { return {_mm512_maskz_getmant_ps(ALL, x.v, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_zero)}; }

#elif defined(__AVX2__) && defined(__FMA__)

struct Lanes {
    __m256 low, high;
};

inline Lanes splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Lanes load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Lanes a) {
    _mm256_storeu_ps(p, a.low);
    _mm256_storeu_ps(p + 8, a.high);
}
inline Lanes operator+(Lanes a, Lanes b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Lanes operator-(Lanes a, Lanes b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Lanes operator*(Lanes a, Lanes b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Lanes operator/(Lanes a, Lanes b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline Lanes fma(Lanes a, Lanes b, Lanes c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Lanes sqrt(Lanes a) { return {_mm256_sqrt_ps(a.low), _mm256_sqrt_ps(a.high)}; }

inline uint32_t bits_of(__m256 low, __m256 high) {
    return static_cast<uint32_t>(_mm256_movemask_ps(low)) | static_cast<uint32_t>(_mm256_movemask_ps(high)) << 8;
}
inline uint32_t less(Lanes a, Lanes b) {
    return bits_of(_mm256_cmp_ps(a.low, b.low, _CMP_LT_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_LT_OQ));
}
inline uint32_t is_nan(Lanes a) {
    return bits_of(_mm256_cmp_ps(a.low, a.low, _CMP_UNORD_Q), _mm256_cmp_ps(a.high, a.high, _CMP_UNORD_Q));
}
inline __m256 mask_of(uint32_t bits) {
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i all = _mm256_set1_epi32(static_cast<int>(bits));
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(all, bit), bit));
}
inline Lanes select(uint32_t bits, Lanes yes, Lanes no) {
    return {_mm256_blendv_ps(no.low, yes.low, mask_of(bits)), _mm256_blendv_ps(no.high, yes.high, mask_of(bits >> 8))};
}

struct PairOfLanes {
    Lanes first, second;
};
inline PairOfLanes load_pairs(const Bf16* p) {
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xFFFF0000u));
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16));
    return {{_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))},
            {_mm256_castsi256_ps(_mm256_and_si256(low, upper)), _mm256_castsi256_ps(_mm256_and_si256(high, upper))}};
}
inline __m256 load_eight(const Bf16* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
inline Lanes load(const Bf16* p) { return {load_eight(p), load_eight(p + 8)}; }

// 2^(n / 2) and 2^(n - n / 2) are both normal numbers where the product is not.
inline __m256 scale_eight(__m256 p, __m256 n) {
    const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1), bias = _mm256_set1_epi32(127);
    const __m256i a = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
    const __m256i b = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), bias), 23);
    return _mm256_mul_ps(_mm256_mul_ps(p, _mm256_castsi256_ps(a)), _mm256_castsi256_ps(b));
}
inline Lanes scale_by_power(Lanes p, Lanes n) { return {scale_eight(p.low, n.low), scale_eight(p.high, n.high)}; }
inline __m256 exponent_of_eight(__m256 x) {
    const __m256i biased = _mm256_srli_epi32(_mm256_castps_si256(x), 23);
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(biased, _mm256_set1_epi32(127)));
}
inline __m256 mantissa_of_eight(__m256 x) {
    const __m256i fraction = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x007FFFFF));
    return _mm256_castsi256_ps(_mm256_or_si256(fraction, _mm256_set1_epi32(0x3F800000)));
}
inline Lanes exponent(Lanes x) { return {exponent_of_eight(x.low), exponent_of_eight(x.high)}; }
inline Lanes mantissa(Lanes x) { return {mantissa_of_eight(x.low), mantissa_of_eight(x.high)}; }

#else

struct Lanes {
    float v[LANES];
};

template <class F>
inline Lanes each_lane(F f) {
    Lanes out;
    for (int i = 0; i < LANES; i++) out.v[i] = f(i);
    return out;
}
inline Lanes splat(float x) { return each_lane([=](int) { return x; }); }
inline Lanes load(const float* p) { return each_lane([=](int i) { return p[i]; }); }
inline Lanes load(const Bf16* p) { return each_lane([=](int i) { return bf16_to_float(p[i]); }); }
inline void store(float* p, const Lanes& a) { std::memcpy(p, a.v, sizeof a.v); }
inline Lanes operator+(const Lanes& a, const Lanes& b) { return each_lane([&](int i) { return a.v[i] + b.v[i]; }); }
inline Lanes operator-(const Lanes& a, const Lanes& b) { return each_lane([&](int i) { return a.v[i] - b.v[i]; }); }
inline Lanes operator*(const Lanes& a, const Lanes& b) { return each_lane([&](int i) { return a.v[i] * b.v[i]; }); }
inline Lanes operator/(const Lanes& a, const Lanes& b) { return each_lane([&](int i) { return a.v[i] / b.v[i]; }); }
inline Lanes fma(const Lanes& a, const Lanes& b, const Lanes& c) {
    return each_lane([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); });
}
inline Lanes sqrt(const Lanes& a) { return each_lane([&](int i) { return std::sqrt(a.v[i]); }); }

template <class F>
inline uint32_t bits_where(F f) {
    uint32_t bits = 0;
    for (int i = 0; i < LANES; i++) bits |= (f(i) ? 1u : 0u) << i;
    return bits;
}
inline uint32_t less(const Lanes& a, const Lanes& b) { return bits_where([&](int i) { return a.v[i] < b.v[i]; }); }
inline uint32_t is_nan(const Lanes& a) { return bits_where([&](int i) { return a.v[i] != a.v[i]; }); }
inline Lanes select(uint32_t bits, const Lanes& yes, const Lanes& no) {
    return each_lane([&](int i) { return bits >> i & 1u ? yes.v[i] : no.v[i]; });
}

struct PairOfLanes {
    Lanes first, second;
};
inline PairOfLanes load_pairs(const Bf16* p) {
    return {each_lane([=](int i) { return bf16_to_float(p[2 * i]); }),
            each_lane([=](int i) { return bf16_to_float(p[2 * i + 1]); })};
}

inline Lanes scale_by_power(const Lanes& p, const Lanes& n) {
    return each_lane([&](int i) {
        const int32_t whole = n.v[i] == n.v[i] ? static_cast<int32_t>(n.v[i]) : 0, half = whole >> 1;
        const float a = float_of_bits(static_cast<uint32_t>(half + 127) << 23);
        const float b = float_of_bits(static_cast<uint32_t>(whole - half + 127) << 23);
        return p.v[i] * a * b;
    });
}
inline Lanes exponent(const Lanes& x) {
    return each_lane([&](int i) { return static_cast<float>(static_cast<int32_t>(bits_of_float(x.v[i]) >> 23) - 127); });
}
inline Lanes mantissa(const Lanes& x) {
    return each_lane([&](int i) { return float_of_bits((bits_of_float(x.v[i]) & 0x007FFFFFu) | 0x3F800000u); });
}

#endif

inline Lanes zeros() { return splat(0.0f); }

// NaN where one of the two is NaN.
inline Lanes max(Lanes a, Lanes b) { return select(less(a, b) | is_nan(b), b, a); }
inline Lanes min(Lanes a, Lanes b) { return select(less(b, a) | is_nan(b), b, a); }

// The first n lanes, which from 16 on are all. The others are `rest`, and are not stored.
inline Lanes load_first(const float* p, int64_t n, float rest = 0.0f) {
    if (n >= LANES) return load(p);
    float whole[LANES];
    for (int i = 0; i < LANES; i++) whole[i] = i < n ? p[i] : rest;
    return load(whole);
}
inline void store_first(float* p, Lanes a, int64_t n) {
    if (n >= LANES) return store(p, a);
    float whole[LANES];
    store(whole, a);
    for (int i = 0; i < n; i++) p[i] = whole[i];
}

// The sum of the lanes: lane i plus lane i + 8, those plus their fourth next, their second next, their next.
inline float sum(Lanes a) {
    float v[LANES];
    store(v, a);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) v[i] += v[i + half];
    return v[0];
}
// The largest lane, NaN if one is.
inline float max_of(Lanes a) {
    float v[LANES];
    store(v, a);
    float top = v[0];
    for (int i = 1; i < LANES; i++) top = v[i] > top || v[i] != v[i] ? v[i] : top;
    return top;
}

// e^x to about 1 ulp; 0 below -104, infinity above 88.8. (Cephes' polynomial: x = n ln 2 + f, |f| <= ln 2 / 2.)
inline Lanes exp(Lanes x) {
    x = min(max(x, splat(-104.0f)), splat(89.0f));
    const Lanes shift = splat(12582912.0f);  // 1.5 2^23: adding and taking it away rounds to an integer
    const Lanes n = fma(x, splat(1.44269504088896341f), shift) - shift;
    Lanes f = fma(n, splat(-0.693359375f), x);
    f = fma(n, splat(2.12194440e-4f), f);
    Lanes p = splat(1.9875691500e-4f);
    p = fma(p, f, splat(1.3981999507e-3f));
    p = fma(p, f, splat(8.3334519073e-3f));
    p = fma(p, f, splat(4.1665795894e-2f));
    p = fma(p, f, splat(1.6666665459e-1f));
    p = fma(p, f, splat(5.0000001201e-1f));
    p = fma(p, f * f, f) + splat(1.0f);
    return scale_by_power(p, n);
}

// ln x to about 1 ulp; -infinity of 0, NaN below. (Cephes' polynomial: x = 2^n (1 + f), f between -0.3 and 0.42.)
inline Lanes log(Lanes x) {
    const Lanes smallest = splat(1.17549435e-38f), one = splat(1.0f);
    const uint32_t is_small = less(x, smallest);
    const Lanes normal = select(is_small, x * splat(8388608.0f), x);  // 2^23
    Lanes n = exponent(normal) - select(is_small, splat(23.0f), zeros());
    Lanes m = mantissa(normal);
    const uint32_t is_big = less(splat(1.41421356f), m);
    n = select(is_big, n + one, n);
    const Lanes f = select(is_big, m * splat(0.5f), m) - one;
    Lanes p = splat(7.0376836292e-2f);
    p = fma(p, f, splat(-1.1514610310e-1f));
    p = fma(p, f, splat(1.1676998740e-1f));
    p = fma(p, f, splat(-1.2420140846e-1f));
    p = fma(p, f, splat(1.4249322787e-1f));
    p = fma(p, f, splat(-1.6668057665e-1f));
    p = fma(p, f, splat(2.0000714765e-1f));
    p = fma(p, f, splat(-2.4999993993e-1f));
    p = fma(p, f, splat(3.3333331174e-1f));
    const Lanes square = f * f;
    Lanes y = fma(n, splat(-2.12194440e-4f), p * square * f);
    y = fma(square, splat(-0.5f), y) + f;
    y = fma(n, splat(0.693359375f), y);
    y = select(less(splat(std::numeric_limits<float>::max()), x), splat(INF), y);
    y = select(less(x, smallest * splat(1.1920929e-7f)), splat(-INF), y);
    y = select(less(x, zeros()) | is_nan(x), splat(std::numeric_limits<float>::quiet_NaN()), y);
    return y;
}

// ln(1 + u) for u >= 0, exact to about 2 ulp also where u is tiny: what 1 + u rounds away is put back.
inline Lanes log1p(Lanes u) {
    const Lanes one = splat(1.0f), w = one + u;
    const Lanes y = log(w) + (u - (w - one)) / w;
    return select(less(splat(std::numeric_limits<float>::max()), u), u, y);
}

inline float exp(float x) {
    float out[LANES];
    store(out, exp(splat(x)));
    return out[0];
}

inline Lanes sigmoid(Lanes x) { return splat(1.0f) / (splat(1.0f) + exp(zeros() - x)); }

// ln(1 + e^x); from 20 on that is x in fp32.
inline Lanes softplus(Lanes x) { return max(x, log1p(exp(min(x, splat(20.0f))))); }

}  // namespace kernels
