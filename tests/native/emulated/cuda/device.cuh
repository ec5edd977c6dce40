// The functions of csrc/cuda/device.cuh for a CPU. CPU threads emulate GPU threads, atomics emulate
// memory orderings. The kernel sources are unchanged.
#pragma once

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>

#include "cuda/arguments.h"
#include "grid.h"
#include "host/vector_scalar.h"

#define TPK_DEVICE inline
#define TPK_KERNEL(threads) extern "C" void
#define TPK_PARAM const
#define TPK_SM_90 1

namespace tpkernels::cuda {

inline int thread() { return emulated::current_thread.thread; }
inline int threads() { return emulated::current_thread.grid->threads; }
inline int block() { return emulated::current_thread.block; }
inline int blocks() { return emulated::current_thread.grid->blocks; }

inline bool sync_block_or(bool value) {
  ++emulated::current_thread.counts.barriers;
  return emulated::current_thread.barrier->arrive_and_wait(value);
}
inline void sync_block() { sync_block_or(false); }

using emulated::kScratchFloats;
inline int cluster_blocks() { return emulated::current_thread.grid->cluster; }
inline int block_in_cluster() { return block() % cluster_blocks(); }
inline float* scratch() {
  return emulated::current_thread.cluster->blocks[block_in_cluster()]->scratch;
}

inline void sync_cluster() {
  ++emulated::current_thread.counts.barriers;
  if (emulated::loose) return sync_block();
  emulated::current_thread.cluster->barrier.arrive_and_wait(false);
}

inline void store_in_block(float* dst, int block, float value) {
  emulated::current_thread.cluster->blocks[block]->scratch[dst - scratch()] = value;
}

inline void await_previous() {
  while (emulated::previous.awaited && !emulated::previous.ended) std::this_thread::yield();
}

inline u64 clock_ns() { return std::chrono::steady_clock::now().time_since_epoch().count(); }
inline void pause() { std::this_thread::yield(); }

// Negative controls of the tests remove one ordering.
#ifdef WITHOUT_ACQUIRE
constexpr auto kAcquire = std::memory_order_relaxed;
#else
constexpr auto kAcquire = std::memory_order_acquire;
#endif
#ifdef WITHOUT_RELEASE
constexpr auto kRelease = std::memory_order_relaxed;
#else
constexpr auto kRelease = std::memory_order_release;
#endif

inline u64 load_acquire_sys(const u64* p) { return __atomic_load_n(p, static_cast<int>(kAcquire)); }
inline u64 load_relaxed_sys(const u64* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
inline u64 load_relaxed_gpu(const u64* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
inline void store_relaxed_sys(u64* p, u64 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
inline void store_release_sys(u64* p, u64 v) {
  ++emulated::current_thread.counts.releases;
  if (emulated::fault == emulated::Fault::kLostWakeUp) return;
  __atomic_store_n(p, v, static_cast<int>(kRelease));
}
inline u64 add_acq_rel_gpu(u64* p, u64 v) {
  ++emulated::current_thread.counts.atomics;
  return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL);
}
inline u64 max_relaxed_gpu(u64* p, u64 v) {
  u64 seen = load_relaxed_gpu(p);
  while (seen < v &&
         !__atomic_compare_exchange_n(p, &seen, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return seen;
}
inline u64 cas_acq_rel_gpu(u64* p, u64 expected, u64 v) {
  __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  return expected;
}

struct alignas(16) Pack {
  unsigned word[4];
};

// Traps on a misaligned address, as a GPU faults.
inline u64 checked(u64 address) {
  if (address % sizeof(Pack) != 0) __builtin_trap();
  return address;
}
inline u64 checked(const void* p) { return checked(reinterpret_cast<u64>(p)); }

inline Pack load_pack(const void* src) { return *reinterpret_cast<const Pack*>(checked(src)); }
inline void store_pack(void* dst, Pack pack) {
  if (emulated::fault == emulated::Fault::kMissingFence) {
    const auto& word = pack.word;
    return emulated::pending_stores.push_back({dst, {word[0], word[1], word[2], word[3]}});
  }
  *reinterpret_cast<Pack*>(checked(dst)) = pack;
}

inline void prefetch(const void*) {}

struct alignas(16) Line {
  u64 word[2];
};

inline Line load_line_sys(const Line* src) {
  const auto* line = reinterpret_cast<const Line*>(checked(src));
  Line seen{{load_relaxed_sys(&line->word[0]), load_relaxed_sys(&line->word[1])}};
  if (emulated::tearing == emulated::Tearing::kOneFlagPerLine) {
    seen.word[1] = (seen.word[1] & ~0xffffffffull) | (seen.word[0] & 0xffffffffull);
  }
  return seen;
}

// Stores the two words one after the other, in either order. Other threads run in between.
inline void store_line_sys(Line* dst, Line line) {
  static thread_local unsigned stored = 0;
  const int first = ++stored % 3 == 0;
  const auto let_threads_run = [] {
    if (stored % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
  };
  checked(dst);
  for (int i = 0; i < 2; ++i) {
    const int index = i == 0 ? first : 1 - first;
    if (emulated::tearing == emulated::Tearing::kTornWords) {
      auto* half = reinterpret_cast<unsigned*>(&dst->word[index]);
      __atomic_store_n(half, static_cast<unsigned>(line.word[index]), __ATOMIC_RELAXED);
      let_threads_run();
      __atomic_store_n(half + 1, static_cast<unsigned>(line.word[index] >> 32), __ATOMIC_RELAXED);
    } else {
      store_relaxed_sys(&dst->word[index], line.word[index]);
      let_threads_run();
    }
  }
}

inline float bits_to_float(unsigned bits) { return host::scalar::bits_to_float(bits); }
inline unsigned float_to_bits(float value) { return host::scalar::float_to_bits(value); }
inline float multiply(float a, float b) { return a * b; }
inline float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
inline float divide(float a, float b) { return a / b; }
inline float square_root(float value) { return std::sqrt(value); }
inline float widen_f16(unsigned short half) { return host::scalar::f16_to_float(half); }
inline unsigned short round_f16(float value) { return host::scalar::float_to_f16(value); }
inline unsigned short round_bf16(float value) { return host::scalar::float_to_bf16(value); }

// The calling thread stores the scratch synchronously.
inline void fence_scratch() {}
inline void store_scratch(u64 dst, const float* src, unsigned bytes) {
  for (unsigned offset = 0; offset < bytes; offset += sizeof(Pack)) {
    const void* pack = reinterpret_cast<const char*>(src) + offset;
    store_pack(reinterpret_cast<void*>(dst + offset), *static_cast<const Pack*>(pack));
  }
}
inline void await_scratch_stores() {}

}  // namespace tpkernels::cuda
