// Problem: a process waits for a signal that a different process stores.
//
// Algorithm: the waiter polls, then yields its core between polls, then sleeps on a futex
// (`wait_until`).
//
// Invariant (no lost wake-up): the writer stores the signal, then reads the number of sleepers. A
// waiter increments the number of sleepers, then reads the signal. All accesses are sequentially
// consistent, so the writer sees the sleeper or the waiter sees the signal.
#pragma once

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <vector>

namespace tpkernels::host {

// Microseconds since an arbitrary time that is equal for all threads.
inline double now_us() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::micro>(since).count();
}

// Number of forks between the first process that called this function and the current process.
// Costs one load. An object that stores it at construction can detect its use in a fork.
inline std::uint32_t fork_generation() {
  static std::atomic<std::uint32_t> generation{0};
  static const int registered = pthread_atfork(nullptr, nullptr, [] { ++generation; });
  static_cast<void>(registered);
  return generation.load(std::memory_order_relaxed);
}

// Decides how long a waiter polls before it sleeps. A wake-up takes about 50 us, longer than most
// waits of a decode step. But polling through the waits of a training step would waste a core.
//
// A wait polls for at most `max_us` if most of the recent waits were shorter than `max_us`, and for
// at most kMinFraction of it otherwise. All polling together uses at most the fraction kMaxLoad of
// the time. The state is small, and there are no logarithms: after a model has evicted the caches,
// a wait costs mainly the memory that it touches.
class SpinBudget {
 public:
  // `max_us`: maximum polling time of one wait; 0 disables polling.
  explicit SpinBudget(double max_us) : max_us_(max_us) {}

  // Returns the polling time of a wait that begins at `now_us`.
  double begin(double now_us) {
    budget_us_ = std::min(kMaxBurst * max_us_, budget_us_ + kMaxLoad * (now_us - last_us_));
    last_us_ = now_us;
    return std::min(balance_ >= 0 ? max_us_ : kMinFraction * max_us_, budget_us_);
  }

  // Records a finished wait.
  void end(double waited_us, double polled_us) {
    budget_us_ -= polled_us;
    balance_ = waited_us < max_us_ ? std::min(balance_ + 1, kMaxBalance)
                                   : std::max(balance_ - 1, -kMaxBalance);
  }

 private:
  static constexpr double kMinFraction = 0.05;  // fraction of `max_us`: 100 us of 2 ms
  static constexpr double kMaxLoad = 0.5;       // fraction of the time
  static constexpr double kMaxBurst = 4;        // consecutive waits of `max_us`
  static constexpr int kMaxBalance = 8;         // about this many opposite waits switch the limit

  double max_us_;
  double budget_us_ = 0;
  double last_us_ = -1e9;      // long ago: the first waits may poll
  int balance_ = kMaxBalance;  // recent short waits minus long waits, clamped
};

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until `poll()` returns true. The caller has polled once without success.
// After `yield_us` it yields the core between polls. After the polling time that `budget` allows,
// it calls `sleep(start_us)` between polls. It also returns if `sleep` returns false.
template <class Poll, class Sleep>
void wait_until(SpinBudget& budget, double yield_us, Poll&& poll, Sleep&& sleep) {
  const double start_us = now_us();
  const double limit_us = budget.begin(start_us);
  double waited_us = 0;
  bool ready = false;
  while (true) {
    for (int i = 0; i < 32 && !ready && limit_us > 0; ++i) {
      cpu_relax();
      ready = poll();
    }
    waited_us = now_us() - start_us;
    if (ready || waited_us >= limit_us) break;
    if (waited_us >= yield_us) sched_yield();  // the peer may need this core
  }
  while (!ready && sleep(start_us)) ready = poll();
  waited_us = now_us() - start_us;
  budget.end(waited_us, std::min(waited_us, limit_us));
}

// The futex of a signal: its low 32 bits.
inline std::uint32_t* futex_half(std::atomic<std::uint64_t>* value) {
  auto* halves = reinterpret_cast<std::uint32_t*>(value);
  return __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? halves : halves + 1;
}

inline timespec as_timespec(double seconds) {
  timespec time{};
  time.tv_sec = static_cast<time_t>(seconds);
  time.tv_nsec = static_cast<long>((seconds - static_cast<double>(time.tv_sec)) * 1e9);
  return time;
}

// Sleeps until woken, for at most `seconds`. Returns immediately if the low half differs from
// `seen`.
inline void futex_wait(std::atomic<std::uint64_t>* value, std::uint32_t seen, double seconds) {
  const timespec limit = as_timespec(seconds);
  syscall(SYS_futex, futex_half(value), FUTEX_WAIT, seen, &limit, nullptr, 0);
}

// A 64-bit value that other processes wait for, on a separate cache line.
struct alignas(64) Signal {
  std::atomic<std::uint64_t> value;
  std::atomic<std::uint32_t> sleepers;

  // Wakes the sleepers. Call it after every change of `value`.
  void wake() {
    if (sleepers.load(std::memory_order_seq_cst) == 0) return;
    syscall(SYS_futex, futex_half(&value), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
};

// Whether the kernel supports FUTEX_WAITV (Linux 5.16) and permits this process to call it. Tests
// clear it.
inline std::atomic<bool> futex_waitv_works{true};

// struct futex_waitv of the kernel.
struct FutexWaiter {
  std::uint64_t seen;
  std::uint64_t address;
  std::uint32_t flags = 2;  // FUTEX2_SIZE_U32, shared between processes
  std::uint32_t reserved = 0;
};

// Sleeps until one of the signals is woken, for at most `seconds`. Does not sleep if
// `is_ready(value)` is true for any of them. If the kernel cannot wait for several signals, sleeps
// on the first signal for at most `fallback_seconds`, because the other signals may change during
// the sleep. Returns false if a Unix signal has interrupted the sleep.
template <class IsReady>
bool sleep_on(const std::vector<Signal*>& signals, double seconds, double fallback_seconds,
              IsReady&& is_ready) {
  constexpr long kWaitv = 449;  // system call number on all architectures
  constexpr std::size_t kMaxWaiters = 128;
  const std::size_t count = signals.size();
  std::vector<FutexWaiter> waiters;
  waiters.reserve(count);
  for (Signal* signal : signals) signal->sleepers.fetch_add(1, std::memory_order_seq_cst);
  bool must_sleep = true;
  for (Signal* signal : signals) {
    const std::uint64_t value = signal->value.load(std::memory_order_seq_cst);
    must_sleep = must_sleep && !is_ready(value);
    waiters.push_back({static_cast<std::uint32_t>(value),
                       reinterpret_cast<std::uint64_t>(futex_half(&signal->value))});
  }
  errno = 0;
  bool done = !must_sleep;
  if (must_sleep && count > 1 && count <= kMaxWaiters &&
      futex_waitv_works.load(std::memory_order_relaxed)) {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    timespec deadline = as_timespec(seconds + static_cast<double>(now.tv_nsec) * 1e-9);
    deadline.tv_sec += now.tv_sec;
    done = syscall(kWaitv, waiters.data(), count, 0, &deadline, CLOCK_MONOTONIC) >= 0 ||
           errno == EAGAIN || errno == EINTR || errno == ETIMEDOUT;
    // Not available: ENOSYS, or EPERM from a seccomp filter.
    if (!done) futex_waitv_works.store(false, std::memory_order_relaxed);
  }
  if (!done) {
    futex_wait(&signals[0]->value, static_cast<std::uint32_t>(waiters[0].seen),
               count == 1 ? seconds : std::min(seconds, fallback_seconds));
  }
  const bool interrupted = errno == EINTR;
  for (Signal* signal : signals) signal->sleepers.fetch_sub(1, std::memory_order_seq_cst);
  return !interrupted;
}

}  // namespace tpkernels::host
