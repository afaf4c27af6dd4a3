// Linear maps: x [rows, in] times a weight [out, in] transposed -> [rows, out], fp32; weights fp32 or bf16.
//
// Packed form: panels of PANEL columns (outputs), the last one as many sixteens as are left. A panel of width w is
// [in, w] in fp32, or [in / 2 rounded up, w, 2] in bf16: a number and its neighbour along `in` share 32 bits.
// Columns and rows that only fill up are zero and are not stored to. A tile computes all columns of a panel for up to
// six rows in registers, so that a panel is read from end to end.
//
// The rule that keeps bits fixed: `in` is cut into parts of PART elements. Inside a part an output is one chain of
// fused multiply-adds in ascending order that starts with 0; the parts are added in ascending order. Rows, panels,
// threads and the width of a register change who computes a chain, never the chain.
#pragma once
#include "kernels.h"

namespace kernels {

#if defined(__AVX512F__)
constexpr int PANEL = 64;  // 6 rows by 64 columns are 24 of 32 registers
#else
constexpr int PANEL = 16;  // 6 rows by 16 columns are 12 of 16 registers
#endif
constexpr int PART = 256;

// x [rows, in] -> out [rows, out]; the strides between rows are in elements. x and out may not overlap.
struct Product {
    const Matrix* weight;
    const float* x;
    int64_t x_stride, rows;
    float* out;
    int64_t out_stride;
    int64_t first_task;  // set by linear_all
};

void linear(const Matrix& weight, const float* x, int64_t x_stride, int64_t rows, float* out, int64_t out_stride,
            int threads);

// Several maps whose panels the threads share as if they were one: experts, or the groups of an output projection.
void linear_all(Product* products, int64_t count, int threads);

inline Matrix group_of(const GroupedMatrix& weight, int group) {
    Matrix one = weight.first;
    if (one.stored)
        one.stored += group;
    else
        one.data = static_cast<const char*>(one.data) + group * weight.stride;
    return one;
}

}  // namespace kernels

#pragma GCC visibility push(default)
extern "C" {
// One map by itself: x [rows, in] -> out [rows, out].
int32_t kernels_linear(const Matrix* weight, const float* x, int64_t rows, float* out, int32_t threads);
}
#pragma GCC visibility pop
