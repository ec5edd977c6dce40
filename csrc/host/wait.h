// How a process waits for a word that another one stores: it polls, then yields its core between
// polls, then sleeps on a futex. `wait_until` is the one loop.
//
// Wake-up: whoever changes a word changes it first, then looks for sleepers. A waiter counts itself
// as a sleeper, then looks at the word. Both are sequentially consistent, so at least one sees the
// other.
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

// Microseconds from an arbitrary begin, the same for all threads.
inline double now_us() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::micro>(since).count();
}

// Number of forks between the process that first called this and the current one, at the cost of
// one load. An object that stores it at construction can later detect that it is used in a fork.
inline std::uint32_t fork_generation() {
  static std::atomic<std::uint32_t> generation{0};
  static const int registered = pthread_atfork(nullptr, nullptr, [] { ++generation; });
  static_cast<void>(registered);
  return generation.load(std::memory_order_relaxed);
}

// How long a waiter polls before it sleeps: waking from sleep takes some 50 us, longer than most
// waits of a decode step, while polling through the waits of a training step would waste a core.
//
// It polls for long where most of the last waits were shorter than that, and for kLeast of it
// otherwise. Polling never takes more than kShare of the time. No logarithms: what a wait costs is
// mostly the memory that it touches, when a model has emptied the caches.
class Patience {
 public:
  // `most_us` bounds one wait's polling; 0: none.
  explicit Patience(double most_us) : most_us_(most_us) {}

  // For how long to poll in a wait that begins at `now_us`.
  double begin(double now_us) {
    allowance_us_ = std::min(kBurst * most_us_, allowance_us_ + kShare * (now_us - last_us_));
    last_us_ = now_us;
    return std::min(balance_ >= 0 ? most_us_ : kLeast * most_us_, allowance_us_);
  }

  // The wait has ended, after `polled_us` of polling.
  void end(double waited_us, double polled_us) {
    allowance_us_ -= polled_us;
    balance_ =
        waited_us < most_us_ ? std::min(balance_ + 1, kMemory) : std::max(balance_ - 1, -kMemory);
  }

 private:
  static constexpr double kLeast = 0.05;  // of `most_us`: 100 us of 2 ms
  static constexpr double kShare = 0.5;   // of the time
  static constexpr double kBurst = 4;     // waits of `most_us` in a row
  static constexpr int kMemory = 8;       // waits after which another kind is the usual one

  double most_us_;
  double allowance_us_ = 0;
  double last_us_ = -1e9;  // long ago: the first waits may poll
  int balance_ = kMemory;  // of short waits and long ones
};

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Returns when `look()` is true, which has been false before: polls, yields the core between polls
// after `yield_us`, and from `patience`'s limit on calls `sleep(begin)` between looks, with the
// time at which the wait began. Also returns when that is false.
template <class Look, class Sleep>
void wait_until(Patience& patience, double yield_us, Look&& look, Sleep&& sleep) {
  const double start_us = now_us();
  const double limit_us = patience.begin(start_us);
  double waited_us = 0;
  bool over = false;
  while (true) {
    for (int i = 0; i < 32 && !over && limit_us > 0; ++i) {
      cpu_relax();
      over = look();
    }
    waited_us = now_us() - start_us;
    if (over || waited_us >= limit_us) break;
    if (waited_us >= yield_us) sched_yield();  // the peer may need this core
  }
  while (!over && sleep(start_us)) over = look();
  waited_us = now_us() - start_us;
  patience.end(waited_us, std::min(waited_us, limit_us));
}

// A futex is 32 bits wide: the low half of a word of 64.
inline std::uint32_t* futex_half(std::atomic<std::uint64_t>* word) {
  auto* halves = reinterpret_cast<std::uint32_t*>(word);
  return __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? halves : halves + 1;
}

inline timespec as_timespec(double seconds) {
  timespec time{};
  time.tv_sec = static_cast<time_t>(seconds);
  time.tv_nsec = static_cast<long>((seconds - static_cast<double>(time.tv_sec)) * 1e9);
  return time;
}

// Sleeps until woken, for at most `seconds`. Returns at once if the low half is no longer `seen`.
inline void futex_wait(std::atomic<std::uint64_t>* word, std::uint32_t seen, double seconds) {
  const timespec limit = as_timespec(seconds);
  syscall(SYS_futex, futex_half(word), FUTEX_WAIT, seen, &limit, nullptr, 0);
}

// A word that others wait for, on a cache line of its own.
struct alignas(64) Signal {
  std::atomic<std::uint64_t> word;
  std::atomic<std::uint32_t> sleepers;

  // After every change of the word.
  void wake() {
    if (sleepers.load(std::memory_order_seq_cst) == 0) return;
    syscall(SYS_futex, futex_half(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
};

// Whether the kernel has FUTEX_WAITV (Linux 5.16) and lets this process call it. Tests clear it.
inline std::atomic<bool> futex_waitv_works{true};

// The kernel's struct futex_waitv.
struct FutexWaiter {
  std::uint64_t seen;
  std::uint64_t address;
  std::uint32_t flags = 2;  // FUTEX2_SIZE_U32, shared between processes
  std::uint32_t reserved = 0;
};

// Sleeps until one of the signals is woken, for at most `seconds`; not at all if `awake(word)` is
// true of one. If the kernel cannot wait for several, sleeps on the first alone, and for at most
// `blind_seconds`, because the others may change meanwhile. False if a signal of the process has
// interrupted it.
template <class Awake>
bool sleep_on(const std::vector<Signal*>& signals, double seconds, double blind_seconds,
              Awake&& awake) {
  constexpr long kWaitv = 449;  // the same on all architectures
  constexpr std::size_t kMostWaiters = 128;
  const std::size_t count = signals.size();
  std::vector<FutexWaiter> waiters;
  waiters.reserve(count);
  for (Signal* signal : signals) signal->sleepers.fetch_add(1, std::memory_order_seq_cst);
  bool sleeps = true;
  for (Signal* signal : signals) {
    const std::uint64_t word = signal->word.load(std::memory_order_seq_cst);
    sleeps = sleeps && !awake(word);
    waiters.push_back({static_cast<std::uint32_t>(word),
                       reinterpret_cast<std::uint64_t>(futex_half(&signal->word))});
  }
  errno = 0;
  bool done = !sleeps;
  if (sleeps && count > 1 && count <= kMostWaiters &&
      futex_waitv_works.load(std::memory_order_relaxed)) {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    timespec until = as_timespec(seconds + static_cast<double>(now.tv_nsec) * 1e-9);
    until.tv_sec += now.tv_sec;
    done = syscall(kWaitv, waiters.data(), count, 0, &until, CLOCK_MONOTONIC) >= 0 ||
           errno == EAGAIN || errno == EINTR || errno == ETIMEDOUT;
    // Else ENOSYS, or EPERM from a seccomp filter.
    if (!done) futex_waitv_works.store(false, std::memory_order_relaxed);
  }
  if (!done) {
    futex_wait(&signals[0]->word, static_cast<std::uint32_t>(waiters[0].seen),
               count == 1 ? seconds : std::min(seconds, blind_seconds));
  }
  const bool interrupted = errno == EINTR;
  for (Signal* signal : signals) signal->sleepers.fetch_sub(1, std::memory_order_seq_cst);
  return !interrupted;
}

}  // namespace tpkernels::host
