#include "calls/shortcut.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <functional>
#include <optional>

#include "calls/kernel.h"
#include "calls/product.h"
#include "calls/python.h"
#include "calls/tensor.h"

namespace tpkernels::calls {
namespace {

// Where torch keeps its key sets.

constexpr const char* kThreadKeys = "_ZN3c104impl26raw_local_dispatch_key_setE";
constexpr std::size_t kWord = sizeof(std::uint64_t);
constexpr std::size_t kImplBytes = 208;  // of TensorImpl in torch 2.11 to 2.13

struct Places {
  void* libc10;
  ThreadKeys defaults;  // are stored as zero
  std::size_t impl;     // bytes from the begin of the Python object
  std::size_t keys;     // bytes from the begin of the TensorImpl
};

std::optional<Places> places;

std::uint64_t word_at(const void* begin, std::size_t bytes) {
  std::uint64_t word = 0;
  std::memcpy(&word, static_cast<const std::byte*>(begin) + bytes, kWord);
  return word;
}

const void* impl_of(const void* tensor, std::size_t place) {
  return reinterpret_cast<const void*>(word_at(tensor, place));
}

// `defaults` are stored as zero.
ThreadKeys read_keys_of_thread(void* libc10, ThreadKeys defaults) {
  thread_local const void* const mine = dlsym(libc10, kThreadKeys);
  return {word_at(mine, 0) ^ defaults.first, word_at(mine, kWord) ^ defaults.second};
}

// The only place below `end` at which the word that `fits` says is found in every sample.
std::optional<std::size_t> only_place(
    const std::vector<KeySample>& samples, std::size_t end,
    const std::function<bool(const KeySample&, std::size_t)>& fits) {
  std::optional<std::size_t> found;
  for (std::size_t at = 0; at + kWord <= end; at += kWord) {
    const bool all = std::all_of(samples.begin(), samples.end(),
                                 [&](const KeySample& sample) { return fits(sample, at); });
    if (!all) continue;
    if (found) return std::nullopt;
    found = at;
  }
  return found;
}

std::optional<Places> find(const std::vector<KeySample>& samples, ThreadKeys thread) {
  void* const libc10 = dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD);
  if (!libc10 || !dlsym(libc10, kThreadKeys)) return std::nullopt;
  const bool differ = std::any_of(samples.begin(), samples.end(), [&](const KeySample& sample) {
    return std::get<2>(sample) != std::get<2>(samples[0]);
  });
  if (!differ) return std::nullopt;
  const auto object_bytes =
      static_cast<std::size_t>(Py_TYPE(std::get<0>(samples[0]).ptr())->tp_basicsize);
  const auto impl = only_place(samples, object_bytes, [](const KeySample& sample, std::size_t at) {
    return word_at(std::get<0>(sample).ptr(), at) == std::get<1>(sample);
  });
  if (!impl) return std::nullopt;
  const auto keys = only_place(samples, kImplBytes, [&](const KeySample& sample, std::size_t at) {
    return word_at(impl_of(std::get<0>(sample).ptr(), *impl), at) == std::get<2>(sample);
  });
  if (!keys) return std::nullopt;
  return Places{libc10, read_keys_of_thread(libc10, thread), *impl, *keys};
}

std::uint64_t bits_of(PyObject* keys) {
  static PyObject* const raw = PyUnicode_InternFromString("raw_repr");
  const auto bits = checked(PyObject_CallMethodNoArgs(keys, raw));
  return PyLong_AsUnsignedLongLongMask(bits.ptr());
}

// What needs more than a kernel.

bool contains(const std::vector<std::uint64_t>& sets, std::uint64_t keys) {
  return std::find(sets.begin(), sets.end(), keys) != sets.end();
}

// Whether a dual tensor may be among the arguments.
bool forward_mode() {
  static const Global level("torch.autograd.forward_ad", "_current_level");
  return !level.value() || PyLong_AsLong(level.value()) >= 0;
}

bool is_true(PyObject* function) {
  return checked(PyObject_CallNoArgs(function)).is(py::bool_(true));
}

bool requires_grad(PyObject* value) {
  if (PyList_Check(value) || PyTuple_Check(value)) {
    PyObject** const items = PySequence_Fast_ITEMS(value);
    return std::any_of(items, items + PySequence_Fast_GET_SIZE(value), requires_grad);
  }
  static PyObject* const name = PyUnicode_InternFromString("requires_grad");
  return is_tensor(value) && checked(PyObject_GetAttr(value, name)).is(py::bool_(true));
}

// Whether one of the values, or of the elements of a list, needs a gradient, or may be a dual
// tensor.
bool needs_gradient(PyObject* const* values, std::size_t count) {
  static PyObject* const enabled = lasting("torch", "is_grad_enabled");
  if (forward_mode()) return true;
  return is_true(enabled) && std::any_of(values, values + count, requires_grad);
}

// Tells autograd that x is overwritten.
void increment_version(PyObject* x) {
  static PyObject* const increment = lasting("torch._C", "_increment_version");
  const auto one = checked(PyTuple_Pack(1, x));
  checked(PyObject_CallOneArg(increment, one.ptr()));
}

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
    return std::get<0>(state) == keys.first && std::get<1>(state) == keys.second;
  });
  return found == states.end() || is_true(functions) ? nullptr : &*found;
}

// Whether all tensors are plain; adds their keys to `keys`.
bool is_plain(const std::vector<std::uint64_t>& sets, PyObject* value, std::uint64_t* keys) {
  if (PyList_Check(value) || PyTuple_Check(value)) {
    PyObject** const items = PySequence_Fast_ITEMS(value);
    return std::all_of(items, items + PySequence_Fast_GET_SIZE(value),
                       [&](PyObject* item) { return is_plain(sets, item, keys); });
  }
  if (!is_tensor(value)) return true;
  if (!is_of_torch(value)) return false;
  const std::uint64_t found = keys_of_tensor(value);
  *keys |= found;
  return contains(sets, found);
}

// Whether all is plain for an op with these arguments.
bool are_plain(const std::vector<PlainState>& states, PyObject* const* values, std::size_t count,
               std::uint64_t* keys) {
  const PlainState* const state = state_of_thread(states);
  if (!state) return false;
  const auto& [included, excluded, records, sets] = *state;
  const auto plain = [&sets = sets, keys](PyObject* value) { return is_plain(sets, value, keys); };
  return std::all_of(values, values + count, plain) && !(records && needs_gradient(values, count));
}

// The callables.

struct Shortcut {
  std::shared_ptr<const Arguments> arguments;
  py::object kernel;
  py::object op;
  std::vector<PlainState> states;
  std::uint64_t versioned;
  bool overwrites;
};

// x @ w, where w is packed; null: the op is to be called.
py::object packed_product(const Slots& slots) {
  if (slots[2] != Py_None || slots[3] != Py_None || !is_tensor(slots[1])) return {};
  Tensor x{}, w{};
  if (profiling() || !read(slots[1], &w) || w.ndim != kPackedDims || !read(slots[0], &x) ||
      x.ndim != 2 || x.shape[0] == 0) {
    return {};
  }
  return matmul(py::reinterpret_borrow<py::object>(slots[0]), slots[1]);
}

// Null without a Python error: the op is to be called.
py::object run(const Shortcut& shortcut, PyObject* args, PyObject* kwargs) {
  const Slots slots = shortcut.arguments->parse(args, kwargs);
  std::uint64_t keys = 0;
  if (!is_tensor(slots[0]) || !are_plain(shortcut.states, slots.data(), slots.size(), &keys)) {
    return {};
  }
  if (shortcut.kernel.is_none()) return packed_product(slots);
  if (shortcut.overwrites && (keys & shortcut.versioned)) increment_version(slots[0]);
  return run_warm(shortcut.kernel, slots);
}

// The call may not have been made, where an interrupt comes: all of the op's Python code is below.
void leave(const Shortcut& shortcut, PyObject* args, PyObject* kwargs,
           const py::error_already_set& error) {
  static PyObject* const breaks = lasting("tpkernels.groups", "break_if_interrupted");
  const int group = shortcut.arguments->index("group");
  if (group < 0 || error.matches(PyExc_TypeError)) return;
  const Slots slots = shortcut.arguments->parse(args, kwargs);
  PyObject* const name = slots[static_cast<std::size_t>(group)];
  checked(PyObject_CallFunctionObjArgs(breaks, name, error.value().ptr(), nullptr));
}

PyObject* call_shortcut(PyObject* self, PyObject* args, PyObject* kwargs) {
  const auto& shortcut = state_of<Shortcut>(self);
  return raising([&] {
    try {
      if (py::object result = run(shortcut, args, kwargs)) return result;
      return checked(PyObject_Call(shortcut.op.ptr(), args, kwargs));
    } catch (const py::error_already_set& error) {
      leave(shortcut, args, kwargs, error);
      throw;
    }
  });
}

using PlainStates = std::vector<PlainState>;

PyObject* call_is_plain(PyObject* self, PyObject* args, PyObject*) {
  return raising([&] {
    std::uint64_t keys = 0;
    const auto count = static_cast<std::size_t>(PyTuple_GET_SIZE(args));
    PyObject** const values = PySequence_Fast_ITEMS(args);
    return py::object(py::bool_(are_plain(state_of<PlainStates>(self), values, count, &keys)));
  });
}

struct Above {
  py::object kernel;
  py::object otherwise;
  std::uint64_t below;
  std::vector<std::uint64_t> plain;
  bool overwrites;

  bool takes(PyObject* args) const {
    if (!contains(plain, bits_of(PyTuple_GET_ITEM(args, 0)) & below)) return false;
    // The ops have no tensors that are given by keyword only.
    const auto count = static_cast<std::size_t>(PyTuple_GET_SIZE(args));
    return !needs_gradient(&PyTuple_GET_ITEM(args, 0) + 1, count - 1);
  }
};

PyObject* call_above(PyObject* self, PyObject* args, PyObject* kwargs) {
  const auto& above = state_of<Above>(self);
  return raising([&] {
    if (!above.takes(args)) return checked(PyObject_Call(above.otherwise.ptr(), args, kwargs));
    if (above.overwrites) increment_version(PyTuple_GET_ITEM(args, 1));
    const auto rest = checked(PyTuple_GetSlice(args, 1, PyTuple_GET_SIZE(args)));
    return checked(PyObject_Call(above.kernel.ptr(), rest.ptr(), kwargs));
  });
}

}  // namespace

ThreadKeys keys_of_thread() {
  if (places) return read_keys_of_thread(places->libc10, places->defaults);
  static PyObject* const included = lasting("torch._C", "_dispatch_tls_local_include_set");
  static PyObject* const excluded = lasting("torch._C", "_dispatch_tls_local_exclude_set");
  return {bits_of(checked(PyObject_CallNoArgs(included)).ptr()),
          bits_of(checked(PyObject_CallNoArgs(excluded)).ptr())};
}

std::uint64_t keys_of_tensor(PyObject* tensor) {
  if (places) return word_at(impl_of(tensor, places->impl), places->keys);
  static PyObject* const keys = lasting("torch._C", "_dispatch_keys");
  return bits_of(checked(PyObject_CallOneArg(keys, tensor)).ptr());
}

bool find_key_sets(const std::vector<KeySample>& samples, ThreadKeys thread) {
  places = samples.empty() ? std::nullopt : find(samples, thread);
  return places.has_value();
}

py::object make_is_plain(std::vector<PlainState> states) {
  return Callable<PlainStates>::make("tpkernels._C.calls.IsPlain", &call_is_plain,
                                     std::make_unique<PlainStates>(std::move(states)));
}

py::object make_shortcut(std::shared_ptr<Arguments> arguments, py::object kernel, py::object op,
                         std::vector<PlainState> states, std::uint64_t versioned, bool overwrites) {
  auto made =
      std::make_unique<Shortcut>(Shortcut{std::move(arguments), std::move(kernel), std::move(op),
                                          std::move(states), versioned, overwrites});
  return Callable<Shortcut>::make("tpkernels._C.calls.Shortcut", &call_shortcut, std::move(made));
}

py::object make_above(py::object kernel, py::object otherwise, std::uint64_t below,
                      std::vector<std::uint64_t> plain, bool overwrites) {
  auto made = std::make_unique<Above>(
      Above{std::move(kernel), std::move(otherwise), below, std::move(plain), overwrites});
  return Callable<Above>::make("tpkernels._C.calls.Above", &call_above, std::move(made));
}

}  // namespace tpkernels::calls
