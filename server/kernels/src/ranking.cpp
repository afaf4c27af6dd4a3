#include "ranking.h"

namespace kernels {

ScannedRow scan(const float* values, int32_t n, Scratch& scratch) {
    const int32_t n_blocks = (n + BLOCK - 1) / BLOCK;
    float* block_best = scratch.floats(n_blocks);
    ScannedRow row{values, block_best, n, n_blocks, -INF, true};
    int32_t n_unsound = 0;
    for (int32_t b = 0; b < n_blocks; b++) {
        const float* block = values + b * BLOCK;
        const int32_t length = row.length(b);
        float best = -INF;
#pragma omp simd reduction(max : best) reduction(+ : n_unsound)
        for (int32_t i = 0; i < length; i++) {
            best = block[i] > best ? block[i] : best;
            n_unsound += block[i] < INF ? 0 : 1;
        }
        block_best[b] = best;
        row.best = std::max(row.best, best);
    }
    row.is_sound = n_unsound == 0 && row.best > -INF;
    return row;
}

int32_t best_id(const ScannedRow& row) {
    const int64_t block = std::find(row.block_best, row.block_best + row.n_blocks, row.best) - row.block_best;
    return static_cast<int32_t>(std::find(row.values + block * BLOCK, row.values + row.n, row.best) - row.values);
}

Ranked* best_k(const ScannedRow& row, int32_t k, Scratch& scratch) {
    Ranked* found = scratch.array<Ranked>(row.n);
    float least = -INF;  // k logits are at least this: the best ones of k blocks
    if (k <= row.n_blocks) {
        float* sorted = scratch.floats(row.n_blocks);
        std::copy(row.block_best, row.block_best + row.n_blocks, sorted);
        std::nth_element(sorted, sorted + (k - 1), sorted + row.n_blocks, std::greater<float>());
        least = sorted[k - 1];
    }
    const Lanes bound = splat(least);
    const int32_t count = collect(
        row, [=](float best) { return best >= least; }, [=](Lanes v) { return ~less(v, bound); }, found);
    std::nth_element(found, found + (k - 1), found + count, ranks_before);
    std::sort(found, found + k, ranks_before);
    return found;
}

}  // namespace kernels
