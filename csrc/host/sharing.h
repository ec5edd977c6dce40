// Whether data that peers read is stored to the cache or past it.
//
// Where two cores share a cache, the way through it is the fastest for large data. Where they do
// not, a line that is in another core's cache is slow to read and slow to overwrite. A virtual
// machine may have either, and may be moved from one to the other at any time. All-reduce of 2
// ranks, AMD EPYC Zen 4, 2 virtual cores, 2026-11-22, stored to the cache / past it: 64 KB
// 14.7 / 10.6 us, 256 KB 49 / 32 us, 1 MB 60 / 93 us, 32 MB 4.1 / 5.7 ms at one moment; 256 KB
// 169 / 28 us, 1 MB 0.61 / 0.08 ms, 32 MB 19 / 4.1 ms at another.
//
// So medium data goes past the caches, and large data where the way through them was slow the last
// time. Every kEvery large chunks one takes it and is measured. The ranks count the same chunks, so
// they measure the same one. The choice is each rank's own: it affects times only.
#pragma once

#include <chrono>
#include <cstddef>

namespace tpkernels::host {

class Sharing {
 public:
  static constexpr std::size_t kMedium = 8 << 10;   // bytes of a chunk
  static constexpr std::size_t kLarge = 512 << 10;  // and of what is measured
  static constexpr unsigned kEvery = 64;
  static constexpr double kSlow = 5e9;  // bytes per second; above: 1.7e9, and 8e9 to 17e9

  // Begins a chunk, of which the largest rank stores `bytes`.
  void begin(std::size_t bytes) {
    if (measured_) slow_ = static_cast<double>(bytes_) < kSlow * seconds_;
    measured_ = bytes >= kLarge && chunks_++ % kEvery == kFirst;
    past_caches_ = bytes >= kMedium && !measured_ && (bytes < kLarge || slow_);
    bytes_ = bytes;
    seconds_ = 0;
  }

  // Whether to store past the caches what peers are to read.
  bool past_caches() const { return past_caches_; }

  // Calls `move`, which stores data for peers or reads theirs.
  template <class Move>
  void timed(Move&& move) {
    if (!measured_) return move();
    const auto begin = std::chrono::steady_clock::now();
    move();
    took(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }

  void took(double seconds) { seconds_ += seconds; }

 private:
  static constexpr unsigned kFirst = 4;  // those before have touched the pages

  unsigned chunks_ = 0;  // large ones
  bool slow_ = true;     // until it is known
  bool measured_ = false;
  bool past_caches_ = false;
  std::size_t bytes_ = 0;
  double seconds_ = 0;  // of the chunk
};

}  // namespace tpkernels::host
