#include "calls/entry.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "calls/kernel.h"
#include "calls/python.h"
#include "calls/tensor.h"

namespace tpkernels::calls {
namespace {

struct Entry {
  std::shared_ptr<const Arguments> arguments;
  py::object op;
  py::object record;
  py::object custom;
  py::object detour;
};

bool is_true(PyObject* function) {
  return checked(PyObject_CallNoArgs(function)).is(py::bool_(true));
}

// Whether a dual tensor may be among the arguments.
bool forward_mode() {
  static const Global level("torch.autograd.forward_ad", "_current_level");
  return !level.value() || PyLong_AsLong(level.value()) >= 0;
}

bool requires_grad(PyObject* value) {
  if (PyList_Check(value) || PyTuple_Check(value)) {
    PyObject** const items = PySequence_Fast_ITEMS(value);
    return std::any_of(items, items + PySequence_Fast_GET_SIZE(value), requires_grad);
  }
  static PyObject* const name = PyUnicode_InternFromString("requires_grad");
  return is_tensor(value) && checked(PyObject_GetAttr(value, name)).is(py::bool_(true));
}

bool needs_gradient(const Slots& slots) {
  static PyObject* const enabled = lasting("torch", "is_grad_enabled");
  return forward_mode() ||
         (is_true(enabled) && std::any_of(slots.begin(), slots.end(), requires_grad));
}

py::object enter(const Entry& entry, const Slots& slots) {
  if (!entry.custom.is_none() && !entry.arguments->weights_are_tensors(slots)) {
    return checked(PyObject_CallOneArg(entry.custom.ptr(), entry.arguments->named(slots).ptr()));
  }
  if (!entry.detour.is_none() && profiling()) {
    return entry.arguments->call(entry.detour.ptr(), slots);
  }
  if (!needs_gradient(slots)) return entry.arguments->call(entry.op.ptr(), slots);
  return checked(PyObject_CallOneArg(entry.record.ptr(), entry.arguments->named(slots).ptr()));
}

PyObject* call_entry(const Entry& entry, const Given& given) {
  return raising([&] {
    const Slots slots = entry.arguments->parse(given);
    const int group = entry.arguments->group();
    if (group < 0) return enter(entry, slots);
    return breaking_if_interrupted(slots[static_cast<std::size_t>(group)],
                                   [&] { return enter(entry, slots); });
  });
}

}  // namespace

py::object make_entry(std::shared_ptr<Arguments> arguments, py::object op, py::object record,
                      py::object custom, py::object detour) {
  auto made = std::make_unique<Entry>(Entry{std::move(arguments), std::move(op), std::move(record),
                                            std::move(custom), std::move(detour)});
  return Callable<Entry>::make<call_entry>("tpkernels._C.calls.entry", std::move(made));
}

}  // namespace tpkernels::calls
