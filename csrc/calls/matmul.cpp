#include "calls/matmul.h"

#include <stdexcept>

#include "calls/collective.h"
#include "calls/memory.h"
#include "calls/python.h"
#include "calls/tensor.h"

namespace tpkernels::calls {
namespace {

namespace py = pybind11;

py::object packed_matmul(const py::object& x, PyObject* w) {
  // What the overload calls, without the Python code around it.
  static PyObject* const multiply = py::object(py::module_::import("torch")
                                                   .attr("ops")
                                                   .attr("mkldnn")
                                                   .attr("_linear_pointwise")
                                                   .attr("default")
                                                   .attr("_op"))
                                        .release()
                                        .ptr();
  static PyObject* const none = PyUnicode_InternFromString("none");
  static PyObject* const no_algorithm = PyUnicode_InternFromString("");
  static PyObject* const no_scalars = PyList_New(0);
  PyObject* const given[] = {x.ptr(), w, Py_None, none, no_scalars, no_algorithm};
  return checked(PyObject_Vectorcall(multiply, given, 6, nullptr));
}

Tensor dense(PyObject* object) {
  Tensor tensor{};
  if (!read(object, &tensor)) throw std::invalid_argument("not a dense tensor");
  return tensor;
}

}  // namespace

py::object matmul(const py::object& x, PyObject* w, bool packed) {
  static const Global mm("torch", "mm");
  static PyObject* const by_name = py::make_tuple("out").release().ptr();
  static PyObject* const dtype_name = PyUnicode_InternFromString("dtype");
  const Tensor a = dense(x.ptr());
  const auto new_result = [&](std::int64_t columns) {
    const auto dtype = checked(PyObject_GetAttr(x.ptr(), dtype_name));
    return empty(py::make_tuple(a.shape[0], columns), dtype);
  };
  const auto rows = static_cast<std::size_t>(a.shape[0]);
  const Whole whole{rows, 0};
  Weight weight{};
  if (read_weight(w, packed, &weight)) {
    const py::object given = with_unit_stride(x, weight, weight.dtype, whole);
    const Tensor factor = dense(given.ptr());
    if (const host::Way way = way_of(factor, weight, weight.dtype, whole); way.multiply) {
      py::object out = new_result(weight.n);
      multiply(factor, weight, dense(out.ptr()), {}, way);
      return out;
    }
  }
  if (packed) return packed_matmul(x, w);
  const std::int64_t columns = dense(w).shape[1];
  PyObject* factors[] = {x.ptr(), w, nullptr};
  const auto bytes = rows * static_cast<std::size_t>(columns) * a.dtype.bits / 8;
  if (bytes < kLargeBytes) return checked(PyObject_Vectorcall(mm.value(), factors, 2, nullptr));
  const py::object out = new_result(columns);
  factors[2] = out.ptr();
  return checked(PyObject_Vectorcall(mm.value(), factors, 2, by_name));
}

bool multiply(const py::object& x, PyObject* w, PyObject* out, PyObject* bias, bool packed,
              const Whole& whole) {
  Tensor a{}, to{}, added{};
  Weight weight{};
  const bool known = read_weight(w, packed, &weight) && read(out, &to) && takes_result(to);
  if (!known || !(bias == Py_None || read(bias, &added))) return false;
  const py::object given = with_unit_stride(x, weight, dtype_of(to), whole);
  if (!read(given.ptr(), &a)) return false;
  const host::Way way = way_of(a, weight, dtype_of(to), whole);
  if (way.multiply) multiply(a, weight, to, added, way);
  return way.multiply != nullptr;
}

}  // namespace tpkernels::calls
