#include "calls/kernel.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "calls/caller.h"
#include "calls/python.h"

namespace tpkernels::calls {
namespace {

struct KernelState {
  std::shared_ptr<Arguments> arguments;
  py::object plan, run, on_failure, check;
  bool overwrites;
};

bool is_deterministic() {
  static PyObject* const flag = import_static("torch", "are_deterministic_algorithms_enabled");
  return is_true(flag);
}

// Runs a planned call in the extension. Returns null, without a Python error, if Python must run
// the call: to report why the group cannot be used, or to plan the call again.
py::object run_bound(const KernelState& kernel, GroupCalls& group, const PlannedCall& planned,
                     const Slots& slots, const Tensor& x) {
  std::optional<GroupCalls::CallGuard> guard;
  try {
    guard.emplace(group);
  } catch (const py::error_already_set& error) {  // a signal handler raised before the call
    planned.call.attr("group").attr("break_between_calls")(error.value());
    throw;
  }
  if (!guard->can_run || group.untuned_in_capture || planned.generation != group.generation()) {
    return {};
  }
  const RecordCaller recorded;
  try {
    return planned.bound->run(slots, x);
  } catch (...) {
    set_python_error(std::current_exception());
  }
  py::error_already_set error;
  kernel.on_failure(planned.call, error.value());
  throw error;
}

bool requires_grad(PyObject* value) {
  if (PyList_Check(value) || PyTuple_Check(value)) {
    PyObject** const items = PySequence_Fast_ITEMS(value);
    return std::any_of(items, items + PySequence_Fast_GET_SIZE(value), requires_grad);
  }
  static PyObject* const name = PyUnicode_InternFromString("requires_grad");
  return is_tensor(value) && checked(PyObject_GetAttr(value, name)).is(py::bool_(true));
}

// Raises if `_X` is called with an input that requires a gradient. The gradient would be lost, or
// the torch functions inside an algorithm would record a wrong one.
void refuse_gradient(const KernelState& kernel, const Slots& slots) {
  if (!needs_gradient(slots)) return;
  const std::string& op = kernel.arguments->op();
  const std::string message = "torch.ops.tpkernels._" + op +
                              " records no gradient; call tpkernels." + op +
                              ", or torch.ops.tpkernels." + op;
  PyErr_SetString(PyExc_NotImplementedError, message.c_str());
  throw py::error_already_set();
}

// Notifies autograd that x is overwritten: a value of x saved for the backward is stale.
void increment_version(PyObject* x) {
  static PyObject* const increment = import_static("torch.autograd.graph", "increment_version");
  static PyObject* const is_inference = PyUnicode_InternFromString("is_inference");
  if (checked(PyObject_CallMethodNoArgs(x, is_inference)).is(py::bool_(true))) return;
  checked(PyObject_CallOneArg(increment, x));
}

PyObject* get_group_argument(const KernelState& kernel, const Slots& slots) {
  return slots[static_cast<std::size_t>(kernel.arguments->group())];
}

// The result of a plan cache lookup.
struct Lookup {
  bool has_key;
  Tensor x;                              // only valid with a key
  GroupCalls* group;                     // null without a key, or if the group is not set up
  std::shared_ptr<PlannedCall> planned;  // null if the call is not cached

  bool runs_in_extension(const Slots& slots) const {
    return planned && planned->bound && !profiling() && planned->bound->accepts(slots, x);
  }
};

// The key of a call. Consecutive calls of a thread reuse its memory. A nested call, for example in
// a finalizer, allocates a separate buffer.
class Key {
 public:
  Key() { bytes.swap(spare()); }
  ~Key() { bytes.swap(spare()); }
  Key(const Key&) = delete;
  Key& operator=(const Key&) = delete;

  std::string bytes;

 private:
  static std::string& spare() {
    thread_local std::string buffer;
    return buffer;
  }
};

Lookup look_up(const KernelState& kernel, const Slots& slots, std::string* key) {
  Lookup lookup{};
  lookup.has_key = kernel.arguments->key(slots, key, &lookup.x);
  lookup.group = lookup.has_key ? GroupCalls::lookup(get_group_argument(kernel, slots)) : nullptr;
  if (lookup.group) lookup.planned = lookup.group->find(*key);
  return lookup;
}

py::object call(const KernelState& kernel, const Slots& slots) {
  refuse_gradient(kernel, slots);
  Key key;
  const Lookup lookup = look_up(kernel, slots, &key.bytes);
  std::shared_ptr<PlannedCall> planned = lookup.planned;
  if (!kernel.check.is_none() && !(lookup.has_key && is_contiguous(lookup.x))) {
    kernel.check(py::handle(slots[0]));
  }
  if (kernel.overwrites) increment_version(slots[0]);
  if (lookup.runs_in_extension(slots)) {
    if (py::object result = run_bound(kernel, *lookup.group, *planned, slots, lookup.x)) {
      return result;
    }
  }
  const py::object arguments = kernel.arguments->to_named_tuple(slots);
  if (!planned) {
    const auto plan = kernel.plan(arguments).cast<std::pair<py::object, py::object>>();
    const auto generation = plan.first.attr("generation").cast<std::uint64_t>();
    planned = std::make_shared<PlannedCall>(PlannedCall{plan.first, nullptr, generation});
    if (!plan.second.is_none()) planned->bound = plan.second.cast<std::shared_ptr<BoundCall>>();
    GroupCalls* const group =
        lookup.has_key ? GroupCalls::lookup(get_group_argument(kernel, slots)) : nullptr;
    if (group) group->insert(key.bytes, planned);
  }
  const RecordCaller recorded;
  return kernel.run(planned->call, arguments);
}

PyObject* call_kernel(const KernelState& kernel, const CallArgs& args) {
  return return_or_set_error([&] {
    const Slots slots = kernel.arguments->parse(args);
    return breaking_if_interrupted(get_group_argument(kernel, slots),
                                   [&] { return call(kernel, slots); });
  });
}

}  // namespace

bool needs_gradient(const Slots& slots) {
  static PyObject* const enabled = import_static("torch", "is_grad_enabled");
  return is_true(enabled) && std::any_of(slots.begin(), slots.end(), requires_grad);
}

bool profiling() {
  static const Global enabled("torch.autograd.profiler", "_is_profiler_enabled");
  return enabled.value() != Py_False;
}

py::object make_kernel(std::shared_ptr<Arguments> arguments, py::object plan, py::object run,
                       py::object on_failure, py::object check, bool overwrites) {
  auto state = std::make_unique<KernelState>(KernelState{std::move(arguments), std::move(plan),
                                                         std::move(run), std::move(on_failure),
                                                         std::move(check), overwrites});
  return Callable<KernelState>::make<call_kernel>("tpkernels._C.calls.kernel", std::move(state));
}

void Alarm::unwatch(std::uint64_t flag) {
  flags_.erase(std::remove(flags_.begin(), flags_.end(), flag), flags_.end());
}

bool Alarm::is_set() const {
  return raised || std::any_of(flags_.begin(), flags_.end(), [](std::uint64_t flag) {
           return *reinterpret_cast<const volatile std::int64_t*>(flag) != 0;
         });
}

PythonCall::PythonCall(std::shared_ptr<const Arguments> arguments, py::object execute,
                       py::object call, std::shared_ptr<const Alarm> alarm,
                       std::optional<bool> deterministic)
    : arguments_(std::move(arguments)),
      execute_(std::move(execute)),
      call_(std::move(call)),
      alarm_(std::move(alarm)),
      deterministic_(deterministic) {}

// A kernel may still fail after this check. The next call then detects the failure.
bool PythonCall::accepts(const Slots&, const Tensor&) const {
  return !(alarm_ && alarm_->is_set()) &&
         (!deterministic_ || *deterministic_ == is_deterministic());
}

py::object PythonCall::run(const Slots& slots, const Tensor&) const {
  const py::object arguments = arguments_->to_named_tuple(slots);
  PyObject* const args[] = {call_.ptr(), arguments.ptr()};
  return checked(PyObject_Vectorcall(execute_.ptr(), args, 2, nullptr));
}

}  // namespace tpkernels::calls
