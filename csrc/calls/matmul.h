// Local matmuls on tensors: the kernels of csrc/host/matmul.h on the torch thread pool. Used by
// calls that run without Python and by tpkernels/local/matmul.py.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "calls/tensor.h"
#include "host/matmul.h"

namespace tpkernels::calls {

// A weight in a layout of csrc/host/matmul.h.
struct Weight {
  const void* data = nullptr;
  std::size_t pitch = 0;  // bytes between columns, rows or panels
  std::int64_t k = 0, n = 0;
  host::DType dtype{};  // required dtype of x; also the dtype of w unless w is int8
  host::WeightLayout layout{};
  std::size_t group = 0;  // elements of K that share a scale, in int8 panels

  bool packed() const {
    return layout == host::WeightLayout::kPanels || layout == host::WeightLayout::kInt8Panels;
  }
};

// Calls `function` on disjoint ranges of [0, count), of at least `grain` elements each, on the
// torch thread pool. Call it without the GIL.
using RangeFunction = void (*)(std::int64_t begin, std::int64_t end, void* context);
void parallel_for(std::int64_t count, std::int64_t grain, RangeFunction function, void* context);

// Number of dims of a packed weight (tpkernels/local/packed.py). A plain weight has 2.
constexpr std::int32_t kPackedDims = 3;

// Whether the extension has a kernel for large weights, `rows` rows and the dtype of x as output.
bool has_matmul_kernel(host::DType dtype, host::WeightLayout layout, std::size_t rows);

// Rows and columns of a full matmul, of which a call computes one chunk. The full shape selects the
// kernel, so the result does not depend on the chunking.
using FullShape = std::pair<std::size_t, std::size_t>;

// Returns x [rows, K] @ w, for a plain or packed weight.
pybind11::object matmul(const pybind11::object& x, const pybind11::handle& w);

// Returns x [..., K] @ w, of shape [..., N]. `x` is a view of `object`. If the extension computes
// the matmul, no torch views are created.
pybind11::object linear(const pybind11::object& object, const Tensor& x, const pybind11::handle& w);

// Returns the fp32 nodes [nodes, ..., N] of x [..., K] @ w, for a packed weight. x is contiguous.
// Throws std::invalid_argument if the operands do not fit.
pybind11::object multiply_nodes(const Tensor& x, const pybind11::handle& w,
                                const host::LocalSums& tree);

// Returns a kernel of `column_matmul`. It handles packed weights without biases, and passes all
// other calls, including invalid calls, to the Python function `run`.
pybind11::object make_columns_kernel(pybind11::object run);

// Computes out = x @ w + bias, rounded once, if the extension has the fastest kernel. Otherwise
// returns false and leaves `out` unchanged. bias is fp32 [N] or None. Throws std::invalid_argument
// if the shapes do not fit.
bool multiply(const pybind11::object& x, const pybind11::handle& w, const pybind11::handle& out,
              const pybind11::handle& bias, const FullShape& full_shape);

// Grouped GEMM: out[rows of group i] = x[rows of group i] @ w[i], for plain or packed matrices,
// each computed as in `multiply`. The rows of x and out are sorted by group, with unit column
// stride. counts [groups] holds the rows per group. Returns the nonempty groups that are left to
// torch. Throws std::invalid_argument.
std::vector<std::size_t> grouped_multiply(const pybind11::handle& x, const pybind11::handle& w,
                                          const pybind11::handle& counts,
                                          const pybind11::handle& out);

}  // namespace tpkernels::calls
