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

// Whether a dual tensor may be among the arguments.
bool forward_mode() {
  static const Global level("torch.autograd.forward_ad", "_current_level");
  return !level.value() || PyLong_AsLong(level.value()) >= 0;
}

// Whether torch sees no more in a value than its own tensors, which do not wrap others.
bool is_plain(PyObject* value) {
  static PyObject* const types[] = {lasting("torch", "Tensor"), lasting("torch.nn", "Parameter")};
  if (PyList_Check(value) || PyTuple_Check(value)) {
    PyObject** const items = PySequence_Fast_ITEMS(value);
    return std::all_of(items, items + PySequence_Fast_GET_SIZE(value), is_plain);
  }
  const auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(value));
  return type == types[0] || type == types[1] || !is_tensor(value);
}

// Whether only the dispatcher can tell who needs a gradient, or somebody wants to see `X`, such as
// `torch.fx`, whose values are no tensors.
bool needs_dispatcher(const Slots& slots) {
  static PyObject* const transforms = lasting("torch._C", "_are_functorch_transforms_active");
  static PyObject* const functions = lasting("torch._C", "_is_torch_function_mode_enabled");
  return !is_tensor(slots[0]) || profiling() || is_true(transforms) || is_true(functions) ||
         !std::all_of(slots.begin(), slots.end(), is_plain);
}

py::object enter(const Entry& entry, const Slots& slots) {
  if (!entry.custom.is_none() && is_tensor(slots[0]) &&
      !entry.arguments->weights_are_tensors(slots)) {
    return checked(PyObject_CallOneArg(entry.custom.ptr(), entry.arguments->named(slots).ptr()));
  }
  if (!entry.detour.is_none() && needs_dispatcher(slots)) {
    return entry.arguments->call(entry.detour.ptr(), slots);
  }
  if (!forward_mode() && !needs_gradient(slots))
    return entry.arguments->call(entry.op.ptr(), slots);
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
