// Tasks that do not depend on each other, shared out among the threads of a step.
//
// The rule that keeps bits fixed: a task computes whole chains of operations, so it does not matter who does it or when.
// A parallel region costs some microseconds: what is too small for that stays in the calling thread. Tasks may not throw.
#pragma once
#ifdef _OPENMP
#include <omp.h>
#endif
#include <cstdint>

namespace kernels {

constexpr int64_t WORK_FOR_THREADS = 1 << 18;  // operations (multiply-adds) below which other threads do not pay

inline int thread_number() {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

// task(i, thread) for i = 0 .. n - 1, with 0 <= thread < threads. `work` is what all of them take together.
template <class F>
inline void in_parallel(int64_t n, int64_t work, int threads, const F& task) {
    if (threads <= 1 || n <= 1 || work < WORK_FOR_THREADS) {
        for (int64_t i = 0; i < n; i++) task(i, 0);
        return;
    }
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t i = 0; i < n; i++) task(i, thread_number());
}

// The same for tasks that need no memory of their thread: task(i).
template <class F>
inline void parallel_for(int64_t n, int64_t work, int threads, const F& task) {
    in_parallel(n, work, threads, [&](int64_t i, int) { task(i); });
}

}  // namespace kernels
