#include "calls/lock.h"

#include <chrono>
#include <stdexcept>

#include "binding_errors.h"

namespace tpkernels::calls {
namespace {

constexpr std::chrono::milliseconds kSlice{20};  // between looks for signals

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
    std::uint64_t seen = 0;
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      seen = releases_;
    }
    {
      const GilReleased released;  // nobody can have released it since `seen`
      std::unique_lock<std::mutex> guard(mutex_);
      freed_.wait_for(guard, kSlice, [&] { return releases_ != seen; });
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
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    ++releases_;
  }
  freed_.notify_one();
}

}  // namespace tpkernels::calls
