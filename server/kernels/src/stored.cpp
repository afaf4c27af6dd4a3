#include "stored.h"

#include <algorithm>
#include <new>

#include "mapped.h"

namespace kernels {
namespace {

constexpr int64_t SLAB_NBYTES = int64_t{4} << 20;
constexpr int64_t SLAB_ROWS = 128;               // a slab is a multiple of them: the rows that share scales
constexpr int64_t GROUP_NBYTES = int64_t{2} << 20;  // that are worth a parallel region
constexpr int64_t GATHERED_NBYTES = int64_t{4} << 20;
constexpr int64_t SHARE = 8;  // of the budget: an eighth is left for slabs that go again

int64_t row_nbytes(const StoredTensor& tensor) { return stored_nbytes(tensor.encoding, tensor.columns); }

int64_t rows_of_slab(const StoredTensor& tensor) {
    const int64_t nbytes = std::max<int64_t>(row_nbytes(tensor), 1);
    return std::max<int64_t>(SLAB_NBYTES / nbytes / SLAB_ROWS, 1) * SLAB_ROWS;
}

// The memory of rows row .. row + rows - 1: their numbers, and their scales.
struct Ranges {
    MappedRange data, scale;

    Ranges(const StoredTensor& tensor, int64_t row, int64_t rows)
        : data{tensor.data + row * row_nbytes(tensor), rows * row_nbytes(tensor), tensor.map, tensor.map_nbytes},
          scale{nullptr, 0, nullptr, 0} {
        if (!tensor.scale) return;
        const int64_t block = scale_rows_of_block(tensor), first = row / block, end = (row + rows + block - 1) / block;
        const int64_t width = scale_columns(tensor);
        scale = {tensor.scale + first * width, (end - first) * width, tensor.scale_map, tensor.scale_map_nbytes};
    }
    int64_t in_memory() const { return data.in_memory() + scale.in_memory(); }
    int64_t most_in_memory() const { return data.most_in_memory() + scale.most_in_memory(); }
    void ask_ahead() const {
        data.ask_ahead();
        scale.ask_ahead();
    }
    bool bring_in() const { return data.bring_in() && scale.bring_in(); }
    void let_go() const {
        data.let_go();
        scale.let_go();
    }
};

// Of every process that maps these files, so that a budget which is enough once always is.
int64_t largest_slab(const StoredTensor* tensors, int64_t count) {
    int64_t most = 0;
    for (int64_t i = 0; i < count; i++)
        if (tensors[i].use != BY_ROW)
            for (int64_t row = 0, rows = rows_of_slab(tensors[i]); row < tensors[i].rows; row += rows)
                most = std::max(most,
                                Ranges(tensors[i], row, std::min<int64_t>(rows, tensors[i].rows - row)).most_in_memory());
    return most;
}

}  // namespace

int64_t StoredWeights::smallest_budget(const StoredTensor* tensors, int64_t count) {
    return 2 * largest_slab(tensors, count) + GATHERED_NBYTES;
}

StoredWeights::StoredWeights(const StoredTensor* tensors, int64_t count, int64_t budget)
    : tensors_(tensors, tensors + count) {
    budget -= GATHERED_NBYTES;
    const int64_t share = std::max(2 * largest_slab(tensors, count), budget / SHARE);
    int64_t kept = 0;
    for (int32_t i = 0; i < count; i++) {
        const StoredTensor& tensor = tensors_[i];
        first_slab_.push_back(static_cast<int32_t>(slabs_.size()));
        slab_rows_.push_back(rows_of_slab(tensor));
        if (tensor.use == BY_ROW) continue;
        for (int64_t row = 0; row < tensor.rows; row += slab_rows_[i]) {
            Slab slab;
            slab.tensor = i;
            slab.row = row;
            slab.rows = std::min<int64_t>(slab_rows_[i], tensor.rows - row);
            slab.nbytes = Ranges(tensor, row, slab.rows).in_memory();
            slab.stays = tensor.use == EVERY_STEP && kept + slab.nbytes <= budget - share;
            if (slab.stays) kept += slab.nbytes;
            slabs_.push_back(slab);
        }
    }
    room_ = budget - kept;
}

void StoredWeights::list(const StoredMatrix& matrix, int64_t product, std::vector<Portion>& out) const {
    int64_t column = 0;
    for (int32_t i = 0; i < matrix.n_parts; i++) {
        const StoredPart& part = matrix.parts[i];
        const int64_t rows = slab_rows_[part.tensor], end = part.first_row + part.rows;
        for (int64_t row = part.first_row, stop; row < end; row = stop) {
            stop = std::min((row / rows + 1) * rows, end);
            const int32_t slab = first_slab_[part.tensor] + static_cast<int32_t>(row / rows);
            out.push_back({product, slab, row, stop - row, part.first_column, column, 0});
            column += stop - row;
        }
    }
}

void StoredWeights::begin() { expect_bus_errors(); }

void StoredWeights::fail(int32_t slab) {
    failed_tensor = slabs_[slab].tensor;
    throw Unreadable();
}

// As many portions from `first` on as take half of the room, so that the next ones can be read meanwhile.
size_t StoredWeights::start_wave(const std::vector<Portion>& portions, size_t first) {
    wave_++;
    int64_t taken = 0;
    size_t end = first;
    for (; end < portions.size(); end++) {
        Slab& slab = slabs_[portions[end].slab];
        const int64_t cost = slab.stays || slab.wave == wave_ ? 0 : slab.nbytes;
        if (taken && taken + cost > room_ / 2) break;
        taken += cost;
        slab.wave = wave_;
    }
    ask_from(portions, ask_from(portions, first));
    return end;
}

// Begins to read slabs of portions from `first` on, up to half of the room; returns the first portion behind them.
size_t StoredWeights::ask_from(const std::vector<Portion>& portions, size_t first) {
    int64_t asked = 0;
    for (; first < portions.size(); first++) {
        Slab& slab = slabs_[portions[first].slab];
        if (slab.is_here || slab.is_asked) continue;
        if (asked && asked + slab.nbytes > room_ / 2) break;
        Ranges(tensors_[slab.tensor], slab.row, slab.rows).ask_ahead();
        slab.is_asked = true;
        asked += slab.nbytes;
    }
    return first;
}

void StoredWeights::ask_for(const std::vector<Portion>& portions) {
    const std::lock_guard<std::mutex> lock(using_);
    ask_from(portions, 0);
}

// Puts the portions whose slabs are in memory first; returns where they end.
size_t StoredWeights::hits_first(std::vector<Portion>& portions, size_t first, size_t end) {
    const auto is_here = [&](const Portion& portion) { return slabs_[portion.slab].is_here; };
    const auto from = portions.begin();
    const size_t stop = static_cast<size_t>(
        std::stable_partition(from + static_cast<int64_t>(first), from + static_cast<int64_t>(end), is_here) - from);
    for (size_t i = first; i < stop; i++) {
        const int32_t slab = portions[i].slab;
        counters.hits++;
        if (slabs_[slab].stays) continue;
        unlink(slab);
        link_newest(slab);
    }
    return stop;
}

size_t StoredWeights::bring_in_some(std::vector<Portion>& portions, size_t first, size_t end) {
    int64_t nbytes = 0;
    for (; first < end && nbytes < GROUP_NBYTES; first++) {
        const int32_t slab = portions[first].slab;
        if (slabs_[slab].is_here) continue;  // two portions of one slab
        bring_in(slab);
        nbytes += slabs_[slab].nbytes;
    }
    return first;
}

void StoredWeights::bring_in(int32_t number) {
    Slab& slab = slabs_[number];
    slab.is_asked = false;
    if (!slab.stays)
        while (passing_ + slab.nbytes > room_ && oldest_ >= 0 && slabs_[oldest_].wave != wave_) evict_oldest();
    if (!Ranges(tensors_[slab.tensor], slab.row, slab.rows).bring_in()) fail(number);
    slab.is_here = true;
    if (!slab.stays) {
        passing_ += slab.nbytes;
        link_newest(number);
    }
    counters.misses++;
    counters.read_nbytes += slab.nbytes;
    counters.resident_nbytes += slab.nbytes;
}

void StoredWeights::evict_oldest() {
    const int32_t number = oldest_;
    Slab& slab = slabs_[number];
    unlink(number);
    Ranges(tensors_[slab.tensor], slab.row, slab.rows).let_go();
    slab.is_here = false;
    passing_ -= slab.nbytes;
    counters.evictions++;
    counters.resident_nbytes -= slab.nbytes;
}

void StoredWeights::unlink(int32_t number) {
    Slab& slab = slabs_[number];
    (slab.newer < 0 ? newest_ : slabs_[slab.newer].older) = slab.older;
    (slab.older < 0 ? oldest_ : slabs_[slab.older].newer) = slab.newer;
    slab.newer = slab.older = -1;
}

void StoredWeights::link_newest(int32_t number) {
    slabs_[number].older = newest_;
    (newest_ < 0 ? oldest_ : slabs_[newest_].newer) = number;
    newest_ = number;
}

void StoredWeights::gather(const StoredMatrix& table, const int64_t* ids, int64_t n, float* out) {
    const std::lock_guard<std::mutex> lock(using_);
    begin();
    const StoredTensor& tensor = tensors_[table.parts->tensor];
    const int64_t nbytes = row_nbytes(tensor);
    for (int64_t i = 0; i < n; i++) Ranges(tensor, ids[i], 1).data.ask_ahead();
    struct One {
        const StoredTensor& tensor;
        int64_t row;
        float* out;
    };
    for (int64_t i = 0; i < n; i++) {
        const One one{tensor, ids[i], out + i * tensor.columns};
        const auto read = [](const void* of) {
            const One& row = *static_cast<const One*>(of);
            expand_row(row.tensor, row.row, 0, row.tensor.columns, row.out);
        };
        if (!read_mapped(read, &one)) {
            failed_tensor = table.parts->tensor;
            throw Unreadable();
        }
        counters.read_nbytes += nbytes;
        gathered_ += Ranges(tensor, ids[i], 1).in_memory();
        if (gathered_ < GATHERED_NBYTES) continue;
        Ranges(tensor, 0, tensor.rows).let_go();
        gathered_ = 0;
    }
}

}  // namespace kernels

using kernels::StoredWeights;

void* kernels_weights(const StoredTensor* tensors, int64_t count, int64_t budget) {
    try {
        return new StoredWeights(tensors, count, budget);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

void kernels_weights_free(void* weights) { delete static_cast<StoredWeights*>(weights); }

int64_t kernels_weights_smallest(const StoredTensor* tensors, int64_t count) {
    return StoredWeights::smallest_budget(tensors, count);
}

void kernels_weights_state(const void* weights, int64_t out[6]) {
    const auto& from = *static_cast<const StoredWeights*>(weights);
    const auto& counters = from.counters;
    out[0] = counters.hits;
    out[1] = counters.misses;
    out[2] = counters.evictions;
    out[3] = counters.read_nbytes;
    out[4] = counters.resident_nbytes;
    out[5] = from.failed_tensor;
}
