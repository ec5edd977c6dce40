#include "calls/shortcut.h"

#include <algorithm>
#include <utility>

#include "calls/callable.h"
#include "calls/errors.h"
#include "calls/kernel.h"
#include "calls/matmul.h"
#include "calls/python.h"
#include "calls/tensor.h"

namespace tpkernels::calls {
namespace {

namespace py = pybind11;

struct ShortcutState {
  std::shared_ptr<const Arguments> arguments;
  py::object kernel;
  py::object op;
  std::vector<PlainState> states;
  std::uint64_t versioned;
  bool overwrites;
};

// No subclass, which might have a __torch_function__.
bool is_of_torch(PyObject* tensor) {
  static PyObject* const types[] = {lasting("torch", "Tensor"), lasting("torch.nn", "Parameter")};
  const auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
  return type == types[0] || type == types[1];
}

// The state that the thread is in; null: one that is not plain.
const PlainState* state_of_thread(const std::vector<PlainState>& states) {
  static PyObject* const functions = lasting("torch._C", "_is_torch_function_mode_enabled");
  const ThreadKeys keys = keys_of_thread();
  const auto found = std::find_if(states.begin(), states.end(), [&](const PlainState& state) {
    return state.thread.included == keys.included && state.thread.excluded == keys.excluded;
  });
  if (found == states.end()) return nullptr;
  return checked(PyObject_CallNoArgs(functions)).is(py::bool_(false)) ? &*found : nullptr;
}

// Adds the keys of the tensors that it sees to `keys`.
bool is_plain(const PlainState& state, PyObject* value, std::uint64_t* keys) {
  if (PyList_Check(value) || PyTuple_Check(value)) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) {
      if (!is_plain(state, PySequence_Fast_GET_ITEM(value, i), keys)) return false;
    }
    return true;
  }
  if (!is_tensor(value)) return true;
  if (!is_of_torch(value)) return false;
  const std::uint64_t own = keys_of_tensor(value);
  *keys |= own;
  return std::find(state.tensors.begin(), state.tensors.end(), own) != state.tensors.end();
}

// Whether all is plain for an op with these arguments.
bool are_plain(const std::vector<PlainState>& states, PyObject* const* values, std::size_t count,
               std::uint64_t* keys) {
  const PlainState* const state = state_of_thread(states);
  if (!state) return false;
  const bool plain = std::all_of(values, values + count,
                                 [&](PyObject* value) { return is_plain(*state, value, keys); });
  return plain && !(state->records && needs_gradient(values, count));
}

// Null without a Python error: the op is to be called.
py::object run(const ShortcutState& shortcut, PyObject* args, PyObject* kwargs) {
  const Slots slots = shortcut.arguments->parse(args, kwargs);
  std::uint64_t keys = 0;
  if (!is_tensor(slots[0]) || !are_plain(shortcut.states, slots.data(), slots.size(), &keys)) {
    return {};
  }
  if (shortcut.overwrites && (keys & shortcut.versioned)) increment_version(slots[0]);
  return run_warm(shortcut.kernel, slots);
}

// The call may not have been made, where an interrupt comes: all of the op's Python code is below.
void leave(const ShortcutState& shortcut, PyObject* args, PyObject* kwargs,
           const py::error_already_set& error) {
  static PyObject* const breaks = lasting("tpkernels.groups", "break_if_left");
  const Slots slots = shortcut.arguments->parse(args, kwargs);
  const auto group = static_cast<std::size_t>(shortcut.arguments->group());
  checked(PyObject_CallFunctionObjArgs(breaks, slots[group], error.value().ptr(), nullptr));
}

PyObject* call(PyObject* self, PyObject* args, PyObject* kwargs) {
  const auto& shortcut = state_of<ShortcutState>(self);
  return raising([&] {
    try {
      if (py::object result = run(shortcut, args, kwargs)) return result;
      return checked(PyObject_Call(shortcut.op.ptr(), args, kwargs));
    } catch (const py::error_already_set& error) {
      if (!error.matches(PyExc_TypeError)) leave(shortcut, args, kwargs, error);
      throw;
    }
  });
}

struct MatmulState {
  std::shared_ptr<const Arguments> arguments;
  py::object op;
  std::vector<PlainState> states;
};

// Null without a Python error: the op is to be called.
py::object run_matmul(const MatmulState& shortcut, PyObject* args, PyObject* kwargs) {
  static PyObject* const is_packed = PyUnicode_InternFromString("is_mkldnn");
  const Slots slots = shortcut.arguments->parse(args, kwargs);
  if (slots.size() != 4 || slots[2] != Py_None || slots[3] != Py_None) return {};
  if (!is_tensor(slots[0]) || !is_tensor(slots[1])) return {};
  std::uint64_t keys = 0;
  if (!are_plain(shortcut.states, slots.data(), 2, &keys)) return {};
  Tensor x{};
  if (!checked(PyObject_GetAttr(slots[1], is_packed)).is(py::bool_(true)) || profiling() ||
      !read(slots[0], &x) || x.ndim != 2 || x.shape[0] == 0) {
    return {};
  }
  return matmul(py::reinterpret_borrow<py::object>(slots[0]), slots[1], true);
}

PyObject* call_matmul(PyObject* self, PyObject* args, PyObject* kwargs) {
  const auto& shortcut = state_of<MatmulState>(self);
  return raising([&] {
    if (py::object result = run_matmul(shortcut, args, kwargs)) return result;
    return checked(PyObject_Call(shortcut.op.ptr(), args, kwargs));
  });
}

PyObject* answer(PyObject* self, PyObject* args, PyObject*) {
  const auto& states = state_of<std::vector<PlainState>>(self);
  return raising([&] {
    std::uint64_t keys = 0;
    const auto count = static_cast<std::size_t>(PyTuple_GET_SIZE(args));
    return py::object(py::bool_(are_plain(states, PySequence_Fast_ITEMS(args), count, &keys)));
  });
}

}  // namespace

py::object make_is_plain(std::vector<PlainState> states) {
  return Callable<std::vector<PlainState>>::make(
      "tpkernels._C.calls.IsPlain", &answer,
      std::make_unique<std::vector<PlainState>>(std::move(states)));
}

py::object make_matmul_shortcut(std::shared_ptr<const Arguments> arguments, py::object op,
                                std::vector<PlainState> states) {
  return Callable<MatmulState>::make("tpkernels._C.calls.MatmulShortcut", &call_matmul,
                                     std::make_unique<MatmulState>(MatmulState{
                                         std::move(arguments), std::move(op), std::move(states)}));
}

py::object make_shortcut(std::shared_ptr<const Arguments> arguments, py::object kernel,
                         py::object op, std::vector<PlainState> states, std::uint64_t versioned,
                         bool overwrites) {
  return Callable<ShortcutState>::make("tpkernels._C.calls.Shortcut", &call,
                                       std::make_unique<ShortcutState>(ShortcutState{
                                           std::move(arguments), std::move(kernel), std::move(op),
                                           std::move(states), versioned, overwrites}));
}

}  // namespace tpkernels::calls
