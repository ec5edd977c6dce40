#include "calls/arguments.h"

#include <utility>

#include "calls/product.h"
#include "calls/python.h"

namespace tpkernels::calls {
namespace {

bool is_dtype(PyObject* value) {
  static PyObject* const type = lasting("torch", "dtype");
  return Py_IS_TYPE(value, reinterpret_cast<PyTypeObject*>(type));
}

template <class T>
void append(std::string* key, const T& value) {
  key->append(reinterpret_cast<const char*>(&value), sizeof value);
}

void append(std::string* key, const Tensor& x, bool any_rows) {
  append(key, x.device);
  append(key, x.dtype);
  append(key, x.ndim);
  const int first = any_rows && x.ndim > 0 ? 1 : 0;
  key->append(reinterpret_cast<const char*>(x.shape + first),
              static_cast<std::size_t>(x.ndim - first) * sizeof *x.shape);
}

// A weight that is known to a CustomMatmul, of which only shape and dtype matter.
bool append_product(std::string* key, PyObject* w) {
  static PyObject* const shape_name = PyUnicode_InternFromString("shape");
  static PyObject* const dtype_name = PyUnicode_InternFromString("dtype");
  const auto shape = py::reinterpret_steal<py::object>(PyObject_GetAttr(w, shape_name));
  if (!shape) return PyErr_Clear(), false;
  const auto dtype = py::reinterpret_steal<py::object>(PyObject_GetAttr(w, dtype_name));
  if (!dtype) return PyErr_Clear(), false;
  if (!PyTuple_Check(shape.ptr()) || !is_dtype(dtype.ptr())) return false;
  key->push_back('c');
  append(key, dtype.ptr());
  append(key, PyTuple_GET_SIZE(shape.ptr()));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(shape.ptr()); ++i) {
    const long long size = PyLong_AsLongLong(PyTuple_GET_ITEM(shape.ptr(), i));
    if (size < 0) return PyErr_Clear(), false;
    append(key, size);
  }
  return true;
}

// Each value starts with a letter for its kind, and says how long it is.
bool append(std::string* key, PyObject* value, Tensor* x, const Argument& argument) {
  const bool weight = argument.weight;
  if (value == Py_None) {
    key->push_back('n');
  } else if (is_tensor(value)) {
    if (!read(value, x)) return false;
    if (weight && x->ndim == kPackedDims && !is_contiguous(*x)) return false;  // to be refused
    key->push_back('t');
    append(key, *x, argument.any_rows);
  } else if (PyUnicode_Check(value)) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(value, &size);
    if (!text) return PyErr_Clear(), false;
    key->push_back('s');
    append(key, size);
    key->append(text, static_cast<std::size_t>(size));
  } else if (PyLong_Check(value)) {  // or a bool
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow) return false;
    key->push_back('i');
    append(key, number);
  } else if (PyFloat_Check(value)) {
    key->push_back('f');
    append(key, PyFloat_AS_DOUBLE(value));
  } else if (is_dtype(value)) {  // there is one of each
    key->push_back('d');
    append(key, value);
  } else if (PyList_Check(value) || PyTuple_Check(value)) {
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(value);
    key->push_back('l');
    append(key, count);
    Tensor other;
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (!append(key, PySequence_Fast_GET_ITEM(value, i), &other, argument)) return false;
    }
  } else {
    return weight && append_product(key, value);
  }
  return true;
}

}  // namespace

Arguments::Arguments(std::string op, const Described& described, py::object cls)
    : op_(std::move(op)), cls_(std::move(cls)) {
  for (const auto& [name, has_standard, standard, by_keyword, any_rows] : described) {
    const std::string text = name;
    const bool weight = text == "w" || text == "weights";
    arguments_.push_back(
        {name, has_standard ? standard : py::object(), by_keyword, weight, any_rows});
    if (!by_keyword) ++positional_;
  }
  group_ = index("group");
}

int Arguments::index(const char* name) const {
  for (std::size_t i = 0; i < arguments_.size(); ++i) {
    if (std::string(arguments_[i].name) == name) return static_cast<int>(i);
  }
  return -1;
}

Slots Arguments::parse(PyObject* args, PyObject* kwargs) const {
  const Py_ssize_t given = PyTuple_GET_SIZE(args);
  Py_ssize_t by_name = 0;
  Slots slots;
  slots.reserve(arguments_.size());
  for (const Argument& argument : arguments_) {
    const auto at = static_cast<Py_ssize_t>(slots.size());
    PyObject* value = nullptr;
    if (at < given && !argument.by_keyword) {
      value = PyTuple_GET_ITEM(args, at);
    } else if (kwargs && (value = PyDict_GetItemWithError(kwargs, argument.name.ptr()))) {
      ++by_name;
    } else if (PyErr_Occurred()) {
      throw py::error_already_set();
    } else if (argument.standard) {
      value = argument.standard.ptr();
    } else {
      throw py::type_error(op_ + " is missing the argument " + std::string(argument.name));
    }
    slots.push_back(value);
  }
  if (given > positional_ || (kwargs && by_name != PyDict_GET_SIZE(kwargs))) {
    throw py::type_error(op_ + " got unexpected arguments");
  }
  return slots;
}

py::object Arguments::named(const Slots& slots) const {
  static PyObject* const make =
      py::object(py::type::of(py::tuple()).attr("__new__")).release().ptr();
  const auto values = checked(PyTuple_New(static_cast<Py_ssize_t>(slots.size())));
  for (std::size_t i = 0; i < slots.size(); ++i) {
    PyTuple_SET_ITEM(values.ptr(), static_cast<Py_ssize_t>(i), Py_NewRef(slots[i]));
  }
  PyObject* const given[] = {cls_.ptr(), values.ptr()};
  return checked(PyObject_Vectorcall(make, given, 2, nullptr));
}

bool Arguments::key(const Slots& slots, std::string* key, Tensor* x) const {
  key->assign(op_);
  Tensor other;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (static_cast<int>(i) == group_) continue;
    if (!append(key, slots[i], i == 0 ? x : &other, arguments_[i])) return false;
  }
  return true;
}

}  // namespace tpkernels::calls
