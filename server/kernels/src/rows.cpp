#include "rows.h"

#include <cstring>

#include "norm.h"
#include "quantization.h"
#include "status.h"

namespace kernels {
namespace {

// Where the parts of a row of FP8_KV are.
struct KvRow {
    int nope, block;
    int64_t tail_at, scales_at, used, nbytes;

    explicit KvRow(const Pool& pool)
        : nope(pool.width - pool.tail), block(kv_block(nope)), tail_at(nope), scales_at(tail_at + 2 * int64_t{pool.tail}),
          used(scales_at + nope / block), nbytes((used + 7) / 8 * 8) {}
};

void write_kv(const Pool& pool, const float* x, uint8_t* row) {
    const KvRow at(pool);
    encode_fp8(x, at.nope, at.block, row, row + at.scales_at);
    for (int i = 0; i < pool.tail; i++) {
        const Bf16 element = float_to_bf16(x[at.nope + i]);
        std::memcpy(row + at.tail_at + 2 * i, &element, sizeof element);
    }
    std::memset(row + at.used, 0, static_cast<size_t>(at.nbytes - at.used));
}

void put(Bf16 element, float* x) { *x = bf16_to_float(element); }
void put(Bf16 element, Bf16* x) { *x = element; }

template <class T>
void read_kv(const Pool& pool, const uint8_t* row, T* x) {
    const KvRow at(pool);
    decode_fp8(row, row + at.scales_at, at.nope, at.block, x);
    for (int i = 0; i < pool.tail; i++) {
        Bf16 element;
        std::memcpy(&element, row + at.tail_at + 2 * i, sizeof element);
        put(element, x + at.nope + i);
    }
}

}  // namespace

int64_t row_nbytes(const Pool& pool) {
    switch (pool.dtype) {
        case FP8_KV: return KvRow(pool).nbytes;
        case MXFP4_INDEX: return pool.width / 2 + pool.width / index_block(pool.width);
        case FP8_INDEX: return pool.width + static_cast<int64_t>(sizeof(float));
        default: return pool.width * dtype_nbytes(pool.dtype);
    }
}

void write_row(const Pool& pool, const float* x, void* row) {
    auto* const bytes = static_cast<uint8_t*>(row);
    const int width = pool.width;
    switch (pool.dtype) {
        case FP8_KV: return write_kv(pool, x, bytes);
        case MXFP4_INDEX: return encode_fp4(x, width, index_block(width), bytes, bytes + width / 2);
        case FP8_INDEX: {
            const float scale = encode_fp8_row(x, width, bytes);
            std::memcpy(bytes + width, &scale, sizeof scale);
            return;
        }
        default: return to_dtype(x, width, pool.dtype, row);
    }
}

void read_row(const Pool& pool, const void* row, float* x) {
    const auto* const bytes = static_cast<const uint8_t*>(row);
    const int width = pool.width;
    switch (pool.dtype) {
        case FP8_KV: return read_kv(pool, bytes, x);
        case MXFP4_INDEX: return decode_fp4(bytes, bytes + width / 2, width, index_block(width), x);
        case FP8_INDEX: {
            float scale;
            std::memcpy(&scale, bytes + width, sizeof scale);
            return decode_fp8_row(bytes, scale, width, x);
        }
        default: return from_dtype(row, width, pool.dtype, x);
    }
}

void read_row(const Pool& pool, const void* row, Bf16* x) { read_kv(pool, static_cast<const uint8_t*>(row), x); }

void simulate_row(int32_t simulation, float* x, int width, int tail) {
    if (simulation == AS_KV_ROW) simulate_fp8(x, width - tail, kv_block(width - tail), x);
    if (simulation == AS_INDEX_ROW) {
        hadamard(x, width);
        simulate_fp4(x, width, index_block(width), x);
    }
}

}  // namespace kernels

using namespace kernels;

int32_t kernels_write_rows(const Pool* pool, const float* x, int64_t rows) {
    return guarded([&] {
        for (int64_t i = 0; i < rows; i++) write_row(*pool, x + i * pool->width, pool->data + i * pool->row_stride);
        return OK;
    });
}

int32_t kernels_read_rows(const Pool* pool, int64_t rows, float* x) {
    return guarded([&] {
        for (int64_t i = 0; i < rows; i++) read_row(*pool, pool->data + i * pool->row_stride, x + i * pool->width);
        return OK;
    });
}

int32_t kernels_simulate_rows(int64_t simulation, float* x, int64_t rows, int64_t width, int64_t tail) {
    return guarded([&] {
        for (int64_t i = 0; i < rows; i++)
            simulate_row(static_cast<int32_t>(simulation), x + i * width, static_cast<int>(width),
                         static_cast<int>(tail));
        return OK;
    });
}
