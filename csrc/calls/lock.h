// A lock that its thread may take again, as threading.RLock, but without a Python call where it is
// free. Its state changes under the GIL only; those who wait without it sleep on a word.
#pragma once

#include <pybind11/pybind11.h>

#include "host/wait.h"

namespace tpkernels::calls {

class Lock {
 public:
  // False: another thread has it, and the caller does not want to wait. Throws error_already_set
  // where a signal handler raises during the wait.
  bool acquire(bool blocking = true);
  // Throws std::runtime_error where this thread does not have it.
  void release();

 private:
  void wait();

  unsigned long owner_ = 0;
  int depth_ = 0;
  int waiting_ = 0;
  host::Signal released_{};  // counts the releases that somebody waited for
};

}  // namespace tpkernels::calls
