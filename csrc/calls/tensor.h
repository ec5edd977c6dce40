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

// Takes torch's exchange interface from `torch.Tensor`; false where it has none that fits.
bool open_exchange(const pybind11::handle& tensor_class);

// What a torch tensor is. False, without a Python error, for one that has no such description, such
// as one of a dtype that DLPack does not know. Torch describes negative views and tensors of zeros
// without memory as if they were plain, so the tensors must be those that torch's dispatcher gives
// to a kernel.
bool read(PyObject* object, Tensor* out);
// The same; throws std::invalid_argument.
Tensor tensor(const pybind11::handle& object);

std::size_t count_of(const Tensor& x);
std::size_t bytes_of(const Tensor& x);
bool is_contiguous(const Tensor& x);

inline std::byte* data_of(const Tensor& x) {
  return static_cast<std::byte*>(x.data) + x.byte_offset;
}

// What DLPack calls a dtype; throws std::invalid_argument for one that the ops do not take.
host::DType dtype_of(const Tensor& x);

// `torch.empty(shape, dtype=dtype, device="cpu")`. A large tensor gets huge pages: one page fault
// per 2 MiB instead of one per 4 KiB.
pybind11::object empty(const pybind11::tuple& shape, const pybind11::handle& dtype);

}  // namespace tpkernels::calls
