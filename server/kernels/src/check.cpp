// What is checked: tokens against the vocabulary, positions against the rope tables and the row's segment, slots and
// pages against the smallest pool that they index, that every segment has rows, and the rows whose logits are wanted.
// Slot 0 and page 0 are nobody's: they stay zero. The cost is a few comparisons a row and a layer.
#include "check.h"

#include <algorithm>
#include <limits>

namespace kernels {
namespace {

bool is_below(int64_t x, int64_t end) { return x >= 0 && x < end; }

// Whether a request may have this slot or page of so many.
bool is_item(int64_t item, int64_t items) { return item >= 1 && item < items; }

// The slots that every pool of these layers has.
struct Slots {
    int64_t count = std::numeric_limits<int64_t>::max();

    void of_pool(const Pool& pool) {
        if (pool.data) count = std::min<int64_t>(count, pool.items);
    }
    void of_layer(const Attention& layer) {
        of_pool(layer.swa);
        for (const Compressor* compressor : {&layer.compressor, &layer.indexer})
            if (compressor->ratio) {
                of_pool(compressor->state_a);
                of_pool(compressor->state_b);
            }
    }
};

bool reaches(const RopeTable& rope, int64_t position) {
    return is_below(position, static_cast<int64_t>(rope.n_blocks) * rope.block) && rope.blocks[position / rope.block];
}

// Whether the ropes reach a row, and the first position of the entry that it closes.
bool has_ropes(const Network& network, const Attention& layer, int64_t position) {
    const int64_t first = std::max<int64_t>(position + 1 - layer.ratio, 0);
    return layer.uses_compress_rope ? reaches(network.compress, position) && reaches(network.compress, first)
                                    : reaches(network.main, position);
}

bool is_run(const Step& step, int64_t row, int64_t segment) {
    return step.start[segment] >= 0 && is_below(step.valid_from[segment], step.start[segment] + 1) &&
           is_below(step.first_row[segment], row + 1) && step.segment[step.first_row[segment]] == segment &&
           step.position[row] - step.start[segment] == row - step.first_row[segment];
}

// Whether the segment of `row` has a page for every entry that is closed up to it.
bool has_pages(const Compressor& compressor, const Step& step, int64_t row) {
    if (!compressor.ratio) return true;
    const Pool& pool = compressor.entries;
    const int64_t entries = (step.position[row] + 1) / compressor.ratio;
    const int64_t n_pages = (entries + pool.rows - 1) / pool.rows;
    const int64_t* const pages = step.pages + step.segment[row] * step.max_pages;
    return n_pages <= step.max_pages &&
           std::all_of(pages, pages + n_pages, [&](int64_t page) { return is_item(page, pool.items); });
}

// Rows of a segment follow each other: the last one reaches the most pages.
bool is_last(const Step& step, int64_t row) {
    return row + 1 == step.rows || step.segment[row + 1] != step.segment[row];
}

Status check_row(const Network& network, const Layer* layers, int64_t n_layers, const Step& step,
                 int64_t n_slots, int64_t row) {
    const int64_t segment = step.segment[row];
    if (!is_below(segment, step.segments)) return BAD_SEGMENT;
    if (!is_below(step.token[row], network.vocab)) return BAD_TOKEN;
    if (step.position[row] < 0) return BAD_POSITION;
    if (!is_run(step, row, segment)) return BAD_SEGMENT;
    if (!is_item(step.slot[segment], n_slots)) return BAD_SLOT;
    for (int64_t i = 0; i < n_layers; i++) {
        const Attention& attention = layers[i].attention;
        if (!has_ropes(network, attention, step.position[row])) return BAD_POSITION;
        if (is_last(step, row) &&
            !(has_pages(attention.compressor, step, row) && has_pages(attention.indexer, step, row)))
            return BAD_PAGE;
    }
    return OK;
}

}  // namespace

Status check_step(const Network& network, const Layer* layers, int64_t n_layers, const Step& step, int64_t* detail) {
    Slots slots;
    for (int64_t i = 0; i < n_layers; i++) slots.of_layer(layers[i].attention);
    for (*detail = 0; *detail < step.rows; ++*detail)
        if (const Status status = check_row(network, layers, n_layers, step, slots.count, *detail)) return status;
    for (int64_t i = 0; i < step.segments; i++)
        if (!is_below(step.first_row[i], step.rows) || step.segment[step.first_row[i]] != i) {
            *detail = -1;  // it has no row
            return BAD_SEGMENT;
        }
    for (int64_t i = 0; i < step.n_wanted; i++)
        if (!is_below(step.wanted[i], step.rows)) {
            *detail = step.wanted[i];
            return BAD_SEGMENT;
        }
    *detail = -1;
    return OK;
}

}  // namespace kernels
