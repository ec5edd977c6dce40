#pragma once

#include <pybind11/pybind11.h>

#include <exception>

namespace tpkernels::host {

// Fills the submodule _C.host.
void bind(pybind11::module_& m);

// Sets Python's error for an exception of this folder; false: it is another's.
bool set_python_error(const std::exception_ptr& error);

}  // namespace tpkernels::host
