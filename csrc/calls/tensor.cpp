#include "calls/tensor.h"

#include <stdexcept>

#include "calls/python.h"
#include "host/arena.h"

namespace tpkernels::calls {
namespace {

const dlpack::ExchangeApi* exchange = nullptr;

// Minimum size for huge pages. From this size on, torch gets new pages from the kernel for every
// tensor.
constexpr std::size_t kLargeBytes = std::size_t{4} << 20;

}  // namespace

bool is_tensor(PyObject* value) {
  static PyObject* const type = import_static("torch", "Tensor");
  return PyObject_TypeCheck(value, reinterpret_cast<PyTypeObject*>(type)) != 0;
}

bool open_exchange(const py::handle& tensor_class) {
  const py::object capsule = py::getattr(tensor_class, "__dlpack_c_exchange_api__", py::none());
  if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return false;
  auto* api = static_cast<const dlpack::ExchangeApi*>(
      PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  while (api && api->version.major > dlpack::kMajorVersion) api = api->previous;
  if (!api || api->version.major != dlpack::kMajorVersion) return false;
  if (!api->tensor_from_python) return false;
  exchange = api;
  return true;
}

bool read(PyObject* object, Tensor* out) {
  if (!exchange || !is_tensor(object)) return false;
  if (exchange->tensor_from_python(object, out) == 0) return true;
  PyErr_Clear();
  return false;
}

Tensor tensor(const py::handle& object) {
  Tensor x{};
  if (!read(object.ptr(), &x)) throw std::invalid_argument("expected a dense tensor");
  return x;
}

std::size_t num_elements(const Tensor& x) {
  std::size_t count = 1;
  for (int i = 0; i < x.ndim; ++i) count *= static_cast<std::size_t>(x.shape[i]);
  return count;
}

std::size_t num_bytes(const Tensor& x) { return num_elements(x) * x.dtype.bits / 8; }

bool is_contiguous(const Tensor& x) {
  if (num_elements(x) == 0) return true;
  std::int64_t expected = 1;
  for (int i = x.ndim - 1; i >= 0; --i) {
    if (x.shape[i] != 1 && x.strides[i] != expected) return false;
    expected *= x.shape[i];
  }
  return true;
}

host::DType get_dtype(const Tensor& x) {
  if (x.dtype.lanes == 1 && x.dtype.code == dlpack::kBFloat && x.dtype.bits == 16)
    return host::DType::kBF16;
  if (x.dtype.lanes == 1 && x.dtype.code == dlpack::kFloat) {
    if (x.dtype.bits == 32) return host::DType::kF32;
    if (x.dtype.bits == 16) return host::DType::kF16;
    if (x.dtype.bits == 64) return host::DType::kF64;
  }
  // Integers are moved and never added, so only the width matters.
  if (x.dtype.lanes == 1 && x.dtype.code == dlpack::kInt) {
    if (x.dtype.bits == 32) return host::DType::kF32;
    if (x.dtype.bits == 64) return host::DType::kF64;
  }
  throw std::invalid_argument(
      "unsupported tensor dtype; supported: float32, float16, bfloat16, float64, int32, int64");
}

py::object empty(const py::tuple& shape, const py::handle& dtype) {
  static const Global make("torch", "empty");
  static PyObject* const names = py::make_tuple("dtype", "device").release().ptr();
  static PyObject* const cpu = py::module_::import("torch").attr("device")("cpu").release().ptr();
  PyObject* const args[] = {shape.ptr(), dtype.ptr(), cpu};
  py::object out = checked(PyObject_Vectorcall(make.value(), args, 1, names));
  Tensor x{};
  if (read(out.ptr(), &x) && num_bytes(x) >= kLargeBytes) {
    host::advise_huge_pages(data_ptr(x), num_bytes(x));
  }
  return out;
}

}  // namespace tpkernels::calls
