#include "hyper_connections.h"

#include "lanes.h"
#include "linear.h"
#include "norm.h"
#include "parallel.h"
#include "status.h"

namespace kernels {
namespace {

void sigmoid_of(float* x, int n) {
    for (int i = 0; i < n; i += LANES) store_first(x + i, sigmoid(load_first(x + i, n - i)), n - i);
}

// logits [N, N] become rows of a softmax plus eps.
void softmax_rows(float* logits, int n, float eps) {
    for (int j = 0; j < n; j++) {
        float* const row = logits + j * n;
        Lanes top = splat(-INF);
        for (int k = 0; k < n; k += LANES) top = max(top, load_first(row + k, n - k, -INF));
        const Lanes highest = splat(max_of(top));
        for (int k = 0; k < n; k += LANES)
            store_first(row + k, exp(load_first(row + k, n - k) - highest), n - k);
        float total = 0.0f;
        for (int k = 0; k < n; k++) total += row[k];
        for (int k = 0; k < n; k++) row[k] = row[k] / total + eps;
    }
}

// Divides every column, or every row, of comb [N, N] by its sum plus eps.
template <int N>
inline void divide_columns(float* comb, int any, float eps) {
    const int n = N ? N : any;
    for (int k = 0; k < n; k++) {
        float total = comb[k];
        for (int j = 1; j < n; j++) total += comb[j * n + k];
        total += eps;
        for (int j = 0; j < n; j++) comb[j * n + k] /= total;
    }
}
template <int N>
inline void divide_rows(float* comb, int any, float eps) {
    const int n = N ? N : any;
    for (int j = 0; j < n; j++) {
        float total = comb[j * n];
        for (int k = 1; k < n; k++) total += comb[j * n + k];
        total += eps;
        for (int k = 0; k < n; k++) comb[j * n + k] /= total;
    }
}

// N = 0: as many streams as `any` says.
template <int N>
void sinkhorn(float* comb, int any, int iterations, float eps) {
    divide_columns<N>(comb, any, eps);
    for (int i = 1; i < iterations; i++) {
        divide_rows<N>(comb, any, eps);
        divide_columns<N>(comb, any, eps);
    }
}

// x = norm(sum_j weights[j] streams[j])
void weighted_sum(const HyperConnection& site, const float* weights, const float* streams, float* x) {
    for (int64_t d = 0; d < site.hidden; d += LANES) {
        const int64_t left = site.hidden - d;
        Lanes total = splat(weights[0]) * load_first(streams + d, left);
        for (int j = 1; j < site.streams; j++)
            total = fma(splat(weights[j]), load_first(streams + static_cast<int64_t>(j) * site.hidden + d, left), total);
        store_first(x + d, total, left);
    }
    rms_norm(x, site.norm, site.hidden, site.norm_eps, x);
}

int64_t width_of(const HyperConnection& site) { return static_cast<int64_t>(site.streams) * site.hidden; }

// fn of every row [rows, fn.out], not yet divided by the row's rms.
float* mixes_of(const HyperConnection& site, const float* streams, int64_t rows, int threads, Scratch& scratch) {
    float* const mixes = scratch.floats(rows * site.fn.out);
    linear(site.fn, streams, width_of(site), rows, mixes, site.fn.out, threads);
    return mixes;
}

void collapse_row(const HyperConnection& site, const float* streams, float* mix, float* x, float* post, float* comb) {
    const int n = site.streams;
    const float inverse = inverse_rms(streams, width_of(site), site.norm_eps);
    for (int i = 0; i < n; i++) mix[i] = mix[i] * inverse * site.scale[0] + site.base[i];
    for (int i = n; i < 2 * n; i++) mix[i] = mix[i] * inverse * site.scale[1] + site.base[i];
    for (int i = 2 * n; i < (2 + n) * n; i++) comb[i - 2 * n] = mix[i] * inverse * site.scale[2] + site.base[i];
    sigmoid_of(mix, 2 * n);
    for (int i = 0; i < n; i++) mix[i] += site.hc_eps;
    for (int i = 0; i < n; i++) post[i] = 2.0f * mix[n + i];
    softmax_rows(comb, n, site.hc_eps);
    if (n == 4)
        sinkhorn<4>(comb, n, site.iterations, site.hc_eps);
    else
        sinkhorn<0>(comb, n, site.iterations, site.hc_eps);
    weighted_sum(site, mix, streams, x);
}

void expand_row(const HyperConnection& site, const float* out, const float* streams, const float* post,
                const float* comb, float* next) {
    const int n = site.streams;
    for (int64_t d = 0; d < site.hidden; d += LANES) {
        const int64_t left = site.hidden - d;
        for (int k = 0; k < n; k++) {
            Lanes total = splat(post[k]) * load_first(out + d, left);
            for (int j = 0; j < n; j++) {
                const Lanes stream = load_first(streams + static_cast<int64_t>(j) * site.hidden + d, left);
                total = fma(splat(comb[j * n + k]), stream, total);
            }
            store_first(next + static_cast<int64_t>(k) * site.hidden + d, total, left);
        }
    }
}

}  // namespace

void collapse(const HyperConnection& site, const float* streams, int64_t rows, float* x, float* post, float* comb,
              int threads, Scratch& scratch) {
    const Scratch::Frame frame(scratch);
    const int64_t n = site.streams, width = width_of(site);
    float* const mixes = mixes_of(site, streams, rows, threads, scratch);
    parallel_for(rows, 2 * rows * width, threads, [&](int64_t r) {
        collapse_row(site, streams + r * width, mixes + r * site.fn.out, x + r * site.hidden, post + r * n,
                     comb + r * n * n);
    });
}

void expand(const HyperConnection& site, const float* out, const float* streams, const float* post, const float* comb,
            int64_t rows, float* next, int threads) {
    const int64_t n = site.streams, width = width_of(site);
    parallel_for(rows, n * rows * width, threads, [&](int64_t r) {
        expand_row(site, out + r * site.hidden, streams + r * width, post + r * n, comb + r * n * n, next + r * width);
    });
}

void head_collapse(const HyperConnection& site, const float* streams, int64_t rows, float* x, int threads,
                   Scratch& scratch) {
    const Scratch::Frame frame(scratch);
    const int64_t width = width_of(site);
    float* const mixes = mixes_of(site, streams, rows, threads, scratch);
    parallel_for(rows, 2 * rows * width, threads, [&](int64_t r) {
        float* const mix = mixes + r * site.fn.out;
        const float inverse = inverse_rms(streams + r * width, width, site.norm_eps);
        for (int i = 0; i < site.streams; i++) mix[i] = mix[i] * inverse * site.scale[0] + site.base[i];
        sigmoid_of(mix, site.streams);
        for (int i = 0; i < site.streams; i++) mix[i] += site.hc_eps;
        weighted_sum(site, mix, streams + r * width, x + r * site.hidden);
    });
}

}  // namespace kernels

using namespace kernels;

int32_t kernels_hc_collapse(const HyperConnection* site, const float* streams, int64_t rows, float* x, float* post,
                            float* comb, int32_t threads) {
    return guarded([&] {
        const Borrowed scratch;
        collapse(*site, streams, rows, x, post, comb, threads, *scratch);
        return OK;
    });
}

int32_t kernels_hc_expand(const HyperConnection* site, const float* out, const float* streams, const float* post,
                          const float* comb, int64_t rows, float* next, int32_t threads) {
    return guarded([&] {
        expand(*site, out, streams, post, comb, rows, next, threads);
        return OK;
    });
}

int32_t kernels_head_collapse(const HyperConnection* site, const float* streams, int64_t rows, float* x,
                              int32_t threads) {
    return guarded([&] {
        const Borrowed scratch;
        head_collapse(*site, streams, rows, x, threads, *scratch);
        return OK;
    });
}
