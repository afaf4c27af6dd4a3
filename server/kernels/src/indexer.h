// The indexer of CSA layers: which compressed entries a row reads, if it sees more than `index_topk`.
#pragma once
#include <algorithm>

#include "kernels.h"
#include "scratch.h"

namespace kernels {

constexpr int CSA = 4;  // the ratio of layers that have an indexer

// The entries that are closed at a position, and how many of them a row reads.
inline int64_t visible_entries(const Attention& layer, int64_t position) {
    return layer.ratio ? (position + 1) / layer.ratio : 0;
}
inline int64_t read_entries(const Attention& layer, int64_t visible) {
    return layer.ratio == CSA ? std::min<int64_t>(visible, layer.index_topk) : visible;
}

// The entries of each row that reads fewer than it sees.
struct Picks {
    int64_t* entries;  // [rows, stride]; null: every row reads all that it sees
    int64_t stride;

    // The entries of a row that sees so many, ascending; null: it reads them all.
    const int64_t* of(const Attention& layer, int64_t row, int64_t visible) const {
        return visible > read_entries(layer, visible) ? entries + row * stride : nullptr;
    }
};

// q [rows, q_proj.out]: the indexer's queries are behind those of the heads, without rope; they are overwritten.
// weights [rows, index_heads] as projected.
Picks pick_entries(const Attention& layer, const RopeTable& rope, const Step& step, float* q, const float* weights,
                   Scratch& scratch);

}  // namespace kernels

#pragma GCC visibility push(default)
extern "C" {
// The scores [visible] of entries 0 .. visible - 1 for one row: query [index_heads, index_dim] with rope.
int32_t kernels_score_entries(const Attention* layer, const float* query, const float* weights, const int64_t* pages,
                              int64_t visible, float* scores);
// The k largest of n scores (k < n): their places in `picked`, ascending, with room for one more. Among equals the
// earlier wins; NaN counts as larger than all numbers, and -0 as 0.
int32_t kernels_pick_best(const float* scores, int64_t n, int64_t k, int64_t* picked);
}
#pragma GCC visibility pop
