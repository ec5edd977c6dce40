#include "host/matmul.h"

#include <cstring>

#include "host/vector.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace tpkernels::host {
namespace {

// torch uses MKL for fp32, and MKL uses only AVX2 on processors of other vendors.
bool is_intel() {
#if defined(__x86_64__)
  unsigned a = 0, maker[3] = {};
  return __get_cpuid(0, &a, &maker[0], &maker[2], &maker[1]) != 0 &&
         std::memcmp(maker, "GenuineIntel", sizeof(maker)) == 0;
#else
  return false;
#endif
}

// Whether packing panels is faster than torch.mm. False on Intel processors, which were not
// measured. torch multiplies 16-bit operands in fp32 if the output dtype differs.
bool should_repack(const MatmulShape& shape, DType dtype, WeightLayout layout, DType out_dtype) {
  static const bool intel = is_intel();
  if (intel || dtype == DType::kF16 || shape.k < 32 || shape.columns < 48) return false;
  if (dtype == DType::kF32) return shape.rows >= 4;
  return shape.rows >= 24 && (layout == WeightLayout::kRows || out_dtype != dtype);
}

// If K is not a multiple of this, the AMX matmuls of torch 2.13 read past the end of a row. A NaN
// there becomes a NaN in the result.
constexpr std::size_t kTileK = 32;

}  // namespace

Matmul select_rows(const Matmul& gemm, std::size_t row, std::size_t count) {
  Matmul slice = gemm;
  slice.rows = count;
  slice.x = static_cast<const std::byte*>(gemm.x) + row * gemm.x_pitch;
  slice.out = static_cast<std::byte*>(gemm.out) + row * gemm.out_pitch;
  return slice;
}

// The thresholds come from measurements against torch.mm with 1 thread, torch 2.13, AMD EPYC Zen 5,
// 2026-11-23, K x N from 576 x 1536 to 4096 x 4096 (benchmarks/results/cpu-2core-few-rows.md,
// cpu-2core-products.md). Measured: bf16 with AVX512_BF16, fp32 with AVX-512. Not measured: fp16,
// AVX2 only, bf16 without dot products, Intel processors, AMX.
MatmulKernel select_kernel(const MatmulShape& shape, DType dtype, WeightLayout layout,
                           DType out_dtype) {
  if (dtype == DType::kF64) return {};
  const VectorUnit& unit = vector_unit();
  const int dtype_index = static_cast<int>(dtype);
  if (layout == WeightLayout::kPanels)
    return {unit.panels[dtype_index], Matmul::kPanelColumns, true};
  if (layout == WeightLayout::kInt8Panels)
    return {unit.int8[dtype_index], Matmul::kPanelColumns, true};
  if (layout == WeightLayout::kColumns && shape.rows <= unit.max_few_rows[dtype_index]) {
    return {unit.few_rows[dtype_index], Matmul::kBlockColumns, false};
  }
  const bool torch_is_safe = !amx().bf16 || dtype != DType::kBF16 || shape.k % kTileK == 0;
  if (torch_is_safe && !should_repack(shape, dtype, layout, out_dtype)) return {};
  return {(layout == WeightLayout::kColumns ? unit.columns : unit.rows)[dtype_index],
          Matmul::kPanelColumns, true};
}

}  // namespace tpkernels::host
