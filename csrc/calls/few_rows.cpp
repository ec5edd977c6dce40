#include "calls/few_rows.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>

#include "binding_errors.h"
#include "calls/collective.h"
#include "host/few_rows.h"
#include "host/vector.h"

namespace tpkernels::calls {
namespace {

using host::DType;
using host::FewRows;

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

// Bytes of the weight that are worth a thread's while.
constexpr std::size_t kGrainBytes = 128 << 10;

struct Work {
  FewRows product;
  host::MultiplyFewRows multiply;
  std::size_t columns;
};

void multiply_blocks(std::int64_t begin, std::int64_t end, void* context) {
  const auto& work = *static_cast<const Work*>(context);
  work.multiply(work.product, static_cast<std::size_t>(begin) * FewRows::kBlock,
                std::min(static_cast<std::size_t>(end) * FewRows::kBlock, work.columns));
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

}  // namespace

std::size_t most_rows(DType dtype) { return parallel_for() ? host::most_few_rows(dtype) : 0; }

bool takes_few_rows(const Tensor& x, const Tensor& w, std::size_t whole_rows) {
  DType of_x{}, of_w{};
  if (whole_rows > FewRows::kMost || !supported(x, &of_x) || !supported(w, &of_w)) return false;
  if (of_x != of_w || whole_rows > most_rows(of_x)) return false;
  return x.strides[1] == 1 && w.strides[0] == 1 && x.shape[0] > 0 && x.shape[1] > 1 &&
         w.shape[1] > 0 && w.shape[0] == x.shape[1] &&
         static_cast<std::size_t>(x.shape[0]) <= whole_rows;
}

bool multiply_few_rows(const Tensor& x, const Tensor& w, const Tensor& out, const Tensor& bias,
                       std::size_t whole_rows) {
  Work work{};
  if (!takes_few_rows(x, w, whole_rows) || !supported(out, &work.product.out_dtype) ||
      out.strides[1] != 1) {
    return false;
  }
  const bool biased = bias.data != nullptr;
  if (out.shape[0] != x.shape[0] || out.shape[1] != w.shape[1] ||
      (biased && (dtype_of(bias) != DType::kF32 || bias.ndim != 1 || !is_contiguous(bias) ||
                  bias.shape[0] != w.shape[1]))) {
    throw std::invalid_argument("the result or the bias of a product has another shape or dtype");
  }
  FewRows& product = work.product;
  product.rows = static_cast<std::size_t>(x.shape[0]);
  product.k = static_cast<std::size_t>(x.shape[1]);
  product.x = data_of(x);
  product.x_pitch = pitch(x, 0);
  product.w = data_of(w);
  product.w_pitch = pitch(w, 1);
  product.out = data_of(out);
  product.out_pitch = pitch(out, 0);
  product.bias = biased ? reinterpret_cast<const float*>(data_of(bias)) : nullptr;
  work.multiply = host::few_rows_product(dtype_of(x));
  work.columns = static_cast<std::size_t>(w.shape[1]);
  const std::size_t blocks = (work.columns + FewRows::kBlock - 1) / FewRows::kBlock;
  const std::size_t block_bytes = FewRows::kBlock * product.k * x.dtype.bits / 8;
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
