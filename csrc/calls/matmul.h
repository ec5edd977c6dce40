// The local matmul of calls that run without Python.
#pragma once

#include <pybind11/pybind11.h>

namespace tpkernels::calls {

// x [rows, K] @ w. `packed`: w is what tpkernels/local/packed.py makes of a weight, not [K, N].
pybind11::object matmul(const pybind11::object& x, PyObject* w, bool packed);

}  // namespace tpkernels::calls
