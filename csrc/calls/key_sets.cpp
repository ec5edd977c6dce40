#include "calls/key_sets.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <functional>
#include <optional>

#include "calls/python.h"

namespace tpkernels::calls {
namespace {

namespace py = pybind11;

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

ThreadKeys raw_keys_of_thread(void* libc10) {
  thread_local const void* const mine = dlsym(libc10, kThreadKeys);
  return {word_at(mine, 0), word_at(mine, kWord)};
}

// The only place below `end` that fits.
std::optional<std::size_t> only_place(std::size_t end,
                                      const std::function<bool(std::size_t)>& fits) {
  std::optional<std::size_t> found;
  for (std::size_t at = 0; at + kWord <= end; at += kWord) {
    if (!fits(at)) continue;
    if (found) return std::nullopt;
    found = at;
  }
  return found;
}

std::optional<Places> find(const std::vector<KeySample>& samples, ThreadKeys thread) {
  void* const libc10 = dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD);
  if (!libc10 || !dlsym(libc10, kThreadKeys)) return std::nullopt;
  const bool differ = std::any_of(samples.begin(), samples.end(), [&](const KeySample& sample) {
    return sample.keys != samples[0].keys;
  });
  if (!differ) return std::nullopt;
  const auto object_bytes =
      static_cast<std::size_t>(Py_TYPE(samples[0].tensor.ptr())->tp_basicsize);
  const auto impl = only_place(object_bytes, [&](std::size_t at) {
    return std::all_of(samples.begin(), samples.end(), [&](const KeySample& sample) {
      return word_at(sample.tensor.ptr(), at) == sample.impl;
    });
  });
  if (!impl) return std::nullopt;
  const auto keys = only_place(kImplBytes, [&](std::size_t at) {
    return std::all_of(samples.begin(), samples.end(), [&](const KeySample& sample) {
      return word_at(impl_of(sample.tensor.ptr(), *impl), at) == sample.keys;
    });
  });
  if (!keys) return std::nullopt;
  const ThreadKeys raw = raw_keys_of_thread(libc10);
  return Places{
      libc10, {raw.included ^ thread.included, raw.excluded ^ thread.excluded}, *impl, *keys};
}

}  // namespace

std::uint64_t bits_of(PyObject* keys) {
  static PyObject* const raw = PyUnicode_InternFromString("raw_repr");
  const auto bits = checked(PyObject_CallMethodNoArgs(keys, raw));
  return PyLong_AsUnsignedLongLongMask(bits.ptr());
}

ThreadKeys keys_of_thread() {
  if (places) {
    const ThreadKeys raw = raw_keys_of_thread(places->libc10);
    return {raw.included ^ places->defaults.included, raw.excluded ^ places->defaults.excluded};
  }
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

}  // namespace tpkernels::calls
