// The two products of attention with rows of keys that lie anywhere: scores q . k, and weighted sums of keys.
//
// The rule that keeps bits fixed: a score is one chain of fused multiply-adds in each of 16 lanes over the channels,
// and then the tree of `sum`; a channel of a weighted sum is one chain over the keys in the order of the list. How many
// queries and keys are computed beside each other changes no chain.
#pragma once
#include "lanes.h"
#include "pools.h"
#include "sums.h"

namespace kernels {

#if defined(__AVX512F__)
constexpr int ACCUMULATORS = 16;  // of the machine's registers
#else
constexpr int ACCUMULATORS = 4;
#endif

// out[q * out_stride + k] = scale * query q . key k, for Q queries and all keys; `width` channels.
template <int Q, class T>
inline void score_queries(const float* queries, int64_t stride, const T* const* keys, int64_t n_keys, int width,
                          float scale, float* out, int64_t out_stride) {
    const int whole = width / LANES * LANES, rest = width - whole;
    int64_t k = 0;
    for (; k + 4 <= n_keys; k += 4) {
        Lanes acc[Q][4];
        for (int q = 0; q < Q; q++)
            for (int j = 0; j < 4; j++) acc[q][j] = zeros();
        const T *k0 = keys[k], *k1 = keys[k + 1], *k2 = keys[k + 2], *k3 = keys[k + 3];
        const auto step = [&](auto channels, int i) {
            const Lanes b0 = channels(k0 + i), b1 = channels(k1 + i), b2 = channels(k2 + i), b3 = channels(k3 + i);
            for (int q = 0; q < Q; q++) {
                const Lanes a = channels(queries + q * stride + i);
                acc[q][0] = fma(a, b0, acc[q][0]);
                acc[q][1] = fma(a, b1, acc[q][1]);
                acc[q][2] = fma(a, b2, acc[q][2]);
                acc[q][3] = fma(a, b3, acc[q][3]);
            }
        };
        for (int i = 0; i < whole; i += LANES) step([](auto p) { return load(p); }, i);
        if (rest) step([rest](auto p) { return load_first(p, rest); }, whole);
        for (int q = 0; q < Q; q++) {
            float* o = out + q * out_stride + k;
            store_four_sums(o, acc[q][0], acc[q][1], acc[q][2], acc[q][3]);
            for (int j = 0; j < 4; j++) o[j] *= scale;
        }
    }
    for (; k < n_keys; k++)
        for (int q = 0; q < Q; q++) {
            const float* query = queries + q * stride;
            Lanes acc = zeros();
            for (int i = 0; i < whole; i += LANES) acc = fma(load(query + i), load(keys[k] + i), acc);
            if (rest) acc = fma(load_first(query + whole, rest), load_first(keys[k] + whole, rest), acc);
            out[q * out_stride + k] = sum(acc) * scale;
        }
}

template <class T>
inline void score_keys(const float* queries, int64_t stride, int n_queries, const T* const* keys, int64_t n_keys,
                       int width, float scale, float* out, int64_t out_stride) {
    constexpr int Q = ACCUMULATORS / 4;
    int q = 0;
    for (; q + Q <= n_queries; q += Q)
        score_queries<Q>(queries + q * stride, stride, keys, n_keys, width, scale, out + q * out_stride, out_stride);
    if (Q > 2 && q + 2 <= n_queries) {
        score_queries<2>(queries + q * stride, stride, keys, n_keys, width, scale, out + q * out_stride, out_stride);
        q += 2;
    }
    for (; q < n_queries; q++)
        score_queries<1>(queries + q * stride, stride, keys, n_keys, width, scale, out + q * out_stride, out_stride);
}

// out[q * out_stride + i] += sum over k of weights[q * stride + k] * key k [i], for Q queries and C * 16 channels from
// `i` on; with `rest`, for that many channels.
template <int Q, int C, class T>
inline void add_channels(const float* weights, int64_t stride, const T* const* keys, int64_t n_keys, int i, int rest,
                         float* out, int64_t out_stride) {
    Lanes acc[Q][C];
    for (int q = 0; q < Q; q++)
        for (int c = 0; c < C; c++) {
            const float* o = out + q * out_stride + i + c * LANES;
            acc[q][c] = rest ? load_first(o, rest) : load(o);
        }
    for (int64_t k = 0; k < n_keys; k++) {
        Lanes key[C];
        for (int c = 0; c < C; c++)
            key[c] = rest ? load_first(keys[k] + i, rest) : load(keys[k] + i + c * LANES);
        for (int q = 0; q < Q; q++) {
            const Lanes w = splat(weights[q * stride + k]);
            for (int c = 0; c < C; c++) acc[q][c] = fma(w, key[c], acc[q][c]);
        }
    }
    for (int q = 0; q < Q; q++)
        for (int c = 0; c < C; c++) {
            float* o = out + q * out_stride + i + c * LANES;
            if (rest)
                store_first(o, acc[q][c], rest);
            else
                store(o, acc[q][c]);
        }
}

template <int Q, class T>
inline void add_queries(const float* weights, int64_t stride, const T* const* keys, int64_t n_keys, int width,
                        float* out, int64_t out_stride) {
    constexpr int C = ACCUMULATORS / Q < 8 ? ACCUMULATORS / Q : 8;
    int i = 0;
    for (; i + C * LANES <= width; i += C * LANES)
        add_channels<Q, C>(weights, stride, keys, n_keys, i, 0, out, out_stride);
    for (; i + LANES <= width; i += LANES)
        add_channels<Q, 1>(weights, stride, keys, n_keys, i, 0, out, out_stride);
    if (i < width) add_channels<Q, 1>(weights, stride, keys, n_keys, i, width - i, out, out_stride);
}

template <class T>
inline void add_weighted_keys(const float* weights, int64_t stride, int n_queries, const T* const* keys, int64_t n_keys,
                              int width, float* out, int64_t out_stride) {
    int q = 0;
    for (; q + 4 <= n_queries; q += 4)
        add_queries<4>(weights + q * stride, stride, keys, n_keys, width, out + q * out_stride, out_stride);
    if (q + 2 <= n_queries) {
        add_queries<2>(weights + q * stride, stride, keys, n_keys, width, out + q * out_stride, out_stride);
        q += 2;
    }
    if (q < n_queries)
        add_queries<1>(weights + q * stride, stride, keys, n_keys, width, out + q * out_stride, out_stride);
}

}  // namespace kernels
