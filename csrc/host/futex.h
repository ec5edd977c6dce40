// Sleeping on, and waking, a 64-bit word that processes share.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
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

// A futex is 32 bits wide: the half of the word that holds the epoch.
inline std::uint32_t* futex_half(std::atomic<std::uint64_t>* word) {
  auto* halves = reinterpret_cast<std::uint32_t*>(word);
  return __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? halves : halves + 1;
}

// Sleeps until woken, for `seconds` at most, unless the low half no longer is `seen`.
inline void futex_wait(std::atomic<std::uint64_t>* word, std::uint32_t seen, double seconds) {
  timespec limit{};
  limit.tv_sec = static_cast<time_t>(seconds);
  limit.tv_nsec = static_cast<long>((seconds - static_cast<double>(limit.tv_sec)) * 1e9);
  syscall(SYS_futex, futex_half(word), FUTEX_WAIT, seen, &limit, nullptr, 0);
}

inline void futex_wake_all(std::atomic<std::uint64_t>* word) {
  syscall(SYS_futex, futex_half(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace tpkernels::host
