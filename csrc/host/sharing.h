// Choice between cached and streaming (non-temporal) stores for data that peers read.
//
// If two cores share a cache, cached stores are faster for large data. If they do not, a line in
// the cache of a different core is slow to read and slow to overwrite. A virtual machine may have
// either topology, and may migrate between them at any time.
//
// All-reduce of 2 ranks, AMD EPYC Zen 4, 2 virtual cores, 2026-11-22, cached / streaming stores, at
// two different times:
//            64 KB           256 KB        1 MB              32 MB
//   time 1   14.7 / 10.6 us  49 / 32 us    60 / 93 us        4.1 / 5.7 ms
//   time 2                   169 / 28 us   0.61 / 0.08 ms    19 / 4.1 ms
//
// So medium chunks use streaming stores. Large chunks use them if cached stores were slow in the
// last sample: one of kSampleInterval large chunks uses cached stores and is timed. All ranks count
// the same chunks, so they sample the same chunk. Each rank decides separately: this affects only
// speed.
#pragma once

#include <chrono>
#include <cstddef>

namespace tpkernels::host {

class Sharing {
 public:
  // Minimum sizes of medium and large chunks. Only large chunks are sampled.
  static constexpr std::size_t kMediumBytes = 8 << 10;
  static constexpr std::size_t kLargeBytes = 512 << 10;
  static constexpr unsigned kSampleInterval = 64;
  static constexpr double kMinBandwidth = 5e9;  // bytes/s; the table has 1.7e9 and 8e9 to 17e9

  // Begins a chunk. `bytes`: the most that any rank stores.
  void begin(std::size_t bytes) {
    if (measured_) slow_ = static_cast<double>(bytes_) < kMinBandwidth * seconds_;
    measured_ = bytes >= kLargeBytes && chunks_++ % kSampleInterval == kFirstSample;
    streaming_ = bytes >= kMediumBytes && !measured_ && (bytes < kLargeBytes || slow_);
    bytes_ = bytes;
    seconds_ = 0;
  }

  // Whether data for peers uses streaming stores.
  bool streaming() const { return streaming_; }

  // Calls `move`. It stores data for peers or reads the data of peers.
  template <class Move>
  void timed(Move&& move) {
    if (!measured_) return move();
    const auto begin = std::chrono::steady_clock::now();
    move();
    add_time(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }

  void add_time(double seconds) { seconds_ += seconds; }

 private:
  static constexpr unsigned kFirstSample = 4;  // earlier chunks touch the pages for the first time

  unsigned chunks_ = 0;  // number of large chunks
  bool slow_ = true;     // whether cached stores were slow in the last sample
  bool measured_ = false;
  bool streaming_ = false;
  std::size_t bytes_ = 0;
  double seconds_ = 0;  // time of the current sample
};

}  // namespace tpkernels::host
