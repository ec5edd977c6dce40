// Borrowed views of torch tensors, read without creating Python objects, and CPU memory for results
// and large temporaries.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>

#include "calls/dlpack.h"
#include "host/vector.h"

namespace tpkernels::calls {

using Tensor = dlpack::Tensor;

bool is_tensor(PyObject* value);

// Loads the DLPack exchange interface of `torch.Tensor`. Returns false if this torch lacks a
// compatible version.
bool open_exchange(const pybind11::handle& tensor_class);

// Reads a torch tensor into `out`. Returns false, without a Python error, if DLPack cannot describe
// it, for example because of its dtype. Torch describes negative views and zero tensors without
// memory (ZeroTensor) as plain tensors. So pass only tensors that a kernel got from the torch
// dispatcher.
bool read(PyObject* object, Tensor* out);
// Reads a torch tensor. Throws std::invalid_argument if `read` fails.
Tensor tensor(const pybind11::handle& object);

std::size_t num_elements(const Tensor& x);
std::size_t num_bytes(const Tensor& x);
bool is_contiguous(const Tensor& x);

inline std::byte* data_ptr(const Tensor& x) {
  return static_cast<std::byte*>(x.data) + x.byte_offset;
}

// Converts the DLPack dtype of a tensor. Throws std::invalid_argument if the ops do not support it.
host::DType get_dtype(const Tensor& x);

// `torch.empty(shape, dtype=dtype, device="cpu")`. A large tensor gets huge pages: one page fault
// per 2 MiB instead of one per 4 KiB.
pybind11::object empty(const pybind11::tuple& shape, const pybind11::handle& dtype);

}  // namespace tpkernels::calls
