#include "calls/collective.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "binding_errors.h"

namespace tpkernels::calls {
namespace {

namespace py = pybind11;
using host::DType;

host::Epilogue epilogue(const Tensor& out, const Addends& addends) {
  host::Epilogue made;
  made.out_dtype = dtype_of(out);
  if (addends.bias.data) {
    made.bias = data_of(addends.bias);
    made.cols = std::max<std::size_t>(count_of(addends.bias), 1);
  }
  if (addends.residual.data) {
    made.residual = data_of(addends.residual);
    made.residual_dtype = dtype_of(addends.residual);
  }
  return made;
}

host::RmsNorm rms_norm(const Norm& norm) {
  host::RmsNorm made;
  if (!norm.out.data) return made;
  made.out = data_of(norm.out);
  made.weight = data_of(norm.weight);
  made.weight_dtype = dtype_of(norm.weight);
  made.cols = count_of(norm.weight);
  made.eps = norm.eps;
  return made;
}

}  // namespace

DType dtype_of(const Tensor& x) {
  if (x.dtype.lanes == 1 && x.dtype.code == dlpack::kBFloat && x.dtype.bits == 16)
    return DType::kBF16;
  if (x.dtype.lanes == 1 && x.dtype.code == dlpack::kFloat) {
    if (x.dtype.bits == 32) return DType::kF32;
    if (x.dtype.bits == 16) return DType::kF16;
    if (x.dtype.bits == 64) return DType::kF64;
  }
  throw std::invalid_argument("a tensor of a dtype that the ops do not take");
}

Collective::Collective(const py::object& channel, std::shared_ptr<host::Segments> segments,
                       std::uint32_t signature, std::string text)
    : keep_(channel),
      channel_(channel.cast<host::Channel&>()),
      segments_(std::move(segments)),
      signature_(signature),
      text_(std::move(text)) {}

host::Source Collective::source(const Tensor& x) const {
  const std::byte* data = data_of(x);
  const auto [segment, offset] =
      segments_->locate(reinterpret_cast<std::uintptr_t>(data), bytes_of(x));
  return {data, segment, offset};
}

void Collective::all_gather(const Tensor& x, const Tensor& out,
                            const host::ShardLayout& layout) const {
  const host::Source in = source(x);
  const DType dtype = dtype_of(x);
  const GilReleased released;
  host::all_gather(channel_, id(), in, data_of(out), layout, dtype);
}

void Collective::reduce_scatter(const Tensor& x, const Tensor& out, const host::ShardLayout& layout,
                                const Addends& addends) const {
  const host::Source in = source(x);
  const DType wire = dtype_of(x);
  const host::Epilogue after = epilogue(out, addends);
  const GilReleased released;
  host::reduce_scatter(channel_, id(), in, data_of(out), layout, wire, after);
}

void Collective::all_to_all(const Tensor& x, const Tensor& out, const host::ShardLayout& given,
                            const host::ShardLayout& taken, std::size_t largest) const {
  const DType dtype = dtype_of(x);
  const GilReleased released;
  host::all_to_all(channel_, id(), data_of(x), data_of(out), given, taken, largest, dtype);
}

void Collective::all_reduce(const Tensor& x, const Tensor& out, const Addends& addends,
                            const Norm& norm) const {
  const bool in_place = data_of(x) == data_of(out);
  const host::Source in = in_place ? host::Source{data_of(x)} : source(x);
  const std::size_t count = count_of(x);
  const DType wire = dtype_of(x);
  const host::Epilogue after = epilogue(out, addends);
  const host::RmsNorm rows = rms_norm(norm);
  const GilReleased released;
  host::all_reduce(channel_, id(), in, data_of(out), count, wire, after, rows);
}

}  // namespace tpkernels::calls
