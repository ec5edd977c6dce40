#pragma once

#include <pybind11/pybind11.h>

namespace tpkernels::nccl {

// Adds NcclLibrary, NcclCommunicator and what they take.
void bind_nccl(pybind11::module_& m);

}  // namespace tpkernels::nccl
