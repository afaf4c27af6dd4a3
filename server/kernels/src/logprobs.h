// ln of the sum of e^logit over a row, in fp64: what log probabilities are measured from.
//
// The order of the sum is fixed: element i of a block goes to partial sum i mod 16, and those are added in a tree. exp
// and ln are our own, so that no bit depends on the machine's libm.
#pragma once
#include "ranking.h"

namespace kernels {

double log_sum_exp(const ScannedRow& row);

}  // namespace kernels
