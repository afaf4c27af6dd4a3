// One layer's attention. K and V of a token are one shared row kv of `head_dim` channels.
//
//     y = in_proj(x) = [q_low | kv],  index weights = index_proj(x),  q = q_proj(q_norm(q_low)) = [heads | index heads]
//     a row of kv is kv_norm'ed and rotated; a head of q is divided by its own RMS and rotated
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

#include "compressor.h"
#include "indexer.h"
#include "key_products.h"
#include "linear.h"
#include "norm.h"
#include "parallel.h"
#include "pools.h"
#include "status.h"

namespace kernels {
namespace {

constexpr int CSA = 4;
constexpr int HEADS = 4;  // whose scores are in working memory at a time

int64_t in_lanes(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

// The rows of one step in one layer.
template <class T>
struct Rows {
    const Attention& layer;
    const RopeTable& rope;
    const Step& step;
    const float* y;              // [rows, in_proj.out]
    const float* index_weights;  // [rows, index_proj.out]
    const T* kv;                 // [rows, head_dim] in the window pool's dtype
    float *q, *out;              // [rows, q_proj.out], [rows, heads head_dim]
};

// The working memory of one thread.
template <class T>
struct RowWork {
    const T** keys;   // of all candidates
    float* scores;    // [HEADS, stride]
    int64_t stride;
    const T** entries;  // of all visible entries, where some are picked
    int64_t* picked;
    IndexerWork indexer;

    RowWork(const Attention& layer, int64_t most_visible, int64_t most_read, Scratch& scratch)
        : keys(scratch.array<const T*>(layer.window + most_read)),
          scores(scratch.floats(HEADS * in_lanes(layer.window + most_read))),
          stride(in_lanes(layer.window + most_read)), entries(scratch.array<const T*>(most_visible)),
          picked(scratch.array<int64_t>(most_read + 1)), indexer(layer, most_visible, scratch) {}
};

int64_t visible_entries(const Attention& layer, int64_t position) {
    return layer.ratio ? (position + 1) / layer.ratio : 0;
}

int64_t read_entries(const Attention& layer, int64_t visible) {
    return layer.ratio == CSA ? std::min<int64_t>(visible, layer.index_topk) : visible;
}

// y's kv columns, normed and rotated, in the dtype of the pool.
template <class T>
void make_kv(const Attention& layer, const RopeTable& rope, const Step& step, int64_t row, float* kv, T* out) {
    const int tail = layer.head_dim - layer.rope_dim;
    rms_norm(kv, layer.kv_norm, layer.head_dim, layer.norm_eps, kv);
    rotate(kv + tail, rope_at(rope, step.position[row], layer.rope_dim), layer.rope_dim);
    to_dtype(kv, layer.head_dim, layer.swa.dtype, out + row * layer.head_dim);
}

// The compressed entries that a row reads; returns how many.
template <class T>
int64_t list_compressed(const Rows<T>& rows, int64_t row, const float* turns, const RowWork<T>& work, const T** out) {
    const Attention& layer = rows.layer;
    const int64_t visible = visible_entries(layer, rows.step.position[row]);
    const int64_t read = read_entries(layer, visible);
    const int64_t* pages = pages_of(rows.step, rows.step.segment[row]);
    if (visible == read) {
        list_entries(layer.compressor.entries, pages, visible, out);
        return visible;
    }
    float* query = rows.q + row * layer.q_proj.out + layer.heads * layer.head_dim;
    for (int h = 0; h < layer.index_heads; h++)
        rotate(query + (h + 1) * layer.index_dim - layer.rope_dim, turns, layer.rope_dim);
    const float* weights = rows.index_weights + row * layer.index_proj.out;
    score_entries(layer, query, weights, pages, visible, work.indexer);
    pick_best(work.indexer.scores, visible, read, work.indexer.ranks, work.picked);
    list_entries(layer.compressor.entries, pages, visible, work.entries);
    for (int64_t i = 0; i < read; i++) out[i] = work.entries[work.picked[i]];
    return read;
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

    const RingRows<T> window(layer.swa, rows.kv, width, step, segment);
    const int64_t oldest = std::max<int64_t>({0, step.valid_from[segment], position + 1 - layer.window});
    int64_t n = window.list(oldest, position + 1, work.keys);
    if (layer.ratio) n += list_compressed(rows, row, turns, work, work.keys + n);

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
    int64_t most_visible = 0;
    for (int64_t row = 0; row < step.rows; row++)
        most_visible = std::max(most_visible, visible_entries(layer, step.position[row]));
    const int64_t most_read = read_entries(layer, most_visible);
    const int threads = std::max(1, step.threads);
    RowWork<T>* memory = scratch.array<RowWork<T>>(threads);
    for (int i = 0; i < threads; i++) new (memory + i) RowWork<T>(layer, most_visible, most_read, scratch);
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
    float* low = scratch.floats(rows * layer.wo_a.first.out);
    float** parts = scratch.array<float*>(groups);
    for (int g = 0; g < groups; g++) {
        parts[g] = g ? scratch.floats(rows * hidden) : out;
        const Matrix down = group_of(layer.wo_a, g), up = group_of(layer.wo_b, g);
        linear(down, attended + g * down.in, wide, rows, low, down.out, step.threads);
        linear(up, low, down.out, rows, parts[g], hidden, step.threads);
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
        {&layer.in_proj, x, layer.in_proj.in, rows, y, layer.in_proj.out, 0},
        {&layer.index_proj, x, layer.index_proj.in, rows, index_weights, layer.index_proj.out, 0},
    };
    linear_all(projections, layer.index_proj.out ? 2 : 1, step.threads);
    T* kv = scratch.array<T>(rows * layer.head_dim);
    parallel_for(rows, rows * (layer.q_rank + layer.head_dim) * 4, step.threads, [&](int64_t row) {
        float* low = y + row * layer.in_proj.out;
        rms_norm(low, layer.q_norm, layer.q_rank, layer.norm_eps, low);
        make_kv(layer, rope, step, row, low + layer.q_rank, kv);
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

    float* attended = scratch.floats(rows * layer.heads * layer.head_dim);
    attend_all(Rows<T>{layer, rope, step, y, index_weights, kv, q, attended}, scratch);
    write_ring(layer.swa, step, kv, layer.head_dim);
    project(layer, step, attended, out, scratch);
}

}  // namespace

void attention(const Attention& layer, const RopeTable& main, const RopeTable& compress_rope, const Step& step,
               const float* x, float* out, Scratch& scratch) {
    if (layer.ratio && layer.compressor.entries.dtype != layer.swa.dtype)
        throw std::invalid_argument("the window and the compressed entries of a layer have different dtypes");
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
        linear(layer.in_proj, x, layer.in_proj.in, rows, y, static_cast<int>(columns), step.threads);
        T* kv = scratch.array<T>(rows * layer.head_dim);
        const RopeTable& rope = layer.uses_compress_rope ? compress_rope : main;
        parallel_for(rows, rows * layer.head_dim * 4, step.threads, [&](int64_t row) {
            make_kv(layer, rope, step, row, y + row * columns + layer.q_rank, kv);
        });
        write_ring(layer.swa, step, kv, layer.head_dim);
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
