#include "calls/lock.h"

#include <stdexcept>

#include "binding_errors.h"

namespace tpkernels::calls {
namespace {

constexpr double kSlice = 0.02;  // s between looks for signals

}  // namespace

bool Lock::acquire(bool blocking) {
  const unsigned long self = PyThread_get_thread_ident();
  if (owner_ == self) {
    ++depth_;
    return true;
  }
  if (owner_ != 0) {
    if (!blocking) return false;
    wait();
  }
  owner_ = self;
  depth_ = 1;
  return true;
}

void Lock::wait() {
  ++waiting_;
  while (owner_ != 0) {
    const std::uint64_t seen = released_.word.load();
    {
      const GilReleased released;  // nobody can have released the lock since `seen`
      host::sleep_on({&released_}, kSlice, 0, [=](std::uint64_t word) { return word != seen; });
    }
    if (PyErr_CheckSignals() != 0) {
      --waiting_;
      throw pybind11::error_already_set();
    }
  }
  --waiting_;
}

void Lock::release() {
  if (owner_ != PyThread_get_thread_ident()) {
    throw std::runtime_error("a lock that another thread has, or nobody, cannot be released");
  }
  if (--depth_ != 0) return;
  owner_ = 0;
  if (waiting_ == 0) return;
  ++released_.word;
  released_.wake();
}

}  // namespace tpkernels::calls
