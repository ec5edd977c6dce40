// Products of few rows in a call: csrc/host/few_rows.h on tensors, with torch's threads.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>

#include "calls/tensor.h"
#include "host/few_rows.h"

namespace tpkernels::calls {

// A weight as csrc/host/few_rows.h reads it.
struct FewRowsWeight {
  const void* data = nullptr;
  std::size_t pitch = 0;
  std::int64_t k = 0, n = 0;
  host::DType dtype{};
  host::Form form{};
};

// What packed.py tells of a weight that oneDNN has packed in panels.
struct Panels {
  FewRowsWeight weight;
  pybind11::object owner;  // keeps the memory
};

// Of a dense tensor w [K, N], or of what tpkernels/local/packed.py makes of one. Valid as long as w
// is. False: it is none that csrc/host/few_rows.h reads.
bool read_weight(PyObject* w, bool packed, FewRowsWeight* weight);

// out = x @ w + bias, rounded once, where csrc/host/few_rows.h is the fastest way; otherwise false,
// and nothing is computed. x [rows, K], out [rows, N] of any float dtype on the CPU; bias [N] in
// fp32, or without data. `whole_rows`: of the product that this is a part of, so that its bits do
// not depend on the parts. Gives up the GIL. Throws std::invalid_argument if out or bias has
// another shape.
bool multiply_few_rows(const Tensor& x, const FewRowsWeight& w, const Tensor& out,
                       const Tensor& bias, std::size_t whole_rows);

// The most rows that are; 0 for a dtype of which none are.
std::size_t most_rows(host::DType dtype, host::Form form);

// Whether a product without a bias would be computed.
bool takes_few_rows(const Tensor& x, const FewRowsWeight& w, std::size_t whole_rows);

}  // namespace tpkernels::calls
