// A token's state is a row [kv | score], the position's `ape` already in the score; in CSA layers (ratio 4) one row for
// each of two halves, A and B. Position p closes entry p / ratio if it is the last of its window. The entry is
//     norm(sum over the window's rows of softmax(score) kv, channel by channel), with rope at the window's first position
// and then as Compressor::simulation says.
// Its rows are the window's, in CSA layers the A halves of the window before (entry 0 has none) and then its B halves.
//
// The rule that keeps bits fixed: a channel is pooled by one chain over its rows, oldest first.
#include "compressor.h"

#include <type_traits>

#include "norm.h"
#include "parallel.h"
#include "pools.h"
#include "status.h"

namespace kernels {
namespace {

constexpr int CSA = 4;

// The step's own rows of one half (0: A, 1: B), in the pool's dtype.
template <class T>
T* own_rows(const Compressor& c, int half, const Step& step, const float* projected, int64_t stride, Scratch& scratch) {
    const int width = c.width;
    const int64_t both = (c.ratio == CSA ? 2 : 1) * static_cast<int64_t>(width);
    T* own = scratch.array<T>(static_cast<int64_t>(step.rows) * 2 * width);
    float* score = scratch.floats(width);
    for (int64_t row = 0; row < step.rows; row++) {
        const float* kv = projected + row * stride + c.columns + half * width;
        const float* gate = kv + both;
        const float* ape = c.ape + step.position[row] % c.ratio * both + half * width;
        T* out = own + row * 2 * width;
        for (int i = 0; i < width; i++) score[i] = gate[i] + ape[i];
        to_dtype(kv, width, c.state_a.dtype, out);
        to_dtype(score, width, c.state_a.dtype, out + width);
    }
    return own;
}

// Sixteen channels from `i` on (the first `n` of them exist) of rows [kv | score].
template <class T>
Lanes pool_channels(const T* const* rows, int64_t n_rows, int width, int i, int n) {
    const auto channels = [n](const T* p) { return n == LANES ? load(p) : load_first(p, n); };
    Lanes top = channels(rows[0] + width + i);
    for (int64_t r = 1; r < n_rows; r++) top = max(top, channels(rows[r] + width + i));
    Lanes total = zeros(), weighted = zeros();
    for (int64_t r = 0; r < n_rows; r++) {
        const Lanes weight = exp(channels(rows[r] + width + i) - top);
        total = total + weight;
        weighted = fma(weight, channels(rows[r] + i), weighted);
    }
    return weighted / total;
}

// The entry that `row` closes. `pooled` [width] and `rows` [2 ratio] are working memory.
template <class T>
void close_entry(const Compressor& c, const RopeTable& rope, int rope_dim, const Step& step, int64_t row, const T* own_a,
                 const T* own_b, const T** rows, float* pooled) {
    const int64_t segment = step.segment[row], stop = step.position[row] + 1, first = stop - c.ratio;
    const int64_t own_stride = 2 * static_cast<int64_t>(c.width);
    int64_t n_rows = 0;
    const RingRows<T> half_a(c.state_a, own_a, own_stride, step, segment);
    if (own_b) {
        const RingRows<T> half_b(c.state_b, own_b, own_stride, step, segment);
        if (first > 0) n_rows = half_a.list(first - c.ratio, first, rows);
        n_rows += half_b.list(first, stop, rows + n_rows);
    } else {
        n_rows = half_a.list(first, stop, rows);
    }
    for (int i = 0; i < c.width; i += LANES) {
        const int n = std::min(LANES, c.width - i);
        store_first(pooled + i, pool_channels(rows, n_rows, c.width, i, n), n);
    }
    rms_norm(pooled, c.norm, c.width, c.norm_eps, pooled);
    rotate(pooled + c.width - rope_dim, rope_at(rope, first, rope_dim), rope_dim);
    simulate_row(c.simulation, pooled, c.width, rope_dim);
    write_row(c.entries, pooled, entry_at<uint8_t>(c.entries, pages_of(step, segment), first / c.ratio));
}

template <class T>
void compress_as(const Compressor& c, const RopeTable& rope, int rope_dim, const Step& step, const float* projected,
                 int64_t stride, Scratch& scratch) {
    Scratch::Frame frame(scratch);
    const T* own_a = own_rows<T>(c, 0, step, projected, stride, scratch);
    const T* own_b = c.ratio == CSA ? own_rows<T>(c, 1, step, projected, stride, scratch) : nullptr;

    int64_t* closing = scratch.array<int64_t>(step.rows);
    int64_t n_closing = 0;
    for (int64_t row = 0; row < step.rows; row++)
        if ((step.position[row] + 1) % c.ratio == 0) closing[n_closing++] = row;
    const T** rows = scratch.array<const T*>(static_cast<int64_t>(step.threads) * 2 * c.ratio);
    float* pooled = scratch.floats(static_cast<int64_t>(step.threads) * c.width);
    const int64_t work = n_closing * 2 * c.ratio * c.width * 16;
    in_parallel(n_closing, work, step.threads, [&](int64_t i, int thread) {
        close_entry(c, rope, rope_dim, step, closing[i], own_a, own_b, rows + static_cast<int64_t>(thread) * 2 * c.ratio,
                    pooled + static_cast<int64_t>(thread) * c.width);
    });

    const int64_t own_stride = 2 * static_cast<int64_t>(c.width) * static_cast<int64_t>(sizeof(T));
    write_ring(c.state_a, step, own_a, own_stride);
    if (own_b) write_ring(c.state_b, step, own_b, own_stride);
}

}  // namespace

void compress(const Compressor& compressor, const RopeTable& rope, int rope_dim, const Step& step,
              const float* projected, int64_t stride, Scratch& scratch) {
    with_dtype(compressor.state_a.dtype, [&](auto element) {
        using T = std::remove_const_t<std::remove_pointer_t<decltype(element)>>;
        compress_as<T>(compressor, rope, rope_dim, step, projected, stride, scratch);
    });
}

}  // namespace kernels

int32_t kernels_compress(const Compressor* compressor, const RopeTable* rope, int32_t rope_dim, const Step* step,
                         const float* projected, int64_t stride) {
    return kernels::guarded([&] {
        const kernels::Borrowed scratch;
        kernels::compress(*compressor, *rope, rope_dim, *step, projected, stride, *scratch);
        return OK;
    });
}
