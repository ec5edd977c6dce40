// Arithmetic on blocks of elements, in one table per vector unit, chosen at run time.
//
// Three small kernels compose into every sum the collectives need: load (or add) a block of any
// dtype into fp32 accumulators that stay in the L1 cache, then store them with one rounding. That
// keeps "sum of W partials, then bias, then residual, then round" free of a dtype cross product.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace tpkernels::host {

enum class DType : int { kF32 = 0, kF16 = 1, kBF16 = 2, kF64 = 3 };

constexpr std::size_t size_of(DType dtype) {
  return dtype == DType::kF64 ? 8 : dtype == DType::kF32 ? 4 : 2;
}

struct VectorUnit {
  const char* name;
  // Indexed by DType (fp32, fp16, bf16). Rounding is to nearest even; NaN stays NaN.
  void (*load[3])(float* acc, const void* src, std::size_t count);
  void (*add[3])(float* acc, const void* src, std::size_t count);
  void (*store[3])(void* dst, const float* acc, std::size_t count);
  // The plain case, with the sum in registers: dst = round(sum of `world` sources in order).
  void (*sum[3])(void* dst, const std::byte* const* sources, std::size_t world, std::size_t count);
  // Copy that leaves the destination out of the cache: for results that nobody reads soon.
  void (*stream)(void* dst, const void* src, std::size_t bytes);
};

const VectorUnit& plain_unit();
#if defined(__x86_64__)
const VectorUnit& avx2_unit();
const VectorUnit& avx512_unit();
#endif

// The units this processor can run, the best one last.
std::vector<const VectorUnit*> available_units();
// The unit in use: the best one, unless `use_unit` chose another.
const VectorUnit& vector_unit();
// Throws std::invalid_argument for a name that is not available here.
void use_unit(const std::string& name);

// One sum: out[i] = round(sum over r of partial_r[i], in rank order, + bias[i % cols] +
// residual[i]). `begin` is where `out`, `partials` and `residual` stand within the whole output,
// for the bias.
struct Epilogue {
  DType out_dtype = DType::kF32;
  const void* bias = nullptr;  // fp32 (fp64 for fp64 partials), `cols` elements
  std::size_t cols = 1;
  const void* residual = nullptr;
  DType residual_dtype = DType::kF32;
};

void sum_partials(void* out, const std::vector<const std::byte*>& partials, DType wire,
                  std::size_t begin, std::size_t count, const Epilogue& epilogue);

}  // namespace tpkernels::host
