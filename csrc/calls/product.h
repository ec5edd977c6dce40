// The local product of a call in the extension: csrc/host/product.h on tensors, with torch's
// threads.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>

#include "calls/tensor.h"
#include "host/product.h"

namespace tpkernels::calls {

// A weight as csrc/host/product.h reads it.
struct Weight {
  const void* data = nullptr;
  std::size_t pitch = 0;
  std::int64_t k = 0, n = 0;
  host::DType dtype{};
  host::Form form{};
};

// What packed.py tells of a weight that oneDNN has packed in panels.
struct Panels {
  Weight weight;
  pybind11::object owner;  // keeps the memory
};

// Of a dense tensor w [K, N], or of what tpkernels/local/packed.py makes of one. Valid as long as w
// is. False: it is none that csrc/host/product.h reads.
bool read_weight(PyObject* w, bool packed, Weight* weight);

// Whether products of large weights with `rows` rows would be computed, to x's dtype.
bool multiplies(host::DType dtype, host::Form form, std::size_t rows);

// Whether a product of x's dtype without a bias would be computed. `whole_rows`: of the product
// that this is a part of, so that its bits do not depend on the parts.
bool multiplies(const Tensor& x, const Weight& w, std::size_t whole_rows);

// out = x @ w + bias, rounded once, where csrc/host/product.h has the fastest way; otherwise false,
// and nothing is computed. x [rows, K], out [rows, N] of any float dtype on the CPU, both with unit
// column stride; bias [N] in fp32, or without data. Gives up the GIL. Throws std::invalid_argument
// if out or bias has another shape.
bool multiply(const Tensor& x, const Weight& w, const Tensor& out, const Tensor& bias,
              std::size_t whole_rows);

}  // namespace tpkernels::calls
