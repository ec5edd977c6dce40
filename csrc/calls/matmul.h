// Products of tensors, for calls that run without Python and for tpkernels/local/matmul.py.
#pragma once

#include <pybind11/pybind11.h>

#include "calls/product.h"

namespace tpkernels::calls {

// x [rows, K] @ w. `packed`: w is what tpkernels/local/packed.py makes of a weight, not [K, N].
pybind11::object matmul(const pybind11::object& x, PyObject* w, bool packed);

// out = x @ w + bias, where the extension has the fastest way; otherwise false, and nothing is
// computed. bias [N] in fp32, or None.
bool multiply(const pybind11::object& x, PyObject* w, PyObject* out, PyObject* bias, bool packed,
              const Whole& whole);

}  // namespace tpkernels::calls
