#include "logprobs.h"

#include <cmath>
#include <cstring>

namespace kernels {
namespace {

constexpr int SUMS = 16;
constexpr double NOTHING = -60.0;  // e^-60 of the largest summand changes no bit, a million times

uint64_t bits_of(double x) {
    uint64_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

double of_bits(uint64_t bits) {
    double x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// e^x for -700 <= x <= 0, or x = -infinity, which counts as -700: x = n ln 2 + r, and Taylor's series for e^r.
inline double exp_of(double x) {
    x = x < -700.0 ? -700.0 : x;
    const double shift = 6755399441055744.0;  // 1.5 2^52: adding and taking it away rounds to an integer
    const double shifted = std::fma(x, 1.4426950408889634074, shift);
    const double n = shifted - shift;
    double r = std::fma(n, -6.93147180369123816490e-01, x);
    r = std::fma(n, -1.90821492927058770002e-10, r);
    double p = 1.0 / 6227020800.0;
    p = std::fma(p, r, 1.0 / 479001600.0);
    p = std::fma(p, r, 1.0 / 39916800.0);
    p = std::fma(p, r, 1.0 / 3628800.0);
    p = std::fma(p, r, 1.0 / 362880.0);
    p = std::fma(p, r, 1.0 / 40320.0);
    p = std::fma(p, r, 1.0 / 5040.0);
    p = std::fma(p, r, 1.0 / 720.0);
    p = std::fma(p, r, 1.0 / 120.0);
    p = std::fma(p, r, 1.0 / 24.0);
    p = std::fma(p, r, 1.0 / 6.0);
    p = std::fma(p, r, 0.5);
    p = std::fma(p, r, 1.0);
    p = std::fma(p, r, 1.0);
    return of_bits(bits_of(p) + (bits_of(shifted) << 52));  // the low bits of `shifted` are n
}

// ln x for x >= 1: x = 2^n m with m near 1, and ln m = 2 artanh((m - 1) / (m + 1)) by its series.
double log_of(double x) {
    int n;
    double m = std::frexp(x, &n);
    if (m < 0.70710678118654752440) {
        m *= 2;
        n--;
    }
    const double s = (m - 1) / (m + 1), square = s * s;
    double p = 1.0 / 23;
    for (int k = 21; k >= 1; k -= 2) p = std::fma(p, square, 1.0 / k);
    return std::fma(n, 0.69314718055994530942, 2 * s * p);
}

}  // namespace

double log_sum_exp(const ScannedRow& row) {
    const double best = row.best;
    double sums[SUMS] = {};
    for (int32_t b = 0; b < row.n_blocks; b++) {
        if (row.block_best[b] - best < NOTHING) continue;
        const float* block = row.values + b * BLOCK;
        const int32_t length = row.length(b);
        int32_t i = 0;
        for (; i + SUMS <= length; i += SUMS) {
#pragma omp simd
            for (int32_t j = 0; j < SUMS; j++) sums[j] += exp_of(block[i + j] - best);
        }
        for (int32_t j = 0; i + j < length; j++) sums[j] += exp_of(block[i + j] - best);
    }
    for (int half = SUMS / 2; half; half /= 2)
        for (int j = 0; j < half; j++) sums[j] += sums[j + half];
    return best + log_of(sums[0]);
}

}  // namespace kernels
