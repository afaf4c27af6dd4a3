// Every id of a step is checked before anything is read or written with it.
#pragma once
#include "kernels.h"

namespace kernels {

// 0, or what is wrong with the step for these layers; `detail` is then the row at fault, -1 for a segment without rows.
Status check_step(const Network& network, const Layer* layers, int64_t n_layers, const Step& step, int64_t* detail);

}  // namespace kernels
