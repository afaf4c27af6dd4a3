// The indexer of CSA layers: which compressed entries a row reads, if it sees more than `index_topk`.
#pragma once
#include "kernels.h"
#include "scratch.h"

namespace kernels {

// The working memory of one thread.
struct IndexerWork {
    float *queries, *weights;  // [index_dim, heads], [heads]; heads in whole sixteens
    float *keys, *scores;      // [4, index_dim], [visible, in whole fours]
    uint32_t* ranks;           // [visible]

    IndexerWork(const Attention& layer, int64_t most_visible, Scratch& scratch);
};

// The scores of entries 0 .. visible - 1, in work.scores. query [index_heads, index_dim] with rope, weights
// [index_heads] as projected.
void score_entries(const Attention& layer, const float* query, const float* weights, const int64_t* pages,
                   int64_t visible, const IndexerWork& work);

// The k largest of n scores (k < n): their places in `picked`, ascending, with room for one more. Among equals the
// earlier wins; NaN counts as larger than all numbers, and -0 as 0. `ranks` [n] is working memory.
void pick_best(const float* scores, int64_t n, int64_t k, uint32_t* ranks, int64_t* picked);

}  // namespace kernels

#pragma GCC visibility push(default)
extern "C" {
// The two by themselves. `scores` [visible]; `picked` has room for k + 1.
int32_t kernels_score_entries(const Attention* layer, const float* query, const float* weights, const int64_t* pages,
                              int64_t visible, float* scores);
int32_t kernels_pick_best(const float* scores, int64_t n, int64_t k, int64_t* picked);
}
#pragma GCC visibility pop
