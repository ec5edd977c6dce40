#pragma once

#include <pybind11/pybind11.h>

namespace tpkernels::cuda {

// Fills the submodule _C.cuda.
void bind(pybind11::module_& m);

}  // namespace tpkernels::cuda
