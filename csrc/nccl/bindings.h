#pragma once

#include <pybind11/pybind11.h>

namespace tpkernels::nccl {

// Fills the submodule _C.nccl.
void bind(pybind11::module_& m);

}  // namespace tpkernels::nccl
