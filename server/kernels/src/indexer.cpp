// score[entry] = sum over heads of weight[h] relu(q[h] . k[entry]), weight as projected / sqrt(index_dim heads).
//
// The rule that keeps bits fixed: heads lie in lanes, so q[h] . k is one chain of fused multiply-adds over the channels;
// the sixteens of heads are added to a lane's total in ascending order, and the lanes by the tree of `sum`.
#include "indexer.h"

#include <cmath>
#include <new>
#include <type_traits>

#include "norm.h"
#include "parallel.h"
#include "pools.h"
#include "status.h"
#include "sums.h"

namespace kernels {
namespace {

constexpr int KEYS = 4;         // scored beside each other
constexpr int TILE_KEYS = 64;   // in working memory at a time
constexpr int TILE_ROWS = 8;    // of a segment that are scored with them, so that each key is decoded once for all

int in_sixteens(int heads) { return (heads + LANES - 1) / LANES * LANES; }

// Rows of a segment that follow each other; each sees as many entries as the one before, or more.
struct Tile {
    int64_t segment, first;
    int count;
};

// The working memory of one thread, and in it what belongs to row r of a tile.
struct Work {
    float *queries, *weights;  // [rows, index_dim, heads], [rows, heads]; heads in whole sixteens
    float* keys;               // [TILE_KEYS, index_dim]
    float* scores;             // [rows, stride]
    int64_t stride;            // most that are visible, in whole tiles of keys
    uint32_t* ranks;           // [visible]
    int heads, width;

    Work(const Attention& layer, int rows, int64_t most_visible, Scratch& scratch)
        : stride((most_visible + TILE_KEYS - 1) / TILE_KEYS * TILE_KEYS), heads(in_sixteens(layer.index_heads)),
          width(layer.index_dim) {
        queries = scratch.floats(int64_t{rows} * width * heads);
        weights = scratch.floats(int64_t{rows} * heads);
        keys = scratch.floats(int64_t{TILE_KEYS} * width);
        scores = scratch.floats(rows * stride);
        ranks = scratch.array<uint32_t>(most_visible);
    }
    float* query_of(int r) const { return queries + int64_t{r} * width * heads; }
    float* weights_of(int r) const { return weights + int64_t{r} * heads; }
    float* scores_of(int r) const { return scores + r * stride; }
};

// Heads in lanes: query [heads, width] -> [width, padded heads]; lanes behind the last head are 0.
void lay_out(const Attention& layer, const float* query, const float* weights, const Work& work, int r) {
    const int heads = layer.index_heads, width = layer.index_dim, padded = work.heads;
    const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(width)) /
                                           std::sqrt(static_cast<double>(heads)));
    float *const by_head = work.weights_of(r), *const by_channel = work.query_of(r);
    for (int h = 0; h < padded; h++) by_head[h] = h < heads ? weights[h] * scale : 0.0f;
    for (int i = 0; i < width; i++)
        for (int h = 0; h < padded; h++) by_channel[i * padded + h] = h < heads ? query[h * width + i] : 0.0f;
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

void score_keys(const Attention& layer, const float* const* keys, const Work& work, int r, float* out) {
    constexpr uint32_t ALL = 0xFFFF;
    const int padded = work.heads;
    const float *const queries = work.query_of(r), *const weights = work.weights_of(r);
    const uint32_t last = ALL >> (padded - layer.index_heads);
    Lanes totals[KEYS] = {zeros(), zeros(), zeros(), zeros()};
    int h = 0;
    const auto take = [&](auto sixteens) {
        constexpr int V = decltype(sixteens)::value;
        for (; h + V * LANES <= padded; h += V * LANES)
            add_heads<V>(queries + h, padded, keys, work.width, weights + h, h + V * LANES == padded ? last : ALL, totals);
    };
#if defined(__AVX512F__)
    take(std::integral_constant<int, 4>());
    take(std::integral_constant<int, 2>());
#endif
    take(std::integral_constant<int, 1>());
    store_four_sums(out, totals[0], totals[1], totals[2], totals[3]);
}

// Where the floats of entries first .. first + n - 1 are: in the pool, or read into `room`; the last one repeats up to
// whole KEYS.
void list_keys(const Pool& pool, const int64_t* pages, int64_t first, int64_t n, float* room, const float** keys) {
    for (int64_t k = 0; k < n; k++) {
        const uint8_t* row = entry_at<const uint8_t>(pool, pages, first + k);
        if (pool.dtype == FP32) {
            keys[k] = reinterpret_cast<const float*>(row);
        } else {
            keys[k] = room + k * pool.width;
            read_row(pool, row, room + k * pool.width);
        }
    }
    for (int64_t k = n; k % KEYS; k++) keys[k] = keys[n - 1];
}

// The scores of all that the rows of a tile see. Row r sees visible(r) entries.
template <class F>
void score_tile(const Attention& layer, const int64_t* pages, int rows, F visible, const Work& work) {
    const Pool& pool = layer.indexer.entries;
    const int64_t most = visible(rows - 1);
    for (int64_t first = 0; first < most; first += TILE_KEYS) {
        const float* keys[TILE_KEYS];
        list_keys(pool, pages, first, std::min<int64_t>(TILE_KEYS, most - first), work.keys, keys);
        for (int r = 0; r < rows; r++) {
            const int64_t end = std::min<int64_t>(TILE_KEYS, visible(r) - first);
            for (int64_t k = 0; k < end; k += KEYS) score_keys(layer, keys + k, work, r, work.scores_of(r) + first + k);
        }
    }
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

// The k largest of n scores, as kernels_pick_best says. `ranks` [n] is working memory.
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

// Turns a row's queries in place into what keys are multiplied with.
void make_query(const Attention& layer, const float* turns, float* query) {
    for (int h = 0; h < layer.index_heads; h++, query += layer.index_dim) {
        rotate(query + layer.index_dim - layer.rope_dim, turns, layer.rope_dim);
        simulate_row(layer.query_simulation, query, layer.index_dim, layer.rope_dim);
    }
}

// The rows that pick, in tiles; returns how many there are.
int64_t make_tiles(const Attention& layer, const Step& step, Tile* tiles) {
    Tile* next = tiles;
    for (int64_t segment = 0; segment < step.segments; segment++) {
        const int64_t end = end_of_segment(step, segment);
        int64_t row = step.first_row[segment];
        while (row < end && visible_entries(layer, step.position[row]) <= layer.index_topk) row++;
        for (; row < end; row += TILE_ROWS)
            *next++ = {segment, row, static_cast<int>(std::min<int64_t>(TILE_ROWS, end - row))};
    }
    return next - tiles;
}

}  // namespace

Picks pick_entries(const Attention& layer, const RopeTable& rope, const Step& step, float* q, const float* weights,
                   Scratch& scratch) {
    const int64_t stride = layer.index_topk + 1, k = layer.index_topk;
    int64_t most_visible = 0, work = 0;
    for (int64_t row = 0; row < step.rows; row++) {
        const int64_t visible = visible_entries(layer, step.position[row]);
        most_visible = std::max(most_visible, visible);
        work += visible * layer.index_heads * layer.index_dim;
    }
    if (layer.ratio != CSA || most_visible <= k) return {nullptr, 0};
    const Picks picks{scratch.array<int64_t>(step.rows * stride), stride};
    const Scratch::Frame frame(scratch);
    Tile* const tiles = scratch.array<Tile>(step.rows);
    const int64_t n_tiles = make_tiles(layer, step, tiles);
    int rows = 0;
    for (int64_t i = 0; i < n_tiles; i++) rows = std::max(rows, tiles[i].count);
    const int threads = std::max(1, step.threads);
    Work* const memory = scratch.array<Work>(threads);
    for (int i = 0; i < threads; i++) new (memory + i) Work(layer, rows, most_visible, scratch);
    in_parallel(n_tiles, work, threads, [&](int64_t i, int thread) {
        const Tile& tile = tiles[i];
        const Work& mine = memory[thread];
        const auto visible = [&](int r) { return visible_entries(layer, step.position[tile.first + r]); };
        for (int r = 0; r < tile.count; r++) {
            const int64_t row = tile.first + r;
            float* const query = q + row * layer.q_proj.out + int64_t{layer.heads} * layer.head_dim;
            make_query(layer, rope_at(rope, step.position[row], layer.rope_dim), query);
            lay_out(layer, query, weights + row * layer.index_heads, mine, r);
        }
        score_tile(layer, pages_of(step, tile.segment), tile.count, visible, mine);
        for (int r = 0; r < tile.count; r++)
            pick_best(mine.scores_of(r), visible(r), k, mine.ranks, picks.entries + (tile.first + r) * stride);
    });
    return picks;
}

}  // namespace kernels

using namespace kernels;

int32_t kernels_score_entries(const Attention* layer, const float* query, const float* weights, const int64_t* pages,
                              int64_t visible, float* scores) {
    return guarded([&] {
        const Borrowed scratch;
        const Work work(*layer, 1, visible, *scratch);
        lay_out(*layer, query, weights, work, 0);
        score_tile(*layer, pages, 1, [=](int) { return visible; }, work);
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
