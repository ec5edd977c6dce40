// How a call enters an op. Each op `X` with a gradient, or with a refusal of one, is two: `X`,
// which has a CompositeImplicitAutograd kernel that asks whether autograd has to record the call,
// and `_X`, which has the kernels (kernel.h) and falls through at the Autograd keys. So a call that
// needs no gradient runs no Python code here, and passes the dispatcher once where it enters by the
// public function.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "calls/arguments.h"

namespace tpkernels::calls {

// Callable with the arguments of an op: `record(arguments)` where one of them needs a gradient, or
// may have a tangent; `custom(arguments)`, unless it is None, where a weight is no tensor; else
// `op`, the overload `_X`.
//
// `detour` is the overload `X`, for calls that do not come from the dispatcher. They take it in
// transforms and function modes, with tensors of other classes, and in profiles, which are to show
// the public name. None makes the kernel of `X`.
pybind11::object make_entry(std::shared_ptr<Arguments> arguments, pybind11::object op,
                            pybind11::object record, pybind11::object custom,
                            pybind11::object detour);

}  // namespace tpkernels::calls
