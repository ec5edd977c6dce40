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
  py::object dispatched_op;
};

// Whether a dual tensor may be among the arguments.
bool in_forward_mode() {
  static const Global level("torch.autograd.forward_ad", "_current_level");
  return !level.value() || PyLong_AsLong(level.value()) >= 0;
}

// Whether a value contains no tensor subclass. Subclasses may wrap tensors or override functions.
bool is_plain(PyObject* value) {
  static PyObject* const types[] = {import_static("torch", "Tensor"),
                                    import_static("torch.nn", "Parameter")};
  if (PyList_Check(value) || PyTuple_Check(value)) {
    PyObject** const items = PySequence_Fast_ITEMS(value);
    return std::all_of(items, items + PySequence_Fast_GET_SIZE(value), is_plain);
  }
  const auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(value));
  return type == types[0] || type == types[1] || !is_tensor(value);
}

// Whether a call must go through the op `X`: only the dispatcher can decide about gradients, or a
// tracer such as `torch.fx`, with non-tensor values, must see `X`.
bool needs_dispatcher(const Slots& slots) {
  static PyObject* const transforms = import_static("torch._C", "_are_functorch_transforms_active");
  static PyObject* const functions = import_static("torch._C", "_is_torch_function_mode_enabled");
  return !is_tensor(slots[0]) || profiling() || is_true(transforms) || is_true(functions) ||
         !std::all_of(slots.begin(), slots.end(), is_plain);
}

py::object enter(const Entry& entry, const Slots& slots) {
  if (!entry.custom.is_none() && is_tensor(slots[0]) &&
      !entry.arguments->weights_are_tensors(slots)) {
    return checked(
        PyObject_CallOneArg(entry.custom.ptr(), entry.arguments->to_named_tuple(slots).ptr()));
  }
  if (!entry.dispatched_op.is_none() && needs_dispatcher(slots)) {
    return entry.arguments->call(entry.dispatched_op.ptr(), slots);
  }
  if (!in_forward_mode() && !needs_gradient(slots))
    return entry.arguments->call(entry.op.ptr(), slots);
  return checked(
      PyObject_CallOneArg(entry.record.ptr(), entry.arguments->to_named_tuple(slots).ptr()));
}

PyObject* call_entry(const Entry& entry, const CallArgs& args) {
  return return_or_set_error([&] {
    const Slots slots = entry.arguments->parse(args);
    const int group = entry.arguments->group();
    if (group < 0) return enter(entry, slots);
    return breaking_if_interrupted(slots[static_cast<std::size_t>(group)],
                                   [&] { return enter(entry, slots); });
  });
}

}  // namespace

py::object make_entry(std::shared_ptr<Arguments> arguments, py::object op, py::object record,
                      py::object custom, py::object dispatched_op) {
  auto entry = std::make_unique<Entry>(Entry{std::move(arguments), std::move(op), std::move(record),
                                             std::move(custom), std::move(dispatched_op)});
  return Callable<Entry>::make<call_entry>("tpkernels._C.calls.entry", std::move(entry));
}

}  // namespace tpkernels::calls
