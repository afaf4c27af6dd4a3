// The best logits of one row, without sorting the row: first the larger logit, of equal ones the lower id.
//
// One scan keeps the largest logit of every block of BLOCK, so that later passes look only into blocks that matter. The
// results are exact: nothing depends on the blocks, the vector width or the order in which the compiler adds.
#pragma once
#include <algorithm>
#include <cstdint>

#include "lanes.h"
#include "scratch.h"

namespace kernels {

constexpr int BLOCK = 256;

struct Ranked {
    float value;
    int32_t id;
    int32_t weight;  // weights.h
};

inline bool ranks_before(const Ranked& a, const Ranked& b) {
    return a.value > b.value || (a.value == b.value && a.id < b.id);
}

// One row of logits [n] and the largest of each block.
struct ScannedRow {
    const float* values;
    const float* block_best;
    int32_t n, n_blocks;
    float best;
    bool is_sound;  // no NaN, no +infinity, and not only -infinity

    int32_t length(int32_t block) const { return std::min(BLOCK, n - block * BLOCK); }
};

ScannedRow scan(const float* values, int32_t n, Scratch& scratch);

// The id of the largest logit, the lowest of equal ones. The row is sound.
int32_t best_id(const ScannedRow& row);

// The k best (1 <= k <= n), best first, with weight 0. The row is sound.
Ranked* best_k(const ScannedRow& row, int32_t k, Scratch& scratch);

// The logits for which `wanted(lanes)` has a bit, by id, with weight 0, from the blocks for which `may_have(best of the
// block)`. Returns how many; `out` has room for all of them.
template <class MayHave, class Wanted>
int32_t collect(const ScannedRow& row, MayHave may_have, Wanted wanted, Ranked* out) {
    int32_t count = 0;
    for (int32_t b = 0; b < row.n_blocks; b++) {
        if (!may_have(row.block_best[b])) continue;
        const int32_t first = b * BLOCK, end = first + row.length(b);
        for (int32_t i = first; i < end; i += LANES) {
            const int32_t n = std::min(LANES, end - i);
            const Lanes values = n == LANES ? load(row.values + i) : load_first(row.values + i, n);
            for (uint32_t bits = wanted(values) & ((1u << n) - 1); bits; bits &= bits - 1) {
                const int32_t id = i + __builtin_ctz(bits);
                out[count++] = {row.values[id], id, 0};
            }
        }
    }
    return count;
}

}  // namespace kernels
