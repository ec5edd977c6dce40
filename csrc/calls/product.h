// The local product of a call in the extension: csrc/host/product.h on tensors, with torch's
// threads; for calls that run without Python and for tpkernels/local/matmul.py.
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

// The rows and columns of the product that a call's is a part of: the bits follow from these, so
// that they do not depend on the parts.
struct Whole {
  std::size_t rows, columns;
};

// x, or a copy with unit column stride where the extension multiplies faster by that than torch by
// x; `out_dtype` is that of the product.
pybind11::object with_unit_stride(const pybind11::object& x, const Weight& w, host::DType out_dtype,
                                  const Whole& whole);

// How to compute x @ w to `out_dtype`; without `multiply` where the extension does not, as with
// other column strides than 1 of x.
host::Way way_of(const Tensor& x, const Weight& w, host::DType out_dtype, const Whole& whole);

// Whether the extension writes results to tensors like `out`: of any float dtype on the CPU, with
// unit column stride.
bool takes_result(const Tensor& out);

// out [rows, N] = x [rows, K] @ w + bias by way_of(x, w, out's dtype, ...), rounded once; bias [N]
// in fp32, or without data. Gives up the GIL. Throws std::invalid_argument if out or bias has
// another shape or dtype.
void multiply(const Tensor& x, const Weight& w, const Tensor& out, const Tensor& bias,
              const host::Way& way);

// x [rows, K] @ w. `packed`: w is what tpkernels/local/packed.py makes of a weight, not [K, N].
pybind11::object matmul(const pybind11::object& x, PyObject* w, bool packed);

// out = x @ w + bias, where the extension has the fastest way; otherwise false, and nothing is
// computed. bias [N] in fp32, or None.
bool multiply(const pybind11::object& x, PyObject* w, PyObject* out, PyObject* bias, bool packed,
              const Whole& whole);

}  // namespace tpkernels::calls
