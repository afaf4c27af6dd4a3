#include "quantization.h"

#include <cmath>

namespace kernels {
namespace {

constexpr uint32_t SIGN = 0x80000000u, INFINITE = 0x7F800000u, FRACTION = 0x007FFFFFu;

// E4M3: numbers from 2^-6 on have 3 bits of fraction behind a hidden one; below they are multiples of 2^-9.
struct Fp8 {
    static constexpr float FLOOR = 1e-4f;                  // the least that counts as a block's largest magnitude
    static constexpr uint32_t TOP_EXPONENT = 8;            // 448 = 1.75 2^8
    static constexpr uint32_t TOP_FRACTION = 0x00600000u;  // the bits of 0.75
    static constexpr int DROPPED = 20;                     // bits of an fp32 fraction that it does not have
    static constexpr float STEPS = 16384.0f;               // 2^14: fp32 numbers of this size are 2^-9 apart
    static constexpr uint32_t BIAS = 120;                  // of fp32's exponent, less that of this format's
};

// E2M1: numbers from 1 on have 1 bit of fraction behind a hidden one; below they are multiples of 0.5.
struct Fp4 {
    static constexpr float FLOOR = 7.052966104933725e-38f;  // 6 2^-126
    static constexpr uint32_t TOP_EXPONENT = 2;             // 6 = 1.5 2^2
    static constexpr uint32_t TOP_FRACTION = 0x00400000u;
    static constexpr int DROPPED = 22;
    static constexpr float STEPS = 4194304.0f;  // 2^22: 0.5 apart
    static constexpr uint32_t BIAS = 126;
};

// The bits of the largest magnitude; those of a NaN are the largest of all.
uint32_t largest(const float* x, int64_t n) {
    uint32_t top = 0;
    for (int64_t i = 0; i < n; i++) top = std::max(top, bits_of_float(x[i]) & ~SIGN);
    return top;
}

template <class F>
uint8_t scale_of(const float* x, int64_t n) {
    const uint32_t top = std::max(largest(x, n), bits_of_float(F::FLOOR));
    if (top >= INFINITE) return NAN_SCALE;
    return static_cast<uint8_t>((top >> 23) - F::TOP_EXPONENT + ((top & FRACTION) > F::TOP_FRACTION));
}

// 1 / scale_value(byte); both are normal numbers for what scale_of returns.
float inverse_of(uint8_t byte) { return float_of_bits((254u - byte) << 23); }

// a or b, by a mask: GCC vectorizes no branch around an operation with fp32 numbers.
inline uint32_t choose(bool first, uint32_t a, uint32_t b) { return b ^ ((a ^ b) & (0u - first)); }
inline float choose(bool first, float a, float b) {
    return float_of_bits(choose(first, bits_of_float(a), bits_of_float(b)));
}

// Whether a magnitude is too small to have a hidden one in the format.
template <class F>
inline bool is_subnormal(float size) {
    return bits_of_float(size) < ((F::BIAS + 1) << 23);
}

// The nearest number of the format to a magnitude that it reaches.
template <class F>
inline float nearest(float size) {
    const uint32_t bits = bits_of_float(size), half = (1u << (F::DROPPED - 1)) - 1;
    const uint32_t rounded = (bits + half + (bits >> F::DROPPED & 1u)) >> F::DROPPED << F::DROPPED;
    const float small = (size + F::STEPS) - F::STEPS;
    return choose(is_subnormal<F>(size), small, float_of_bits(rounded));
}

inline float magnitude(float x) { return float_of_bits(bits_of_float(x) & ~SIGN); }
inline float with_sign_of(float size, float x) { return float_of_bits(bits_of_float(size) | (bits_of_float(x) & SIGN)); }

// The code of a magnitude that is a number of the format.
template <class F>
inline uint32_t code_of(float size) {
    const uint32_t normal = (bits_of_float(size) >> F::DROPPED) - (F::BIAS << (23 - F::DROPPED));
    const uint32_t small = bits_of_float(size + F::STEPS) - bits_of_float(F::STEPS);
    return choose(is_subnormal<F>(size), small, normal);
}

// The magnitude of a code.
template <class F>
inline float size_of(uint32_t code) {
    constexpr uint32_t ONE = 1u << (23 - F::DROPPED);  // the least code of a normal number
    const float normal = float_of_bits((code << F::DROPPED) + (F::BIAS << 23));
    const float small = float_of_bits((code << F::DROPPED) + ((F::BIAS + 1) << 23)) - float_of_bits((F::BIAS + 1) << 23);
    return choose(code < ONE, small, normal);
}

inline uint8_t fp8_code(float scaled) {
    const uint32_t code = code_of<Fp8>(nearest<Fp8>(magnitude(scaled)));
    return static_cast<uint8_t>(code | (bits_of_float(scaled) >> 24 & 0x80u));
}
inline float fp8_value(uint8_t code) {
    constexpr uint32_t NAN_CODE = 0x7F;
    const uint32_t size = code & 0x7Fu;
    const float value = choose(size == NAN_CODE, std::numeric_limits<float>::quiet_NaN(), size_of<Fp8>(size));
    return float_of_bits(bits_of_float(value) | (code & 0x80u) << 24);
}

inline uint32_t fp4_code(float scaled) {
    return code_of<Fp4>(nearest<Fp4>(magnitude(scaled))) | (bits_of_float(scaled) >> 28 & 8u);
}
inline float fp4_value(uint32_t code) {
    return float_of_bits(bits_of_float(size_of<Fp4>(code & 7u)) | (code & 8u) << 28);
}

inline void put(float x, float* out) { *out = x; }
inline void put(float x, Bf16* out) { *out = float_to_bf16(x); }

// block(first, length, index) for every block.
template <class B>
inline void each_block(int64_t n, int block, B one) {
    for (int64_t first = 0, i = 0; first < n; first += block, i++) one(first, std::min<int64_t>(block, n - first), i);
}

template <class F>
void simulate(const float* x, int64_t n, int block, float* out) {
    each_block(n, block, [=](int64_t first, int64_t length, int64_t) {
        const float* from = x + first;
        float* to = out + first;
        const uint8_t byte = scale_of<F>(from, length);
        const float scale = scale_value(byte);
        if (byte == NAN_SCALE) return std::fill(to, to + length, scale);
        const float inverse = inverse_of(byte);
#pragma omp simd  // from and to may be the same
        for (int64_t i = 0; i < length; i++)
            to[i] = with_sign_of(nearest<F>(magnitude(from[i] * inverse)) * scale, from[i]);
    });
}

template <class T>
void decode(const uint8_t* codes, const uint8_t* scales, int64_t n, int block, T* x) {
    each_block(n, block, [=](int64_t first, int64_t length, int64_t index) {
        const float scale = scale_value(scales[index]);
        for (int64_t i = first; i < first + length; i++) put(fp8_value(codes[i]) * scale, x + i);
    });
}

}  // namespace

void encode_fp8(const float* x, int64_t n, int block, uint8_t* codes, uint8_t* scales) {
    each_block(n, block, [=](int64_t first, int64_t length, int64_t index) {
        const uint8_t byte = scales[index] = scale_of<Fp8>(x + first, length);
        if (byte == NAN_SCALE) return std::fill(codes + first, codes + first + length, uint8_t{0x7F});
        const float inverse = inverse_of(byte);
        for (int64_t i = first; i < first + length; i++) codes[i] = fp8_code(x[i] * inverse);
    });
}

void decode_fp8(const uint8_t* codes, const uint8_t* scales, int64_t n, int block, float* x) {
    decode(codes, scales, n, block, x);
}
void decode_fp8(const uint8_t* codes, const uint8_t* scales, int64_t n, int block, Bf16* x) {
    decode(codes, scales, n, block, x);
}

void encode_fp4(const float* x, int64_t n, int block, uint8_t* codes, uint8_t* scales) {
    each_block(n, block, [=](int64_t first, int64_t length, int64_t index) {
        const uint8_t byte = scales[index] = scale_of<Fp4>(x + first, length);
        if (byte == NAN_SCALE) return std::fill(codes + first / 2, codes + (first + length) / 2, uint8_t{0});
        const float inverse = inverse_of(byte);
        const float* const from = x + first;
        uint8_t* const to = codes + first / 2;
        for (int64_t i = 0; i < length / 2; i++)
            to[i] = static_cast<uint8_t>(fp4_code(from[2 * i] * inverse) | fp4_code(from[2 * i + 1] * inverse) << 4);
    });
}

void decode_fp4(const uint8_t* codes, const uint8_t* scales, int64_t n, int block, float* x) {
    each_block(n, block, [=](int64_t first, int64_t length, int64_t index) {
        const float scale = scale_value(scales[index]);
        const uint8_t* const from = codes + first / 2;
        float* const to = x + first;
        for (int64_t i = 0; i < length / 2; i++) {
            to[2 * i] = fp4_value(from[i] & 15u) * scale;
            to[2 * i + 1] = fp4_value(from[i] >> 4) * scale;
        }
    });
}

float encode_fp8_row(const float* x, int64_t n, uint8_t* codes) {
    constexpr float MOST = 448.0f;
    const float scale = float_of_bits(std::max(largest(x, n), bits_of_float(Fp8::FLOOR))) / MOST;
    if (!(scale < INF)) {
        std::fill(codes, codes + n, uint8_t{0x7F});
        return std::numeric_limits<float>::quiet_NaN();
    }
    for (int64_t i = 0; i < n; i++) {
        const float scaled = x[i] / scale, bounded = std::min(magnitude(scaled), MOST);
        codes[i] = fp8_code(with_sign_of(bounded, scaled));
    }
    return scale;
}

void decode_fp8_row(const uint8_t* codes, float scale, int64_t n, float* x) {
    for (int64_t i = 0; i < n; i++) x[i] = fp8_value(codes[i]) * scale;
}

void simulate_fp8(const float* x, int64_t n, int block, float* out) { simulate<Fp8>(x, n, block, out); }
void simulate_fp4(const float* x, int64_t n, int block, float* out) { simulate<Fp4>(x, n, block, out); }

void hadamard(float* x, int n) {
    for (int apart = 1; apart < n; apart *= 2)
        for (int first = 0; first < n; first += 2 * apart)
            for (int i = first; i < first + apart; i++) {
                const float a = x[i], b = x[i + apart];
                x[i] = a + b;
                x[i + apart] = a - b;
            }
    const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(n)));
    for (int i = 0; i < n; i++) x[i] *= scale;
}

}  // namespace kernels

using namespace kernels;

#pragma GCC visibility push(default)
extern "C" {
// Each by itself, for tests.
void kernels_encode_fp8(const float* x, int64_t n, int64_t block, uint8_t* codes, uint8_t* scales) {
    encode_fp8(x, n, static_cast<int>(block), codes, scales);
}
void kernels_decode_fp8(const uint8_t* codes, const uint8_t* scales, int64_t n, int64_t block, float* x) {
    decode_fp8(codes, scales, n, static_cast<int>(block), x);
}
void kernels_encode_fp4(const float* x, int64_t n, int64_t block, uint8_t* codes, uint8_t* scales) {
    encode_fp4(x, n, static_cast<int>(block), codes, scales);
}
void kernels_decode_fp4(const uint8_t* codes, const uint8_t* scales, int64_t n, int64_t block, float* x) {
    decode_fp4(codes, scales, n, static_cast<int>(block), x);
}
void kernels_simulate_fp8(const float* x, int64_t n, int64_t block, float* out) {
    simulate_fp8(x, n, static_cast<int>(block), out);
}
void kernels_simulate_fp4(const float* x, int64_t n, int64_t block, float* out) {
    simulate_fp4(x, n, static_cast<int>(block), out);
}
void kernels_hadamard(float* x, int64_t n) { hadamard(x, static_cast<int>(n)); }
}
#pragma GCC visibility pop
