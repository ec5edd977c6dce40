// The kernels of the ops for CPU and CUDA tensors. torch.library gets them as Python callables that
// the extension implements. If the plan cache has a plan for the arguments, a kernel runs it,
// either entirely in C++ or by calling one Python function, the algorithm. Python functions do the
// rest: checks, planning and error handling.
//
// The kernels do not use the stable C interface of libtorch, because it replaces the type of a
// Python exception by an error code. A Python callable costs the conversion of its arguments: an
// empty op took 1.2 us, registered as a C function 0.9 us (torch 2.13, 2-core Xeon, November 2026).
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "calls/arguments.h"
#include "calls/group_calls.h"
#include "calls/python.h"

namespace tpkernels::calls {

// Returns a kernel that is callable with the arguments of an op. It calls these Python functions:
//   plan(arguments) -> (Call, BoundCall | None)
//   run(Call, arguments) -> the result of the op
//   on_failure(Call, error)  before the error of a call is raised
//   check(x)                 if x is not contiguous or the call has no key; may be None
// `overwrites`: the op modifies x in place, and the kernel notifies autograd.
pybind11::object make_kernel(std::shared_ptr<Arguments> arguments, pybind11::object plan,
                             pybind11::object run, pybind11::object on_failure,
                             pybind11::object check, bool overwrites);

// Returns f(). If an interrupt such as Ctrl-C ends it, this rank may not have started the call that
// its peers wait for. The group of that name is then broken, and the peers are notified.
template <class F>
pybind11::object breaking_if_interrupted(PyObject* group, F&& f) {
  static PyObject* const break_group = import_static("tpkernels.groups", "break_if_interrupted");
  try {
    return f();
  } catch (const pybind11::error_already_set& error) {
    checked(PyObject_CallFunctionObjArgs(break_group, group, error.value().ptr(), nullptr));
    throw;
  }
}

// Whether grad mode is enabled and a tensor among the arguments requires a gradient.
bool needs_gradient(const Slots& slots);

// Whether a torch profiler is running. Python then records ranges for it.
bool profiling();

// Is set if kernels of a group may have failed on the GPU. Python must then check for errors before
// the next call. The GIL protects its state.
class Alarm {
 public:
  // Adds the address of a 64-bit flag in host memory that a kernel sets to nonzero on failure. The
  // memory must stay valid until `unwatch`.
  void watch(std::uint64_t flag) { flags_.push_back(flag); }
  void unwatch(std::uint64_t flag);

  bool is_set() const;

  bool raised = false;  // set by the host

 private:
  std::vector<std::uint64_t> flags_;
};

// A planned call whose algorithm is Python code: runs `execute(call, arguments)`. `alarm` belongs
// to the GPUs of the group and is null for calls on CPU tensors. `deterministic` is the value of
// the torch flag for deterministic algorithms that the plan is valid for; nullopt if for both
// values.
class PythonCall : public BoundCall {
 public:
  PythonCall(std::shared_ptr<const Arguments> arguments, pybind11::object execute,
             pybind11::object call, std::shared_ptr<const Alarm> alarm,
             std::optional<bool> deterministic);

  bool accepts(const Slots& slots, const Tensor& x) const override;
  pybind11::object run(const Slots& slots, const Tensor& x) const override;

 private:
  std::shared_ptr<const Arguments> arguments_;
  pybind11::object execute_;
  pybind11::object call_;
  std::shared_ptr<const Alarm> alarm_;
  std::optional<bool> deterministic_;
};

}  // namespace tpkernels::calls
