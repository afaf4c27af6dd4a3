// A loop over independent items, shared out among threads.
#pragma once
#ifdef _OPENMP
#include <omp.h>
#endif
#include <cstdint>

namespace kernels {

inline int thread_number() {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

// f(i, thread) for i = 0 .. n - 1, with 0 <= thread < threads. f may not throw.
template <class F>
inline void in_parallel(int64_t n, int threads, F f) {
    if (threads <= 1 || n <= 1) {
        for (int64_t i = 0; i < n; i++) f(i, 0);
        return;
    }
#pragma omp parallel for num_threads(threads) schedule(dynamic, 4)
    for (int64_t i = 0; i < n; i++) f(i, thread_number());
}

}  // namespace kernels
