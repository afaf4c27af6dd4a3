// The rows of keys that the rows of a step read, as numbers of type T: where the pools have them, or decoded.
//
// Encoded rows are decoded once for a segment, and only those that one of its rows reads; that takes as much memory as
// they would in bf16. The step's own window rows are decoded from what will be stored, like older ones.
#pragma once
#include <algorithm>

#include "indexer.h"
#include "kernels.h"
#include "norm.h"
#include "parallel.h"
#include "pools.h"
#include "scratch.h"

namespace kernels {

template <class T>
class KeyRows {
public:
    // Takes memory for the window: the step's own rows, and older ones if they will be decoded.
    KeyRows(const Attention& layer, const Step& step, Scratch& scratch)
        : layer_(layer), step_(step), scratch_(scratch), is_encoded_(is_encoded(layer.swa)),
          stored_nbytes_(row_nbytes(layer.swa)) {
        if (is_encoded_) {
            stored_ = scratch.array<uint8_t>(step.rows * stored_nbytes_);
            decoded_ = scratch.array<Decoded>(step.segments);
            for (int64_t s = 0; s < step.segments; s++) n_older_ += step.start[s] - oldest(s);
        }
        own_ = scratch.array<T>((n_older_ + step.rows) * layer.head_dim);
        T* next = own_;
        for (int64_t s = 0; is_encoded_ && s < step.segments; s++) {
            decoded_[s] = {next, oldest(s), nullptr, nullptr, 0};
            next += (step.start[s] - oldest(s) + end_of_segment(step, s) - step.first_row[s]) * layer.head_dim;
        }
    }

    // Keeps the window row [head_dim] of a row of the step.
    void keep(int64_t row, const float* kv) const {
        if (!is_encoded_) return to_dtype(kv, layer_.head_dim, layer_.swa.dtype, own_ + row * layer_.head_dim);
        uint8_t* const bytes = stored_ + row * stored_nbytes_;
        write_row(layer_.swa, kv, bytes);
        read_row(layer_.swa, bytes, window_row(step_.segment[row], step_.position[row]));
    }

    // Stores the window rows of the step: when it has read older ones.
    void store() const {
        write_ring(layer_.swa, step_, is_encoded_ ? static_cast<const void*>(stored_) : own_, stored_nbytes_);
    }

    // Decodes what the step reads: older window rows, and entries, those that it closed included.
    void decode(const Picks& picks) {
        if (!is_encoded_) return;
        int64_t n_entries = 0;
        for (int64_t s = 0; s < step_.segments; s++) n_entries += find_entries(s, picks);
        Copy* const copies = scratch_.array<Copy>(n_older_ + n_entries);
        T* entries = scratch_.array<T>(n_entries * layer_.head_dim);
        Copy* next = copies;
        for (int64_t s = 0; s < step_.segments; s++) {
            next = copy_window(s, next);
            decoded_[s].entries = entries;
            next = copy_entries(s, next);
            entries += decoded_[s].n_entries * layer_.head_dim;
        }
        constexpr int64_t AT_A_TIME = 16;
        const int64_t n = next - copies;
        parallel_for((n + AT_A_TIME - 1) / AT_A_TIME, n * layer_.head_dim, step_.threads, [&](int64_t task) {
            for (int64_t i = task * AT_A_TIME; i < std::min(n, (task + 1) * AT_A_TIME); i++)
                read_row(layer_.swa, copies[i].from, copies[i].to);
        });
    }

    // Where the rows of a segment's positions first .. stop - 1 are; returns how many there are.
    int64_t list_window(int64_t segment, int64_t first, int64_t stop, const T** out) const {
        if (!is_encoded_)
            return RingRows<T>(layer_.swa, own_, layer_.head_dim, step_, segment).list(first, stop, out);
        for (int64_t position = first; position < stop; position++) *out++ = window_row(segment, position);
        return stop - first;
    }

    // Where the entries are that a row reads; returns how many there are.
    int64_t list_entries_of(int64_t row, const Picks& picks, const T** out) const {
        const int64_t visible = visible_entries(layer_, step_.position[row]), n = read_entries(layer_, visible);
        const int64_t segment = step_.segment[row];
        const int64_t* const picked = picks.of(layer_, row, visible);
        const Pool& pool = layer_.compressor.entries;
        if (is_encoded_) {
            const Decoded& decoded = decoded_[segment];
            for (int64_t i = 0; i < n; i++) {
                const int64_t entry = picked ? picked[i] : i;
                out[i] = decoded.entries + (decoded.places ? decoded.places[entry] : entry) * layer_.head_dim;
            }
        } else if (picked) {
            list_picked(pool, pages_of(step_, segment), picked, n, out);
        } else {
            list_entries(pool, pages_of(step_, segment), n, out);
        }
        return n;
    }

private:
    // The decoded rows of one segment: of positions from `first` on, up to its own last one; and of entries.
    struct Decoded {
        T* window;
        int64_t first;
        T* entries;
        int32_t* places;  // which of them an entry is, -1: nobody reads it; null: all are there, in their order
        int64_t n_entries;
    };
    struct Copy {
        const uint8_t* from;
        T* to;
    };

    // The first position that a row of the segment may read.
    int64_t oldest(int64_t segment) const {
        return std::max<int64_t>({0, step_.valid_from[segment], step_.start[segment] + 1 - layer_.window});
    }

    T* window_row(int64_t segment, int64_t position) const {
        return decoded_[segment].window + (position - decoded_[segment].first) * layer_.head_dim;
    }

    // Finds the entries that a row of the segment reads; returns how many there are.
    int64_t find_entries(int64_t segment, const Picks& picks) {
        const int64_t end = end_of_segment(step_, segment);
        const int64_t visible = visible_entries(layer_, step_.position[end - 1]);
        decoded_[segment].n_entries = visible;
        if (!picks.of(layer_, end - 1, visible)) return visible;
        int32_t* const places = decoded_[segment].places = scratch_.array<int32_t>(visible);
        std::fill(places, places + visible, -1);
        for (int64_t row = step_.first_row[segment]; row < end; row++) {
            const int64_t mine = visible_entries(layer_, step_.position[row]);
            const int64_t* const picked = picks.of(layer_, row, mine);
            for (int64_t i = 0; i < read_entries(layer_, mine); i++) places[picked ? picked[i] : i] = 0;
        }
        int32_t n = 0;
        for (int64_t entry = 0; entry < visible; entry++)
            if (places[entry] == 0) places[entry] = n++;
        return decoded_[segment].n_entries = n;
    }

    Copy* copy_window(int64_t segment, Copy* next) const {
        const Pool& pool = layer_.swa;
        for (int64_t position = decoded_[segment].first; position < step_.start[segment]; position++)
            *next++ = {row_at<const uint8_t>(pool, step_.slot[segment], position % pool.rows),
                       window_row(segment, position)};
        return next;
    }

    Copy* copy_entries(int64_t segment, Copy* next) const {
        const Decoded& decoded = decoded_[segment];
        const int64_t* const pages = pages_of(step_, segment);
        T* to = decoded.entries;
        for (int64_t entry = 0, left = decoded.n_entries; left; entry++) {
            if (decoded.places && decoded.places[entry] < 0) continue;
            *next++ = {entry_at<const uint8_t>(layer_.compressor.entries, pages, entry), to};
            to += layer_.head_dim;
            left--;
        }
        return next;
    }

    const Attention& layer_;
    const Step& step_;
    Scratch& scratch_;
    const bool is_encoded_;
    const int64_t stored_nbytes_;
    int64_t n_older_ = 0;          // rows of windows that are decoded
    T* own_ = nullptr;             // [rows, head_dim] as in the pool; of encoded pools the windows of all segments
    uint8_t* stored_ = nullptr;    // encoded: [rows, stored_nbytes]
    Decoded* decoded_ = nullptr;   // encoded: [segments]
};

}  // namespace kernels
