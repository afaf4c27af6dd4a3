// The working memory of one call: arrays are cut from blocks that stay for the next call, so that a step allocates
// nothing once the largest step has been seen.
//
// A call borrows a Scratch (`Borrowed`), takes arrays from it and opens a `Frame` where arrays may go again: at the end
// of a frame all that was taken inside it is free. Arrays hold what was there before. Only the thread that borrowed
// it may take arrays; what threads of a parallel region need is taken before the region. Throws std::bad_alloc, which
// `guarded` (status.h) turns into OUT_OF_MEMORY.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kernels {

class Scratch {
public:
    Scratch() = default;
    ~Scratch();
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

    // `count` elements, aligned to 64 bytes.
    template <class T>
    T* array(int64_t count) {
        return static_cast<T*>(take(static_cast<size_t>(count) * sizeof(T)));
    }
    float* floats(int64_t count) { return array<float>(count); }

    class Frame {
    public:
        explicit Frame(Scratch& scratch) : scratch_(scratch), block_(scratch.block_), used_(scratch.used_) {}
        ~Frame() { scratch_.release(block_, used_); }
        Frame(const Frame&) = delete;
        Frame& operator=(const Frame&) = delete;

    private:
        Scratch& scratch_;
        size_t block_, used_;
    };

private:
    struct Block {
        unsigned char* data;
        size_t nbytes;
    };

    void* take(size_t nbytes);
    void release(size_t block, size_t used);
    void free_from(size_t block);

    std::vector<Block> blocks_;
    size_t block_ = 0, used_ = 0;  // the block that arrays come from, and how much of it is taken
};

// A Scratch for one call. They are kept in a pool, so that calls from several threads do not share one.
class Borrowed {
public:
    Borrowed();
    ~Borrowed();
    Borrowed(const Borrowed&) = delete;
    Borrowed& operator=(const Borrowed&) = delete;
    Scratch& operator*() const { return *scratch_; }

private:
    Scratch* scratch_;
};

}  // namespace kernels
