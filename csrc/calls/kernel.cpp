#include "calls/kernel.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "calls/callable.h"
#include "calls/errors.h"
#include "calls/key_sets.h"
#include "calls/python.h"
#include "calls/turns.h"

namespace tpkernels::calls {
namespace {

namespace py = pybind11;

struct KernelState {
  std::shared_ptr<const Arguments> arguments;
  KernelFunctions functions;
};

struct AboveState {
  py::object kernel;
  py::object otherwise;
  PlainKeys keys;
  bool overwrites;
};

// Whether a dual tensor may be among the arguments.
bool forward_mode() {
  static const Global level("torch.autograd.forward_ad", "_current_level");
  return !level.value() || PyLong_AsLong(level.value()) >= 0;
}

bool grad_enabled() {
  static PyObject* const enabled = lasting("torch", "is_grad_enabled");
  return checked(PyObject_CallNoArgs(enabled)).is(py::bool_(true));
}

bool requires_grad(PyObject* value) {
  if (PyList_Check(value) || PyTuple_Check(value)) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) {
      if (requires_grad(PySequence_Fast_GET_ITEM(value, i))) return true;
    }
    return false;
  }
  static PyObject* const name = PyUnicode_InternFromString("requires_grad");
  if (!is_tensor(value)) return false;
  return checked(PyObject_GetAttr(value, name)).is(py::bool_(true));
}

// Has the group's turn as long as it lives, where `taken`.
class Turn {
 public:
  explicit Turn(Turns& turns) : turns_(turns), lock_(turns.lock()) {
    lock_->acquire();
    taken = turns.open && !turns.in_call;
    if (taken) turns.in_call = true;
  }
  ~Turn() {
    if (taken) turns_.in_call = false;
    lock_->release();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  bool taken;

 private:
  Turns& turns_;
  std::shared_ptr<Lock> lock_;  // that was taken: a fork has another
};

// Runs a planned call in the extension. Null without a Python error: Python is to run it, because
// the group cannot be used, and Python says why, or the call is to be planned anew.
py::object run_bound(const KernelState& kernel, Turns& turns, const Planned& planned,
                     const Slots& slots, const Tensor& x) {
  std::optional<Turn> turn;
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
  kernel.functions.failed(planned.call, error.value());
  throw error;
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

py::object call(const KernelState& kernel, PyObject* args, PyObject* kwargs) {
  const Slots slots = kernel.arguments->parse(args, kwargs);
  Key key;
  const Found found = find(kernel, slots, &key.text);
  std::shared_ptr<Planned> planned = found.planned;
  if (!kernel.functions.check.is_none() && !(found.has_key && is_contiguous(found.x))) {
    kernel.functions.check(py::handle(slots[0]));
  }
  if (found.runs_in_extension(slots)) {
    if (py::object result = run_bound(kernel, *found.turns, *planned, slots, found.x)) {
      return result;
    }
  }
  const py::object given = kernel.arguments->named(slots);
  if (!planned) {
    const auto made = kernel.functions.plan(given).cast<std::pair<py::object, py::object>>();
    const auto generation = made.first.attr("generation").cast<std::uint64_t>();
    planned = std::make_shared<Planned>(Planned{made.first, nullptr, generation});
    if (!made.second.is_none()) planned->bound = made.second.cast<std::shared_ptr<Bound>>();
    Turns* const turns = found.has_key ? Turns::of(group_of(kernel, slots)) : nullptr;
    if (turns) turns->remember(key.text, planned);
  }
  return kernel.functions.run(planned->call, given);
}

bool is_plain(const AboveState& above, PyObject* args) {
  const std::uint64_t rest = bits_of(PyTuple_GET_ITEM(args, 0)) & above.keys.below;
  const auto& plain = above.keys.plain;
  if (std::find(plain.begin(), plain.end(), rest) == plain.end()) return false;
  // The ops have no tensors that are given by keyword only.
  const auto count = static_cast<std::size_t>(PyTuple_GET_SIZE(args));
  return !needs_gradient(&PyTuple_GET_ITEM(args, 0) + 1, count - 1);
}

PyObject* call_kernel(PyObject* self, PyObject* args, PyObject* kwargs) {
  return raising([&] { return call(state_of<KernelState>(self), args, kwargs); });
}

PyObject* call_above(PyObject* self, PyObject* args, PyObject* kwargs) {
  const auto& above = state_of<AboveState>(self);
  return raising([&] {
    if (!is_plain(above, args)) {
      return checked(PyObject_Call(above.otherwise.ptr(), args, kwargs));
    }
    if (above.overwrites) increment_version(PyTuple_GET_ITEM(args, 1));
    const auto rest = checked(PyTuple_GetSlice(args, 1, PyTuple_GET_SIZE(args)));
    return checked(PyObject_Call(above.kernel.ptr(), rest.ptr(), kwargs));
  });
}

}  // namespace

bool needs_gradient(PyObject* const* values, std::size_t count) {
  if (forward_mode()) return true;
  return grad_enabled() && std::any_of(values, values + count, requires_grad);
}

bool profiling() {
  static const Global enabled("torch.autograd.profiler", "_is_profiler_enabled");
  return enabled.value() != Py_False;
}

void increment_version(PyObject* x) {
  static PyObject* const increment = lasting("torch._C", "_increment_version");
  const auto one = checked(PyTuple_Pack(1, x));
  checked(PyObject_CallOneArg(increment, one.ptr()));
}

py::object run_warm(const py::object& kernel, const Slots& slots) {
  const auto& state = state_of<KernelState>(kernel.ptr());
  Key key;
  const Found found = find(state, slots, &key.text);
  if (!found.runs_in_extension(slots)) return {};
  if (!state.functions.check.is_none() && !is_contiguous(found.x)) return {};
  if (py::object result = run_bound(state, *found.turns, *found.planned, slots, found.x)) {
    return result;
  }
  return state.functions.run(found.planned->call, state.arguments->named(slots));
}

py::object make_kernel(std::shared_ptr<const Arguments> arguments, KernelFunctions functions) {
  return Callable<KernelState>::make(
      "tpkernels._C.calls.Kernel", &call_kernel,
      std::make_unique<KernelState>(KernelState{std::move(arguments), std::move(functions)}));
}

py::object make_above(py::object kernel, py::object otherwise, PlainKeys keys, bool overwrites) {
  return Callable<AboveState>::make(
      "tpkernels._C.calls.Above", &call_above,
      std::make_unique<AboveState>(
          AboveState{std::move(kernel), std::move(otherwise), std::move(keys), overwrites}));
}

}  // namespace tpkernels::calls
