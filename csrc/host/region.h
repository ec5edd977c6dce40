// The layout of a region's control part: what ranks read of each other besides data.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace tpkernels::host {

constexpr std::size_t kTextBytes = 448;
constexpr int kPhases = 3;

constexpr std::uint64_t word_of(std::uint32_t signature, std::uint32_t epoch) {
  return std::uint64_t{signature} << 32 | epoch;
}
constexpr std::uint32_t epoch_of(std::uint64_t word) { return static_cast<std::uint32_t>(word); }
constexpr std::uint32_t signature_of(std::uint64_t word) {
  return static_cast<std::uint32_t>(word >> 32);
}

// Text that peers may read. It is bounded, and readers only ever print it.
struct Text {
  std::atomic<std::uint32_t> length;
  char bytes[kTextBytes];

  void write(std::string_view text) {
    const std::size_t n = std::min(text.size(), kTextBytes);
    std::memcpy(bytes, text.data(), n);
    length.store(static_cast<std::uint32_t>(n), std::memory_order_release);
  }
  std::string read() const {
    const std::size_t n = length.load(std::memory_order_acquire);
    return std::string(bytes, std::min(n, kTextBytes));
  }
};

// A word and the number of waiters that sleep on it, on a cache line of their own.
struct alignas(64) Signal {
  std::atomic<std::uint64_t> word;
  std::atomic<std::uint32_t> sleepers;
};

// What a rank publishes about a call. There is one slot per parity of the epoch.
struct CallSlot {
  Signal entered;
  std::atomic<std::uint64_t> segment;  // holds the data of this call; 0: the data buffer does
  std::atomic<std::uint64_t> offset;
  Text text;
};

// The start of a region. The signals of the phases follow: [parity][phase][rank].
struct alignas(64) Header {
  CallSlot calls[2];
  std::atomic<std::uint32_t> fault;  // FailureKind, or 0 if there is none; written last
  std::atomic<std::int32_t> culprit;
  Text fault_text;
};

// A rank that leaves a call may overwrite what peers read in place. The peer reads first, then
// looks for a fault; the rank stores the fault first, then overwrites. So a peer that finds no
// fault has read nothing of what was written later. Acquire and release would not do: a load may
// move before an acquire, as a store may move after a release. ThreadSanitizer knows no fences, and
// reports such a race of the user's data as one, although nobody uses what was read.
#ifdef __SANITIZE_THREAD__
inline void fence_before_overwrites() {}
inline void fence_after_reads() {}
#else
inline void fence_before_overwrites() { std::atomic_thread_fence(std::memory_order_release); }
inline void fence_after_reads() { std::atomic_thread_fence(std::memory_order_acquire); }
#endif

static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "processes share the words");

}  // namespace tpkernels::host
