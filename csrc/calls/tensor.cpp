#include "calls/tensor.h"

#include "calls/key_sets.h"
#include "calls/python.h"

namespace tpkernels::calls {
namespace {

namespace py = pybind11;

const dlpack::ExchangeApi* exchange = nullptr;
std::uint64_t plain_keys = 0;

}  // namespace

bool is_tensor(PyObject* value) {
  static PyObject* const type = lasting("torch", "Tensor");
  return PyObject_TypeCheck(value, reinterpret_cast<PyTypeObject*>(type)) != 0;
}

bool open_exchange(const py::handle& tensor_class, std::uint64_t plain) {
  const py::object capsule = py::getattr(tensor_class, "__dlpack_c_exchange_api__", py::none());
  if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return false;
  auto* api = static_cast<const dlpack::ExchangeApi*>(
      PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  while (api && api->version.major > dlpack::kMajorVersion) api = api->previous;
  if (!api || api->version.major != dlpack::kMajorVersion) return false;
  if (!api->tensor_from_python || !api->owned_to_python) return false;
  exchange = api;
  plain_keys = plain;
  return true;
}

bool read(PyObject* object, Tensor* out) {
  if (!exchange || !is_tensor(object) || (keys_of_tensor(object) & ~plain_keys)) return false;
  if (exchange->tensor_from_python(object, out) == 0) return true;
  PyErr_Clear();
  return false;
}

py::object make_tensor(dlpack::ManagedTensor* owned) {
  void* made = nullptr;
  if (exchange->owned_to_python(owned, &made) != 0) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(static_cast<PyObject*>(made));
}

std::size_t count_of(const Tensor& x) {
  std::size_t count = 1;
  for (int i = 0; i < x.ndim; ++i) count *= static_cast<std::size_t>(x.shape[i]);
  return count;
}

std::size_t bytes_of(const Tensor& x) { return count_of(x) * x.dtype.bits / 8; }

bool is_contiguous(const Tensor& x) {
  if (count_of(x) == 0) return true;
  std::int64_t expected = 1;
  for (int i = x.ndim - 1; i >= 0; --i) {
    if (x.shape[i] != 1 && x.strides[i] != expected) return false;
    expected *= x.shape[i];
  }
  return true;
}

}  // namespace tpkernels::calls
