// The way past torch's dispatcher, for calls in which it would have nothing to do: no gradient,
// no mode, no transform, no tracing, no profiler, dense or packed tensors. Within a model, whose
// weights have emptied the caches, the dispatcher and its conversion of the arguments take most of
// the time of a small collective: benchmarks/results/cpu-2core-decode.md.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "calls/arguments.h"
#include "calls/key_sets.h"

namespace tpkernels::calls {

// A state of the thread, and the key sets of tensors that have nothing but a kernel run in it.
struct PlainState {
  ThreadKeys thread;
  bool records;  // gradients
  std::vector<std::uint64_t> tensors;
};

// Callable like `op`, an overload, which changes x, its only tensor, if it `overwrites`: runs its
// `kernel` where all is plain, the call was planned before and the extension can run it, and `op`
// otherwise. `versioned` is the key of tensors that count their versions.
pybind11::object make_shortcut(std::shared_ptr<const Arguments> arguments, pybind11::object kernel,
                               pybind11::object op, std::vector<PlainState> states,
                               std::uint64_t versioned, bool overwrites);

// Callable like `op`, the local matmul `op(x, w, *, bias, out_dtype)`: the extension multiplies a
// matrix x by a packed w where all is plain and neither of the others is given.
pybind11::object make_matmul_shortcut(std::shared_ptr<const Arguments> arguments,
                                      pybind11::object op, std::vector<PlainState> states);

// `is_plain(*values)`: whether all is plain for an op with these arguments.
pybind11::object make_is_plain(std::vector<PlainState> states);

}  // namespace tpkernels::calls
