#include "scratch.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <new>

namespace kernels {
namespace {

constexpr size_t ALIGNMENT = 64;
constexpr size_t SMALLEST_BLOCK = size_t{1} << 20;
// With the address sanitizer every array is a block of its own, so that it sees where an array ends.
#if defined(__SANITIZE_ADDRESS__)
constexpr bool BLOCK_PER_ARRAY = true;
#else
constexpr bool BLOCK_PER_ARRAY = false;
#endif

struct Pool {
    std::mutex mutex;
    std::vector<std::unique_ptr<Scratch>> idle;
};

Pool& pool() {
    static Pool* const one = new Pool;  // never destroyed: a thread may still compute while the process ends
    return *one;
}

}  // namespace

Scratch::~Scratch() { free_from(0); }

void* Scratch::take(size_t nbytes) {
    const size_t wanted = std::max((nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT, ALIGNMENT);
    while (block_ < blocks_.size() && (BLOCK_PER_ARRAY || used_ + wanted > blocks_[block_].nbytes)) {
        block_++;
        used_ = 0;
    }
    if (block_ == blocks_.size()) {
        const size_t twice = blocks_.empty() ? 0 : 2 * blocks_.back().nbytes;
        const size_t size = BLOCK_PER_ARRAY ? nbytes : std::max({wanted, twice, SMALLEST_BLOCK});
        blocks_.push_back({nullptr, 0});
        blocks_.back().data = static_cast<unsigned char*>(::operator new(size, std::align_val_t{ALIGNMENT}));
        blocks_.back().nbytes = size;
    }
    void* const array = blocks_[block_].data + used_;
    used_ += wanted;
    return array;
}

void Scratch::release(size_t block, size_t used) {
    block_ = block;
    used_ = used;
    if (BLOCK_PER_ARRAY) free_from(used ? block + 1 : block);
}

void Scratch::free_from(size_t block) {
    for (size_t i = block; i < blocks_.size(); i++) ::operator delete(blocks_[i].data, std::align_val_t{ALIGNMENT});
    blocks_.resize(std::min(block, blocks_.size()));
}

Borrowed::Borrowed() {
    {
        const std::lock_guard<std::mutex> lock(pool().mutex);
        if (!pool().idle.empty()) {
            scratch_ = pool().idle.back().release();
            pool().idle.pop_back();
            return;
        }
        pool().idle.reserve(64);  // giving one back may not throw
    }
    scratch_ = new Scratch;
}

Borrowed::~Borrowed() {
    std::unique_ptr<Scratch> mine(scratch_);
    const std::lock_guard<std::mutex> lock(pool().mutex);
    if (pool().idle.size() < pool().idle.capacity()) pool().idle.push_back(std::move(mine));
}

}  // namespace kernels
