// Sleeping on a 64-bit word in shared memory, and waking its sleepers.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <ctime>

namespace tpkernels::host {

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A futex is 32 bits wide: use the half of the word that holds the epoch.
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

// One of the words that `futex_wait_any` sleeps on: the kernel's struct futex_waitv.
struct FutexWaiter {
  std::uint64_t seen = 0;
  std::uint64_t address = 0;
  std::uint32_t flags = 2;  // FUTEX2_SIZE_U32, shared between processes
  std::uint32_t reserved = 0;

  FutexWaiter(std::atomic<std::uint64_t>* word, std::uint32_t seen_low)
      : seen(seen_low), address(reinterpret_cast<std::uint64_t>(futex_half(word))) {}
};

// Whether the kernel has FUTEX_WAITV (Linux 5.16) and lets this process call it. Tests clear it.
inline std::atomic<bool> futex_waitv_works{true};

// Sleeps until one of the words is woken, for at most `seconds`. Returns at once if the low half of
// any word has changed. If the kernel cannot wait for this many, sleeps on the first word alone,
// and for at most `blind_seconds`, because the others may change meanwhile.
inline void futex_wait_any(FutexWaiter* waiters, std::size_t count, double seconds,
                           double blind_seconds) {
  constexpr long kWaitv = 449;  // the same on all architectures
  constexpr std::size_t kMaxWaiters = 128;
  if (count <= kMaxWaiters && futex_waitv_works.load(std::memory_order_relaxed)) {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    timespec until = as_timespec(seconds + static_cast<double>(now.tv_nsec) * 1e-9);
    until.tv_sec += now.tv_sec;
    if (syscall(kWaitv, waiters, count, 0, &until, CLOCK_MONOTONIC) >= 0) return;
    if (errno == EAGAIN || errno == EINTR || errno == ETIMEDOUT) return;
    // ENOSYS, or EPERM from a seccomp filter.
    futex_waitv_works.store(false, std::memory_order_relaxed);
  }
  const timespec limit = as_timespec(std::min(seconds, blind_seconds));
  syscall(SYS_futex, waiters[0].address, FUTEX_WAIT, static_cast<std::uint32_t>(waiters[0].seen),
          &limit, nullptr, 0);
}

inline void futex_wake_all(std::atomic<std::uint64_t>* word) {
  syscall(SYS_futex, futex_half(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace tpkernels::host
