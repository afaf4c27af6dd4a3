// Chooses one token for every row of logits: the C ABI of the sampler. server/engine/sampler.py has the same in numpy and
// says what the rule is; server/kernels/sampling.py packs these structures.
#pragma once
#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

// What changes one logit of a row before anything is chosen. A list names each token once.
struct SampleEdit {
    int32_t token;
    int32_t count;  // how often the answer has it; 0: only the prompt has it; -1: penalties do not apply
    float bias;     // added last; -infinity: never chosen, whatever the logit is
};

struct SampleRow {
    const SampleEdit* edits;  // of the request
    const SampleEdit* own;    // of this row alone: such an edit takes the place of the request's for the same token
    const uint32_t* mask;     // bit i % 32 of word i / 32: token i may be chosen. Tokens behind the last word may not
    uint64_t draw;  // 53 random bits
    double top_p;   // 1: all
    double min_p;   // 0: all
    float scale;    // log2(e) / temperature; 0: greedy
    float repetition, presence, frequency;  // 1, 0, 0: none
    int32_t n_edits, n_own;
    int32_t n_mask_words;  // 0: there is no mask
    int32_t top_k;         // 0: all
    int32_t n_top;         // how many alternatives are reported; -1: no log probabilities at all
    int32_t pad;
};

struct SampleChoice {
    int64_t token;   // -1: the row has a NaN, or no finite logit left
    double logprob;  // of the raw logits; 0 where none is wanted
};

struct SampleAlternative {
    int64_t token;
    double logprob;
};

struct SampleCall {
    const float* logits;  // [n_rows, vocab], rows `row_stride` elements apart
    int64_t row_stride;
    const SampleRow* rows;
    SampleChoice* choices;
    SampleAlternative* alternatives;  // [n_rows, max_alternatives]: row i fills min(n_top, vocab)
    int32_t n_rows, vocab, max_alternatives, threads;
};

// Returns a Status of kernels.h.
int32_t kernels_sample(const SampleCall* call);

}  // extern "C"
#pragma GCC visibility pop
