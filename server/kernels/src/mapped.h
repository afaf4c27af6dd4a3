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

// What the system does with pages of a mapped range. Each takes a range of any alignment and covers its pages.
void ask_ahead(const uint8_t* from, int64_t nbytes);     // begin to read them
bool bring_in(const uint8_t* from, int64_t nbytes);      // read them now; false: they cannot be read
void let_go(const uint8_t* from, int64_t nbytes);        // they are not part of this process any more
int64_t pages_nbytes(const uint8_t* from, int64_t nbytes);  // of its pages

}  // namespace kernels
