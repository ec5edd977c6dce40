// The ops' kernels for CPU and CUDA tensors, as torch.library takes them: Python callables, but of
// the extension. A call with arguments that were planned before, whose plan the extension can run
// by itself, runs no Python code at all. Everything else is done by the functions that Python gave:
// planning, checks, errors, other algorithms, gradients, tracing.
//
// They are not kernels of libtorch's stable C interface because that could not carry them: it hides
// the type of a Python exception behind an error code, and gives an Autograd kernel no way to go on
// below autograd. What a Python callable costs is the conversion of its arguments: an empty op took
// 1.2 us, registered as a C function 0.9 us (torch 2.13, 2-core Xeon, November 2026). With cold
// caches it is more, which shortcut.h avoids.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "calls/arguments.h"

namespace tpkernels::calls {

// What Python gives a kernel.
struct KernelFunctions {
  pybind11::object plan;    // (arguments) -> (Call, Bound | None)
  pybind11::object run;     // (Call, arguments) -> the op's result
  pybind11::object failed;  // (Call, error): the call's error, before it is raised
  pybind11::object check;   // (x), for an x that is not contiguous; None: nothing to check
};

// A kernel, callable with the op's arguments.
pybind11::object make_kernel(std::shared_ptr<const Arguments> arguments, KernelFunctions functions);

// The op's result, if the kernel was called with such arguments before and the extension can run
// the call; null without a Python error otherwise, with nothing done.
pybind11::object run_warm(const pybind11::object& kernel, const Slots& slots);

// Whether one of the values, or of the elements of a list, needs a gradient, or may be a dual
// tensor.
bool needs_gradient(PyObject* const* values, std::size_t count);

// Whether a profiler runs, for which Python records ranges.
bool profiling();

// Tells autograd that x is overwritten.
void increment_version(PyObject* x);

// What of a dispatch key set, of `below`, is left where nothing else is to be done: one of `plain`.
struct PlainKeys {
  std::uint64_t below;
  std::vector<std::uint64_t> plain;
};

// A kernel for the Autograd keys, callable with a key set and the op's arguments: `kernel` where
// no gradient is needed and nothing traces or wraps, otherwise `otherwise`, with the same
// arguments. `overwrites`: the op changes x, and its version counter is increased.
pybind11::object make_above(pybind11::object kernel, pybind11::object otherwise, PlainKeys keys,
                            bool overwrites);

}  // namespace tpkernels::calls
