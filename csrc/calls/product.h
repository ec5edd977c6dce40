// The local product of a call in the extension: csrc/host/product.h on tensors, with torch's
// threads; for calls that run without Python and for tpkernels/local/matmul.py.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "calls/tensor.h"
#include "host/product.h"

namespace tpkernels::calls {

// A weight as csrc/host/product.h reads it.
struct Weight {
  const void* data = nullptr;
  std::size_t pitch = 0;
  std::int64_t k = 0, n = 0;
  host::DType dtype{};  // that x must have; that it has where the weight has 8 bits
  host::Form form{};
  std::size_t group = 0;  // of K, in panels of 8 bits

  bool packed() const { return form == host::Form::kPanels || form == host::Form::kInt8Panels; }
};

// Does `part` on ranges of [0, count) of `grain` or more, by torch's threads. The GIL is not held.
using Part = void (*)(std::int64_t begin, std::int64_t end, void* context);
void in_threads(std::int64_t count, std::int64_t grain, Part part, void* context);

// The dims of a packed weight: tpkernels/local/packed.py. A plain one has two.
constexpr std::int32_t kPackedDims = 3;

// Whether products of large weights with `rows` rows would be computed, to x's dtype.
bool multiplies(host::DType dtype, host::Form form, std::size_t rows);

// The rows and columns of the product that a call's is a part of: the bits follow from these, so
// that they do not depend on the parts.
using Whole = std::pair<std::size_t, std::size_t>;

// x [rows, K] @ w, plain or packed.
pybind11::object matmul(const pybind11::object& x, const pybind11::handle& w);

// x [..., K] @ w: [..., N]. Where the extension multiplies, torch makes no views.
pybind11::object linear(const pybind11::object& object, const Tensor& x, const pybind11::handle& w);

// A kernel of `column_matmul`: multiplies by packed weights without biases, and leaves everything
// else, such as a refusal, to `run`, Python's.
pybind11::object make_columns_kernel(pybind11::object run);

// out = x @ w + bias, rounded once, where the extension has the fastest way; otherwise false, and
// nothing is computed. bias [N] in fp32, or None. Throws std::invalid_argument for another shape.
bool multiply(const pybind11::object& x, const pybind11::handle& w, const pybind11::handle& out,
              const pybind11::handle& bias, const Whole& whole);

// out[rows of group i] = x[rows of group i] @ w[i], plain or packed matrices, as `multiply`
// computes each. x and out have sorted rows and unit column stride; counts [groups] are the rows of
// each. Returns the groups with rows whose product is left to torch. Throws std::invalid_argument.
std::vector<std::size_t> grouped_multiply(const pybind11::handle& x, const pybind11::handle& w,
                                          const pybind11::handle& counts,
                                          const pybind11::handle& out);

}  // namespace tpkernels::calls
