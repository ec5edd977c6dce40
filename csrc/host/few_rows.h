// The product of a few rows with a weight each of whose columns is contiguous, such as
// `linear.weight.t()`: y[m][n] = the dot product of row m of x and column n of w.
//
// Few rows are limited by how fast the weight is read. The weight is read once, in place: a block
// of columns from end to end, or in chunks where x does not fit the L1 cache. Nothing rearranges it
// first, in every call or once.
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
  std::size_t w_pitch = 0;  // bytes from one column to the next
  void* out = nullptr;
  std::size_t out_pitch = 0;  // bytes from one row to the next
  DType out_dtype{};
  const float* bias = nullptr;  // one per column; added before the result is rounded

  static constexpr std::size_t kMost = 16;
  static constexpr std::size_t kBlock = 32;  // columns whose sums are held at a time
};

// Computes columns [begin, end); `begin` is a multiple of kBlock.
using MultiplyFewRows = void (*)(const FewRows& product, std::size_t begin, std::size_t end);

// Of x's and w's dtype, with the vector unit in use. Null: none of its functions is fast at it.
MultiplyFewRows few_rows_product(DType dtype);

// The most rows for which that is the fastest way on this processor; never above kMost. 0: none.
std::size_t most_few_rows(DType dtype);

}  // namespace tpkernels::host
