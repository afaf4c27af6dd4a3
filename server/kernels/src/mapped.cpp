#include "mapped.h"

#include <cerrno>
#include <csetjmp>
#include <csignal>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22  // Linux 5.14; an older one refuses it, and pages come when they are read
#endif

namespace kernels {
namespace {

thread_local sigjmp_buf* reading = nullptr;  // where this thread goes on after a read that failed
struct sigaction before = {};
std::mutex installing;

void on_bus_error(int number, siginfo_t*, void*) {
    if (reading) siglongjmp(*reading, 1);
    sigaction(number, &before, nullptr);  // the access is repeated, and meets who was there before
}

uintptr_t page_size() {
    static const uintptr_t size = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    return size;
}

constexpr uintptr_t AROUND = uintptr_t{64} << 10;

// A range that begins and ends at multiples of `step`, within the file.
struct Pages {
    uint8_t* from;
    size_t nbytes;

    Pages(const MappedRange& range, uintptr_t step) {
        const uintptr_t address = reinterpret_cast<uintptr_t>(range.from), end = address + to_unsigned(range.nbytes);
        const uintptr_t file = reinterpret_cast<uintptr_t>(range.file), file_end = file + to_unsigned(range.file_nbytes);
        const uintptr_t first = std::max(address / step * step, file);
        const uintptr_t last = std::min((end + step - 1) / step * step, pages_end(file_end));
        from = reinterpret_cast<uint8_t*>(first);
        nbytes = range.nbytes ? last - first : 0;
    }

private:
    static uintptr_t to_unsigned(int64_t n) { return static_cast<uintptr_t>(n); }
    static uintptr_t pages_end(uintptr_t end) { return (end + page_size() - 1) / page_size() * page_size(); }
};

int advise(const Pages& pages, int advice) { return pages.nbytes ? madvise(pages.from, pages.nbytes, advice) : 0; }

}  // namespace

void expect_bus_errors() {
    const std::lock_guard<std::mutex> lock(installing);
    struct sigaction now = {};
    sigaction(SIGBUS, nullptr, &now);
    if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_bus_error) return;
    before = now;
    struct sigaction ours = {};
    ours.sa_sigaction = on_bus_error;
    ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
    sigaction(SIGBUS, &ours, nullptr);
}

bool read_mapped(void (*read)(const void* context), const void* context) {
    sigjmp_buf here;
    if (sigsetjmp(here, 0)) {
        reading = nullptr;
        return false;
    }
    reading = &here;
    read(context);
    reading = nullptr;
    return true;
}

void MappedRange::ask_ahead() const { advise(Pages(*this, page_size()), MADV_WILLNEED); }

bool MappedRange::bring_in() const {
    for (;;) {
        if (!advise(Pages(*this, page_size()), MADV_POPULATE_READ)) return true;
        if (errno == EINTR || errno == EAGAIN) continue;
        return errno != EFAULT && errno != EIO && errno != EHWPOISON;
    }
}

void MappedRange::let_go() const { advise(Pages(*this, AROUND), MADV_DONTNEED); }

int64_t MappedRange::in_memory() const { return static_cast<int64_t>(Pages(*this, AROUND).nbytes); }

int64_t MappedRange::most_in_memory() const {
    constexpr auto around = static_cast<int64_t>(AROUND);
    return nbytes ? (nbytes + around - 2) / around * around + around : 0;
}

}  // namespace kernels
