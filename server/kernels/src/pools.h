// Rows of the arena as the layers see them: rings of slots and entries of pages. T is the element of plain rows; of
// encoded ones (rows.h) only the bytes are handled here.
//
// A step reads its own rows and older ones alike. Its own are kept as the pool stores them, so that a row is the same
// numbers whether this step made it or an earlier one stored it; rings are written when the step has read them.
#pragma once
#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "lanes.h"
#include "rows.h"

namespace kernels {

inline Lanes load_first(const Bf16* p, int n, float rest = 0.0f) {
    Bf16 whole[LANES];
    for (int i = 0; i < LANES; i++) whole[i] = i < n ? p[i] : float_to_bf16(rest);
    return load(whole);
}

// Calls f with a null pointer to the elements that rows of a pool are read as: those of FP8_KV are exact in bf16.
template <class F>
inline void with_dtype(int32_t dtype, F f) {
    if (dtype == FP32)
        f(static_cast<const float*>(nullptr));
    else
        f(static_cast<const Bf16*>(nullptr));
}

template <class T>
inline T* row_at(const Pool& pool, int64_t item, int64_t row) {
    return reinterpret_cast<T*>(pool.data + item * pool.item_stride + row * pool.row_stride);
}

// One segment's rows of a ring component: those before the step in its slot, the step's own in `own` [rows, stride].
template <class T>
struct RingRows {
    const Pool& pool;
    const T* own;
    int64_t stride, slot, start, first_row;

    RingRows(const Pool& pool, const T* own, int64_t stride, const Step& step, int64_t segment)
        : pool(pool), own(own), stride(stride), slot(step.slot[segment]), start(step.start[segment]),
          first_row(step.first_row[segment]) {}

    // Where the rows of positions first .. stop - 1 are; returns how many there are.
    int64_t list(int64_t first, int64_t stop, const T** out) const {
        if (first >= stop) return 0;
        const T** next = out;
        const int64_t old = std::min(stop, start);
        int64_t row = first % pool.rows;
        for (int64_t position = first; position < old; position++) {
            *next++ = row_at<const T>(pool, slot, row);
            if (++row == pool.rows) row = 0;
        }
        const T* mine = own + (first_row + std::max(first, start) - start) * stride;
        for (int64_t position = std::max(first, start); position < stop; position++, mine += stride) *next++ = mine;
        return next - out;
    }
};

inline int64_t end_of_segment(const Step& step, int64_t segment) {
    return segment + 1 < step.segments ? step.first_row[segment + 1] : step.rows;
}

// Stores the step's own rows, which are `stride` bytes apart in `own`; of a segment that is longer than the ring, those
// that stay.
inline void write_ring(const Pool& pool, const Step& step, const void* own, int64_t stride) {
    const auto* const bytes = static_cast<const uint8_t*>(own);
    const auto nbytes = static_cast<size_t>(row_nbytes(pool));
    for (int64_t segment = 0; segment < step.segments; segment++) {
        const int64_t end = end_of_segment(step, segment);
        for (int64_t row = std::max(step.first_row[segment], end - pool.rows); row < end; row++)
            std::memcpy(row_at<uint8_t>(pool, step.slot[segment], step.position[row] % pool.rows), bytes + row * stride,
                        nbytes);
    }
}

inline const int64_t* pages_of(const Step& step, int64_t segment) { return step.pages + segment * step.max_pages; }

// Where entry `entry` of a segment lies.
template <class T>
inline T* entry_at(const Pool& pool, const int64_t* pages, int64_t entry) {
    return row_at<T>(pool, pages[entry / pool.rows], entry % pool.rows);
}

// Where those entries of a segment lie; they are in ascending order.
template <class T>
inline void list_picked(const Pool& pool, const int64_t* pages, const int64_t* entries, int64_t count, const T** out) {
    int64_t first = 0;  // of the page
    for (int64_t i = 0; i < count; i++) {
        for (; entries[i] >= first + pool.rows; first += pool.rows) pages++;
        out[i] = row_at<const T>(pool, *pages, entries[i] - first);
    }
}

// Where entries 0 .. count - 1 of a segment lie.
template <class T>
inline void list_entries(const Pool& pool, const int64_t* pages, int64_t count, const T** out) {
    for (int64_t first = 0; first < count; first += pool.rows, pages++) {
        const int64_t stop = std::min<int64_t>(count, first + pool.rows);
        for (int64_t entry = first; entry < stop; entry++) out[entry] = row_at<const T>(pool, *pages, entry - first);
    }
}

}  // namespace kernels
