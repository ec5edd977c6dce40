#include "calls/direct.h"

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "calls/matmul.h"
#include "calls/python.h"

namespace tpkernels::calls {
namespace {

// Allocates a CPU tensor of that shape with the dtype of x.
py::object empty_like(const py::object& x, const py::tuple& shape) {
  static PyObject* const dtype_name = PyUnicode_InternFromString("dtype");
  return empty(shape, checked(PyObject_GetAttr(x.ptr(), dtype_name)));
}

// Returns an optional argument. It is None if the op does not have the argument.
PyObject* get_optional(const Slots& slots, int index) {
  return index < 0 ? Py_None : slots[static_cast<std::size_t>(index)];
}

}  // namespace

host::Epilogue make_epilogue(const Tensor& out, const Tensor& bias, const Tensor& residual) {
  host::Epilogue epilogue;
  epilogue.out_dtype = get_dtype(out);
  if (bias.data) {
    epilogue.bias = data_ptr(bias);
    epilogue.cols = std::max<std::size_t>(num_elements(bias), 1);
  }
  if (residual.data) {
    epilogue.residual = data_ptr(residual);
    epilogue.residual_dtype = get_dtype(residual);
  }
  return epilogue;
}

host::RmsNorm make_rms_norm(const Tensor& out, const Tensor& weight, double eps) {
  if (!out.data) return {};
  return {data_ptr(out), data_ptr(weight), get_dtype(weight), num_elements(weight), eps};
}

Collective::Collective(const py::object& channel, std::shared_ptr<host::Segments> segments,
                       std::uint32_t signature, std::string description, const std::string& name,
                       host::Shards shards, std::shared_ptr<const host::SumTree> tree)
    : channel_owner_(channel),
      channel_(channel.cast<host::Channel&>()),
      segments_(std::move(segments)),
      signature_(signature),
      description_(std::move(description)),
      shards_(std::move(shards)),
      tree_(std::move(tree)),
      run_(host::collective(name, shards_)) {}

void Collective::run(const Tensor& x, const Tensor& out, const host::Epilogue& epilogue,
                     const host::RmsNorm& norm, const host::Routing* routing,
                     const Tensor& weights) const {
  host::Source in{data_ptr(x)};
  // Peers read `x` in place unless it is overwritten. An all-to-all and a tree always copy.
  if (in.data != data_ptr(out) && shards_.out_layout.sizes.empty() && !tree_) {
    const auto address = reinterpret_cast<std::uintptr_t>(in.data);
    std::tie(in.segment, in.offset) = segments_->locate(address, num_bytes(x));
  }
  const host::CollectiveArgs args{in,           data_ptr(out), num_elements(tree_ ? out : x),
                                  get_dtype(x), epilogue,      norm,
                                  tree_.get(),  routing,       data_ptr(weights)};
  const GilReleased released;
  run_(channel_, {signature_, description_}, args, shards_);
}

void weigh_rows(const Tensor& rows, const Tensor& places, const Tensor& weights,
                const Tensor& out) {
  const host::DType dtype = get_dtype(rows);
  const host::DType acc_dtype = dtype == host::DType::kF64 ? dtype : host::DType::kF32;
  if (rows.ndim != 2 || places.ndim != 2 || places.dtype.code != dlpack::kInt ||
      places.dtype.bits != 64 || get_dtype(weights) != acc_dtype || get_dtype(out) != dtype ||
      num_elements(weights) != num_elements(places) ||
      num_elements(out) != static_cast<std::size_t>(places.shape[0] * rows.shape[1])) {
    throw std::invalid_argument(
        "weigh_rows needs rows [R, H], int64 places [tokens, k] and one weight per place");
  }
  const auto* const place = reinterpret_cast<const std::int64_t*>(data_ptr(places));
  const std::size_t count = num_elements(places), k = static_cast<std::size_t>(places.shape[1]);
  const std::size_t columns = static_cast<std::size_t>(rows.shape[1]);
  const std::size_t width = columns * size_of(dtype);
  std::vector<const std::byte*> sources(count);
  for (std::size_t i = 0; i < count; ++i) {
    if (place[i] < 0 || place[i] >= rows.shape[0]) {
      throw std::invalid_argument("places contains row " + std::to_string(place[i]) +
                                  ", but there are " + std::to_string(rows.shape[0]) + " rows");
    }
    sources[i] = data_ptr(rows) + static_cast<std::size_t>(place[i]) * width;
  }
  auto sum = [&](std::size_t token, std::size_t end) {
    for (; token < end; ++token) {
      host::weighted_sum(data_ptr(out) + token * width, &sources[token * k],
                         data_ptr(weights) + token * k * size_of(acc_dtype), k, dtype, columns);
    }
  };
  constexpr std::size_t kGrainBytes = 128 << 10;  // minimum work per thread
  const GilReleased released;
  parallel_for(
      places.shape[0], static_cast<std::int64_t>(kGrainBytes / (k * width + 1) + 1),
      [](std::int64_t begin, std::int64_t end, void* context) {
        (*static_cast<decltype(sum)*>(context))(static_cast<std::size_t>(begin),
                                                static_cast<std::size_t>(end));
      },
      &sum);
}

Direct::Direct(std::shared_ptr<const Collective> collective, const Arguments& arguments,
               bool in_place, py::tuple shape, bool has_matmul, bool gathers, bool return_gathered,
               double eps)
    : collective_(std::move(collective)),
      bias_(arguments.index("bias")),
      residual_(arguments.index("residual")),
      norm_weight_(arguments.index(has_matmul ? "norm_weight" : "weight")),
      in_place_(in_place),
      shape_(std::move(shape)),
      has_matmul_(has_matmul),
      gathers_(gathers),
      return_gathered_(return_gathered),
      eps_(eps) {}

bool Direct::accepts(const Slots& slots, const Tensor& x) const {
  for (const int index : {bias_, residual_, norm_weight_}) {
    Tensor other{};
    PyObject* const operand = get_optional(slots, index);
    if (operand != Py_None && !(read(operand, &other) && is_contiguous(other))) return false;
  }
  return is_contiguous(x);
}

py::object Direct::run(const Slots& slots, const Tensor& x) const {
  if (gathers_ && has_matmul_) return gather_and_multiply(slots, x);
  if (in_place_) {
    collective_->run(x, x, make_epilogue(x));
    return py::none();
  }
  static PyObject* const to_float = PyUnicode_InternFromString("float");
  auto in = py::reinterpret_borrow<py::object>(slots[0]);
  Tensor partial = x, bias{}, residual{};
  py::object fp32_bias;
  if (get_optional(slots, bias_) != Py_None) {
    bias = tensor(get_optional(slots, bias_));
    if (bias.dtype.bits < 32) {  // the epilogue adds the bias in fp32
      fp32_bias = checked(PyObject_CallMethodNoArgs(get_optional(slots, bias_), to_float));
      bias = tensor(fp32_bias);
    }
  }
  if (get_optional(slots, residual_) != Py_None) residual = tensor(get_optional(slots, residual_));
  py::object out = in;
  if (has_matmul_ && collective_->tree()) {
    out = empty_like(in, shape_);
    in = multiply_nodes(x, slots[1], collective_->tree()->local());
    partial = tensor(in);
  } else if (has_matmul_) {
    in = linear(in, x, slots[1]);
    partial = tensor(in);
    out = collective_->keeps_shape() ? in : empty_like(in, shape_);  // may overwrite the partial
  } else {
    out = empty_like(in, shape_);
  }
  host::RmsNorm norm;
  py::object normed;
  if (norm_weight_ >= 0) {
    normed = empty_like(out, shape_);
    norm = make_rms_norm(tensor(normed), tensor(get_optional(slots, norm_weight_)), eps_);
  }
  const Tensor sum = tensor(out);
  collective_->run(partial, sum, make_epilogue(sum, bias, residual), norm);
  return normed ? py::object(py::make_tuple(std::move(normed), std::move(out))) : out;
}

py::object Direct::gather_and_multiply(const Slots& slots, const Tensor& x) const {
  auto gathered_x = py::reinterpret_borrow<py::object>(slots[0]);
  if (return_gathered_ || !collective_->has_single_shard()) {
    gathered_x = empty_like(gathered_x, shape_);
    const Tensor gathered = tensor(gathered_x);
    collective_->run(x, gathered, make_epilogue(gathered));
  }
  const Tensor rows = tensor(gathered_x);
  py::list results;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(slots[1]); ++i) {
    results.append(linear(gathered_x, rows, PySequence_Fast_GET_ITEM(slots[1], i)));
  }
  if (!return_gathered_) gathered_x = empty_like(gathered_x, py::make_tuple(0));
  return py::make_tuple(std::move(gathered_x), std::move(results));
}

}  // namespace tpkernels::calls
