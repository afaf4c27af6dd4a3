#include "experts.h"

#include <algorithm>

#include "activations.h"
#include "lanes.h"
#include "linear.h"
#include "parallel.h"
#include "status.h"

namespace kernels {
namespace {

constexpr int EIGHTHS = 8;

// A row that an expert computes.
struct Pick {
    int64_t row;
    int32_t expert;
    float weight;
};

bool is_better(float a, float b) { return a > b || (a != a && b == b); }

// The top_k of score + bias [E] in descending order; among equals the lower id comes first.
void best_of(const float* scores, const float* bias, int n_experts, int top_k, int32_t* ids) {
    int found = 0;
    const auto value = [&](int32_t e) { return scores[e] + bias[e]; };
    for (int32_t e = 0; e < n_experts; e++) {
        if (found == top_k && !is_better(value(e), value(ids[top_k - 1]))) continue;
        int place = found < top_k ? found++ : top_k - 1;
        for (; place > 0 && is_better(value(e), value(ids[place - 1])); place--) ids[place] = ids[place - 1];
        ids[place] = e;
    }
}

// gate and up [inner] each, one after the other -> activation [inner], where gate was.
void swiglu(float* both, int inner, float limit, float weight) {
    float *const gate = both, *const up = both + inner;
    const Lanes most = splat(limit > 0.0f ? limit : INF), least = splat(limit > 0.0f ? -limit : -INF);
    for (int i = 0; i < inner; i += LANES) {
        const Lanes g = min(load_first(gate + i, inner - i), most);
        const Lanes u = max(min(load_first(up + i, inner - i), most), least);
        const Lanes act = u * g / (splat(1.0f) + exp(zeros() - g));
        store_first(gate + i, act * splat(weight), inner - i);
    }
}

// All picks, by expert and then by row; `first` [E + 1] says where each expert's begin.
void sort_picks(const Experts& layer, const int32_t* ids, const float* weights, int64_t rows, Pick* picks,
                int64_t* first) {
    const int64_t count = rows * layer.top_k;
    std::fill(first, first + layer.experts + 1, 0);
    for (int64_t i = 0; i < count; i++) first[ids[i] + 1]++;
    for (int e = 0; e < layer.experts; e++) first[e + 1] += first[e];
    for (int64_t i = 0; i < count; i++) picks[first[ids[i]]++] = {i / layer.top_k, ids[i], weights[i]};
    for (int e = layer.experts; e > 0; e--) first[e] = first[e - 1];
    first[0] = 0;
}

// Rows that experts compute: those of the picks, which lie together by expert, and every row for the shared expert.
template <class T>
struct ExpertRows {
    T *picked, *shared;
    int64_t stride;
};

// What the experts multiply whose inputs are quantized; null if there are none.
const float* rounded_input(const Experts& layer, const float* x, int64_t rows, int threads, Scratch& scratch) {
    const Matrix* const end = layer.up + layer.experts + 1;
    const Matrix* const one = std::find_if(layer.up, end, [](const Matrix& up) { return up.quantized_input != 0; });
    return one == end ? nullptr : input_of(*one, x, rows, threads, scratch);
}

// Every expert's matrix times its rows.
void map_rows(const Experts& layer, const Matrix* matrices, const int64_t* first, int64_t rows,
              const ExpertRows<const float>& in, const ExpertRows<float>& out, int threads, Product* products) {
    int64_t used = 0;
    for (int e = 0; e < layer.experts; e++) {
        const int64_t at = first[e], mine = first[e + 1] - at;
        if (!mine) continue;
        products[used++] = {&matrices[e],  in.picked + at * in.stride,   in.stride,  mine,
                            out.picked + at * out.stride, out.stride, 0};
    }
    products[used++] = {&matrices[layer.experts], in.shared, in.stride, rows, out.shared, out.stride, 0};
    linear_all(products, used, threads);
}

// out = shared + the tree over the eighths of what the row's experts gave. `mine` [top_k] are its outputs, ascending.
void add_up(const float* const* mine, const int32_t* eighth, int top_k, int hidden, float* out) {
    for (int64_t d = 0; d < hidden; d += LANES) {
        const int64_t left = hidden - d;
        Lanes sums[EIGHTHS];
        for (Lanes& sum : sums) sum = zeros();
        for (int k = 0; k < top_k; k++) sums[eighth[k]] = sums[eighth[k]] + load_first(mine[k] + d, left);
        for (int half = 1; half < EIGHTHS; half *= 2)
            for (int i = 0; i < EIGHTHS; i += 2 * half) sums[i] = sums[i] + sums[i + half];
        store_first(out + d, sums[0] + load_first(out + d, left), left);
    }
}

}  // namespace

void route(const Experts& layer, const int64_t* tokens, const float* x, int64_t rows, int32_t* ids, float* weights,
           int threads, Scratch& scratch) {
    const Scratch::Frame frame(scratch);
    const int64_t n = layer.experts, top_k = layer.top_k;
    float* const all = scratch.floats(rows * n);
    linear(layer.gate, x, layer.hidden, rows, all, n, threads);
    for (int64_t r = 0; r < rows; r++) {
        float* const scores = all + r * n;
        int32_t* const mine = ids + r * top_k;
        float* const weight = weights + r * top_k;
        for (int64_t e = 0; e < n; e += LANES)
            store_first(scores + e, sqrt(softplus(load_first(scores + e, n - e))), n - e);
        if (layer.by_token)
            for (int64_t k = 0; k < top_k; k++) mine[k] = static_cast<int32_t>(layer.by_token[tokens[r] * top_k + k]);
        else
            best_of(scores, layer.bias, layer.experts, layer.top_k, mine);
        float total = 0.0f;
        for (int64_t k = 0; k < top_k; k++) total += scores[mine[k]];
        for (int64_t k = 0; k < top_k; k++) weight[k] = scores[mine[k]] / total * layer.scale;
    }
}

void experts(const Experts& layer, const int64_t* tokens, const float* x, int64_t rows, float* out, int threads,
             Scratch& scratch) {
    const Scratch::Frame frame(scratch);
    const int64_t n = layer.experts, top_k = layer.top_k, count = rows * top_k;
    const int64_t hidden = layer.hidden, inner = layer.inner;
    int32_t* const ids = scratch.array<int32_t>(count);
    float* const weights = scratch.floats(count);
    route(layer, tokens, x, rows, ids, weights, threads, scratch);

    Pick* const picks = scratch.array<Pick>(count);
    int64_t* const first = scratch.array<int64_t>(n + 1);
    sort_picks(layer, ids, weights, rows, picks, first);
    const float* const rounded = rounded_input(layer, x, rows, threads, scratch);
    const auto input_of_expert = [&](int64_t e) { return layer.up[e].quantized_input ? rounded : x; };
    float* const inputs = scratch.floats(count * hidden);
    for (int64_t p = 0; p < count; p++)
        std::copy_n(input_of_expert(picks[p].expert) + picks[p].row * hidden, hidden, inputs + p * hidden);

    float* const both = scratch.floats((count + rows) * 2 * inner);  // w1 x and w3 x, then the activations
    const int64_t wide = 2 * inner;
    const ExpertRows<float> outputs{scratch.floats(count * hidden), out, hidden};
    Product* const products = scratch.array<Product>(n + 1);
    map_rows(layer, layer.up, first, rows, {inputs, input_of_expert(n), hidden}, {both, both + count * wide, wide},
             threads, products);
    parallel_for(count + rows, (count + rows) * inner * 8, threads, [&](int64_t p) {
        float* const act = both + p * wide;
        swiglu(act, layer.inner, layer.limit, p < count ? picks[p].weight : 1.0f);
        if (layer.down[p < count ? picks[p].expert : n].quantized_input) simulate_fp8(act, inner, ACTIVATION_BLOCK, act);
    });
    map_rows(layer, layer.down, first, rows, {both, both + count * wide, wide}, outputs, threads, products);

    // Picks are in the order of experts, so each row meets its own in ascending order.
    const float** const mine = scratch.array<const float*>(count);
    int32_t* const eighth = scratch.array<int32_t>(count);
    int32_t* const met = scratch.array<int32_t>(rows);
    std::fill(met, met + rows, 0);
    for (int64_t p = 0; p < count; p++) {
        const int64_t at = picks[p].row * top_k + met[picks[p].row]++;
        mine[at] = outputs.picked + p * hidden;
        eighth[at] = static_cast<int32_t>(static_cast<int64_t>(picks[p].expert) * EIGHTHS / n);
    }
    parallel_for(rows, rows * (top_k + EIGHTHS) * hidden, threads, [&](int64_t r) {
        add_up(mine + r * top_k, eighth + r * top_k, layer.top_k, layer.hidden, out + r * hidden);
    });
}

}  // namespace kernels

using namespace kernels;

int32_t kernels_experts(const Experts* layer, const int64_t* tokens, const float* x, int64_t rows, float* out,
                        int32_t threads) {
    return guarded([&] {
        const Borrowed scratch;
        experts(*layer, tokens, x, rows, out, threads, *scratch);
        return OK;
    });
}

int32_t kernels_route(const Experts* layer, const int64_t* tokens, const float* x, int64_t rows, int32_t* ids,
                      float* weights, int32_t threads) {
    return guarded([&] {
        const Borrowed scratch;
        route(*layer, tokens, x, rows, ids, weights, threads, *scratch);
        return OK;
    });
}
