#pragma once

#include <pybind11/pybind11.h>

namespace tpkernels::calls {

// Fills the submodule _C.calls, which needs _C.host.
void bind(pybind11::module_& m);

}  // namespace tpkernels::calls
