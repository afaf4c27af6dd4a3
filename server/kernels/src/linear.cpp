#include "linear.h"

#include <algorithm>

#include "lanes.h"
#include "parallel.h"
#include "status.h"

namespace kernels {
namespace {

constexpr int TILE_ROWS = 6;
constexpr int BLOCK_ROWS = 96;  // rows that a thread takes at a time
constexpr int SIXTEENS = PANEL / LANES;
#if defined(__AVX512F__)
constexpr int AHEAD = 0;  // the machine's own prefetching is as fast as memory
constexpr int EXPAND_ROWS = 1 << 30;
#else
constexpr int AHEAD = 4096;      // bytes that a tile of several rows asks for before it needs them
constexpr int EXPAND_ROWS = 24;  // from so many rows on, bf16 weights are expanded once for all of them
#endif

#define ALWAYS_INLINE inline __attribute__((always_inline))

struct Input {
    const float* at;
    int64_t stride;
    Input from(int64_t i) const { return {at + i, stride}; }
    Input row(int64_t r) const { return {at + r * stride, stride}; }
};
struct Output {
    float* at;
    int64_t stride;
    int columns;  // that exist; a tile may have more
    Output row(int64_t r) const { return {at + r * stride, stride, columns}; }
};

template <int NBYTES>
ALWAYS_INLINE void prefetch(const void* before) {
#pragma GCC unroll 8
    for (int i = 0; i < NBYTES; i += 64) __builtin_prefetch(static_cast<const char*>(before) + AHEAD + i);
}

template <int R, int C>
ALWAYS_INLINE void multiply_add(Lanes (&sums)[R][C], const Input& x, const Lanes (&w)[C]) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        const Lanes value = splat(x.at[r * x.stride]);
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) sums[r][c] = fma(value, w[c], sums[r][c]);
    }
}

// Adds to `sums` what the rows i and i + 1 of the weights bring.
template <int R, int C>
ALWAYS_INLINE void two_steps(Lanes (&sums)[R][C], const Input& x, const float* w) {
    Lanes columns[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) columns[c] = load(w + c * LANES);
    multiply_add(sums, x, columns);
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) columns[c] = load(w + (C + c) * LANES);
    multiply_add(sums, x.from(1), columns);
}
template <int R, int C>
ALWAYS_INLINE void two_steps(Lanes (&sums)[R][C], const Input& x, const Bf16* w) {
    Lanes first[C], second[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
        const PairOfLanes pair = load_pairs(w + 2 * c * LANES);
        first[c] = pair.first;
        second[c] = pair.second;
    }
    multiply_add(sums, x, first);
    multiply_add(sums, x.from(1), second);
}
// The last row of an odd number of them.
template <int R, int C>
inline void last_step(Lanes (&sums)[R][C], const Input& x, const float* w) {
    Lanes columns[C];
    for (int c = 0; c < C; c++) columns[c] = load(w + c * LANES);
    multiply_add(sums, x, columns);
}
template <int R, int C>
inline void last_step(Lanes (&sums)[R][C], const Input& x, const Bf16* w) {
    Lanes columns[C];
    for (int c = 0; c < C; c++) columns[c] = load_pairs(w + 2 * c * LANES).first;
    multiply_add(sums, x, columns);
}

template <int R, int C>
inline void add_part(const Lanes (&sums)[R][C], const Output& out, bool is_first) {
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) {
            float* const at = out.at + r * out.stride + c * LANES;
            const int left = out.columns - c * LANES;
            if (left > 0) store_first(at, is_first ? sums[r][c] : load_first(at, left) + sums[r][c], left);
        }
}

// R rows by C sixteens of columns, P parts of `length` each.
template <int R, int C, int P, class T>
void tile(const Input& x, const T* w, int length, const Output& out, bool is_first) {
    constexpr int width = C * LANES;
    Lanes sums[P][R][C];
    for (int p = 0; p < P; p++)
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) sums[p][r][c] = zeros();
    for (int i = 0; i + 2 <= length; i += 2)
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) {
            const int64_t at = p * PART + i;
            if constexpr (AHEAD && R > 1) prefetch<2 * width * sizeof(T)>(w + at * width);
            two_steps(sums[p], x.from(at), w + at * width);
        }
    if (length % 2)
        for (int p = 0; p < P; p++) {
            const int64_t at = p * PART + length - 1;
            last_step(sums[p], x.from(at), w + at * width);
        }
    for (int p = 0; p < P; p++) add_part(sums[p], out, is_first && p == 0);
}

// As many groups of P parts as there are in `length` from i on; returns where they end.
template <int R, int C, int P, class T>
int64_t whole_parts(const Input& x, const T* w, int64_t i, int64_t length, const Output& out, bool is_first) {
    for (; i + P * PART <= length; i += P * PART)
        tile<R, C, P>(x.from(i), w + i * C * LANES, PART, out, is_first && i == 0);
    return i;
}

// R rows by C sixteens of columns, `length` of `in`: any number of parts. Where a narrow panel gives few accumulators,
// several parts are computed at once: one chain by itself waits for each addition to end. (Not where every panel is
// narrow: these are mostly in memory, and one stream is read faster than several.)
template <int R, int C, class T>
void parts(const Input& x, const T* w, int64_t length, const Output& out, bool is_first) {
    int64_t i = 0;
    if constexpr (SIXTEENS > 1 && R * C == 1) i = whole_parts<R, C, 4>(x, w, i, length, out, is_first);
    if constexpr (SIXTEENS > 1 && R * C < 4) i = whole_parts<R, C, 2>(x, w, i, length, out, is_first);
    i = whole_parts<R, C, 1>(x, w, i, length, out, is_first);
    if (i < length)
        tile<R, C, 1>(x.from(i), w + i * C * LANES, static_cast<int>(length - i), out, is_first && i == 0);
}

// R rows by all columns of a panel.
template <int R, class T>
void row_tile(const Input& x, const T* w, int width, int64_t length, const Output& out, bool is_first) {
    if (width == PANEL) return parts<R, SIXTEENS>(x, w, length, out, is_first);
    if constexpr (SIXTEENS > 1) switch (width / LANES) {
        case 3: return parts<R, 3>(x, w, length, out, is_first);
        case 2: return parts<R, 2>(x, w, length, out, is_first);
        default: return parts<R, 1>(x, w, length, out, is_first);
    }
}

template <class T>
void all_rows(const Input& x, int64_t rows, const T* w, int width, int64_t length, const Output& out, bool is_first) {
    int64_t r = 0;
    for (; r + TILE_ROWS <= rows; r += TILE_ROWS)
        row_tile<TILE_ROWS>(x.row(r), w, width, length, out.row(r), is_first);
    switch (rows - r) {
        case 5: return row_tile<5>(x.row(r), w, width, length, out.row(r), is_first);
        case 4: return row_tile<4>(x.row(r), w, width, length, out.row(r), is_first);
        case 3: return row_tile<3>(x.row(r), w, width, length, out.row(r), is_first);
        case 2: return row_tile<2>(x.row(r), w, width, length, out.row(r), is_first);
        case 1: return row_tile<1>(x.row(r), w, width, length, out.row(r), is_first);
        default: return;
    }
}

void expand(const Bf16* w, int width, int64_t length, float* wide) {
    for (int64_t i = 0; i < length; i += 2)
        for (int c = 0; c < width; c += LANES) {
            const PairOfLanes pair = load_pairs(w + i * width + 2 * c);
            store(wide + i * width + c, pair.first);
            store(wide + (i + 1) * width + c, pair.second);
        }
}

// One panel for some rows. Few rows read it once from end to end; for many a part stays in the cache for all of them.
template <class T>
void panel(const Input& x, int64_t rows, const T* w, int width, int64_t in, const Output& out) {
    if (rows <= TILE_ROWS) return all_rows(x, rows, w, width, in, out, true);
    for (int64_t i = 0; i < in; i += PART) {
        const int64_t length = std::min<int64_t>(PART, in - i);
        if constexpr (sizeof(T) == sizeof(Bf16))
            if (rows >= EXPAND_ROWS) {
                alignas(64) float wide[PART * PANEL];
                expand(w + i * width, width, length, wide);
                all_rows(x.from(i), rows, wide, width, length, out, i == 0);
                continue;
            }
        all_rows(x.from(i), rows, w + i * width, width, length, out, i == 0);
    }
}

int64_t padded(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

int64_t element_nbytes(int32_t dtype) { return dtype == BF16 ? 2 : 4; }

// Rows of `in` in the packed form: bf16 stores them in pairs.
int64_t packed_rows(int32_t in, int32_t dtype) { return dtype == BF16 ? padded(in, 2) : in; }

int64_t n_panels(const Matrix& weight) { return (weight.out + PANEL - 1) / PANEL; }
int64_t n_blocks(int64_t rows) { return (rows + BLOCK_ROWS - 1) / BLOCK_ROWS; }

// One panel for one block of rows: what a thread does at a time.
void panel_of_rows(const Product& product, int64_t task) {
    const Matrix& weight = *product.weight;
    const int64_t blocks = n_blocks(product.rows), column = task / blocks * PANEL, row = task % blocks * BLOCK_ROWS;
    const int columns = static_cast<int>(std::min<int64_t>(PANEL, weight.out - column));
    const int width = static_cast<int>(padded(columns, LANES));
    const int64_t rows = std::min<int64_t>(BLOCK_ROWS, product.rows - row);
    const Input x = Input{product.x, product.x_stride}.row(row);
    const Output out = Output{product.out + column, product.out_stride, columns}.row(row);
    const int64_t before = column * packed_rows(weight.in, weight.dtype);
    if (weight.dtype == BF16)
        panel(x, rows, static_cast<const Bf16*>(weight.data) + before, width, weight.in, out);
    else
        panel(x, rows, static_cast<const float*>(weight.data) + before, width, weight.in, out);
}

}  // namespace

void linear(const Matrix& weight, const float* x, int64_t x_stride, int64_t rows, float* out, int64_t out_stride,
            int threads) {
    Product product{&weight, x, x_stride, rows, out, out_stride, 0};
    linear_all(&product, 1, threads);
}

void linear_all(Product* products, int64_t count, int threads) {
    int64_t tasks = 0, work = 0;
    for (int64_t i = 0; i < count; i++) {
        products[i].first_task = tasks;
        tasks += n_panels(*products[i].weight) * n_blocks(products[i].rows);
        work += products[i].rows * products[i].weight->in * products[i].weight->out;
    }
    parallel_for(tasks, work, threads, [&](int64_t task) {
        const auto is_before = [](int64_t wanted, const Product& product) { return wanted < product.first_task; };
        const Product& product = *(std::upper_bound(products, products + count, task, is_before) - 1);
        panel_of_rows(product, task - product.first_task);
    });
}

}  // namespace kernels

using namespace kernels;

int64_t kernels_packed_nbytes(int32_t out, int32_t in, int32_t dtype) {
    return packed_rows(in, dtype) * padded(out, LANES) * element_nbytes(dtype);
}

namespace {

template <class T>
void pack(const T* weight, int32_t out, int32_t in, bool is_paired, T* packed) {
    const int pair = is_paired ? 2 : 1;
    const int64_t rows = padded(in, pair);
    for (int64_t column = 0; column < out; column += PANEL) {
        const int64_t width = padded(std::min<int64_t>(PANEL, out - column), LANES);
        T* const to = packed + column * rows;
        for (int64_t i = 0; i < rows; i++)
            for (int64_t c = 0; c < width; c++) {
                const bool is_real = i < in && column + c < out;
                to[i / pair * pair * width + c * pair + i % pair] = is_real ? weight[(column + c) * in + i] : T{0};
            }
    }
}

}  // namespace

void kernels_pack(const void* weight, int32_t out, int32_t in, int32_t dtype, void* packed, Matrix* made) {
    if (dtype == BF16)
        pack(static_cast<const Bf16*>(weight), out, in, true, static_cast<Bf16*>(packed));
    else
        pack(static_cast<const float*>(weight), out, in, false, static_cast<float*>(packed));
    *made = Matrix{packed, nullptr, in, out, PANEL, dtype, 0, 0};
}

int32_t kernels_linear(const Matrix* weight, const float* x, int64_t rows, float* out, int32_t threads) {
    return guarded([&] {
        linear(*weight, x, weight->in, rows, out, weight->out, threads);
        return OK;
    });
}
