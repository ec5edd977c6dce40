// Products of few rows in a call: csrc/host/few_rows.h on tensors, with torch's threads.
#pragma once

#include <cstddef>

#include "calls/tensor.h"
#include "host/few_rows.h"

namespace tpkernels::calls {

// out = x @ w + bias, rounded once, where csrc/host/few_rows.h is the fastest way; otherwise false,
// and nothing is computed. x [rows, K], w [K, N], out [rows, N] of any float dtype on the CPU; bias
// [N] in fp32, or without data. `whole_rows`: of the product that this is a part of, so that its
// bits do not depend on the parts. Gives up the GIL. Throws std::invalid_argument if out or bias
// has another shape.
bool multiply_few_rows(const Tensor& x, const Tensor& w, const Tensor& out, const Tensor& bias,
                       std::size_t whole_rows);

// The most rows that are; 0 for a dtype of which none are.
std::size_t most_rows(host::DType dtype);

// Whether a product without a bias would be computed.
bool takes_few_rows(const Tensor& x, const Tensor& w, std::size_t whole_rows);

}  // namespace tpkernels::calls
