// RMS normalisation of rows: y = x / sqrt(mean(x^2) + eps) * weight, in fp32 and rounded once. The
// bits depend on the row alone: not on the vector unit, nor on how many rows are normalised at
// once.
#pragma once

#include <cstddef>

#include "host/vector.h"

namespace tpkernels::host {

struct RmsNorm {
  std::byte* out = nullptr;           // rows of the input's dtype; null: nothing is normalised
  const std::byte* weight = nullptr;  // `cols` elements
  DType weight_dtype = DType::kF32;   // the rows' or fp32
  std::size_t cols = 1;
  double eps = 0;
};

// Normalises rows [first, last) of `rows`, where row 0 is that of `norm.out`.
void normalise_rows(const RmsNorm& norm, const std::byte* rows, DType dtype, std::size_t first,
                    std::size_t last);

}  // namespace tpkernels::host
