#pragma once

#include <pybind11/pybind11.h>

namespace tpkernels::cuda {

void bind_cuda(pybind11::module_& m);

}  // namespace tpkernels::cuda
