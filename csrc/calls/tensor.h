// Tensors as the extension sees them in a call: borrowed, read without making Python objects; and
// memory for results and large temporaries on the CPU.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>

#include "calls/dlpack.h"
#include "host/vector.h"

namespace tpkernels::calls {

using Tensor = dlpack::Tensor;

bool is_tensor(PyObject* value);

// Takes torch's exchange interface from `torch.Tensor`; false where it has none that fits. `plain`:
// the dispatch keys of tensors whose memory holds their values.
bool open_exchange(const pybind11::handle& tensor_class, std::uint64_t plain);

// What a torch tensor is. False, without a Python error, for one that has no such description: one
// with other dispatch keys (torch describes negative views and tensors of zeros without memory as
// if they were plain), or of a dtype that DLPack does not know.
bool read(PyObject* object, Tensor* out);
// The same; throws std::invalid_argument.
Tensor tensor(const pybind11::handle& object);

// A torch tensor of memory that `owned.deleter` takes back, once, when the tensor's storage dies:
// on any thread, without the GIL. Takes `owned` over, also when it throws error_already_set.
pybind11::object make_tensor(dlpack::ManagedTensor* owned);

std::size_t count_of(const Tensor& x);
std::size_t bytes_of(const Tensor& x);
bool is_contiguous(const Tensor& x);

inline std::byte* data_of(const Tensor& x) {
  return static_cast<std::byte*>(x.data) + x.byte_offset;
}

// What DLPack calls a dtype; throws std::invalid_argument for one that the ops do not take.
host::DType dtype_of(const Tensor& x);

// From this size on, fresh memory comes straight from the kernel, page by page. For a 32 MiB fp32
// all_reduce on a 2-core AMD EPYC (Zen 4), 2026-11-22, that nearly doubles the time:
// benchmarks/results/cpu-2core-functional.md.
constexpr std::size_t kLargeBytes = std::size_t{4} << 20;

// `torch.empty(shape, dtype=dtype, device="cpu")`. A large tensor's memory comes from the pool and
// goes back to it with the tensor's storage, which cannot be resized; if the pool has none, it is
// torch's, with huge pages.
pybind11::object empty(const pybind11::tuple& shape, const pybind11::handle& dtype);

}  // namespace tpkernels::calls
