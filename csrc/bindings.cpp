// The extension tpkernels._C. Each folder of csrc/ is a submodule with a separate bindings file. No
// file includes torch headers, so one build works with every torch version.
#include "bindings.h"

#include <cerrno>
#include <iterator>
#include <new>
#include <system_error>

#include "host/channel.h"
#include "unsupported.h"

namespace tpkernels {
namespace {

namespace py = pybind11;

// Sets an exception of tpkernels.errors. `peer` is the rank that caused it, or -1.
void raise_error(const char* name, const char* message, int peer) {
  const py::object cls = py::module_::import("tpkernels.errors").attr(name);
  const py::object culprit = peer < 0 ? py::object(py::none()) : py::int_(peer);
  PyErr_SetObject(cls.ptr(), cls(message, py::arg("peer") = culprit).ptr());
}

// Indexed by FailureKind. A peer writes its FailureKind to shared memory. An invalid value is
// reported as GroupBrokenError.
constexpr const char* kClasses[] = {"GroupBrokenError", "PeerLostError", "CollectiveTimeoutError",
                                    "CollectiveMismatchError"};

// Translates the exceptions of this package and std::system_error. pybind11 passes all other
// exceptions to the next translator.
void translate(std::exception_ptr error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const host::Failure& failure) {
    const auto kind = static_cast<std::size_t>(failure.kind);
    raise_error(kClasses[kind < std::size(kClasses) ? kind : 0], failure.what(), failure.peer);
  } catch (const Unsupported& unsupported) {
    PyErr_SetString(PyExc_NotImplementedError, unsupported.what());
  } catch (const std::system_error& failure) {
    errno = failure.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
  }
}

}  // namespace

void set_python_error(std::exception_ptr error) {
  try {
    translate(error);
  } catch (py::error_already_set& raised) {
    raised.restore();
  } catch (const py::builtin_exception& raised) {
    raised.set_error();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::invalid_argument& raised) {
    PyErr_SetString(PyExc_ValueError, raised.what());
  } catch (const std::exception& raised) {
    PyErr_SetString(PyExc_RuntimeError, raised.what());
  }
}

}  // namespace tpkernels

// def_submodule also adds each submodule to sys.modules, so `import tpkernels._C.host` works.
PYBIND11_MODULE(_C, m) {
  m.doc() = "The C++ part of tpkernels";
  pybind11::register_local_exception_translator(&tpkernels::translate);
  auto host = m.def_submodule("host", "Shared memory, signals and collectives within one host");
  auto nccl = m.def_submodule("nccl", "NCCL, loaded at run time");
  auto cuda = m.def_submodule("cuda", "The CUDA C++ kernels and their launches");
  auto calls = m.def_submodule("calls", "The ops' kernels");
  tpkernels::bind_host(host);
  tpkernels::bind_calls(calls);
  tpkernels::bind_nccl(nccl);
  tpkernels::bind_cuda(cuda);
}
