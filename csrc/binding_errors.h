// What the parts of the Python face share: raising the package's errors, and waiting politely.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

namespace tpkernels {

// Sets an exception of tpkernels.errors; `peer` is the rank to blame, -1 where there is none.
inline void raise_error(const char* name, const char* text, int peer) {
  namespace py = pybind11;
  const py::object cls = py::module_::import("tpkernels.errors").attr(name);
  const py::object blamed = peer < 0 ? py::object(py::none()) : py::int_(peer);
  PyErr_SetObject(cls.ptr(), cls(text, py::arg("peer") = blamed).ptr());
}

// A daemon thread may wait here when the interpreter ends. To take the GIL then would end the
// thread by an unwinding that C++ answers with std::terminate; so it stays, and goes with the
// process.
inline void stay_if_python_ends() {
  if (gettid() == getpid()) return;  // the thread that ends it
#if PY_VERSION_HEX >= 0x030D0000
  while (Py_IsFinalizing()) pause();
#else
  while (_Py_IsFinalizing()) pause();
#endif
}

// Gives up the GIL for as long as it lives; as call_guard, for a function. Unlike pybind11's it
// does not take the GIL back once the interpreter ends.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased() {
    stay_if_python_ends();
    PyEval_RestoreThread(state_);
  }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* state_;
};

// Lets Ctrl-C interrupt a wait that has released the GIL: throws error_already_set.
inline void poll_signals() {
  stay_if_python_ends();
  if (gettid() != getpid()) return;  // only the main thread handles signals
  const pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

}  // namespace tpkernels
