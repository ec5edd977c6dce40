// The check that a unit must pass before it is used: its products of small integers, which every
// order of sums gives exactly, with K and columns that leave tails; and those of 8 bits, whose bits
// are the plain unit's.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <vector>

#include "host/vector.h"

namespace tpkernels::host {
namespace {

constexpr std::size_t kRows = 19, kK = 39, kColumns = 68;

int number(std::size_t i, std::size_t k) { return static_cast<int>((i * 7 + k * 13) % 5) - 2; }

void put(std::byte* to, DType dtype, int exact) {
  const auto value = static_cast<float>(exact);
  plain_unit().store[static_cast<int>(dtype)](to, &value, 1);
}

// The element of a weight in which (k, column) lies.
std::size_t place(Form form, std::size_t group, std::size_t k, std::size_t column) {
  if (form == Form::kColumns) return column * kK + k;
  if (form == Form::kRows) return k * kColumns + column;
  const std::size_t first = column / Product::kPanel * Product::kPanel;
  const std::size_t columns = std::min(Product::kPanel, kColumns - first);
  const std::size_t begin = k / group * group, together = std::min(group, kK - begin);
  return first * kK + begin * columns + (column - first) * together + k - begin;
}

bool is_exact(Multiply multiply, DType dtype, Form form, std::size_t rows, std::size_t at_a_time) {
  const std::size_t size = size_of(dtype);
  std::vector<std::byte> x(rows * kK * size), w(kK * kColumns * size);
  std::vector<float> out(rows * kColumns);
  for (std::size_t k = 0; k < kK; ++k) {
    for (std::size_t m = 0; m < rows; ++m) put(&x[(m * kK + k) * size], dtype, number(m, k));
    for (std::size_t n = 0; n < kColumns; ++n) {
      put(&w[place(form, kGroupBytes / size, k, n) * size], dtype, number(n + 3, k));
    }
  }
  Product product;
  product.rows = rows;
  product.k = kK;
  product.x = x.data();
  product.x_pitch = kK * size;
  product.w = w.data();
  product.w_pitch = size * (form == Form::kPanels    ? kK * Product::kPanel
                            : form == Form::kColumns ? kK
                                                     : kColumns);
  product.columns = kColumns;
  product.out = out.data();
  product.out_pitch = kColumns * sizeof(float);
  for (std::size_t begin = 0; begin < kColumns; begin += at_a_time) {
    multiply(product, begin, std::min(begin + at_a_time, kColumns));
  }
  for (std::size_t m = 0; m < rows; ++m) {
    for (std::size_t n = 0; n < kColumns; ++n) {
      int exact = 0;
      for (std::size_t k = 0; k < kK; ++k) exact += number(m, k) * number(n + 3, k);
      if (out[m * kColumns + n] != static_cast<float>(exact)) return false;
    }
  }
  return true;
}

struct Quantised {
  DType dtype;
  std::size_t rows, group, groups;
};
// Groups that tiles.inc leaves to vectors, and those of one step, with two tiles of rows, and of
// two, with one.
constexpr Quantised kQuantised[] = {
    {DType::kF32, kRows, 8, 5}, {DType::kF16, kRows, 64, 2}, {DType::kBF16, kRows / 2, 128, 1}};

// The sums of 8 bits by a unit, of weights with fractions for scales.
std::vector<float> int8_sums(const VectorUnit& unit, const Quantised& of) {
  const DType dtype = of.dtype;
  const std::size_t size = size_of(dtype), k = of.group * of.groups;
  std::vector<std::byte> x(of.rows * k * size);
  for (std::size_t i = 0; i < of.rows * k; ++i) put(&x[i * size], dtype, number(i / k, i % k));
  std::vector<std::byte> w(kColumns * of.groups * (of.group + kGroupBytes));
  for (std::size_t i = 0; i < w.size(); ++i) w[i] = static_cast<std::byte>(number(i, i / 64));
  std::byte* scales = w.data();
  for (std::size_t first = 0; first < kColumns; first += Product::kPanel) {
    const std::size_t columns = std::min(Product::kPanel, kColumns - first);
    for (std::size_t i = 0; i < of.groups; ++i, scales += columns * (of.group + kGroupBytes)) {
      for (std::size_t column = 0; column < columns; ++column) {
        const float scale = 1.0f / static_cast<float>(1 + first + column + i);
        std::memcpy(scales + column * kGroupBytes, &scale, sizeof(scale));
      }
    }
  }
  std::vector<float> out(of.rows * kColumns);
  Product product;
  product.rows = of.rows;
  product.k = k;
  product.x = x.data();
  product.x_pitch = k * size;
  product.w = w.data();
  product.w_pitch = Product::kPanel * of.groups * (of.group + kGroupBytes);
  product.columns = kColumns;
  product.out = out.data();
  product.out_pitch = kColumns * sizeof(float);
  product.group = of.group;
  unit.int8[static_cast<int>(dtype)](product, 0, kColumns);
  return out;
}

}  // namespace

bool multiplies_exactly(const VectorUnit& unit) {
  const auto holds = [](Multiply multiply, DType dtype, Form form, std::size_t rows,
                        std::size_t at_a_time) {
    return !multiply || is_exact(multiply, dtype, form, rows, at_a_time);
  };
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const auto at = static_cast<std::size_t>(dtype);
    if (!holds(unit.few_rows[at], dtype, Form::kColumns, unit.most_few_rows[at], Product::kBlock) ||
        !holds(unit.panels[at], dtype, Form::kPanels, 1, Product::kPanel) ||
        !holds(unit.panels[at], dtype, Form::kPanels, kRows, Product::kPanel) ||
        !holds(unit.columns[at], dtype, Form::kColumns, kRows, Product::kPanel) ||
        !holds(unit.rows[at], dtype, Form::kRows, kRows, Product::kPanel)) {
      return false;
    }
  }
  return std::all_of(std::begin(kQuantised), std::end(kQuantised), [&](const Quantised& of) {
    return int8_sums(unit, of) == int8_sums(plain_unit(), of);
  });
}

}  // namespace tpkernels::host
