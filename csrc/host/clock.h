// The clock of waits.
#pragma once

#include <chrono>

namespace tpkernels::host {

// Microseconds from an arbitrary begin, the same for all threads.
inline double now_us() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::micro>(since).count();
}

}  // namespace tpkernels::host
