// The entry point of an op. An op that has a gradient, or rejects one, consists of two torch ops:
//   X   has a CompositeImplicitAutograd kernel. It checks whether autograd must record the call.
//   _X  has the kernels (kernel.h) and falls through at the Autograd keys.
// A call without a gradient therefore runs no Python code here. A call through the public function
// passes through the dispatcher once.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "calls/arguments.h"

namespace tpkernels::calls {

// Returns a callable with the arguments of an op. It calls:
//   custom(arguments)  if a weight is not a tensor, and `custom` is not None
//   record(arguments)  if an argument requires a gradient or may have a tangent
//   op                 otherwise; the overload `_X`
//
// `dispatched_op` is the overload `X` for the public function, and None for the kernel of `X`. If
// it is set, calls in transforms, function modes and profiles, and calls with tensor subclasses or
// non-tensor values, go to `dispatched_op` instead of `record` or `op`. Profiles then show the
// public name.
pybind11::object make_entry(std::shared_ptr<Arguments> arguments, pybind11::object op,
                            pybind11::object record, pybind11::object custom,
                            pybind11::object dispatched_op);

}  // namespace tpkernels::calls
