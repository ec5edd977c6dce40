// Memory for results and large temporaries on the CPU.
#pragma once

#include <pybind11/pybind11.h>

namespace tpkernels::calls {

// `torch.empty(shape, dtype=dtype, device="cpu")`. A large tensor's memory comes from the pool and
// goes back to it with the tensor's storage, which cannot be resized; if the pool has none, it is
// torch's, with huge pages.
pybind11::object empty(const pybind11::tuple& shape, const pybind11::handle& dtype);

// torch.mm(x, w) in such memory.
pybind11::object matmul(const pybind11::object& x, const pybind11::handle& w);

}  // namespace tpkernels::calls
