// Helpers for the CPython API. They avoid the overhead of the pybind11 wrappers.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <memory>

#include "bindings.h"

namespace tpkernels::calls {

namespace py = pybind11;

// Wraps a new reference. Throws error_already_set if it is null.
inline py::object checked(PyObject* result) {
  if (!result) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

// Returns an attribute of a module and never releases it. Use it for static variables.
inline PyObject* import_static(const char* module, const char* name) {
  return py::object(py::module_::import(module).attr(name)).release().ptr();
}

// Calls a function without arguments. Returns whether the result is True.
inline bool is_true(PyObject* function) {
  return checked(PyObject_CallNoArgs(function)).is(py::bool_(true));
}

// A module variable that may be reassigned. The module is never unloaded.
class Global {
 public:
  Global(const char* module, const char* name)
      : names_(import_static(module, "__dict__")), name_(PyUnicode_InternFromString(name)) {}
  // Borrowed reference, or null if the variable was deleted.
  PyObject* value() const { return PyDict_GetItem(names_, name_); }

 private:
  PyObject* names_;
  PyObject* name_;
};

// Returns the result of f() as a new reference. If f throws, sets a Python error and returns null.
template <class F>
PyObject* return_or_set_error(F&& f) {
  try {
    return f().release().ptr();
  } catch (...) {
    set_python_error(std::current_exception());
    return nullptr;
  }
}

// Vectorcall arguments: positional values, then keyword values. `names` is the tuple of keyword
// names, or null.
struct CallArgs {
  PyObject* const* values;
  Py_ssize_t positional;
  PyObject* names;
};

// A builtin Python function that owns a State. A call avoids the pybind11 dispatch and creates no
// argument tuple or dict.
template <class State>
struct Callable {
  PyObject_HEAD State* state;

  static void deallocate(PyObject* self) {
    PyTypeObject* const type = Py_TYPE(self);
    delete reinterpret_cast<Callable*>(self)->state;
    type->tp_free(self);
    Py_DECREF(type);
  }

  template <PyObject* (*call)(const State&, const CallArgs&)>
  static PyObject* vectorcall(PyObject* self, PyObject* const* values, Py_ssize_t positional,
                              PyObject* names) {
    if (names && PyTuple_GET_SIZE(names) == 0) names = nullptr;
    return call(*reinterpret_cast<Callable*>(self)->state, {values, positional, names});
  }

  template <PyObject* (*call)(const State&, const CallArgs&)>
  static py::object make(const char* name, std::unique_ptr<State> state) {
    PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(&deallocate)}, {0, nullptr}};
    PyType_Spec spec{name, sizeof(Callable), 0, Py_TPFLAGS_DEFAULT, slots};
    static PyObject* const type = checked(PyType_FromSpec(&spec)).release().ptr();
    auto* const self = PyObject_New(Callable, reinterpret_cast<PyTypeObject*>(type));
    if (!self) throw py::error_already_set();
    self->state = state.release();
    const auto owned = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(self));
    static PyMethodDef method{
        name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&vectorcall<call>)),
        METH_FASTCALL | METH_KEYWORDS, nullptr};
    return checked(PyCFunction_NewEx(&method, owned.ptr(), nullptr));
  }
};

}  // namespace tpkernels::calls
