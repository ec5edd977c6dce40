// C++ exceptions as Python errors, for the functions that pybind11 does not wrap.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>

namespace tpkernels::calls {

// Sets Python's error.
void set_python_error(const std::exception_ptr& error);

// What f() returns, as a new reference; null with a Python error set where it throws.
template <class F>
PyObject* raising(F&& f) {
  try {
    return f().release().ptr();
  } catch (...) {
    set_python_error(std::current_exception());
    return nullptr;
  }
}

}  // namespace tpkernels::calls
