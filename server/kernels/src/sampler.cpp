// One row after the other; see weights.h for the rule and ranking.h for how sorting is avoided.
//
// A row is drawn at a point of its cumulative weights, best token first. With top_k only the k best are looked at.
// Without it the tokens' weights are summed in buckets of near logits, and only a bucket that the point (or the end of
// top_p) falls into is searched.
#include "sampler.h"

#include <cmath>

#include "logprobs.h"
#include "ranking.h"
#include "status.h"
#include "weights.h"

namespace kernels {
namespace {

constexpr int BUCKETS = 1024;

// A place in the ranked tokens: the token there, and the weight of all up to and including it.
struct Place {
    int32_t id;
    int64_t cumulative;
};

// Weights of one row by bucket: bucket b has the logits with b <= (best - logit) per_unit < b + 1, the last one the rest.
struct Buckets {
    const ScannedRow& row;
    const SampleRow& params;
    float per_unit;
    int64_t total = 0;
    int64_t weights[BUCKETS] = {};
};

// What is below this is not chosen: min_p of the best token's weight.
int32_t least_weight(const SampleRow& params) {
    if (!(params.min_p < 1.0)) return BEST_WEIGHT;
    return static_cast<int32_t>(std::ceil(std::max(params.min_p, 0.0) * BEST_WEIGHT));
}

void set_weights(Ranked* tokens, int32_t count, const ScannedRow& row, const SampleRow& params) {
    const int32_t least = least_weight(params);
    for (int32_t i = 0; i < count; i++) {
        const int32_t weight = weight_of(exponent_of(tokens[i].value, row.best, params.scale));
        tokens[i].weight = weight < least ? 0 : weight;
    }
}

int64_t sum_of_weights(const Ranked* begin, const Ranked* end) {
    int64_t sum = 0;
    for (const Ranked* token = begin; token < end; token++) sum += token->weight;
    return sum;
}

// The first place whose cumulative weight is above `point`, among tokens in any order; `before`: the weight of those
// that rank before all of them. It exists. Orders the tokens only where it must.
Place place_in(Ranked* begin, Ranked* end, int64_t before, int64_t point) {
    while (end - begin > 16) {
        Ranked* middle = begin + (end - begin) / 2;
        std::nth_element(begin, middle, end, ranks_before);
        const int64_t upper = before + sum_of_weights(begin, middle);
        if (upper > point) {
            end = middle;
        } else {
            begin = middle;
            before = upper;
        }
    }
    std::sort(begin, end, ranks_before);
    for (; before + begin->weight <= point; begin++) before += begin->weight;
    return {begin->id, before + begin->weight};
}

// top_p keeps the least number of best tokens that have at least that part of the total. The last of them is the one
// whose cumulative weight is the first above this.
int64_t end_of_top_p(double top_p, int64_t total) {
    const double needed = std::max(1.0, std::ceil(top_p * static_cast<double>(total)));
    return std::min(total, static_cast<int64_t>(needed)) - 1;
}

int64_t point_of(uint64_t draw, int64_t total) {
    return static_cast<int64_t>(static_cast<unsigned __int128>(draw) * static_cast<uint64_t>(total) >> 53);
}

// 1,024 buckets over twice the mean distance from the best, of every some-th logit: most of the weight then is in
// buckets of few tokens. Any number is right.
float buckets_per_unit(const ScannedRow& row, float scale) {
    const int32_t step = std::max(1, row.n / 512);
    double sum = 0;
    int32_t count = 0;
    for (int32_t i = 0; i < row.n; i += step, count++) sum -= exponent_of(row.values[i], row.best, scale);
    const double mean = std::min(std::max(sum / count, 1e-6), 16.0);
    return static_cast<float>(BUCKETS / (2 * mean) * scale);
}

void fill(Buckets& buckets) {
    const ScannedRow& row = buckets.row;
    const float best = row.best, scale = buckets.params.scale, per_unit = buckets.per_unit;
    const int32_t least = least_weight(buckets.params);
    uint64_t sums[2][BUCKETS] = {};  // two, because an addition waits for the last one to the same place
    for (int32_t b = 0; b < row.n_blocks; b++) {
        if (exponent_of(row.block_best[b], best, scale) <= LOWEST_EXPONENT) continue;
        const float* block = row.values + b * BLOCK;
        const int32_t length = row.length(b);
        uint32_t weight[BLOCK + 1], bucket[BLOCK + 1];
#pragma omp simd
        for (int32_t i = 0; i < length; i++) {
            const int32_t w = weight_of(exponent_of(block[i], best, scale));
            const float t = (best - block[i]) * per_unit;
            const int32_t k = static_cast<int32_t>(t < BUCKETS - 1.0f ? t : BUCKETS - 1.0f);
            weight[i] = static_cast<uint32_t>(w < least ? 0 : w);
            bucket[i] = static_cast<uint32_t>(w == 0 ? i : k);
        }
        weight[length] = bucket[length] = 0;
        for (int32_t i = 0; i < length; i += 2) {
            sums[0][bucket[i]] += weight[i];
            sums[1][bucket[i + 1]] += weight[i + 1];
        }
    }
    for (int i = 0; i < BUCKETS; i++) {
        buckets.weights[i] = static_cast<int64_t>(sums[0][i] + sums[1][i]);
        buckets.total += buckets.weights[i];
    }
}

// The first place of the whole row whose cumulative weight is above `point` (below the total).
Place place_in_row(const Buckets& buckets, int64_t point, Scratch& scratch) {
    int64_t before = 0;
    int32_t bucket = 0;
    while (before + buckets.weights[bucket] <= point) before += buckets.weights[bucket++];
    const Scratch::Frame frame(scratch);
    Ranked* tokens = scratch.array<Ranked>(buckets.row.n);
    const float best = buckets.row.best, per_unit = buckets.per_unit;
    const float from = static_cast<float>(bucket), to = bucket + 1 < BUCKETS ? from + 1 : INF;
    const int32_t count = collect(
        buckets.row, [=](float block_best) { return (best - block_best) * per_unit < to; },
        [=](Lanes v) {
            const Lanes t = (splat(best) - v) * splat(per_unit);
            return less(t, splat(to)) & ~less(t, splat(from));
        },
        tokens);
    set_weights(tokens, count, buckets.row, buckets.params);
    return place_in(tokens, tokens + count, before, point);
}

int32_t draw_from_best_k(const ScannedRow& row, const SampleRow& params, int32_t k, Scratch& scratch) {
    Ranked* tokens = best_k(row, k, scratch);
    set_weights(tokens, k, row, params);
    int64_t total = sum_of_weights(tokens, tokens + k);
    if (params.top_p < 1.0) total = place_in(tokens, tokens + k, 0, end_of_top_p(params.top_p, total)).cumulative;
    return place_in(tokens, tokens + k, 0, point_of(params.draw, total)).id;
}

int32_t draw_from_all(const ScannedRow& row, const SampleRow& params, Scratch& scratch) {
    Buckets buckets{row, params, buckets_per_unit(row, params.scale)};
    fill(buckets);
    int64_t total = buckets.total;
    if (params.top_p < 1.0) total = place_in_row(buckets, end_of_top_p(params.top_p, total), scratch).cumulative;
    return place_in_row(buckets, point_of(params.draw, total), scratch).id;
}

bool is_edited(const SampleRow& params) { return params.n_edits || params.n_own || params.n_mask_words; }

// `values` are to be the edited `logits`. Each edit begins at the logit itself, so that a later one counts alone.
void apply(const SampleEdit* edits, int32_t count, const float* logits, int32_t vocab, const SampleRow& params,
           float* values) {
    for (const SampleEdit* edit = edits; edit < edits + count; edit++) {
        if (edit->token < 0 || edit->token >= vocab) continue;
        float v = logits[edit->token];
        if (edit->count >= 0) v = v > 0 ? v / params.repetition : v * params.repetition;
        if (edit->count > 0) v = v - (params.frequency * static_cast<float>(edit->count) + params.presence);
        values[edit->token] = edit->bias == -INF ? -INF : v + edit->bias;
    }
}

void apply_mask(const uint32_t* mask, int32_t n_words, int32_t vocab, float* values) {
    for (int32_t first = 0; first < vocab; first += 32) {
        const uint32_t word = first / 32 < n_words ? mask[first / 32] : 0;
        if (word == UINT32_MAX) continue;
        const int32_t n = std::min(32, vocab - first);
#pragma omp simd
        for (int32_t i = 0; i < n; i++) values[first + i] = word >> i & 1 ? values[first + i] : -INF;
    }
}

// The logits with penalties, biases, bans and the mask.
const float* edited(const float* logits, int32_t vocab, const SampleRow& params, Scratch& scratch) {
    if (!is_edited(params)) return logits;
    float* values = scratch.floats(vocab);
    std::copy(logits, logits + vocab, values);
    apply(params.edits, params.n_edits, logits, vocab, params, values);
    apply(params.own, params.n_own, logits, vocab, params, values);
    if (params.n_mask_words) apply_mask(params.mask, params.n_mask_words, vocab, values);
    return values;
}

SampleChoice choose(const float* logits, int32_t vocab, const SampleRow& params, SampleAlternative* alternatives) {
    const Borrowed borrowed;
    Scratch& scratch = *borrowed;
    const Scratch::Frame frame(scratch);
    const ScannedRow row = scan(edited(logits, vocab, params, scratch), vocab, scratch);
    if (!row.is_sound) return {-1, 0.0};
    int32_t token;
    if (params.scale == 0.0f) {
        token = best_id(row);
    } else if (params.top_k > 0) {
        token = draw_from_best_k(row, params, std::min(params.top_k, vocab), scratch);
    } else {
        token = draw_from_all(row, params, scratch);
    }
    if (params.n_top < 0) return {token, 0.0};
    const ScannedRow raw = is_edited(params) ? scan(logits, vocab, scratch) : row;
    if (!raw.is_sound) return {-1, 0.0};
    const double log_sum = log_sum_exp(raw);
    const int32_t n_top = std::min(params.n_top, vocab);
    if (n_top > 0) {
        const Ranked* top = best_k(raw, n_top, scratch);
        for (int32_t i = 0; i < n_top; i++) alternatives[i] = {top[i].id, top[i].value - log_sum};
    }
    return {token, logits[token] - log_sum};
}

}  // namespace
}  // namespace kernels

int32_t kernels_sample(const SampleCall* call) {
    int32_t status = OK;
    const int32_t n = call->n_rows;
    const bool pays = call->threads > 1 && n > 1 && call->vocab > 1 << 14;
#pragma omp parallel for num_threads(call->threads) schedule(dynamic) reduction(max : status) if (pays)
    for (int32_t i = 0; i < n; i++) {
        const int32_t outcome = kernels::guarded([&] {
            call->choices[i] = kernels::choose(call->logits + i * call->row_stride, call->vocab, call->rows[i],
                                               call->alternatives + static_cast<int64_t>(i) * call->max_alternatives);
            return static_cast<int32_t>(OK);
        });
        status = std::max(status, outcome);
    }
    return status;
}
