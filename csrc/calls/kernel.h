// The ops' kernels for CPU and CUDA tensors, as torch.library takes them: Python callables, but of
// the extension. A call with arguments that were planned before runs its plan: all of it here, or
// one function of Python, the algorithm's. The rest is done by the functions that Python gave:
// checks, planning, errors.
//
// They are not kernels of libtorch's stable C interface because that could not carry them: it hides
// the type of a Python exception behind an error code. What a Python callable costs is the
// conversion of its arguments: an empty op took 1.2 us, registered as a C function 0.9 us (torch
// 2.13, 2-core Xeon, November 2026).
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "calls/arguments.h"
#include "calls/python.h"
#include "calls/turns.h"

namespace tpkernels::calls {

// A kernel, callable with the op's arguments, of Python's functions:
//   plan(arguments) -> (Call, Bound | None)
//   run(Call, arguments) -> the op's result
//   failed(Call, error)   the call's error, before it is raised
//   check(x)              for an x that is not contiguous; None: nothing to check
// `overwrites`: the op changes x, and says so to autograd.
pybind11::object make_kernel(std::shared_ptr<Arguments> arguments, pybind11::object plan,
                             pybind11::object run, pybind11::object failed, pybind11::object check,
                             bool overwrites);

// What f() returns. An interrupt in it, such as Ctrl-C, may have come before the call was made, on
// this rank alone: the group of that name is broken, and its peers are told.
template <class F>
pybind11::object breaking_if_interrupted(PyObject* group, F&& f) {
  static PyObject* const breaks = lasting("tpkernels.groups", "break_if_interrupted");
  try {
    return f();
  } catch (const pybind11::error_already_set& error) {
    checked(PyObject_CallFunctionObjArgs(breaks, group, error.value().ptr(), nullptr));
    throw;
  }
}

// Whether gradients are recorded and a tensor among the arguments requires one.
bool needs_gradient(const Slots& slots);

// Whether a profiler runs, for which Python records ranges.
bool profiling();

// Says that something may have failed on the GPUs of a group, so that Python has to look before
// the next call. All of it under the GIL.
class Alarm {
 public:
  // A word in host memory that a kernel sets to nonzero. It must stay there until `unwatch`.
  void watch(std::uint64_t word) { words_.push_back(word); }
  void unwatch(std::uint64_t word);

  bool rings() const;

  bool raised = false;  // by the host

 private:
  std::vector<std::uint64_t> words_;
};

// A planned call whose algorithm is Python code: runs `execute(call, arguments)`. `alarm` is that
// of the group's GPUs; null: the call is on CPU tensors. `deterministic` is the value of torch's
// flag for deterministic algorithms that the call was planned with; none: it does not matter.
class PythonCall : public Bound {
 public:
  PythonCall(std::shared_ptr<const Arguments> arguments, pybind11::object execute,
             pybind11::object call, std::shared_ptr<const Alarm> alarm,
             std::optional<bool> deterministic);

  bool takes(const Slots& slots, const Tensor& x) const override;
  pybind11::object run(const Slots& slots, const Tensor& x) const override;

 private:
  std::shared_ptr<const Arguments> arguments_;
  pybind11::object execute_;
  pybind11::object call_;
  std::shared_ptr<const Alarm> alarm_;
  std::optional<bool> deterministic_;
};

}  // namespace tpkernels::calls
