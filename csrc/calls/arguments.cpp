#include "calls/arguments.h"

#include <algorithm>
#include <utility>

#include "calls/matmul.h"
#include "calls/python.h"

namespace tpkernels::calls {
namespace {

bool is_dtype(PyObject* value) {
  static PyObject* const type = import_static("torch", "dtype");
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

// Appends a weight that is a CustomMatmul: only its shape and dtype affect the plan.
bool append_custom_matmul(std::string* key, PyObject* w) {
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

// Each value is encoded as a letter for its type, its length if it varies, and its bytes.
bool append(std::string* key, PyObject* value, Tensor* x, const Argument& argument) {
  const bool weight = argument.weight;
  if (value == Py_None) {
    key->push_back('n');
  } else if (is_tensor(value)) {
    if (!read(value, x)) return false;
    if (weight && x->ndim == kPackedDims && !is_contiguous(*x)) return false;  // Python rejects it
    key->push_back('t');
    append(key, *x, argument.any_rows);
  } else if (PyUnicode_Check(value)) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(value, &size);
    if (!text) return PyErr_Clear(), false;
    key->push_back('s');
    append(key, size);
    key->append(text, static_cast<std::size_t>(size));
  } else if (PyLong_Check(value)) {  // includes bool
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow) return false;
    key->push_back('i');
    append(key, number);
  } else if (PyFloat_Check(value)) {
    key->push_back('f');
    append(key, PyFloat_AS_DOUBLE(value));
  } else if (is_dtype(value)) {  // dtypes are singletons: the address identifies one
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
    return weight && append_custom_matmul(key, value);
  }
  return true;
}

bool are_tensors(PyObject* value) {
  if (!PyList_Check(value) && !PyTuple_Check(value)) return is_tensor(value);
  PyObject** const items = PySequence_Fast_ITEMS(value);
  return std::all_of(items, items + PySequence_Fast_GET_SIZE(value), is_tensor);
}

bool is_default(const Argument& argument, PyObject* value) {
  PyObject* const default_value = argument.default_value.ptr();
  if (value == default_value) return true;
  return default_value && PyUnicode_Check(default_value) && PyUnicode_Check(value) &&
         PyUnicode_Compare(default_value, value) == 0;
}

}  // namespace

Arguments::Arguments(std::string op, const Specs& specs, py::object cls)
    : op_(std::move(op)), cls_(std::move(cls)) {
  for (const auto& [name, has_default, default_value, keyword_only, any_rows] : specs) {
    const std::string utf8 = name;
    const bool weight = utf8 == "w" || utf8 == "weights";
    PyObject* interned = py::object(name).release().ptr();
    PyUnicode_InternInPlace(&interned);
    arguments_.push_back({py::reinterpret_steal<py::str>(interned),
                          has_default ? default_value : py::object(), keyword_only, weight,
                          any_rows});
    if (!keyword_only) ++positional_;
  }
  group_ = index("group");
  const py::dict defaults = cls_.attr("_field_defaults");
  for (const py::handle field : cls_.attr("_fields")) {
    const int slot = index(field.cast<std::string>().c_str());
    fields_.emplace_back(slot, slot < 0 ? py::object(defaults[field]) : py::object());
  }
}

int Arguments::index(const char* name) const {
  for (std::size_t i = 0; i < arguments_.size(); ++i) {
    if (std::string(arguments_[i].name) == name) return static_cast<int>(i);
  }
  return -1;
}

Slots Arguments::parse(const CallArgs& args) const {
  Slots slots(arguments_.size());
  if (args.positional > positional_) throw unexpected();
  std::copy(args.values, args.values + args.positional, slots.begin());
  const Py_ssize_t keywords = args.names ? PyTuple_GET_SIZE(args.names) : 0;
  for (Py_ssize_t i = 0; i < keywords; ++i) {
    const std::size_t slot = find_slot(PyTuple_GET_ITEM(args.names, i));
    if (slot == slots.size() || slots[slot]) throw unexpected();
    slots[slot] = args.values[args.positional + i];
  }
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i]) continue;
    slots[i] = arguments_[i].default_value.ptr();
    if (!slots[i]) {
      throw py::type_error(op_ + " is missing the argument " + std::string(arguments_[i].name));
    }
  }
  return slots;
}

std::size_t Arguments::find_slot(PyObject* name) const {
  std::size_t slot = 0;
  while (slot < arguments_.size() && arguments_[slot].name.ptr() != name) ++slot;
  if (slot < arguments_.size()) return slot;
  slot = 0;  // `name` is not interned: compare by value
  while (slot < arguments_.size() && PyUnicode_Compare(arguments_[slot].name.ptr(), name) != 0)
    ++slot;
  return slot;
}

py::type_error Arguments::unexpected() const {
  return py::type_error(op_ + " got unexpected arguments");
}

py::object Arguments::to_named_tuple(const Slots& slots) const {
  static PyObject* const make =
      py::object(py::type::of(py::tuple()).attr("__new__")).release().ptr();
  const auto values = checked(PyTuple_New(static_cast<Py_ssize_t>(fields_.size())));
  for (std::size_t i = 0; i < fields_.size(); ++i) {
    const auto& [slot, default_value] = fields_[i];
    PyObject* const value = slot < 0 ? default_value.ptr() : slots[static_cast<std::size_t>(slot)];
    PyTuple_SET_ITEM(values.ptr(), static_cast<Py_ssize_t>(i), Py_NewRef(value));
  }
  PyObject* const args[] = {cls_.ptr(), values.ptr()};
  return checked(PyObject_Vectorcall(make, args, 2, nullptr));
}

bool Arguments::weights_are_tensors(const Slots& slots) const {
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (arguments_[i].weight && !are_tensors(slots[i])) return false;
  }
  return true;
}

py::object Arguments::call(PyObject* function, const Slots& slots) const {
  std::vector<PyObject*> values;
  values.reserve(slots.size());
  std::size_t positional = 0, num_passed = 0;
  while (positional < slots.size() && !arguments_[positional].keyword_only) {
    values.push_back(slots[positional]);
    if (!is_default(arguments_[positional], slots[positional])) num_passed = positional + 1;
    ++positional;
  }
  values.resize(num_passed);
  py::object names;
  for (std::size_t i = positional; i < slots.size(); ++i) {
    if (is_default(arguments_[i], slots[i])) continue;
    if (!names) names = py::list();
    py::reinterpret_borrow<py::list>(names).append(arguments_[i].name);
    values.push_back(slots[i]);
  }
  if (names) names = py::tuple(names);
  return checked(PyObject_Vectorcall(function, values.data(), num_passed, names.ptr()));
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
