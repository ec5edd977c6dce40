#include "calls/tensor.h"

#include <cmath>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "calls/python.h"
#include "calls/shortcut.h"
#include "host/arena.h"
#include "host/pool.h"

namespace tpkernels::calls {
namespace {

const dlpack::ExchangeApi* exchange = nullptr;
std::uint64_t plain_keys = 0;

// What DLPack calls a dtype that results may have; null: another.
const dlpack::DataType* described(const py::handle& dtype) {
  struct Known {
    PyObject* dtype;
    dlpack::DataType described;
  };
  static const Known all[] = {
      {lasting("torch", "float32"), {dlpack::kFloat, 32, 1}},
      {lasting("torch", "bfloat16"), {dlpack::kBFloat, 16, 1}},
      {lasting("torch", "float16"), {dlpack::kFloat, 16, 1}},
      {lasting("torch", "float64"), {dlpack::kFloat, 64, 1}},
      {lasting("torch", "int32"), {dlpack::kInt, 32, 1}},
      {lasting("torch", "int64"), {dlpack::kInt, 64, 1}},
  };
  for (const Known& known : all) {
    if (dtype.ptr() == known.dtype) return &known.described;
  }
  return nullptr;
}

// False for a shape that torch is to judge.
bool large(const py::tuple& shape, const dlpack::DataType& dtype) {
  std::size_t bytes = dtype.bits / 8;
  for (const py::handle& extent : shape) {
    const Py_ssize_t size = PyLong_AsSsize_t(extent.ptr());
    if (size < 0 || __builtin_mul_overflow(bytes, static_cast<std::size_t>(size), &bytes)) {
      PyErr_Clear();
      return false;
    }
  }
  return bytes >= kLargeBytes;
}

// What a tensor made of a block keeps alive.
struct Loan {
  dlpack::ManagedTensor managed{};
  host::Pool::Block block;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
};

void end_loan(dlpack::ManagedTensor* managed) {
  const std::unique_ptr<Loan> loan(static_cast<Loan*>(managed->context));
  host::result_pool().give_back(loan->block);
}

// A tensor in memory from the pool; null without a Python error: the pool has none.
py::object pooled(const py::tuple& shape, const dlpack::DataType& dtype) {
  auto loan = std::make_unique<Loan>();
  const std::size_t dims = shape.size();
  loan->shape.resize(dims);
  loan->strides.resize(dims);
  std::int64_t count = 1;
  for (std::size_t i = dims; i-- > 0;) {
    loan->shape[i] = shape[i].cast<std::int64_t>();
    loan->strides[i] = count;
    count *= loan->shape[i];
  }
  const std::size_t bytes = static_cast<std::size_t>(count) * dtype.bits / 8;
  const std::optional<host::Pool::Block> block = host::result_pool().take(bytes);
  if (!block) return {};
  loan->block = *block;
  dlpack::ManagedTensor& managed = loan->managed;
  managed.version.major = dlpack::kMajorVersion;
  managed.context = loan.get();
  managed.deleter = &end_loan;
  managed.tensor.data = (*block)->data();
  managed.tensor.device.type = dlpack::kCpu;
  managed.tensor.ndim = static_cast<std::int32_t>(dims);
  managed.tensor.dtype = dtype;
  managed.tensor.shape = loan->shape.data();
  managed.tensor.strides = loan->strides.data();
  return make_tensor(&loan.release()->managed);
}

// Whether torch.empty fills what it returns.
bool fills() {
  static PyObject* const on = lasting("torch._C", "_get_deterministic_algorithms");
  static PyObject* const fill = lasting("torch._C", "_get_deterministic_fill_uninitialized_memory");
  return checked(PyObject_CallNoArgs(on)).is(py::bool_(true)) &&
         checked(PyObject_CallNoArgs(fill)).is(py::bool_(true));
}

py::object empty_of_torch(const py::tuple& shape, const py::handle& dtype) {
  static const Global make("torch", "empty");
  static PyObject* const names = py::make_tuple("dtype", "device").release().ptr();
  static PyObject* const cpu = py::module_::import("torch").attr("device")("cpu").release().ptr();
  PyObject* const given[] = {shape.ptr(), dtype.ptr(), cpu};
  return checked(PyObject_Vectorcall(make.value(), given, 1, names));
}

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

Tensor tensor(const py::handle& object) {
  Tensor x{};
  if (!read(object.ptr(), &x)) throw std::invalid_argument("not a dense tensor");
  return x;
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

host::DType dtype_of(const Tensor& x) {
  if (x.dtype.lanes == 1 && x.dtype.code == dlpack::kBFloat && x.dtype.bits == 16)
    return host::DType::kBF16;
  if (x.dtype.lanes == 1 && x.dtype.code == dlpack::kFloat) {
    if (x.dtype.bits == 32) return host::DType::kF32;
    if (x.dtype.bits == 16) return host::DType::kF16;
    if (x.dtype.bits == 64) return host::DType::kF64;
  }
  if (x.dtype.lanes == 1 && x.dtype.code == dlpack::kInt) {  // only moved, so the width matters
    if (x.dtype.bits == 32) return host::DType::kF32;
    if (x.dtype.bits == 64) return host::DType::kF64;
  }
  throw std::invalid_argument("a tensor of a dtype that the ops do not take");
}

py::object empty(const py::tuple& shape, const py::handle& dtype) {
  const dlpack::DataType* const type = described(dtype);
  if (!type || !large(shape, *type)) return empty_of_torch(shape, dtype);
  if (py::object out = pooled(shape, *type)) {
    if (fills()) out.attr("fill_")(std::nan(""));
    return out;
  }
  py::object out = empty_of_torch(shape, dtype);
  Tensor x{};
  if (read(out.ptr(), &x)) host::advise_huge_pages(data_of(x), bytes_of(x));
  return out;
}

}  // namespace tpkernels::calls
