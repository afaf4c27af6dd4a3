// A compressor pools the tokens of a window of `ratio` positions into one entry (attention's and the indexer's alike).
#pragma once
#include "kernels.h"
#include "scratch.h"

namespace kernels {

// `projected` [rows, stride]: the output of Attention::state_proj, of which this compressor takes its columns.
// Stores the entries that the step's rows close, then the rows' own state.
void compress(const Compressor& compressor, const RopeTable& rope, int rope_dim, const Step& step,
              const float* projected, int64_t stride, Scratch& scratch);

}  // namespace kernels

#pragma GCC visibility push(default)
extern "C" {
// One compressor by itself.
int32_t kernels_compress(const Compressor* compressor, const RopeTable* rope, int32_t rope_dim, const Step* step,
                         const float* projected, int64_t stride);
}
#pragma GCC visibility pop
