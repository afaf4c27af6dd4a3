// One layer's attention, and for the draft its window rows alone.
#pragma once
#include "kernels.h"
#include "scratch.h"

namespace kernels {

// x [rows, D] (normed) -> out [rows, D]; reads the pools' past and writes these rows' state.
// `main` is the rope of window-only layers, `compress` that of layers with `uses_compress_rope`.
void attention(const Attention& layer, const RopeTable& main, const RopeTable& compress, const Step& step,
               const float* x, float* out, Scratch& scratch);

// Only the window rows of x [rows, D] (normed).
void write_window(const Attention& layer, const RopeTable& main, const RopeTable& compress, const Step& step,
                  const float* x, Scratch& scratch);

}  // namespace kernels

#pragma GCC visibility push(default)
extern "C" {
// One layer's attention by itself.
int32_t kernels_attention(const Attention* layer, const RopeTable* main, const RopeTable* compress, const Step* step,
                          const float* x, float* out);
}
#pragma GCC visibility pop
