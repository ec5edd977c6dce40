// The product of rows with a weight: y[m][n] = the dot product of row m of x and column n of w.
//
// Panels: the packed form. Every 64 columns form a panel; the last one has those that are left. For
//   each 4 bytes of K, one element of 32 bits or two of 16, a panel holds those of all its columns
//   in turn, and at the end the single elements that an odd K of 16 bits leaves. There is no
//   padding. Memory is read in order, and no sum is spread over a vector's lanes.
// Panels of 8 bits: each group of K, a multiple of 4 elements, is 4 bytes of each column in turn,
// as
//   above, behind the scales in fp32 of its columns, whose element is the scale's multiple. Rows of
//   x are quantised in the same groups: the largest magnitude is 127 times the scale.
// Columns: each is contiguous, as in `linear.weight.t()`. Few rows are limited by how fast the
//   weight is read: it is read once, in place, a block of columns from end to end, or in chunks
//   where x does not fit the L1 cache.
// Rows: each row of w is contiguous.
//
// Many rows multiply panels whatever the form: those that are none yet are made of the weight on
// the way, some K at a time, in memory that stays in the L2 cache.
//
// A result is summed in an order that follows from K and the way alone, whatever the other rows and
// columns.
#pragma once

#include <cstddef>

namespace tpkernels::host {

enum class DType : int;

enum class Form { kColumns, kRows, kPanels, kInt8Panels };

struct Product {
  std::size_t rows = 0;
  std::size_t k = 0;
  const void* x = nullptr;
  std::size_t x_pitch = 0;  // bytes from one row to the next
  const void* w = nullptr;
  std::size_t w_pitch = 0;  // bytes from one column, row or panel to the next
  std::size_t columns = 0;  // of w
  void* out = nullptr;
  std::size_t out_pitch = 0;  // bytes from one row to the next
  DType out_dtype{};
  const float* bias = nullptr;  // one per column; added before the result is rounded
  std::size_t group = 0;        // elements of K that share a scale, in panels of 8 bits

  static constexpr std::size_t kFewRows = 16;  // the most that columns in place are for
  static constexpr std::size_t kBlock = 32;    // columns whose sums are held at a time
  static constexpr std::size_t kPanel = 64;    // the same, of panels
};

// Bytes of K that panels hold together, and those of all columns of a panel.
inline constexpr std::size_t kGroupBytes = 4;
inline constexpr std::size_t kPanelGroup = Product::kPanel * kGroupBytes;

// The product of rows [row, row + count) of x.
Product some_rows(const Product& product, std::size_t row, std::size_t count);

// Computes columns [begin, end); `begin` is a multiple of the way's `columns`.
using Multiply = void (*)(const Product& product, std::size_t begin, std::size_t end);

struct Way {
  Multiply multiply = nullptr;
  std::size_t columns = 0;     // that it multiplies at a time
  bool parts_of_rows = false;  // whether it is worth while to give it some of the rows
};

struct Size {
  std::size_t rows, k, columns;
};

// The fastest way on this processor, with the vector unit in use. Without `multiply`: torch is, or
// there is none.
Way fastest_way(const Size& size, DType dtype, Form form, DType out_dtype);

}  // namespace tpkernels::host
