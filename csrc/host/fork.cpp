#include "host/fork.h"

#include <pthread.h>

#include <atomic>

namespace tpkernels::host {
namespace {

std::atomic<std::uint32_t> generation{0};

}  // namespace

std::uint32_t fork_generation() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { ++generation; });
  static_cast<void>(registered);
  return generation.load(std::memory_order_relaxed);
}

}  // namespace tpkernels::host
