// No exception crosses the C ABI: what a kernel throws becomes a Status.
#pragma once
#include <new>

#include "kernels.h"
#include "stored.h"

namespace kernels {

template <class F>
int32_t guarded(F compute) {
    try {
        return compute();
    } catch (const std::bad_alloc&) {
        return OUT_OF_MEMORY;
    } catch (const Unreadable&) {
        return UNREADABLE;
    } catch (...) {
        return INTERNAL;
    }
}

}  // namespace kernels
