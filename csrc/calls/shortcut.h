// What torch's dispatcher would do for a call, and the ways past it where that is nothing.
//
// Within a model, whose weights have emptied the caches, the dispatcher and its conversion of the
// arguments take most of the time of a small collective: benchmarks/results/cpu-2core-decode.md. It
// has nothing to do without a gradient, mode, transform, tracing and profiler, for dense or packed
// tensors. That is read off sets of its keys, as the bits of DispatchKeySet.raw_repr(). Asking
// torch's Python functions for them makes objects and runs a lot of code. So they are read where
// torch keeps them: a thread-local variable of libc10, and a member of TensorImpl, whose place is
// found by comparing tensors' memory with what torch says of them. Where a torch keeps them
// elsewhere, its functions are asked. tpkernels/ops/shortcut.py decides whether any of this is
// used.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "calls/arguments.h"

namespace tpkernels::calls {

using ThreadKeys = std::pair<std::uint64_t, std::uint64_t>;  // included, excluded

ThreadKeys keys_of_thread();
std::uint64_t keys_of_tensor(PyObject* tensor);

// A tensor, its `_cdata` and its key set.
using KeySample = std::tuple<pybind11::object, std::uint64_t, std::uint64_t>;

// Finds the places in memory; `thread` is what torch says of this thread. False: there are none at
// which all samples, of which at least two must differ, are found; torch's functions are asked.
bool find_key_sets(const std::vector<KeySample>& samples, ThreadKeys thread);

// A state of the thread: included and excluded keys, whether gradients are recorded, and the key
// sets of tensors that have nothing but a kernel run in it.
using PlainState = std::tuple<std::uint64_t, std::uint64_t, bool, std::vector<std::uint64_t>>;

// Callable like `op`, an overload, which changes x, its only tensor, if it `overwrites`: runs its
// `kernel` where all is plain, the call was planned before and the extension can run it, and `op`
// otherwise. Without a kernel, `op` is the local matmul `op(x, w, *, bias, out_dtype)`, of which
// the extension multiplies a matrix x by a packed w. `versioned` is the key of tensors that count
// their versions.
pybind11::object make_shortcut(std::shared_ptr<Arguments> arguments, pybind11::object kernel,
                               pybind11::object op, std::vector<PlainState> states,
                               std::uint64_t versioned, bool overwrites);

// `is_plain(*values)`: whether all is plain for an op with these arguments.
pybind11::object make_is_plain(std::vector<PlainState> states);

// A kernel for the Autograd keys, callable with a key set and the op's arguments: `kernel` where
// the keys `below` autograd are one of the `plain` sets and no gradient is needed, else `otherwise`
// with the same arguments. `overwrites`: the op changes x, whose version counter is increased.
pybind11::object make_above(pybind11::object kernel, pybind11::object otherwise,
                            std::uint64_t below, std::vector<std::uint64_t> plain, bool overwrites);

}  // namespace tpkernels::calls
