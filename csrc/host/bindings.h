#pragma once

#include <pybind11/pybind11.h>

namespace tpkernels::host {

// Fills the submodule _C.host.
void bind(pybind11::module_& m);

}  // namespace tpkernels::host
