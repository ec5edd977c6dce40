// The product of a few rows with a weight: y[m][n] = the dot product of row m of x and column n of
// w. Few rows are limited by how fast the weight is read. It is read once, in place, as it lies:
//
// Columns: each is contiguous, as in `linear.weight.t()`. A block of columns is read from end to
//   end, or in chunks where x does not fit the L1 cache.
// Panels: oneDNN's packed form of fp32, and of bf16 with dot products, on processors with AVX-512.
//   Every 64 columns form a panel. For each 4 bytes of K, one element of 32 bits or two of 16, it
//   holds those of all 64 columns in turn. What is missing in the last panel, and in the last 4
//   bytes of an odd K, is zero. Memory is read in order, and no sum is spread over a vector's
//   lanes.
//
// A result is summed in an order that follows from K alone, whatever the other rows and columns.
#pragma once

#include <cstddef>

namespace tpkernels::host {

enum class DType : int;

struct FewRows {
  std::size_t rows = 0;  // at most kMost
  std::size_t k = 0;
  const void* x = nullptr;
  std::size_t x_pitch = 0;  // bytes from one row to the next
  const void* w = nullptr;
  std::size_t w_pitch = 0;  // bytes from one column, or panel, to the next
  void* out = nullptr;
  std::size_t out_pitch = 0;  // bytes from one row to the next
  DType out_dtype{};
  const float* bias = nullptr;  // one per column; added before the result is rounded

  static constexpr std::size_t kMost = 16;
  static constexpr std::size_t kBlock = 32;  // columns whose sums are held at a time
  static constexpr std::size_t kPanel = 64;  // the same, of panels
};

enum class Form { kColumns, kPanels };

// Computes columns [begin, end); `begin` is a multiple of kBlock, or of kPanel.
using MultiplyFewRows = void (*)(const FewRows& product, std::size_t begin, std::size_t end);

// Of x's and w's dtype, with the vector unit in use. Null: none of its functions is fast at it.
MultiplyFewRows few_rows_product(DType dtype, Form form);

// The most rows for which that is the fastest way on this processor; never above kMost. 0: none.
std::size_t most_few_rows(DType dtype, Form form);

}  // namespace tpkernels::host
