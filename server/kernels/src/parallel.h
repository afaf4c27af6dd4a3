// Tasks that do not depend on each other, shared among the threads of a step.
//
// The rule that keeps bits fixed: a task computes whole chains of operations, so it does not matter who does it or when.
// A region costs some microseconds: what is too small for that stays in the calling thread. Tasks may not throw.
#pragma once
#include <cstdint>

namespace kernels {

constexpr int64_t WORK_FOR_THREADS = 1 << 18;  // operations (multiply-adds) below which other threads do not pay

// task(i) for every i below n. `work` is what all of them take together.
template <class F>
void parallel_for(int64_t n, int64_t work, int threads, const F& task) {
    if (threads <= 1 || n <= 1 || work < WORK_FOR_THREADS) {
        for (int64_t i = 0; i < n; i++) task(i);
        return;
    }
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t i = 0; i < n; i++) task(i);
}

}  // namespace kernels
