// What the bound calls share: the operands of a call and its results.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <memory>
#include <stdexcept>
#include <utility>

#include "calls/bound.h"
#include "calls/collective.h"
#include "calls/matmul.h"
#include "calls/memory.h"
#include "calls/python.h"

namespace tpkernels::calls {

using SharedCollective = std::shared_ptr<Collective>;

inline Tensor tensor(const pybind11::handle& object) {
  Tensor read_as{};
  if (!read(object.ptr(), &read_as)) throw std::invalid_argument("not a dense tensor");
  return read_as;
}

// A new tensor of that shape and of x's dtype.
inline pybind11::object empty_like(PyObject* x, const pybind11::tuple& shape) {
  static PyObject* const dtype_name = PyUnicode_InternFromString("dtype");
  return empty(shape, checked(PyObject_GetAttr(x, dtype_name)));
}

// Where the operands of the ops that multiply and sum are, and where those that are added to the
// sum begin: bias, then residual.
inline constexpr std::size_t kX = 0, kW = 1;
inline constexpr std::size_t kAddedToAll = 3, kAddedToShard = 4;

// bias [N], cast to the accumulator's dtype, and residual; both stay alive as long as this.
class Added {
 public:
  Added(const Slots& slots, std::size_t first) {
    if (slots[first] != Py_None) {
      static PyObject* const to_float = PyUnicode_InternFromString("float");
      bias_ = pybind11::reinterpret_borrow<pybind11::object>(slots[first]);
      if (tensor(bias_).dtype.bits < 32) {
        bias_ = checked(PyObject_CallMethodNoArgs(bias_.ptr(), to_float));
      }
      addends.bias = tensor(bias_);
    }
    if (slots[first + 1] != Py_None) addends.residual = tensor(slots[first + 1]);
  }

  Addends addends;

 private:
  pybind11::object bias_;
};

// Whether the operands need no copy.
inline bool takes_operands(const Slots& slots, const Tensor& x, std::size_t first) {
  for (const std::size_t i : {first, first + 1}) {
    Tensor other{};
    if (slots[i] != Py_None && !(read(slots[i], &other) && is_contiguous(other))) return false;
  }
  return is_contiguous(x);
}

// x [..., K] as a matrix [rows, K].
inline pybind11::object as_rows(pybind11::object object, const Tensor& x) {
  return x.ndim == 2 ? object : object.attr("flatten")(0, -2);
}

// The partial of an op that multiplies and sums.
inline pybind11::object partial_of(const Slots& slots, const Tensor& x, bool packed) {
  return matmul(as_rows(pybind11::reinterpret_borrow<pybind11::object>(slots[kX]), x), slots[kW],
                packed);
}

inline pybind11::object viewed(pybind11::object out, const pybind11::tuple& shape) {
  static PyObject* const view = PyUnicode_InternFromString("view");
  if (shape.size() == 2) return out;
  return checked(PyObject_CallMethodOneArg(out.ptr(), view, shape.ptr()));
}

}  // namespace tpkernels::calls
