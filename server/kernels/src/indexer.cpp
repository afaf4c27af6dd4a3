// score[entry] = sum over heads of weight[h] relu(q[h] . k[entry]), weight as projected / sqrt(index_dim heads).
//
// The rule that keeps bits fixed: heads lie in lanes, so q[h] . k is one chain of fused multiply-adds over the channels;
// the sixteens of heads are added to a lane's total in ascending order, and the lanes by the tree of `sum`.
#include "indexer.h"

#include <cmath>
#include <type_traits>

#include "norm.h"
#include "pools.h"
#include "status.h"
#include "sums.h"

namespace kernels {
namespace {

constexpr int KEYS = 4;  // scored beside each other

int in_sixteens(int heads) { return (heads + LANES - 1) / LANES * LANES; }

// Heads in lanes: query [heads, width] -> [width, padded heads]; lanes behind the last head are 0.
void lay_out(const Attention& layer, const float* query, const float* weights, const IndexerWork& work) {
    const int heads = layer.index_heads, width = layer.index_dim, padded = in_sixteens(heads);
    const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(width)) /
                                           std::sqrt(static_cast<double>(heads)));
    for (int h = 0; h < padded; h++) work.weights[h] = h < heads ? weights[h] * scale : 0.0f;
    for (int i = 0; i < width; i++)
        for (int h = 0; h < padded; h++) work.queries[i * padded + h] = h < heads ? query[h * width + i] : 0.0f;
}

// Adds what V sixteens of heads say about four keys; of the last one only the heads in `exist` count.
template <int V>
void add_heads(const float* queries, int64_t stride, const float* const* keys, int width, const float* weights,
               uint32_t exist, Lanes (&totals)[KEYS]) {
    Lanes acc[V][KEYS];
    for (int v = 0; v < V; v++)
        for (int k = 0; k < KEYS; k++) acc[v][k] = zeros();
    for (int i = 0; i < width; i++) {
        Lanes key[KEYS];
        for (int k = 0; k < KEYS; k++) key[k] = splat(keys[k][i]);
        for (int v = 0; v < V; v++) {
            const Lanes query = load(queries + i * stride + v * LANES);
            for (int k = 0; k < KEYS; k++) acc[v][k] = fma(query, key[k], acc[v][k]);
        }
    }
    const Lanes zero = zeros();
    for (int v = 0; v < V; v++) {
        const Lanes weight = load(weights + v * LANES);
        for (int k = 0; k < KEYS; k++) {
            Lanes relu = select(less(acc[v][k], zero), zero, acc[v][k]);  // NaN stays
            if (v == V - 1) relu = select(exist, relu, zero);
            totals[k] = fma(relu, weight, totals[k]);
        }
    }
}

void score_keys(const Attention& layer, const float* const* keys, const IndexerWork& work, float* out) {
    constexpr uint32_t ALL = 0xFFFF;
    const int padded = in_sixteens(layer.index_heads), width = layer.index_dim;
    const uint32_t last = ALL >> (padded - layer.index_heads);
    Lanes totals[KEYS] = {zeros(), zeros(), zeros(), zeros()};
    int h = 0;
    const auto take = [&](auto sixteens) {
        constexpr int V = decltype(sixteens)::value;
        for (; h + V * LANES <= padded; h += V * LANES)
            add_heads<V>(work.queries + h, padded, keys, width, work.weights + h, h + V * LANES == padded ? last : ALL,
                         totals);
    };
#if defined(__AVX512F__)
    take(std::integral_constant<int, 4>());
    take(std::integral_constant<int, 2>());
#endif
    take(std::integral_constant<int, 1>());
    store_four_sums(out, totals[0], totals[1], totals[2], totals[3]);
}

// Where the floats of entry `entry` are; `room` takes them if the pool has another dtype.
const float* key_at(const Pool& pool, const int64_t* pages, int64_t entry, float* room) {
    if (pool.dtype == FP32) return entry_at<const float>(pool, pages, entry);
    from_dtype(entry_at<const uint8_t>(pool, pages, entry), pool.width, pool.dtype, room);
    return room;
}

// Larger scores have larger ranks.
uint32_t rank_of(float score) {
    const uint32_t bits = bits_of_float(score + 0.0f);  // -0 becomes 0
    const uint32_t ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
    return score == score ? ordered : 0xFFFFFFFFu;
}

int64_t count_from(const uint32_t* ranks, int64_t n, uint32_t least) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) count += ranks[i] >= least;
    return count;
}

}  // namespace

IndexerWork::IndexerWork(const Attention& layer, int64_t most_visible, Scratch& scratch)
    : queries(scratch.floats(static_cast<int64_t>(in_sixteens(layer.index_heads)) * layer.index_dim)),
      weights(scratch.floats(in_sixteens(layer.index_heads))),
      keys(scratch.floats(static_cast<int64_t>(KEYS) * layer.index_dim)),
      scores(scratch.floats((most_visible + KEYS - 1) / KEYS * KEYS)), ranks(scratch.array<uint32_t>(most_visible)) {}

void pick_best(const float* scores, int64_t n, int64_t k, uint32_t* ranks, int64_t* picked) {
    for (int64_t i = 0; i < n; i++) ranks[i] = rank_of(scores[i]);
    uint32_t least = 0;  // the largest rank that at least k scores reach, made bit by bit
    int64_t reach = n;
    for (uint32_t bit = 1u << 31; bit && reach != k; bit >>= 1) {
        const int64_t count = count_from(ranks, n, least | bit);
        if (count < k) continue;
        least |= bit;
        reach = count;
    }
    int64_t equal = 0;
    for (int64_t i = 0; i < n; i++) equal += ranks[i] == least;
    int64_t ties = k - (reach - equal);  // how many of the equal ones are taken
    int64_t n_picked = 0;
    for (int64_t i = 0; i < n; i++) {
        const int64_t tie = (ranks[i] == least) & (ties > 0);
        picked[n_picked] = i;
        n_picked += (ranks[i] > least) | tie;
        ties -= tie;
    }
}

void score_entries(const Attention& layer, const float* query, const float* weights, const int64_t* pages,
                   int64_t visible, const IndexerWork& work) {
    const Pool& pool = layer.indexer.entries;
    lay_out(layer, query, weights, work);
    for (int64_t first = 0; first < visible; first += KEYS) {
        const float* keys[KEYS];
        for (int64_t k = 0; k < KEYS; k++)
            keys[k] = key_at(pool, pages, std::min(first + k, visible - 1), work.keys + k * layer.index_dim);
        score_keys(layer, keys, work, work.scores + first);
    }
}

}  // namespace kernels

using namespace kernels;

int32_t kernels_score_entries(const Attention* layer, const float* query, const float* weights, const int64_t* pages,
                              int64_t visible, float* scores) {
    return guarded([&] {
        const Borrowed scratch;
        const IndexerWork work(*layer, visible, *scratch);
        score_entries(*layer, query, weights, pages, visible, work);
        std::copy(work.scores, work.scores + visible, scores);
        return OK;
    });
}

int32_t kernels_pick_best(const float* scores, int64_t n, int64_t k, int64_t* picked) {
    return guarded([&] {
        const Borrowed scratch;
        pick_best(scores, n, k, (*scratch).array<uint32_t>(n), picked);
        return OK;
    });
}
