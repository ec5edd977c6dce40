#include "calls/few_rows.h"

#include <dlfcn.h>

#include <algorithm>
#include <stdexcept>

#include "binding_errors.h"
#include "calls/collective.h"
#include "host/few_rows.h"
#include "host/vector.h"

namespace tpkernels::calls {
namespace {

namespace py = pybind11;
using host::DType;
using host::FewRows;
using host::Form;

// at::parallel_for of libtorch's stable C interface: torch/csrc/stable/c/shim.h, torch 2.10.
using Part = void (*)(std::int64_t begin, std::int64_t end, void* context);
using ParallelFor = std::int32_t (*)(std::int64_t begin, std::int64_t end, std::int64_t grain,
                                     Part part, void* context);

ParallelFor parallel_for() {
  static const auto found = [] {
    void* const torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    return reinterpret_cast<ParallelFor>(torch ? dlsym(torch, "torch_parallel_for") : nullptr);
  }();
  return found;
}

// The attribute of a packed tensor that has Panels: tpkernels/local/packed.py
constexpr char kPanelsName[] = "_tpkernels_panels";

// Bytes of the weight that are worth a thread's while.
constexpr std::size_t kGrainBytes = 128 << 10;

struct Work {
  FewRows product;
  host::MultiplyFewRows multiply;
  std::size_t columns;
  std::size_t block;  // columns
};

void multiply_blocks(std::int64_t begin, std::int64_t end, void* context) {
  const auto& work = *static_cast<const Work*>(context);
  work.multiply(work.product, static_cast<std::size_t>(begin) * work.block,
                std::min(static_cast<std::size_t>(end) * work.block, work.columns));
}

bool supported(const Tensor& x, DType* dtype) {
  const bool floats = x.dtype.lanes == 1 && (x.dtype.code == dlpack::kBFloat ||
                                             (x.dtype.code == dlpack::kFloat && x.dtype.bits < 64));
  if (x.device.type != dlpack::kCpu || x.ndim != 2 || !floats) return false;
  *dtype = dtype_of(x);
  return true;
}

std::size_t pitch(const Tensor& x, int dim) {
  return static_cast<std::size_t>(x.strides[dim]) * x.dtype.bits / 8;
}

bool read_columns(PyObject* object, FewRowsWeight* weight) {
  Tensor w{};
  if (!read(object, &w) || !supported(w, &weight->dtype) || w.strides[0] != 1) return false;
  weight->data = data_of(w);
  weight->pitch = pitch(w, 1);
  weight->k = w.shape[0];
  weight->n = w.shape[1];
  weight->form = Form::kColumns;
  return true;
}

}  // namespace

bool read_weight(PyObject* w, bool packed, FewRowsWeight* weight) {
  if (!packed) return read_columns(w, weight);
  static PyObject* const name = PyUnicode_InternFromString(kPanelsName);
  PyObject* const found = PyObject_GetAttr(w, name);
  if (!found) {
    PyErr_Clear();
    return false;
  }
  const auto panels = py::reinterpret_steal<py::object>(found);
  *weight = panels.cast<const Panels&>().weight;
  return true;
}

std::size_t most_rows(DType dtype, Form form) {
  return parallel_for() ? host::most_few_rows(dtype, form) : 0;
}

bool takes_few_rows(const Tensor& x, const FewRowsWeight& w, std::size_t whole_rows) {
  DType of_x{};
  if (whole_rows > FewRows::kMost || !supported(x, &of_x)) return false;
  if (of_x != w.dtype || whole_rows > most_rows(of_x, w.form)) return false;
  return x.strides[1] == 1 && x.shape[0] > 0 && w.k > 1 && w.n > 0 && w.k == x.shape[1] &&
         static_cast<std::size_t>(x.shape[0]) <= whole_rows;
}

bool multiply_few_rows(const Tensor& x, const FewRowsWeight& w, const Tensor& out,
                       const Tensor& bias, std::size_t whole_rows) {
  Work work{};
  if (!takes_few_rows(x, w, whole_rows) || !supported(out, &work.product.out_dtype) ||
      out.strides[1] != 1) {
    return false;
  }
  const bool biased = bias.data != nullptr;
  if (out.shape[0] != x.shape[0] || out.shape[1] != w.n ||
      (biased && (dtype_of(bias) != DType::kF32 || bias.ndim != 1 || !is_contiguous(bias) ||
                  bias.shape[0] != w.n))) {
    throw std::invalid_argument("the result or the bias of a product has another shape or dtype");
  }
  FewRows& product = work.product;
  product.rows = static_cast<std::size_t>(x.shape[0]);
  product.k = static_cast<std::size_t>(w.k);
  product.x = data_of(x);
  product.x_pitch = pitch(x, 0);
  product.w = w.data;
  product.w_pitch = w.pitch;
  product.out = data_of(out);
  product.out_pitch = pitch(out, 0);
  product.bias = biased ? reinterpret_cast<const float*>(data_of(bias)) : nullptr;
  work.multiply = host::few_rows_product(w.dtype, w.form);
  work.columns = static_cast<std::size_t>(w.n);
  work.block = w.form == Form::kPanels ? FewRows::kPanel : FewRows::kBlock;
  const std::size_t blocks = (work.columns + work.block - 1) / work.block;
  const std::size_t block_bytes = work.block * product.k * size_of(w.dtype);
  const std::size_t grain = std::max<std::size_t>(kGrainBytes / block_bytes, 1);
  std::int32_t failed = 0;
  {
    const GilReleased released;
    failed = parallel_for()(0, static_cast<std::int64_t>(blocks), static_cast<std::int64_t>(grain),
                            multiply_blocks, &work);
  }
  if (failed) throw std::runtime_error("torch_parallel_for failed");
  return true;
}

}  // namespace tpkernels::calls
