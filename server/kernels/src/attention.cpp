// One layer's attention. K and V of a token are one shared row kv of `head_dim` channels.
//
//     y = in_proj(x) = [q_low | kv],  index weights = index_proj(x),  q = q_proj(q_norm(q_low)) = [heads | index heads]
//     a row of kv is kv_norm'ed, rotated, and rounded as kv_simulation says; a head of q is divided by its own RMS and
//     rotated
//     candidates of a row: the window's rows, oldest first, then the compressed entries it reads, ascending
//     out[head] = sum softmax(q . k / sqrt(head_dim), with a sink logit that has no value) k, rotated back
//     then every group of heads through its part of wo_a and its columns of wo_b, and the sum over groups
//
// The rule that keeps bits fixed: a row of the step is computed by itself, from its own candidates in their order.
// Maxima have no order; exponentials are summed in 16 chains (candidate i belongs to chain i % 16) and by the tree of
// `sum`, the sink last; the groups' outputs are added in a binary tree, neighbours first.
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <stdexcept>
#include <type_traits>

#include "activations.h"
#include "compressor.h"
#include "indexer.h"
#include "key_products.h"
#include "key_rows.h"
#include "linear.h"
#include "norm.h"
#include "parallel.h"
#include "pools.h"
#include "status.h"

namespace kernels {
namespace {

constexpr int HEADS = 4;  // whose scores are in working memory at a time

int64_t in_lanes(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

// The rows of one step in one layer.
template <class T>
struct Rows {
    const Attention& layer;
    const RopeTable& rope;
    const Step& step;
    const KeyRows<T>& keys;
    const Picks& picks;
    float *q, *out;  // [rows, q_proj.out], [rows, heads head_dim]
};

// The working memory of one thread.
template <class T>
struct RowWork {
    const T** keys;   // of all candidates
    float* scores;    // [HEADS, stride]
    int64_t stride;

    RowWork(const Attention& layer, int64_t most_read, Scratch& scratch)
        : keys(scratch.array<const T*>(layer.window + most_read)),
          scores(scratch.floats(HEADS * in_lanes(layer.window + most_read))),
          stride(in_lanes(layer.window + most_read)) {}
};

// y's kv columns, normed and rotated, rounded as the reference does if it is to.
void make_kv(const Attention& layer, const RopeTable& rope, const Step& step, int64_t row, float* kv) {
    const int tail = layer.head_dim - layer.rope_dim;
    rms_norm(kv, layer.kv_norm, layer.head_dim, layer.norm_eps, kv);
    rotate(kv + tail, rope_at(rope, step.position[row], layer.rope_dim), layer.rope_dim);
    simulate_row(layer.kv_simulation, kv, layer.head_dim, layer.rope_dim);
}

// Scores [n, filled up to whole sixteens with -infinity] become exp(score - largest); returns their sum and the sink's.
float exponentiate(float* scores, int64_t n, float sink) {
    Lanes tops = splat(-INF);
    for (int64_t i = 0; i < n; i += LANES) tops = max(tops, load(scores + i));
    const float top = max_of(tops);
    Lanes total = zeros();
    for (int64_t i = 0; i < n; i += LANES) {
        const Lanes weight = exp(load(scores + i) - splat(top));
        store(scores + i, weight);
        total = total + weight;
    }
    return sum(total) + exp(sink - top);
}

template <class T>
void attend(const Rows<T>& rows, int64_t row, const RowWork<T>& work) {
    const Attention& layer = rows.layer;
    const Step& step = rows.step;
    const int width = layer.head_dim, tail = width - layer.rope_dim;
    const int64_t segment = step.segment[row], position = step.position[row];
    const float* turns = rope_at(rows.rope, position, layer.rope_dim);

    const int64_t oldest = std::max<int64_t>({0, step.valid_from[segment], position + 1 - layer.window});
    int64_t n = rows.keys.list_window(segment, oldest, position + 1, work.keys);
    n += rows.keys.list_entries_of(row, rows.picks, work.keys + n);

    const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(width)));
    for (int first = 0; first < layer.heads; first += HEADS) {
        const int heads = std::min(HEADS, layer.heads - first);
        float* q = rows.q + row * layer.q_proj.out + first * width;
        float* out = rows.out + (row * layer.heads + first) * width;
        for (int h = 0; h < heads; h++) {
            rms_norm(q + h * width, nullptr, width, layer.norm_eps, q + h * width);
            rotate(q + h * width + tail, turns, layer.rope_dim);
        }
        score_keys(q, width, heads, work.keys, n, width, scale, work.scores, work.stride);
        float totals[HEADS];
        for (int h = 0; h < heads; h++) {
            float* scores = work.scores + h * work.stride;
            std::fill(scores + n, scores + in_lanes(n), -INF);
            totals[h] = exponentiate(scores, n, layer.sink[first + h]);
        }
        std::fill(out, out + heads * width, 0.0f);
        add_weighted_keys(work.scores, work.stride, heads, work.keys, n, width, out, width);
        for (int h = 0; h < heads; h++) {
            for (int i = 0; i < width; i++) out[h * width + i] /= totals[h];
            rotate_back(out + h * width + tail, turns, layer.rope_dim);
        }
    }
}

template <class T>
void attend_all(const Rows<T>& rows, Scratch& scratch) {
    Scratch::Frame frame(scratch);
    const Attention& layer = rows.layer;
    const Step& step = rows.step;
    int64_t most_read = 0;
    for (int64_t row = 0; row < step.rows; row++)
        most_read = std::max(most_read, read_entries(layer, visible_entries(layer, step.position[row])));
    const int threads = std::max(1, step.threads);
    RowWork<T>* memory = scratch.array<RowWork<T>>(threads);
    for (int i = 0; i < threads; i++) new (memory + i) RowWork<T>(layer, most_read, scratch);
    const int64_t work = step.rows * (layer.window + most_read) * layer.heads * layer.head_dim * 2;
    in_parallel(step.rows, work, threads, [&](int64_t row, int thread) { attend(rows, row, memory[thread]); });
}

// Adds `groups` arrays [n] into the first: neighbours, then pairs of neighbours.
void add_groups(float* const* parts, int groups, int64_t n) {
    for (int apart = 1; apart < groups; apart *= 2)
        for (int g = 0; g + apart < groups; g += 2 * apart) {
            float* __restrict to = parts[g];
            const float* __restrict from = parts[g + apart];
            for (int64_t i = 0; i < n; i++) to[i] += from[i];
        }
}

// attended [rows, heads head_dim] -> out [rows, D]
void project(const Attention& layer, const Step& step, const float* attended, float* out, Scratch& scratch) {
    Scratch::Frame frame(scratch);
    const int groups = layer.wo_a.groups, hidden = layer.wo_b.first.out;
    const int64_t rows = step.rows, wide = int64_t{layer.heads} * layer.head_dim;
    const int64_t rank = layer.wo_a.first.out, all = groups * rank;
    float* low = scratch.floats(rows * all);  // of all groups: blocks of channels that are rounded may lie in two
    for (int g = 0; g < groups; g++) {
        const Matrix down = group_of(layer.wo_a, g);
        linear(down, attended + g * down.in, wide, rows, low + g * rank, all, step.threads);
    }
    if (layer.wo_b.first.quantized_input) quantize_rows(low, rows, all, low, step.threads);
    float** parts = scratch.array<float*>(groups);
    for (int g = 0; g < groups; g++) {
        parts[g] = g ? scratch.floats(rows * hidden) : out;
        linear(group_of(layer.wo_b, g), low + g * rank, all, rows, parts[g], hidden, step.threads);
    }
    add_groups(parts, groups, rows * hidden);
}

template <class T>
void attention_as(const Attention& layer, const RopeTable& rope, const Step& step, const float* x, float* out,
                  Scratch& scratch) {
    Scratch::Frame frame(scratch);
    const int64_t rows = step.rows;
    float* y = scratch.floats(rows * layer.in_proj.out);
    float* index_weights = scratch.floats(rows * layer.index_proj.out);
    Product projections[] = {
        {&layer.in_proj, input_of(layer.in_proj, x, rows, step.threads, scratch), layer.in_proj.in, rows, y,
         layer.in_proj.out, 0},
        {&layer.index_proj, x, layer.index_proj.in, rows, index_weights, layer.index_proj.out, 0},
    };
    linear_all(projections, layer.index_proj.out ? 2 : 1, step.threads);
    KeyRows<T> keys(layer, step, scratch);
    parallel_for(rows, rows * (layer.q_rank + layer.head_dim) * 4, step.threads, [&](int64_t row) {
        float* low = y + row * layer.in_proj.out;
        rms_norm(low, layer.q_norm, layer.q_rank, layer.norm_eps, low);
        if (layer.q_proj.quantized_input) simulate_fp8(low, layer.q_rank, ACTIVATION_BLOCK, low);
        make_kv(layer, rope, step, row, low + layer.q_rank);
        keys.keep(row, low + layer.q_rank);
    });
    float* q = scratch.floats(rows * layer.q_proj.out);
    linear(layer.q_proj, y, layer.in_proj.out, rows, q, layer.q_proj.out, step.threads);

    if (layer.compressor.ratio) {
        Scratch::Frame projected(scratch);
        const int columns = layer.state_proj.out;
        float* state = scratch.floats(rows * columns);
        linear(layer.state_proj, x, layer.state_proj.in, rows, state, columns, step.threads);
        compress(layer.compressor, rope, layer.rope_dim, step, state, columns, scratch);
        if (layer.indexer.ratio) compress(layer.indexer, rope, layer.rope_dim, step, state, columns, scratch);
    }

    const Picks picks = pick_entries(layer, rope, step, q, index_weights, scratch);
    keys.decode(picks);
    float* attended = scratch.floats(rows * layer.heads * layer.head_dim);
    attend_all(Rows<T>{layer, rope, step, keys, picks, q, attended}, scratch);
    keys.store();
    project(layer, step, attended, out, scratch);
}

}  // namespace

void attention(const Attention& layer, const RopeTable& main, const RopeTable& compress_rope, const Step& step,
               const float* x, float* out, Scratch& scratch) {
    if (layer.swa.dtype > FP8_KV || (layer.ratio && layer.compressor.entries.dtype != layer.swa.dtype))
        throw std::invalid_argument("the window and the compressed entries of a layer have different formats");
    with_dtype(layer.swa.dtype, [&](auto element) {
        using T = std::remove_const_t<std::remove_pointer_t<decltype(element)>>;
        attention_as<T>(layer, layer.uses_compress_rope ? compress_rope : main, step, x, out, scratch);
    });
}

void write_window(const Attention& layer, const RopeTable& main, const RopeTable& compress_rope, const Step& step,
                  const float* x, Scratch& scratch) {
    with_dtype(layer.swa.dtype, [&](auto element) {
        using T = std::remove_const_t<std::remove_pointer_t<decltype(element)>>;
        Scratch::Frame frame(scratch);
        const int64_t rows = step.rows, columns = layer.in_proj.out;
        float* y = scratch.floats(rows * columns);
        const float* input = input_of(layer.in_proj, x, rows, step.threads, scratch);
        linear(layer.in_proj, input, layer.in_proj.in, rows, y, columns, step.threads);
        const KeyRows<T> keys(layer, step, scratch);
        const RopeTable& rope = layer.uses_compress_rope ? compress_rope : main;
        parallel_for(rows, rows * layer.head_dim * 4, step.threads, [&](int64_t row) {
            float* const kv = y + row * columns + layer.q_rank;
            make_kv(layer, rope, step, row, kv);
            keys.keep(row, kv);
        });
        keys.store();
    });
}

}  // namespace kernels

int32_t kernels_attention(const Attention* layer, const RopeTable* main, const RopeTable* compress, const Step* step,
                          const float* x, float* out) {
    return kernels::guarded([&] {
        const kernels::Borrowed scratch;
        kernels::attention(*layer, *main, *compress, *step, x, out, *scratch);
        return OK;
    });
}
