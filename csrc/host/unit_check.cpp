// Self-check of a vector unit before use. Matmuls of small integers must be exact: every summation
// order gives the exact result. K and N have tails. Int8 matmuls must be bitwise identical to the
// plain unit.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <vector>

#include "host/vector.h"

namespace tpkernels::host {
namespace {

constexpr std::size_t kRows = 19, kK = 39, kColumns = 68;

int test_value(std::size_t i, std::size_t k) { return static_cast<int>((i * 7 + k * 13) % 5) - 2; }

void store_element(std::byte* to, DType dtype, int exact) {
  const auto value = static_cast<float>(exact);
  plain_unit().store[static_cast<int>(dtype)](to, &value, 1);
}

// Index of element (k, column) in a weight.
std::size_t element_index(WeightLayout layout, std::size_t group, std::size_t k,
                          std::size_t column) {
  if (layout == WeightLayout::kColumns) return column * kK + k;
  if (layout == WeightLayout::kRows) return k * kColumns + column;
  const std::size_t first = column / Matmul::kPanelColumns * Matmul::kPanelColumns;
  const std::size_t columns = std::min(Matmul::kPanelColumns, kColumns - first);
  const std::size_t begin = k / group * group, group_size = std::min(group, kK - begin);
  return first * kK + begin * columns + (column - first) * group_size + k - begin;
}

bool is_exact(MatmulFn multiply, DType dtype, WeightLayout layout, std::size_t rows,
              std::size_t columns_per_call) {
  const std::size_t size = size_of(dtype);
  std::vector<std::byte> x(rows * kK * size), w(kK * kColumns * size);
  std::vector<float> out(rows * kColumns);
  for (std::size_t k = 0; k < kK; ++k) {
    for (std::size_t m = 0; m < rows; ++m)
      store_element(&x[(m * kK + k) * size], dtype, test_value(m, k));
    for (std::size_t n = 0; n < kColumns; ++n) {
      store_element(&w[element_index(layout, kGroupBytes / size, k, n) * size], dtype,
                    test_value(n + 3, k));
    }
  }
  Matmul gemm;
  gemm.rows = rows;
  gemm.k = kK;
  gemm.x = x.data();
  gemm.x_pitch = kK * size;
  gemm.w = w.data();
  gemm.w_pitch = size * (layout == WeightLayout::kPanels    ? kK * Matmul::kPanelColumns
                         : layout == WeightLayout::kColumns ? kK
                                                            : kColumns);
  gemm.columns = kColumns;
  gemm.out = out.data();
  gemm.out_pitch = kColumns * sizeof(float);
  for (std::size_t begin = 0; begin < kColumns; begin += columns_per_call) {
    multiply(gemm, begin, std::min(begin + columns_per_call, kColumns));
  }
  for (std::size_t m = 0; m < rows; ++m) {
    for (std::size_t n = 0; n < kColumns; ++n) {
      int exact = 0;
      for (std::size_t k = 0; k < kK; ++k) exact += test_value(m, k) * test_value(n + 3, k);
      if (out[m * kColumns + n] != static_cast<float>(exact)) return false;
    }
  }
  return true;
}

struct Quantised {
  DType dtype;
  std::size_t rows, group, groups;
};
// Groups for the vector kernel of tiles.inc; groups of one step with two row tiles; groups of two
// steps with one row tile.
constexpr Quantised kQuantised[] = {
    {DType::kF32, kRows, 8, 5}, {DType::kF16, kRows, 64, 2}, {DType::kBF16, kRows / 2, 128, 1}};

// Int8 matmul of a unit, with fractional scales.
std::vector<float> int8_sums(const VectorUnit& unit, const Quantised& test_case) {
  const DType dtype = test_case.dtype;
  const std::size_t size = size_of(dtype), k = test_case.group * test_case.groups;
  std::vector<std::byte> x(test_case.rows * k * size);
  for (std::size_t i = 0; i < test_case.rows * k; ++i)
    store_element(&x[i * size], dtype, test_value(i / k, i % k));
  std::vector<std::byte> w(kColumns * test_case.groups * (test_case.group + kGroupBytes));
  for (std::size_t i = 0; i < w.size(); ++i) w[i] = static_cast<std::byte>(test_value(i, i / 64));
  std::byte* scales = w.data();
  for (std::size_t first = 0; first < kColumns; first += Matmul::kPanelColumns) {
    const std::size_t columns = std::min(Matmul::kPanelColumns, kColumns - first);
    for (std::size_t i = 0; i < test_case.groups;
         ++i, scales += columns * (test_case.group + kGroupBytes)) {
      for (std::size_t column = 0; column < columns; ++column) {
        const float scale = 1.0f / static_cast<float>(1 + first + column + i);
        std::memcpy(scales + column * kGroupBytes, &scale, sizeof(scale));
      }
    }
  }
  std::vector<float> out(test_case.rows * kColumns);
  Matmul gemm;
  gemm.rows = test_case.rows;
  gemm.k = k;
  gemm.x = x.data();
  gemm.x_pitch = k * size;
  gemm.w = w.data();
  gemm.w_pitch = Matmul::kPanelColumns * test_case.groups * (test_case.group + kGroupBytes);
  gemm.columns = kColumns;
  gemm.out = out.data();
  gemm.out_pitch = kColumns * sizeof(float);
  gemm.group = test_case.group;
  unit.int8[static_cast<int>(dtype)](gemm, 0, kColumns);
  return out;
}

}  // namespace

bool multiplies_exactly(const VectorUnit& unit) {
  const auto passes = [](MatmulFn multiply, DType dtype, WeightLayout layout, std::size_t rows,
                         std::size_t columns_per_call) {
    return !multiply || is_exact(multiply, dtype, layout, rows, columns_per_call);
  };
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const auto i = static_cast<std::size_t>(dtype);
    if (!passes(unit.few_rows[i], dtype, WeightLayout::kColumns, unit.max_few_rows[i],
                Matmul::kBlockColumns) ||
        !passes(unit.panels[i], dtype, WeightLayout::kPanels, 1, Matmul::kPanelColumns) ||
        !passes(unit.panels[i], dtype, WeightLayout::kPanels, kRows, Matmul::kPanelColumns) ||
        !passes(unit.columns[i], dtype, WeightLayout::kColumns, kRows, Matmul::kPanelColumns) ||
        !passes(unit.rows[i], dtype, WeightLayout::kRows, kRows, Matmul::kPanelColumns)) {
      return false;
    }
  }
  return std::all_of(std::begin(kQuantised), std::end(kQuantised), [&](const Quantised& test_case) {
    return int8_sums(unit, test_case) == int8_sums(plain_unit(), test_case);
  });
}

}  // namespace tpkernels::host
