// The arguments of an op, by name and in schema order, and the plan cache key of a call.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "calls/python.h"
#include "calls/tensor.h"

namespace tpkernels::calls {

// The arguments of one call in schema order, including defaults. Borrowed references.
using Slots = std::vector<PyObject*>;

struct Argument {
  pybind11::str name;
  pybind11::object default_value;  // null if the argument is required
  bool keyword_only;
  bool weight;    // a weight or a list of weights, not necessarily dense tensors
  bool any_rows;  // the number of rows is not part of the key
};

class Arguments {
 public:
  // (name, has_default, default, keyword_only, any_rows) of each argument. The first argument is a
  // tensor. `cls` is a named tuple whose fields are arguments of the op or have defaults.
  using Specs = std::vector<std::tuple<pybind11::str, bool, pybind11::object, bool, bool>>;
  Arguments(std::string op, const Specs& specs, pybind11::object cls);

  // The slot of an argument, or -1 if the op does not have it.
  int index(const char* name) const;
  int group() const { return group_; }
  const std::string& op() const { return op_; }

  Slots parse(const CallArgs& args) const;
  // The arguments as an instance of `cls`.
  pybind11::object to_named_tuple(const Slots& slots) const;
  // False if a weight is not a tensor, such as a `CustomMatmul`.
  bool weights_are_tensors(const Slots& slots) const;
  // Calls `function` with the arguments that differ from their defaults. Omitting defaults saves
  // time in the torch dispatcher.
  pybind11::object call(PyObject* function, const Slots& slots) const;

  // Writes the plan cache key: the op, the shape, dtype, device and weight kind of each tensor, and
  // all other values except the group, because each group has a separate cache. Also fills `x`.
  // Returns false if a value cannot be part of a key.
  bool key(const Slots& slots, std::string* key, Tensor* x) const;

 private:
  // The slot of an argument, or arguments_.size() if the op does not have it.
  std::size_t find_slot(PyObject* name) const;
  pybind11::type_error unexpected() const;

  std::string op_;
  std::vector<Argument> arguments_;
  pybind11::object cls_;
  // For each field of `cls_`: its slot, or -1 and a default.
  std::vector<std::pair<int, pybind11::object>> fields_;
  Py_ssize_t positional_ = 0;
  int group_ = -1;
};

}  // namespace tpkernels::calls
