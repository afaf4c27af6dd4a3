// What is checked: tokens against the vocabulary and the experts that hash layers give them, positions against the rope
// tables and the row's segment, slots and pages against the smallest pool that they index, and the rows whose logits
// are wanted. The cost is a few comparisons a row and a layer.
#include "check.h"

#include <algorithm>
#include <limits>

namespace kernels {
namespace {

constexpr int64_t MOST = std::numeric_limits<int64_t>::max();

bool is_below(int64_t x, int64_t end) { return x >= 0 && x < end; }

// What positions, slots and pages must stay below, over all layers that run.
struct Bounds {
    int64_t positions = MOST, slots = MOST;

    void of_slots(const Pool& pool) { slots = std::min<int64_t>(slots, pool.items); }
    void of_compressor(const Compressor& compressor) {
        if (!compressor.ratio) return;
        of_slots(compressor.state_a);
        if (compressor.state_b.data) of_slots(compressor.state_b);
    }
    void of_layer(const Network& network, const Attention& layer) {
        const RopeTable& rope = layer.uses_compress_rope ? network.compress : network.main;
        positions = std::min(positions, static_cast<int64_t>(rope.n_blocks) * rope.block);
        of_slots(layer.swa);
        of_compressor(layer.compressor);
        of_compressor(layer.indexer);
    }
};

bool is_run(const Step& step, int64_t row, int64_t segment) {
    return step.start[segment] >= 0 && is_below(step.valid_from[segment], step.start[segment] + 1) &&
           is_below(step.first_row[segment], row + 1) && step.segment[step.first_row[segment]] == segment &&
           step.position[row] == step.start[segment] + row - step.first_row[segment];
}

bool has_experts(const Experts& layer, int64_t token) {
    if (!layer.by_token) return true;
    const int64_t* const ids = layer.by_token + token * layer.top_k;
    return std::all_of(ids, ids + layer.top_k, [&](int64_t id) { return is_below(id, layer.experts); });
}

// Whether the segment of `row` has a page for every entry that is closed up to it.
bool has_pages(const Compressor& compressor, const Step& step, int64_t row) {
    if (!compressor.ratio) return true;
    const Pool& pool = compressor.entries;
    const int64_t entries = (step.position[row] + 1) / compressor.ratio;
    const int64_t n_pages = (entries + pool.rows - 1) / pool.rows;
    const int64_t* const pages = step.pages + step.segment[row] * step.max_pages;
    return n_pages <= step.max_pages &&
           std::all_of(pages, pages + n_pages, [&](int64_t page) { return is_below(page, pool.items); });
}

// Rows of a segment follow each other: the last one reaches the most pages.
bool is_last(const Step& step, int64_t row) {
    return row + 1 == step.rows || step.segment[row + 1] != step.segment[row];
}

Status check_row(const Network& network, const Layer* layers, int64_t n_layers, const Step& step,
                 const Bounds& bounds, int64_t row) {
    const int64_t segment = step.segment[row];
    if (!is_below(segment, step.segments)) return BAD_SEGMENT;
    if (!is_below(step.token[row], network.vocab)) return BAD_TOKEN;
    if (!is_below(step.position[row], bounds.positions)) return BAD_POSITION;
    if (!is_run(step, row, segment)) return BAD_SEGMENT;
    if (!is_below(step.slot[segment], bounds.slots)) return BAD_SLOT;
    for (int64_t i = 0; i < n_layers; i++) {
        if (!has_experts(layers[i].experts, step.token[row])) return BAD_TOKEN;
        const Attention& attention = layers[i].attention;
        if (is_last(step, row) &&
            !(has_pages(attention.compressor, step, row) && has_pages(attention.indexer, step, row)))
            return BAD_PAGE;
    }
    return OK;
}

}  // namespace

Status check_step(const Network& network, const Layer* layers, int64_t n_layers, const Step& step, int64_t* detail) {
    Bounds bounds;
    for (int64_t i = 0; i < n_layers; i++) bounds.of_layer(network, layers[i].attention);
    for (*detail = 0; *detail < step.rows; ++*detail)
        if (const Status status = check_row(network, layers, n_layers, step, bounds, *detail)) return status;
    for (int64_t i = 0; i < step.n_wanted; i++)
        if (!is_below(step.wanted[i], step.rows)) {
            *detail = step.wanted[i];
            return BAD_SEGMENT;
        }
    *detail = -1;
    return OK;
}

}  // namespace kernels
