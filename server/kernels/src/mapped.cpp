#include "mapped.h"

#include <csetjmp>
#include <csignal>
#include <cerrno>
#include <sys/mman.h>
#include <unistd.h>

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

int64_t page_size() {
    static const int64_t size = sysconf(_SC_PAGESIZE);
    return size;
}

struct Pages {
    uint8_t* from;
    int64_t nbytes;

    Pages(const uint8_t* begin, int64_t length) {
        const uintptr_t address = reinterpret_cast<uintptr_t>(begin), mask = static_cast<uintptr_t>(page_size()) - 1;
        const uintptr_t first = address & ~mask, end = (address + static_cast<uintptr_t>(length) + mask) & ~mask;
        from = reinterpret_cast<uint8_t*>(first);
        nbytes = static_cast<int64_t>(end - first);
    }
};

int advise(const uint8_t* from, int64_t nbytes, int advice) {
    const Pages pages(from, nbytes);
    return nbytes ? madvise(pages.from, static_cast<size_t>(pages.nbytes), advice) : 0;
}

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

void ask_ahead(const uint8_t* from, int64_t nbytes) { advise(from, nbytes, MADV_WILLNEED); }

bool bring_in(const uint8_t* from, int64_t nbytes) {
    for (;;) {
        if (!advise(from, nbytes, MADV_POPULATE_READ)) return true;
        if (errno == EINTR || errno == EAGAIN) continue;
        return errno != EFAULT && errno != EIO && errno != EHWPOISON;
    }
}

void let_go(const uint8_t* from, int64_t nbytes) { advise(from, nbytes, MADV_DONTNEED); }

int64_t pages_nbytes(const uint8_t* from, int64_t nbytes) { return nbytes ? Pages(from, nbytes).nbytes : 0; }

}  // namespace kernels
