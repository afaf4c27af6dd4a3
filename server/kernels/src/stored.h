// The weights of one checkpoint that stay in its files, and which of their pages are part of this process.
//
// Tensors are cut into slabs: some rows, a few MiB. A slab is in memory or not. Those in memory together take at most
// `budget` bytes: slabs of tensors that every step reads are kept, the first ones first, as long as a share is left for
// the others; an expert's go again when they are the ones that were used longest ago. (Last use first would hit never
// where a step reads more than there is room for.) What does not stay is read again for every step.
//
// The rule that keeps bits fixed: a slab is some rows of a weight, that is whole chains of operations; when it is
// computed changes no bit.
#pragma once
#include <atomic>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "expand.h"
#include "kernels.h"

namespace kernels {

// A file that cannot be read as far as its header says.
struct Unreadable : std::runtime_error {
    Unreadable() : std::runtime_error("a weight cannot be read from its file") {}
};

class StoredWeights {
public:
    StoredWeights(const StoredTensor* tensors, int64_t count, int64_t budget);
    StoredWeights(const StoredWeights&) = delete;
    StoredWeights& operator=(const StoredWeights&) = delete;

    static int64_t smallest_budget(const StoredTensor* tensors, int64_t count);

    // Rows of one slab that a map needs: `product` is the caller's number of the map, `column` where its outputs begin.
    struct Portion {
        int64_t product;
        int32_t slab;
        int64_t row, count, first_column, column;
        int64_t first_task;  // set by the caller
    };

    // The portions of a matrix, appended to `out`.
    void list(const StoredMatrix& matrix, int64_t product, std::vector<Portion>& out) const;

    // Begins to read what is not in memory, as much as there is room for.
    void ask_for(const std::vector<Portion>& portions);

    // compute(portions, count) for all of them, in groups whose slabs are in memory: first what is there already, while
    // the rest is read. Changes their order. `compute` returns a slab that could not be read, or -1. Throws Unreadable.
    template <class F>
    void run(std::vector<Portion>& portions, const F& compute) {
        const std::lock_guard<std::mutex> lock(using_);
        begin();
        for (size_t first = 0, end = 0; first < portions.size(); first = end) {
            end = start_wave(portions, first);
            size_t done = first, stop = hits_first(portions, first, end);
            while (done < end) {
                if (stop == done) stop = bring_in_some(portions, done, end);
                if (const int32_t bad = compute(&portions[done], stop - done); bad >= 0) fail(bad);
                done = stop;
            }
        }
    }

    const StoredTensor& tensor_of(const Portion& portion) const { return tensors_[slabs_[portion.slab].tensor]; }

    // Rows ids [n] of a table -> out [n, columns]. They do not stay in memory. Throws Unreadable.
    void gather(const StoredMatrix& table, const int64_t* ids, int64_t n, float* out);

    struct Counters {
        std::atomic<int64_t> hits{0}, misses{0}, evictions{0}, read_nbytes{0}, resident_nbytes{0};
    } counters;
    std::atomic<int32_t> failed_tensor{-1};

private:
    struct Slab {
        int32_t tensor;
        int64_t row, rows, nbytes;
        int64_t wave = 0;                // in which it was last used
        int32_t newer = -1, older = -1;  // neighbours by time of use, of those that may go
        bool stays = false, is_here = false, is_asked = false;
    };

    void begin();
    size_t start_wave(const std::vector<Portion>& portions, size_t first);
    size_t hits_first(std::vector<Portion>& portions, size_t first, size_t end);
    size_t bring_in_some(std::vector<Portion>& portions, size_t first, size_t end);
    [[noreturn]] void fail(int32_t slab);

    size_t ask_from(const std::vector<Portion>& portions, size_t first);
    void bring_in(int32_t slab);
    void evict_oldest();
    void unlink(int32_t slab);
    void link_newest(int32_t slab);

    std::vector<StoredTensor> tensors_;
    std::vector<Slab> slabs_;
    std::vector<int32_t> first_slab_;  // by tensor
    std::vector<int64_t> slab_rows_;   // by tensor
    int64_t room_ = 0, passing_ = 0;   // bytes for slabs that may go, and what they take now
    int64_t gathered_ = 0;
    int64_t wave_ = 0;
    int32_t newest_ = -1, oldest_ = -1;
    std::mutex using_;
};

}  // namespace kernels

#pragma GCC visibility push(default)
extern "C" {
// `tensors` are copied; their memory must be there as long as what this returns (null: no memory), which
// kernels_weights_free ends. `budget` is at least kernels_weights_smallest.
void* kernels_weights(const StoredTensor* tensors, int64_t count, int64_t budget);
void kernels_weights_free(void* weights);
int64_t kernels_weights_smallest(const StoredTensor* tensors, int64_t count);
// hits, misses, evictions, bytes that were read, bytes in memory now, the number of the tensor that could not be read
// (-1: none). From any thread.
void kernels_weights_state(const void* weights, int64_t out[6]);
}
#pragma GCC visibility pop
