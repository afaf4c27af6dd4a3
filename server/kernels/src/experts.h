// Mixture of experts: the router picks top_k of E experts for every row, the shared expert computes every row.
//
//   score[e] = sqrt(softplus(gate x))                       [E]
//   picks = by token (hash layers) or the top_k of score + bias; a NaN counts as largest, among equals the first wins
//   weight[k] = score[k] / (sum of the picks' scores) * scale
//   expert(x) = w2 (silu(min(w1 x, limit)) * clamp(w3 x, -limit, limit) * weight)
//   x and what w2 multiplies are rounded to fp8 where Matrix::quantized_input says so
//
// The rule that keeps bits fixed: expert e belongs to eighth e * 8 / E. Inside an eighth a row's experts are added in
// ascending order, starting with 0; the eight sums are added as a binary tree, the shared expert last.
#pragma once
#include "kernels.h"
#include "scratch.h"

namespace kernels {

// x [rows, D] (normed), tokens [rows] -> out [rows, D].
void experts(const Experts& layer, const int64_t* tokens, const float* x, int64_t rows, float* out, int threads,
             Scratch& scratch);

// The experts of every row, ids [rows, top_k] and weights [rows, top_k].
void route(const Experts& layer, const int64_t* tokens, const float* x, int64_t rows, int32_t* ids, float* weights,
           int threads, Scratch& scratch);

}  // namespace kernels

#pragma GCC visibility push(default)
extern "C" {
// Each by itself, with the shapes above.
int32_t kernels_experts(const Experts* layer, const int64_t* tokens, const float* x, int64_t rows, float* out,
                        int32_t threads);
int32_t kernels_route(const Experts* layer, const int64_t* tokens, const float* x, int64_t rows, int32_t* ids,
                      float* weights, int32_t threads);
}
#pragma GCC visibility pop
