// Sets of torch's dispatch keys, as the bits of DispatchKeySet.raw_repr(): of tensors and of this
// thread. Asking torch's Python functions for them makes objects and runs a lot of code, most of it
// not in the caches within a model. So they are read where torch keeps them: a thread-local
// variable of libc10, and a member of TensorImpl, whose place is found by comparing tensors' memory
// with what torch says of them. Where a torch keeps them elsewhere, its functions are asked.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

namespace tpkernels::calls {

struct ThreadKeys {
  std::uint64_t included;
  std::uint64_t excluded;
};

// A tensor, its `_cdata` and its key set.
struct KeySample {
  pybind11::object tensor;
  std::uint64_t impl;
  std::uint64_t keys;
};

ThreadKeys keys_of_thread();
std::uint64_t keys_of_tensor(PyObject* tensor);

// The bits of one of torch's DispatchKeySets.
std::uint64_t bits_of(PyObject* keys);

// Finds the places; `thread` is what torch says of this thread. False: there are none at which all
// samples, of which at least two must differ, are found; torch's functions are asked.
bool find_key_sets(const std::vector<KeySample>& samples, ThreadKeys thread);

}  // namespace tpkernels::calls
