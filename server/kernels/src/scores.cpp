#include "scores.h"

#include <algorithm>
#include <cstring>

#include "logprobs.h"
#include "ranking.h"
#include "status.h"

namespace kernels {
namespace {

constexpr int64_t PAIR_NBYTES = sizeof(double) + sizeof(int32_t);

// Writes numbers one behind the other.
struct Out {
    uint8_t* at;

    template <class T>
    void put(T value) {
        std::memcpy(at, &value, sizeof value);
        at += sizeof value;
    }
};

// How many logits rank before that of `token`, and 1.
int32_t rank_of(const float* logits, int32_t vocab, int32_t token) {
    const float own = logits[token];
    int32_t larger = 1, equal = 0;
    for (int32_t i = 0; i < vocab; i++) larger += logits[i] > own;
    for (int32_t i = 0; i < token; i++) equal += logits[i] == own;
    return larger + equal;
}

void score(const float* logits, int32_t vocab, int32_t token, int32_t n_top, Out out) {
    const Borrowed borrowed;
    const Scratch::Frame frame(*borrowed);
    const ScannedRow row = scan(logits, vocab, *borrowed);
    if (!row.is_sound) {
        std::memset(out.at, 0, PAIR_NBYTES * (1 + n_top));
        return;
    }
    const double log_sum = log_sum_exp(row);
    out.put(logits[token] - log_sum);
    out.put(rank_of(logits, vocab, token));
    const int32_t n = std::min(n_top, vocab);
    const Ranked* const top = n ? best_k(row, n, *borrowed) : nullptr;
    for (int32_t i = 0; i < n; i++) {
        out.put(top[i].id);
        out.put(top[i].value - log_sum);
    }
    for (int32_t i = n; i < n_top; i++) {
        out.put(int32_t{-1});
        out.put(0.0);
    }
}

}  // namespace
}  // namespace kernels

int32_t kernels_score(const ScoreCall* call) {
    int32_t status = OK;
    const int32_t n = call->n_rows;
    const bool pays = call->threads > 1 && n > 1 && call->vocab > 1 << 14;
#pragma omp parallel for num_threads(call->threads) schedule(dynamic) reduction(max : status) if (pays)
    for (int32_t i = 0; i < n; i++) {
        const int32_t outcome = kernels::guarded([&] {
            uint8_t* const at = call->scores + i * kernels::PAIR_NBYTES * (1 + call->n_top);
            kernels::score(call->logits + i * call->row_stride, call->vocab, call->tokens[i], call->n_top, {at});
            return static_cast<int32_t>(OK);
        });
        status = std::max(status, outcome);
    }
    return status;
}
