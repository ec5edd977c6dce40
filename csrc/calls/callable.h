// Python callables that are written in C++, without pybind11's dispatch.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

namespace tpkernels::calls {

// A Python object around a State, which lives as long.
template <class State>
struct Callable {
  PyObject_HEAD State* state;

  static void deallocate(PyObject* self) {
    PyTypeObject* const type = Py_TYPE(self);
    delete reinterpret_cast<Callable*>(self)->state;
    type->tp_free(self);
    Py_DECREF(type);
  }

  static pybind11::object make(const char* name, ternaryfunc call, std::unique_ptr<State> state) {
    PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(&deallocate)},
                           {Py_tp_call, reinterpret_cast<void*>(call)},
                           {0, nullptr}};
    PyType_Spec spec{name, sizeof(Callable), 0, Py_TPFLAGS_DEFAULT, slots};
    const auto type = pybind11::reinterpret_steal<pybind11::object>(PyType_FromSpec(&spec));
    if (!type) throw pybind11::error_already_set();
    auto* const made = PyObject_New(Callable, reinterpret_cast<PyTypeObject*>(type.ptr()));
    if (!made) throw pybind11::error_already_set();
    made->state = state.release();
    return pybind11::reinterpret_steal<pybind11::object>(reinterpret_cast<PyObject*>(made));
  }
};

template <class State>
const State& state_of(PyObject* object) {
  return *reinterpret_cast<Callable<State>*>(object)->state;
}

}  // namespace tpkernels::calls
