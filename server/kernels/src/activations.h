// The input of a matrix: as it is, or rounded as the reference does before a weight that is stored in FP8 or FP4, to fp8
// with one scale for each row and block of channels.
//
// The rule that keeps bits fixed: a block of a row is rounded by itself.
#pragma once
#include "kernels.h"
#include "parallel.h"
#include "quantization.h"
#include "scratch.h"

namespace kernels {

// x [rows, width] -> out [rows, width], which may be x.
inline void quantize_rows(const float* x, int64_t rows, int64_t width, float* out, int threads) {
    parallel_for(rows, rows * width, threads, [&](int64_t row) {
        simulate_fp8(x + row * width, width, ACTIVATION_BLOCK, out + row * width);
    });
}

// x [rows, weight.in] as the weight takes it: x, or a copy in `scratch`.
inline const float* input_of(const Matrix& weight, const float* x, int64_t rows, int threads, Scratch& scratch) {
    if (!weight.quantized_input) return x;
    float* const copy = scratch.floats(rows * weight.in);
    quantize_rows(x, rows, weight.in, copy, threads);
    return copy;
}

}  // namespace kernels
