// The functions of lanes.h over arrays, for tests of their accuracy and of their bits on every kind of machine.
#include "lanes.h"

using namespace kernels;

namespace {

template <class F>
void each(const float* x, int64_t n, float* out, F function) {
    for (int64_t i = 0; i < n; i += LANES) store_first(out + i, function(load_first(x + i, n - i)), n - i);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {
void kernels_exp(const float* x, int64_t n, float* out) {
    each(x, n, out, [](Lanes a) { return exp(a); });
}
void kernels_log(const float* x, int64_t n, float* out) {
    each(x, n, out, [](Lanes a) { return log(a); });
}
void kernels_softplus(const float* x, int64_t n, float* out) {
    each(x, n, out, [](Lanes a) { return softplus(a); });
}
void kernels_to_bf16(const float* x, int64_t n, Bf16* out) {
    for (int64_t i = 0; i < n; i++) out[i] = float_to_bf16(x[i]);
}
}
#pragma GCC visibility pop
