// What a row of logits thinks of a token that is given: its log probability, how many rank before it, and who they are.
// server/engine/scoring.py has the same in numpy.
#pragma once
#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

struct ScoreCall {
    const float* logits;  // [n_rows, vocab], rows `row_stride` elements apart
    int64_t row_stride;
    const int32_t* tokens;  // [n_rows], each of the vocabulary
    // [n_rows] of (double logprob, int32 rank, n_top of (int32 token, double logprob)), without any padding. The rank
    // counts from 1; 0: the row has a NaN, or no finite logit. Best first; -1 and 0.0 where the vocabulary has no more.
    uint8_t* scores;
    int32_t n_rows, vocab, n_top, threads;
};

// Returns a Status of kernels.h.
int32_t kernels_score(const ScoreCall* call);

}  // extern "C"
#pragma GCC visibility pop
