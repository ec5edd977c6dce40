// The extension tpkernels._C: one submodule per folder of csrc/, each with its own bindings. There
// are no torch headers, so one build serves every torch version.
#include "bindings.h"

#include <cerrno>
#include <new>
#include <system_error>

#include "host/channel.h"
#include "nccl/library.h"
#include "unsupported.h"

namespace tpkernels {
namespace {

namespace py = pybind11;

// Sets an exception of tpkernels.errors. `peer` is the rank to blame, or -1.
void raise_error(const char* name, const char* text, int peer) {
  const py::object cls = py::module_::import("tpkernels.errors").attr(name);
  const py::object culprit = peer < 0 ? py::object(py::none()) : py::int_(peer);
  PyErr_SetObject(cls.ptr(), cls(text, py::arg("peer") = culprit).ptr());
}

// A peer's failure has its kind from shared memory: an unknown one only means that it is broken.
const char* class_of(host::FailureKind kind) {
  switch (kind) {
    case host::FailureKind::kPeerLost:
      return "PeerLostError";
    case host::FailureKind::kTimeout:
      return "CollectiveTimeoutError";
    case host::FailureKind::kMismatch:
      return "CollectiveMismatchError";
    case host::FailureKind::kBroken:
      break;
  }
  return "GroupBrokenError";
}

}  // namespace

void set_python_error(std::exception_ptr error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const host::Failure& failure) {
    raise_error(class_of(failure.kind), failure.what(), failure.peer);
  } catch (const nccl::Error& failure) {
    raise_error(failure.type, failure.what(), -1);
  } catch (const Unsupported& unsupported) {
    PyErr_SetString(PyExc_NotImplementedError, unsupported.what());
  } catch (const std::system_error& failure) {
    errno = failure.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
  } catch (py::error_already_set& raised) {
    raised.restore();
  } catch (const py::builtin_exception& raised) {
    raised.set_error();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::invalid_argument& raised) {
    PyErr_SetString(PyExc_ValueError, raised.what());
  } catch (const std::out_of_range& raised) {
    PyErr_SetString(PyExc_IndexError, raised.what());
  } catch (const std::exception& raised) {
    PyErr_SetString(PyExc_RuntimeError, raised.what());
  }
}

}  // namespace tpkernels

// def_submodule also adds each submodule to sys.modules, so `import tpkernels._C.host` works.
PYBIND11_MODULE(_C, m) {
  m.doc() = "The C++ part of tpkernels";
  pybind11::register_exception_translator(&tpkernels::set_python_error);
  auto host = m.def_submodule("host", "Shared memory, signals and collectives within one host");
  auto nccl = m.def_submodule("nccl", "NCCL, loaded at run time");
  auto cuda = m.def_submodule("cuda", "The CUDA C++ kernels and their launches");
  auto calls = m.def_submodule("calls", "The ops' kernels");
  tpkernels::host::bind(host);
  tpkernels::calls::bind(calls);
  tpkernels::nccl::bind(nccl);
  tpkernels::cuda::bind(cuda);
}
