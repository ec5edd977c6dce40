#include "host/few_rows.h"

#include <algorithm>

#include "host/vector.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace tpkernels::host {
namespace {

bool has_amx_bf16() {
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d >> 22 & 1) != 0;
#else
  return false;
#endif
}

}  // namespace

MultiplyFewRows few_rows_product(DType dtype, Form form) {
  if (dtype == DType::kF64) return nullptr;
  const VectorUnit& unit = vector_unit();
  return (form == Form::kPanels ? unit.panels : unit.few_rows)[static_cast<int>(dtype)];
}

// The units' numbers, against torch.mm with 1 thread and torch 2.13, AMD EPYC Zen 5, 2026-11-23, K
// x N from 768 x 576 to 4096 x 4096: bf16 with its dot products and fp32 with AVX-512 were measured
// (benchmarks/results/cpu-2core-few-rows.md). Not measured: fp16, AVX2 alone, bf16 without dot
// products, and AMX, with which 8 rows would take longer than torch's by the rate of the dot
// products alone. Panels were the fastest in 47 of 48 cases of 1 to 16 rows in both dtypes.
std::size_t most_few_rows(DType dtype, Form form) {
  constexpr std::size_t kMostBesideAmx = 4;
  static const bool amx = has_amx_bf16();
  if (dtype == DType::kF64) return 0;
  const VectorUnit& unit = vector_unit();
  const int at = static_cast<int>(dtype);
  const std::size_t most_panels = unit.panels[at] ? FewRows::kMost : 0;
  const std::size_t most = form == Form::kPanels ? most_panels : unit.most_few_rows[at];
  return amx && dtype == DType::kBF16 ? std::min(most, kMostBesideAmx) : most;
}

}  // namespace tpkernels::host
