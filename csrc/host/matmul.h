// GEMM with a weight: out[m][n] = dot product of row m of x and column n of w, plus bias[n].
//
// Weight layouts:
//   Panels: the packed layout. A panel has 64 columns, or the remaining columns at the end. For
//     every 4 bytes of K (one 32-bit element or two 16-bit elements), it stores these bytes of all
//     its columns in sequence. If K is odd, the last 16-bit element of each column follows at the
//     end. There is no padding. Memory is read sequentially, and each sum stays in one vector lane.
//   Int8 panels: a group is a multiple of 4 elements of K. It stores the fp32 scales of the
//     columns, then the 8-bit elements, 4 bytes per column in sequence. A weight is element *
//     scale. Rows of x are quantised in the same groups of K, with scale = largest magnitude / 127.
//   Columns: each column is contiguous, as in `linear.weight.t()`. With few rows, the read
//     bandwidth of the weight limits the speed. The weight is read once and in place, one block of
//     columns at a time. If x does not fit the L1 cache, K is processed in chunks.
//   Rows: each row of w is contiguous.
//
// With many rows, all layouts use panels. Weights in other layouts are packed on the fly, one range
// of K at a time, into memory that stays in the L2 cache.
//
// Invariant (bitwise reproducible): K and the kernel determine the summation order of a result. The
// number of rows and columns has no influence.
//
// Sums by a tree (sum_tree.h), for packed weights: the results are the fp32 nodes of the local
// slice of K. Then the split of K over the ranks has no influence either.
#pragma once

#include <cstddef>

#include "host/sum_tree.h"

namespace tpkernels::host {

enum class DType : int;

enum class WeightLayout { kColumns, kRows, kPanels, kInt8Panels };

struct Matmul {
  std::size_t rows = 0;
  std::size_t k = 0;
  const void* x = nullptr;
  std::size_t x_pitch = 0;  // bytes from one row to the next
  const void* w = nullptr;
  std::size_t w_pitch = 0;  // bytes from one column, row or panel to the next
  std::size_t columns = 0;  // columns of w and out
  void* out = nullptr;
  std::size_t out_pitch = 0;  // bytes from one row to the next
  DType out_dtype{};
  const float* bias = nullptr;  // one per column; added before rounding
  std::size_t group = 0;        // int8 panels: elements of K that share a scale
  // Null: one sum over K. Otherwise `out` has fp32 nodes, without bias.
  const LocalSums* tree = nullptr;
  std::size_t node_pitch = 0;  // bytes from one node of `out` to the next

  static constexpr std::size_t kMaxFewRows = 16;    // maximum rows of the in-place columns kernel
  static constexpr std::size_t kBlockColumns = 32;  // columns per block of that kernel
  static constexpr std::size_t kPanelColumns = 64;  // columns per panel
};

// Bytes of K that a panel stores contiguously per column, and for all its columns.
inline constexpr std::size_t kGroupBytes = 4;
inline constexpr std::size_t kPanelGroupBytes = Matmul::kPanelColumns * kGroupBytes;

// Returns the matmul of rows [row, row + count) of x.
Matmul select_rows(const Matmul& gemm, std::size_t row, std::size_t count);

// Computes columns [begin, end). `begin` is a multiple of `MatmulKernel::columns`.
using MatmulFn = void (*)(const Matmul& gemm, std::size_t begin, std::size_t end);

struct MatmulKernel {
  MatmulFn multiply = nullptr;
  std::size_t columns = 0;            // columns per block
  bool worth_splitting_rows = false;  // whether threads should share the rows of a block
};

struct MatmulShape {
  std::size_t rows, k, columns;
};

// Returns the fastest kernel on this processor for the vector unit in use. `multiply` is null if
// torch is faster or no kernel exists.
MatmulKernel select_kernel(const MatmulShape& shape, DType dtype, WeightLayout layout,
                           DType out_dtype);

}  // namespace tpkernels::host
