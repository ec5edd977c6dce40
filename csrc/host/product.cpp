#include "host/product.h"

#include <cstring>

#include "host/vector.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace tpkernels::host {
namespace {

// MKL, which torch multiplies fp32 with, takes AVX2 on other makers' processors.
bool is_intel() {
#if defined(__x86_64__)
  unsigned a = 0, maker[3] = {};
  return __get_cpuid(0, &a, &maker[0], &maker[2], &maker[1]) != 0 &&
         std::memcmp(maker, "GenuineIntel", sizeof(maker)) == 0;
#else
  return false;
#endif
}

// Whether making panels is faster than torch.mm: where it was measured to be, which Intel's
// processors were not. Torch multiplies 16-bit operands in fp32 if the result has another dtype.
bool pays_to_repack(const Size& size, DType dtype, Form form, DType out_dtype) {
  static const bool intel = is_intel();
  if (intel || dtype == DType::kF16 || size.k < 32 || size.columns < 48) return false;
  if (dtype == DType::kF32) return size.rows >= 4;
  return size.rows >= 24 && (form == Form::kRows || out_dtype != dtype);
}

// With other K, torch 2.13's products on AMX read beyond the end of a row: a NaN behind it becomes
// one in the result.
constexpr std::size_t kTileK = 32;

}  // namespace

Product some_rows(const Product& product, std::size_t row, std::size_t count) {
  Product some = product;
  some.rows = count;
  some.x = static_cast<const std::byte*>(product.x) + row * product.x_pitch;
  some.out = static_cast<std::byte*>(product.out) + row * product.out_pitch;
  return some;
}

// The numbers, against torch.mm with 1 thread and torch 2.13, AMD EPYC Zen 5, 2026-11-23, K x N
// from 576 x 1536 to 4096 x 4096: bf16 with its dot products and fp32 with AVX-512 were measured
// (benchmarks/results/cpu-2core-few-rows.md, cpu-2core-products.md). Not measured: fp16, AVX2
// alone, bf16 without dot products, Intel's processors, AMX.
Way fastest_way(const Size& size, DType dtype, Form form, DType out_dtype) {
  if (dtype == DType::kF64) return {};
  const VectorUnit& unit = vector_unit();
  const int at = static_cast<int>(dtype);
  if (form == Form::kPanels) return {unit.panels[at], Product::kPanel, true};
  if (form == Form::kInt8Panels) return {unit.int8[at], Product::kPanel, true};
  if (form == Form::kColumns && size.rows <= unit.most_few_rows[at]) {
    return {unit.few_rows[at], Product::kBlock, false};
  }
  const bool torch_is_safe = !amx().bf16 || dtype != DType::kBF16 || size.k % kTileK == 0;
  if (torch_is_safe && !pays_to_repack(size, dtype, form, out_dtype)) return {};
  return {(form == Form::kColumns ? unit.columns : unit.rows)[at], Product::kPanel, true};
}

}  // namespace tpkernels::host
