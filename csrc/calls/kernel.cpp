#include "calls/kernel.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "calls/python.h"

namespace tpkernels::calls {
namespace {

struct KernelState {
  std::shared_ptr<Arguments> arguments;
  py::object plan, run, failed, check;
  bool overwrites;
};

bool deterministic_now() {
  static PyObject* const flag = lasting("torch", "are_deterministic_algorithms_enabled");
  return is_true(flag);
}

// Runs a planned call in the extension. Null without a Python error: Python is to run it, because
// the group cannot be used, and Python says why, or the call is to be planned anew.
py::object run_bound(const KernelState& kernel, Turns& turns, const Planned& planned,
                     const Slots& slots, const Tensor& x) {
  std::optional<Turns::Turn> turn;
  try {
    turn.emplace(turns);
  } catch (const py::error_already_set& error) {  // of a signal handler: the call is not made
    planned.call.attr("group").attr("break_between_calls")(error.value());
    throw;
  }
  if (!turn->taken || turns.untuned_in_capture || planned.generation != turns.generation()) {
    return {};
  }
  try {
    return planned.bound->run(slots, x);
  } catch (...) {
    set_python_error(std::current_exception());
  }
  py::error_already_set error;
  kernel.failed(planned.call, error.value());
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

// `_X` would lose a gradient, or torch's functions in the algorithms would record one of their own.
void refuse_gradient(const KernelState& kernel, const Slots& slots) {
  if (!needs_gradient(slots)) return;
  const std::string& op = kernel.arguments->op();
  const std::string text = "torch.ops.tpkernels._" + op + " records no gradient; call tpkernels." +
                           op + ", or torch.ops.tpkernels." + op;
  PyErr_SetString(PyExc_NotImplementedError, text.c_str());
  throw py::error_already_set();
}

// Tells autograd that x is overwritten: what a backward has saved of it is stale.
void increment_version(PyObject* x) {
  static PyObject* const increment = lasting("torch.autograd.graph", "increment_version");
  static PyObject* const is_inference = PyUnicode_InternFromString("is_inference");
  if (checked(PyObject_CallMethodNoArgs(x, is_inference)).is(py::bool_(true))) return;
  checked(PyObject_CallOneArg(increment, x));
}

PyObject* group_of(const KernelState& kernel, const Slots& slots) {
  return slots[static_cast<std::size_t>(kernel.arguments->group())];
}

// What is known of a call: its x, where it can be read; and its plan, where it has been planned.
struct Found {
  bool has_key;
  Tensor x;
  Turns* turns;
  std::shared_ptr<Planned> planned;

  bool runs_in_extension(const Slots& slots) const {
    return planned && planned->bound && !profiling() && planned->bound->takes(slots, x);
  }
};

// The key of a call. Its memory is the thread's, for the next call; a call that Python code makes
// meanwhile, such as a finalizer, has some of its own.
class Key {
 public:
  Key() { text.swap(spare()); }
  ~Key() { text.swap(spare()); }
  Key(const Key&) = delete;
  Key& operator=(const Key&) = delete;

  std::string text;

 private:
  static std::string& spare() {
    thread_local std::string text;
    return text;
  }
};

Found find(const KernelState& kernel, const Slots& slots, std::string* key) {
  Found found{};
  found.has_key = kernel.arguments->key(slots, key, &found.x);
  found.turns = found.has_key ? Turns::of(group_of(kernel, slots)) : nullptr;
  if (found.turns) found.planned = found.turns->find(*key);
  return found;
}

py::object call(const KernelState& kernel, const Slots& slots) {
  refuse_gradient(kernel, slots);
  Key key;
  const Found found = find(kernel, slots, &key.text);
  std::shared_ptr<Planned> planned = found.planned;
  if (!kernel.check.is_none() && !(found.has_key && is_contiguous(found.x))) {
    kernel.check(py::handle(slots[0]));
  }
  if (kernel.overwrites) increment_version(slots[0]);
  if (found.runs_in_extension(slots)) {
    if (py::object result = run_bound(kernel, *found.turns, *planned, slots, found.x)) {
      return result;
    }
  }
  const py::object arguments = kernel.arguments->named(slots);
  if (!planned) {
    const auto made = kernel.plan(arguments).cast<std::pair<py::object, py::object>>();
    const auto generation = made.first.attr("generation").cast<std::uint64_t>();
    planned = std::make_shared<Planned>(Planned{made.first, nullptr, generation});
    if (!made.second.is_none()) planned->bound = made.second.cast<std::shared_ptr<Bound>>();
    Turns* const turns = found.has_key ? Turns::of(group_of(kernel, slots)) : nullptr;
    if (turns) turns->remember(key.text, planned);
  }
  return kernel.run(planned->call, arguments);
}

PyObject* call_kernel(const KernelState& kernel, const Given& given) {
  return raising([&] {
    const Slots slots = kernel.arguments->parse(given);
    return breaking_if_interrupted(group_of(kernel, slots), [&] { return call(kernel, slots); });
  });
}

}  // namespace

bool needs_gradient(const Slots& slots) {
  static PyObject* const enabled = lasting("torch", "is_grad_enabled");
  return is_true(enabled) && std::any_of(slots.begin(), slots.end(), requires_grad);
}

bool profiling() {
  static const Global enabled("torch.autograd.profiler", "_is_profiler_enabled");
  return enabled.value() != Py_False;
}

py::object make_kernel(std::shared_ptr<Arguments> arguments, py::object plan, py::object run,
                       py::object failed, py::object check, bool overwrites) {
  auto made = std::make_unique<KernelState>(KernelState{std::move(arguments), std::move(plan),
                                                        std::move(run), std::move(failed),
                                                        std::move(check), overwrites});
  return Callable<KernelState>::make<call_kernel>("tpkernels._C.calls.kernel", std::move(made));
}

void Alarm::unwatch(std::uint64_t word) {
  words_.erase(std::remove(words_.begin(), words_.end(), word), words_.end());
}

bool Alarm::rings() const {
  return raised || std::any_of(words_.begin(), words_.end(), [](std::uint64_t word) {
           return *reinterpret_cast<const volatile std::int64_t*>(word) != 0;
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

// It may ring after this, too: kernels fail at any time, and the next call finds it.
bool PythonCall::takes(const Slots&, const Tensor&) const {
  return !(alarm_ && alarm_->rings()) &&
         (!deterministic_ || *deterministic_ == deterministic_now());
}

py::object PythonCall::run(const Slots& slots, const Tensor&) const {
  const py::object given = arguments_->named(slots);
  PyObject* const both[] = {call_.ptr(), given.ptr()};
  return checked(PyObject_Vectorcall(execute_.ptr(), both, 2, nullptr));
}

}  // namespace tpkernels::calls
