// Rows of a weight as its file stores them -> the fp32 panel that a linear map multiplies with.
#pragma once
#include "kernels.h"

namespace kernels {

// A piece of a StoredTensor: `count` rows from `row` on.
struct StoredRows {
    const StoredTensor* tensor;
    int64_t row;
    int count;
};

// Columns column .. column + length - 1 of `rows`, transposed: to[i * width + r]. `width` is count, or more up to whole
// sixteens; what only fills up are copies of the last row.
void expand(const StoredRows& rows, int64_t column, int64_t length, int width, float* to);

// `count` numbers of one row from a column on, not transposed.
void expand_row(const StoredTensor& tensor, int64_t row, int64_t column, int64_t count, float* to);

// Bytes of `columns` numbers. A row of FP4 has an even number of them.
int64_t stored_nbytes(int32_t encoding, int64_t columns);

// Scales of one row of blocks, and rows of a block.
int64_t scale_columns(const StoredTensor& tensor);
int64_t scale_rows_of_block(const StoredTensor& tensor);

}  // namespace kernels

#pragma GCC visibility push(default)
extern "C" {
// Each by itself: to [length, width], and to [count].
void kernels_expand(const StoredTensor* tensor, int64_t row, int64_t count, int64_t column, int64_t length,
                    int64_t width, float* to);
void kernels_expand_row(const StoredTensor* tensor, int64_t row, int64_t column, int64_t count, float* to);
}
#pragma GCC visibility pop
