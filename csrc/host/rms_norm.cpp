#include "host/rms_norm.h"

#include <cmath>

namespace tpkernels::host {
namespace {

// fp64 is for gradient checks: simple rather than fast.
void normalise_double(const RmsNorm& norm, double* out, const double* row) {
  const auto* weight = reinterpret_cast<const double*>(norm.weight);
  double sum = 0;
  for (std::size_t i = 0; i < norm.cols; ++i) sum += row[i] * row[i];
  const double factor = 1 / std::sqrt(sum / static_cast<double>(norm.cols) + norm.eps);
  for (std::size_t i = 0; i < norm.cols; ++i) out[i] = row[i] * factor * weight[i];
}

}  // namespace

void normalise_rows(const RmsNorm& norm, const std::byte* rows, DType dtype, std::size_t first,
                    std::size_t last) {
  const std::size_t row_bytes = norm.cols * size_of(dtype);
  const VectorUnit& unit = vector_unit();
  for (std::size_t row = first; row < last; ++row) {
    const std::byte* from = rows + row * row_bytes;
    std::byte* to = norm.out + row * row_bytes;
    if (dtype == DType::kF64) {
      normalise_double(norm, reinterpret_cast<double*>(to), reinterpret_cast<const double*>(from));
      continue;
    }
    const auto d = static_cast<int>(dtype);
    const float mean = unit.squares[d](from, norm.cols) / static_cast<float>(norm.cols);
    const float factor = 1.0f / std::sqrt(mean + static_cast<float>(norm.eps));
    unit.scale[d][norm.weight_dtype != dtype](to, from, norm.weight, factor, norm.cols);
  }
}

}  // namespace tpkernels::host
