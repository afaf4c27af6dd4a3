// Reading memory that a file stands behind: where the file was cut off or the disk fails, the system sends SIGBUS.
// Inside of `read_mapped` that ends the read instead of the process.
#pragma once
#include <cstdint>

namespace kernels {

// Before the first read_mapped of a call: makes sure that the signal comes here, and goes on to whoever had it before
// where it was not a read of ours.
void expect_bus_errors();

// read(context); false if the memory could not be read to the end. `read` may not own anything that needs an end.
bool read_mapped(void (*read)(const void* context), const void* context);

// Some bytes of a mapped file. The system reads them page by page, and may make the pages around one that is read a part
// of the process, too, as far as they lie in the same 64 KiB.
struct MappedRange {
    const uint8_t* from;
    int64_t nbytes;
    const uint8_t* file;
    int64_t file_nbytes;

    void ask_ahead() const;   // begins to read them
    bool bring_in() const;    // reads them now; false: they cannot be read
    void let_go() const;      // they and what is around them are not part of this process any more
    int64_t in_memory() const;  // bytes of them and what is around them
    int64_t most_in_memory() const;  // the same, wherever the system maps the file
};

}  // namespace kernels
