#include "expand.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "lanes.h"
#include "numbers.h"

namespace kernels {
namespace {

constexpr int FP8_BLOCK = 128, FP4_BLOCK = 32;
constexpr uint8_t SMALLEST_EXACT = 3;  // below this scale byte bf16 does not have every value

// The value of every scale byte.
struct Scales {
    float value[256];
    Scales() {
        for (int byte = 0; byte < 256; byte++) value[byte] = e8m0(static_cast<uint8_t>(byte));
    }
};
const Scales SCALES;

template <int E>
constexpr int BLOCK = E == STORED_FP8 ? FP8_BLOCK : FP4_BLOCK;
template <int E>
constexpr bool HAS_SCALE = E == STORED_FP8 || E == STORED_FP4;

template <int E>
int64_t nbytes_of(int64_t columns) {
    return E == STORED_FP4 ? columns / 2 : columns * (E == STORED_FP32 ? 4 : E == STORED_BF16 ? 2 : 1);
}

template <int E>
Lanes sixteen_codes(const uint8_t* p) {
    if constexpr (E == STORED_FP32) return fp32_numbers(p);
    if constexpr (E == STORED_BF16) return bf16_numbers(p);
    if constexpr (E == STORED_FP8) return e4m3_numbers(p);
    if constexpr (E == STORED_FP4) return e2m1_numbers(p);
}

// One row of a tensor.
template <int E>
struct Row {
    const uint8_t *codes = nullptr, *scales = nullptr;
    bool rounds = false;

    Row() = default;
    Row(const StoredTensor& tensor, int64_t row) : codes(tensor.data + row * nbytes_of<E>(tensor.columns)),
                                                   rounds(tensor.rounds) {
        if constexpr (HAS_SCALE<E>)
            scales = tensor.scale + row / scale_rows_of_block(tensor) * scale_columns(tensor);
    }

    // 16 numbers from a column on, which share a scale.
    Lanes sixteen(int64_t column) const { return scaled(sixteen_codes<E>(codes + nbytes_of<E>(column)), column); }

    // n < 16 numbers, or numbers that lie in several blocks; the lanes behind them are 0.
    Lanes some(int64_t column, int n) const {
        uint8_t few[4 * LANES] = {};
        float values[LANES] = {};
        std::memcpy(few, codes + nbytes_of<E>(column), static_cast<size_t>(nbytes_of<E>(n + (E == STORED_FP4 && n % 2))));
        float numbers[LANES];
        store(numbers, sixteen_codes<E>(few));
        for (int i = 0; i < n; i++) {
            float one[LANES];
            store(one, scaled(splat(numbers[i]), column + i));
            values[i] = one[0];
        }
        return load(values);
    }

private:
    Lanes scaled(Lanes value, int64_t column) const {
        bool inexact = E == STORED_FP32;
        if constexpr (HAS_SCALE<E>) {
            const uint8_t byte = scales[column / BLOCK<E>];
            value = value * splat(SCALES.value[byte]);
            inexact = byte < SMALLEST_EXACT;
        }
        return rounds && inexact ? rounded_to_bf16(value) : value;
    }
};

// Whether 16 numbers from a column on share a scale.
template <int E>
bool is_in_one_block(int64_t column) {
    return !HAS_SCALE<E> || column / BLOCK<E> == (column + LANES - 1) / BLOCK<E>;
}

// Calls f with the encoding as a constant.
template <class F>
void with_encoding(int32_t encoding, F f) {
    switch (encoding) {
        case STORED_FP32: return f(std::integral_constant<int, STORED_FP32>{});
        case STORED_BF16: return f(std::integral_constant<int, STORED_BF16>{});
        case STORED_FP8: return f(std::integral_constant<int, STORED_FP8>{});
        default: return f(std::integral_constant<int, STORED_FP4>{});
    }
}

template <int E>
void expand_as(const StoredRows& rows, int64_t column, int64_t length, int width, float* to) {
    for (int c = 0; c < width; c += LANES) {
        Row<E> row[LANES];
        for (int r = 0; r < LANES; r++) row[r] = Row<E>(*rows.tensor, rows.row + std::min(c + r, rows.count - 1));
        for (int64_t i = 0; i < length; i += LANES) {
            const int n = static_cast<int>(std::min<int64_t>(LANES, length - i));
            Lanes block[LANES];
            if (n == LANES && is_in_one_block<E>(column + i))
                for (int r = 0; r < LANES; r++) block[r] = row[r].sixteen(column + i);
            else
                for (int r = 0; r < LANES; r++) block[r] = row[r].some(column + i, n);
            transpose(block);
            for (int j = 0; j < n; j++) store(to + (i + j) * width + c, block[j]);
        }
    }
}

}  // namespace

int64_t stored_nbytes(int32_t encoding, int64_t columns) {
    int64_t nbytes = 0;
    with_encoding(encoding, [&](auto e) { nbytes = nbytes_of<e.value>(columns); });
    return nbytes;
}

int64_t scale_columns(const StoredTensor& tensor) {
    if (!tensor.scale) return 0;
    const int block = tensor.encoding == STORED_FP8 ? FP8_BLOCK : FP4_BLOCK;
    return (tensor.columns + block - 1) / block;
}

int64_t scale_rows_of_block(const StoredTensor& tensor) { return tensor.encoding == STORED_FP8 ? FP8_BLOCK : 1; }

void expand(const StoredRows& rows, int64_t column, int64_t length, int width, float* to) {
    with_encoding(rows.tensor->encoding,
                  [&](auto e) { expand_as<e.value>(rows, column, length, width, to); });
}

void expand_row(const StoredTensor& tensor, int64_t row, int64_t column, int64_t count, float* to) {
    with_encoding(tensor.encoding, [&](auto e) {
        const Row<e.value> one(tensor, row);
        for (int64_t i = 0; i < count; i += LANES) {
            const int n = static_cast<int>(std::min<int64_t>(LANES, count - i));
            const bool is_whole = n == LANES && is_in_one_block<e.value>(column + i);
            store_first(to + i, is_whole ? one.sixteen(column + i) : one.some(column + i, n), n);
        }
    });
}

}  // namespace kernels

void kernels_expand(const StoredTensor* tensor, int64_t row, int64_t count, int64_t column, int64_t length,
                    int64_t width, float* to) {
    kernels::expand({tensor, row, static_cast<int>(count)}, column, length, static_cast<int>(width), to);
}

void kernels_expand_row(const StoredTensor* tensor, int64_t row, int64_t column, int64_t count, float* to) {
    kernels::expand_row(*tensor, row, column, count, to);
}
