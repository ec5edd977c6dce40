// What the folder needs of CPython's interface beyond pybind11, which is slower.
#pragma once

#include <pybind11/pybind11.h>

namespace tpkernels::calls {

// A new reference as an object; throws where there is none and Python has an error.
inline pybind11::object checked(PyObject* result) {
  if (!result) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(result);
}

// An attribute of a module, kept for ever: for static variables.
inline PyObject* lasting(const char* module, const char* name) {
  return pybind11::object(pybind11::module_::import(module).attr(name)).release().ptr();
}

// A name of a module, which may be given another value. The module is never unloaded.
class Global {
 public:
  Global(const char* module, const char* name)
      : names_(lasting(module, "__dict__")), name_(PyUnicode_InternFromString(name)) {}
  PyObject* value() const { return PyDict_GetItem(names_, name_); }  // borrowed; null: it is gone

 private:
  PyObject* names_;
  PyObject* name_;
};

}  // namespace tpkernels::calls
