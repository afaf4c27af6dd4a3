// Manifold-constrained hyper-connections (mHC): N streams [N, D] are mixed into a sublayer's input [D], and its output
// back into the streams.
//
//   mix = fn (streams / rms(streams))                          [(2 + N) N]
//   pre, post = sigmoid(mix scale + base) + eps, 2 sigmoid(..)  [N] each
//   comb = Sinkhorn(softmax(mix scale + base) + eps)            [N, N]: rows, then columns are divided by their sums
//   x = norm(sum_j pre[j] streams[j])
//   new[k] = post[k] out + sum_j comb[j, k] streams[j]
//
// The rule that keeps bits fixed: every row by itself; sums over streams are chains in ascending order, fused over the
// D elements; the mean square is that of norm.h.
#pragma once
#include "kernels.h"
#include "scratch.h"

namespace kernels {

// streams [rows, N, D] -> x [rows, D] (normed), post [rows, N], comb [rows, N, N].
void collapse(const HyperConnection& site, const float* streams, int64_t rows, float* x, float* post, float* comb,
              int threads, Scratch& scratch);

// out [rows, D] and streams [rows, N, D] -> next [rows, N, D].
void expand(const HyperConnection& site, const float* out, const float* streams, const float* post, const float* comb,
            int64_t rows, float* next, int threads);

// The last collapse before the head: sigmoid weights only. streams [rows, N, D] -> x [rows, D] (normed).
void head_collapse(const HyperConnection& site, const float* streams, int64_t rows, float* x, int threads,
                   Scratch& scratch);

}  // namespace kernels

#pragma GCC visibility push(default)
extern "C" {
// Each by itself, with the shapes above.
int32_t kernels_hc_collapse(const HyperConnection* site, const float* streams, int64_t rows, float* x, float* post,
                            float* comb, int32_t threads);
int32_t kernels_hc_expand(const HyperConnection* site, const float* out, const float* streams, const float* post,
                          const float* comb, int64_t rows, float* next, int32_t threads);
int32_t kernels_head_collapse(const HyperConnection* site, const float* streams, int64_t rows, float* x,
                              int32_t threads);
}
#pragma GCC visibility pop
