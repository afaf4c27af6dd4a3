// Four sums over lanes at once: the bits of `sum` (lanes.h) for a third of its work.
#pragma once
#include "lanes.h"

namespace kernels {

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))

#if defined(__AVX512F__)
// Lane i plus lane i + 8.
inline __m256 fold_to_eight(Lanes a) {  // the zeroing form: GCC 12 warns about its own header in the plain one
    const __m512d both = _mm512_castps_pd(a.v);
    return _mm256_add_ps(_mm256_castpd_ps(_mm512_maskz_extractf64x4_pd(0xF, both, 0)),
                         _mm256_castpd_ps(_mm512_maskz_extractf64x4_pd(0xF, both, 1)));
}
#else
inline __m256 fold_to_eight(Lanes a) { return _mm256_add_ps(a.low, a.high); }
#endif

// Four numbers of a, then four of b: lane i plus lane i + 4.
inline __m256 fold_to_four(__m256 a, __m256 b) {
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

// out[0..3] = the sums of a, b, c, d.
inline void store_four_sums(float* out, Lanes a, Lanes b, Lanes c, Lanes d) {
    const __m256d ab = _mm256_castps_pd(fold_to_four(fold_to_eight(a), fold_to_eight(b)));
    const __m256d cd = _mm256_castps_pd(fold_to_four(fold_to_eight(c), fold_to_eight(d)));
    const __m256 first = _mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd));
    const __m256 second = _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd));
    const __m256 two = _mm256_add_ps(first, second);  // two of a, two of c, two of b, two of d
    const __m256 one = _mm256_add_ps(_mm256_shuffle_ps(two, two, 0x88), _mm256_shuffle_ps(two, two, 0xDD));
    _mm_storeu_ps(out, _mm_unpacklo_ps(_mm256_castps256_ps128(one), _mm256_extractf128_ps(one, 1)));
}

#else

inline void store_four_sums(float* out, const Lanes& a, const Lanes& b, const Lanes& c, const Lanes& d) {
    out[0] = sum(a);
    out[1] = sum(b);
    out[2] = sum(c);
    out[3] = sum(d);
}

#endif

}  // namespace kernels
