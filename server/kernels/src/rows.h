// One row of a pool: its channels in fp32 or bf16, or codes with their scales, without alignment (docs/layout.md).
//
//   FP8_KV       [channels before the tail as fp8 | the tail as bf16 | a scale for each block of codes | zeros up to a
//                multiple of 8 bytes]
//   MXFP4_INDEX  [channels as fp4 | a scale for each block]
//   FP8_INDEX    [channels as fp8 | one fp32 scale]
//
// A row of 0xFF bytes is NaN throughout, whatever its format.
#pragma once
#include "kernels.h"
#include "lanes.h"

namespace kernels {

inline bool is_encoded(const Pool& pool) { return pool.dtype >= FP8_KV; }

int64_t row_nbytes(const Pool& pool);

// x [pool.width] -> the bytes of a row.
void write_row(const Pool& pool, const float* x, void* row);

// The bytes of a row -> x [pool.width]; the second for FP8_KV alone, whose rows are exact in bf16.
void read_row(const Pool& pool, const void* row, float* x);
void read_row(const Pool& pool, const void* row, Bf16* x);

// x [width] is rounded to what the reference would store; the last `tail` channels are rotated.
void simulate_row(int32_t simulation, float* x, int width, int tail);

}  // namespace kernels

#pragma GCC visibility push(default)
extern "C" {
// Rows by themselves: x [rows, pool.width], which lie in a pool of one item.
int32_t kernels_write_rows(const Pool* pool, const float* x, int64_t rows);
int32_t kernels_read_rows(const Pool* pool, int64_t rows, float* x);
int32_t kernels_simulate_rows(int64_t simulation, float* x, int64_t rows, int64_t width, int64_t tail);
}
#pragma GCC visibility pop
