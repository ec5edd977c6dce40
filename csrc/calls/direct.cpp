#include "calls/direct.h"

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "calls/product.h"
#include "calls/python.h"

namespace tpkernels::calls {
namespace {

// A new tensor of that shape and of x's dtype.
py::object empty_like(const py::object& x, const py::tuple& shape) {
  static PyObject* const dtype_name = PyUnicode_InternFromString("dtype");
  return empty(shape, checked(PyObject_GetAttr(x.ptr(), dtype_name)));
}

// An argument that an op may lack; None where it does.
PyObject* at(const Slots& slots, int index) {
  return index < 0 ? Py_None : slots[static_cast<std::size_t>(index)];
}

}  // namespace

host::Epilogue epilogue(const Tensor& out, const Tensor& bias, const Tensor& residual) {
  host::Epilogue made;
  made.out_dtype = dtype_of(out);
  if (bias.data) {
    made.bias = data_of(bias);
    made.cols = std::max<std::size_t>(count_of(bias), 1);
  }
  if (residual.data) {
    made.residual = data_of(residual);
    made.residual_dtype = dtype_of(residual);
  }
  return made;
}

host::RmsNorm rms_norm(const Tensor& out, const Tensor& weight, double eps) {
  if (!out.data) return {};
  return {data_of(out), data_of(weight), dtype_of(weight), count_of(weight), eps};
}

Collective::Collective(const py::object& channel, std::shared_ptr<host::Segments> segments,
                       std::uint32_t signature, std::string text, const std::string& name,
                       host::Shards shards)
    : keep_(channel),
      channel_(channel.cast<host::Channel&>()),
      segments_(std::move(segments)),
      signature_(signature),
      text_(std::move(text)),
      shards_(std::move(shards)),
      run_(host::collective(name, shards_)) {}

void Collective::run(const Tensor& x, const Tensor& out, const host::Epilogue& after,
                     const host::RmsNorm& norm, const host::Routing* routing,
                     const Tensor& weights) const {
  host::Source in{data_of(x)};
  if (in.data != data_of(out) && shards_.taken.sizes.empty()) {  // an exchange copies
    const auto address = reinterpret_cast<std::uintptr_t>(in.data);
    std::tie(in.segment, in.offset) = segments_->locate(address, bytes_of(x));
  }
  const host::Operands operands{in,    data_of(out), count_of(x), dtype_of(x),
                                after, norm,         routing,     data_of(weights)};
  const GilReleased released;
  run_(channel_, {signature_, text_}, operands, shards_);
}

void weigh_rows(const Tensor& rows, const Tensor& places, const Tensor& weights,
                const Tensor& out) {
  const host::DType dtype = dtype_of(rows);
  const host::DType wide = dtype == host::DType::kF64 ? dtype : host::DType::kF32;
  if (rows.ndim != 2 || places.ndim != 2 || places.dtype.code != dlpack::kInt ||
      places.dtype.bits != 64 || dtype_of(weights) != wide || dtype_of(out) != dtype ||
      count_of(weights) != count_of(places) ||
      count_of(out) != static_cast<std::size_t>(places.shape[0] * rows.shape[1])) {
    throw std::invalid_argument(
        "weigh_rows needs rows [R, H], int64 places [tokens, k] and one weight per place");
  }
  const auto* const place = reinterpret_cast<const std::int64_t*>(data_of(places));
  const std::size_t count = count_of(places), k = static_cast<std::size_t>(places.shape[1]);
  const std::size_t columns = static_cast<std::size_t>(rows.shape[1]);
  const std::size_t width = columns * size_of(dtype);
  std::vector<const std::byte*> sources(count);
  for (std::size_t i = 0; i < count; ++i) {
    if (place[i] < 0 || place[i] >= rows.shape[0]) {
      throw std::invalid_argument("places contains row " + std::to_string(place[i]) +
                                  ", but there are " + std::to_string(rows.shape[0]) + " rows");
    }
    sources[i] = data_of(rows) + static_cast<std::size_t>(place[i]) * width;
  }
  auto sum = [&](std::size_t token, std::size_t end) {
    for (; token < end; ++token) {
      host::weigh(data_of(out) + token * width, &sources[token * k],
                  data_of(weights) + token * k * size_of(wide), k, dtype, columns);
    }
  };
  constexpr std::size_t kGrainBytes = 128 << 10;  // that are worth a thread's while
  const GilReleased released;
  in_threads(
      places.shape[0], static_cast<std::int64_t>(kGrainBytes / (k * width + 1) + 1),
      [](std::int64_t begin, std::int64_t end, void* context) {
        (*static_cast<decltype(sum)*>(context))(static_cast<std::size_t>(begin),
                                                static_cast<std::size_t>(end));
      },
      &sum);
}

Direct::Direct(std::shared_ptr<const Collective> collective, const Arguments& arguments,
               bool in_place, py::tuple shape, bool multiplies, bool gathers, bool return_gathered,
               double eps)
    : collective_(std::move(collective)),
      bias_(arguments.index("bias")),
      residual_(arguments.index("residual")),
      norm_weight_(arguments.index(multiplies ? "norm_weight" : "weight")),
      in_place_(in_place),
      shape_(std::move(shape)),
      multiplies_(multiplies),
      gathers_(gathers),
      return_gathered_(return_gathered),
      eps_(eps) {}

bool Direct::takes(const Slots& slots, const Tensor& x) const {
  for (const int index : {bias_, residual_, norm_weight_}) {
    Tensor other{};
    PyObject* const operand = at(slots, index);
    if (operand != Py_None && !(read(operand, &other) && is_contiguous(other))) return false;
  }
  return is_contiguous(x);
}

py::object Direct::run(const Slots& slots, const Tensor& x) const {
  if (gathers_ && multiplies_) return gather_and_multiply(slots, x);
  if (in_place_) {
    collective_->run(x, x, epilogue(x));
    return py::none();
  }
  static PyObject* const to_float = PyUnicode_InternFromString("float");
  auto in = py::reinterpret_borrow<py::object>(slots[0]);
  Tensor summand = x, bias{}, residual{};
  py::object wide_bias;
  if (at(slots, bias_) != Py_None) {
    bias = tensor(at(slots, bias_));
    if (bias.dtype.bits < 32) {  // the sum takes it in the accumulator's dtype
      wide_bias = checked(PyObject_CallMethodNoArgs(at(slots, bias_), to_float));
      bias = tensor(wide_bias);
    }
  }
  if (at(slots, residual_) != Py_None) residual = tensor(at(slots, residual_));
  py::object out = in;
  if (multiplies_) {
    in = linear(in, x, slots[1]);
    summand = tensor(in);
    out = collective_->keeps_shape() ? in : empty_like(in, shape_);  // in: the partial
  } else {
    out = empty_like(in, shape_);
  }
  host::RmsNorm norm;
  py::object normed;
  if (norm_weight_ >= 0) {
    normed = empty_like(out, shape_);
    norm = rms_norm(tensor(normed), tensor(at(slots, norm_weight_)), eps_);
  }
  const Tensor sum = tensor(out);
  collective_->run(summand, sum, epilogue(sum, bias, residual), norm);
  return normed ? py::object(py::make_tuple(std::move(normed), std::move(out))) : out;
}

py::object Direct::gather_and_multiply(const Slots& slots, const Tensor& x) const {
  auto whole = py::reinterpret_borrow<py::object>(slots[0]);
  if (return_gathered_ || !collective_->is_alone()) {
    whole = empty_like(whole, shape_);
    const Tensor gathered = tensor(whole);
    collective_->run(x, gathered, epilogue(gathered));
  }
  const Tensor rows = tensor(whole);
  py::list results;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(slots[1]); ++i) {
    results.append(linear(whole, rows, PySequence_Fast_GET_ITEM(slots[1], i)));
  }
  if (!return_gathered_) whole = empty_like(whole, py::make_tuple(0));
  return py::make_tuple(std::move(whole), std::move(results));
}

}  // namespace tpkernels::calls
