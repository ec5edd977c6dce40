// Shared by all bindings: raising errors in Python, releasing the GIL, handling Ctrl-C.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <exception>
#include <stdexcept>

namespace tpkernels {

// Each function fills a submodule of _C.
void bind_calls(pybind11::module_& m);
void bind_cuda(pybind11::module_& m);
void bind_host(pybind11::module_& m);
void bind_nccl(pybind11::module_& m);

// Converts a C++ exception to the current Python error. Does nothing if `error` is null.
void set_python_error(std::exception_ptr error);

// Parks a daemon thread when the interpreter is shutting down. Taking the GIL at that point would
// unwind the thread, and unwinding through C++ frames calls std::terminate. The parked thread ends
// with the process.
inline void park_if_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  const auto ends = [] { return Py_IsFinalizing() != 0; };
#else
  const auto ends = [] { return _Py_IsFinalizing() != 0; };
#endif
  // The main thread shuts the interpreter down.
  while (ends() && gettid() != getpid()) pause();
}

// Releases the GIL during its lifetime, or during a function as its call_guard. Unlike
// pybind11::gil_scoped_release, it does not reacquire the GIL once the interpreter is shutting
// down.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased() {
    park_if_finalizing();
    PyEval_RestoreThread(state_);
  }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* state_;
};

// Lets Ctrl-C interrupt a wait that has released the GIL: throws error_already_set.
inline void poll_signals() {
  park_if_finalizing();
  if (gettid() != getpid()) return;  // only the main thread handles signals
  const pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

}  // namespace tpkernels
