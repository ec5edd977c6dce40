// What the folder needs of CPython's interface beyond pybind11, which is slower.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <memory>

#include "bindings.h"

namespace tpkernels::calls {

namespace py = pybind11;

// A new reference as an object; throws where there is none and Python has an error.
inline py::object checked(PyObject* result) {
  if (!result) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

// An attribute of a module, kept for ever: for static variables.
inline PyObject* lasting(const char* module, const char* name) {
  return py::object(py::module_::import(module).attr(name)).release().ptr();
}

// Whether a function without arguments returns True.
inline bool is_true(PyObject* function) {
  return checked(PyObject_CallNoArgs(function)).is(py::bool_(true));
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

// The arguments of a call as CPython's vectorcall gives them: the values, those by position first,
// and the names of the others in a tuple, or null.
struct Given {
  PyObject* const* values;
  Py_ssize_t positional;
  PyObject* names;
};

// A builtin function of Python around a State, which lives as long: without pybind11's dispatch,
// and without a tuple and a dict of its arguments.
template <class State>
struct Callable {
  PyObject_HEAD State* state;

  static void deallocate(PyObject* self) {
    PyTypeObject* const type = Py_TYPE(self);
    delete reinterpret_cast<Callable*>(self)->state;
    type->tp_free(self);
    Py_DECREF(type);
  }

  template <PyObject* (*call)(const State&, const Given&)>
  static PyObject* vectorcall(PyObject* self, PyObject* const* values, Py_ssize_t positional,
                              PyObject* names) {
    if (names && PyTuple_GET_SIZE(names) == 0) names = nullptr;
    return call(*reinterpret_cast<Callable*>(self)->state, {values, positional, names});
  }

  template <PyObject* (*call)(const State&, const Given&)>
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
