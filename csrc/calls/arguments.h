// An op's arguments by name and in the schema's order, and the key under which their planned call
// is found.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "calls/python.h"
#include "calls/tensor.h"

namespace tpkernels::calls {

// The arguments of one call in the schema's order, with its defaults; borrowed.
using Slots = std::vector<PyObject*>;

struct Argument {
  pybind11::str name;
  pybind11::object standard;  // its default; null: it has none
  bool by_keyword;            // only
  bool weight;                // one or several weights, which may be no dense tensors
  bool any_rows;              // calls with any number of its rows are planned alike
};

class Arguments {
 public:
  // (name, has a default, default, by keyword only, any rows) of each argument, of which the first
  // is a tensor. `cls` is a named tuple: its fields are arguments, or have defaults.
  using Described = std::vector<std::tuple<pybind11::str, bool, pybind11::object, bool, bool>>;
  Arguments(std::string op, const Described& described, pybind11::object cls);

  // Where an argument is; -1: nowhere.
  int index(const char* name) const;
  int group() const { return group_; }
  const std::string& op() const { return op_; }

  Slots parse(const Given& given) const;
  // The arguments as an object of the named tuple.
  pybind11::object named(const Slots& slots) const;
  // Whether no weight is a `CustomMatmul`, or something else.
  bool weights_are_tensors(const Slots& slots) const;
  // Calls `function` with them, without those that have their defaults: each costs torch's
  // dispatcher time.
  pybind11::object call(PyObject* function, const Slots& slots) const;

  // The op, the shape, dtype and device of each tensor, what kind of weight it is, and all other
  // values but the group's, which has its own table. False where a value has no such description.
  // `x` is filled as well.
  bool key(const Slots& slots, std::string* key, Tensor* x) const;

 private:
  // Where the argument of that name is; past the end: there is none.
  std::size_t place_of(PyObject* name) const;
  pybind11::type_error unexpected() const;

  std::string op_;
  std::vector<Argument> arguments_;
  pybind11::object cls_;
  std::vector<std::pair<int, pybind11::object>> fields_;  // where each is, or its default
  Py_ssize_t positional_ = 0;
  int group_ = -1;
};

}  // namespace tpkernels::calls
