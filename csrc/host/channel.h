// Problem: ranks on one host exchange buffers call after call, and must never read a buffer before
// it is written, overwrite one that is still read, or wait for ever.
//
// Algorithm: each rank owns one region of an arena: signal words, then two data buffers. A call is
// numbered by an epoch; even epochs use one set of words and one buffer, odd epochs the other.
//
// Sync: only its owner writes a region. The owner writes data first, then a word (release); a peer
// waits for the word (acquire), then reads the data. A word is (signature << 32 | epoch), where the
// signature stands for the call: op, shapes, dtypes, options. A peer in another call is thus found
// by the first wait on it.
//
// Invariant (no overwritten read): in every call each rank waits for a word of that epoch from
// every peer, also where there is no data to come. When rank A starts epoch e+2 it has finished
// e+1, so it has seen a word of e+1 from every peer B; B published that after it had finished e. So
// nobody reads A's buffer of epoch e any more when A writes the buffer of e+2, which is the same
// one. Nor can a word be two epochs ahead of a waiter; hence words are compared for equality, which
// wraps safely and cannot take a word left by a call 2^31 epochs ago for an arrival.
//
// Wake-up: a publisher stores the word and then looks for sleepers; a waiter counts itself as a
// sleeper and then looks at the word. Both are sequentially consistent, so one of them sees the
// other.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "host/arena.h"

namespace tpkernels::host {

enum class FailureKind : std::uint32_t { kPeerLost = 1, kTimeout = 2, kMismatch = 3, kBroken = 4 };

// A collective that cannot complete. The message names op, ranks, what was expected and seen.
class Failure : public std::runtime_error {
 public:
  Failure(FailureKind kind, int peer, const std::string& what)
      : std::runtime_error(what), kind(kind), peer(peer) {}
  FailureKind kind;
  int peer;
};

// What a word announces. Every phase has one word per rank: for `kData` indexed by the rank the
// data is for (0 where it is for all), for `kRead` by the rank whose buffer has been read.
enum class Phase : int { kData = 0, kResult = 1, kRead = 2 };

struct ChannelOptions {
  double timeout_s = 30.0;  // the longest that one wait may take
  double spin_us = 100.0;   // polling before the thread goes to sleep
  double yield_us = 5.0;    // from here on each poll offers the core to others
};

// Switches for tests: random delays, and the two ways to break the protocol (negative controls).
struct Chaos {
  std::uint64_t seed = 0;
  unsigned max_delay_us = 0;
  bool single_buffer = false;
  bool skip_waits = false;
};

struct Signal;  // region.h
struct Header;

class Channel {
 public:
  // `pidfds[r]` becomes readable when rank r's process ends; the descriptors now belong to the
  // channel. Buffers of `capacity` bytes have been committed. Epochs go on from `epoch`. Both must
  // be the same on all ranks.
  Channel(std::shared_ptr<Arena> arena, int rank, std::vector<int> pidfds, std::vector<int> pids,
          ChannelOptions options, std::size_t capacity, std::uint32_t epoch);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  int rank() const { return rank_; }
  int world() const { return arena_->world(); }
  std::uint32_t epoch() const { return epoch_; }
  int parity() const { return static_cast<int>(epoch_ & 1u); }

  // Bytes of one data buffer that may be used, and where rank's buffer of this epoch is.
  std::size_t capacity() const { return capacity_; }
  std::byte* buffer(int rank) const;
  // Offset of a data buffer within a region.
  std::size_t buffer_offset(int parity) const;
  // The smallest region whose data buffers can grow to `limit` bytes each.
  static std::size_t region_bytes(int world, std::size_t limit);
  // The parts (offset, bytes) of a region that must be committed for its buffers to grow from
  // `from` to `to` bytes each; from nothing: the words, too.
  static std::vector<std::pair<std::size_t, std::size_t>> parts(int world, std::size_t region_bytes,
                                                                std::size_t from, std::size_t to);
  // All ranks, between the same two calls, when all have committed their parts.
  void grow(std::size_t capacity);

  // Starts the next call. `text` describes it to peers that find themselves in another.
  // Throws Failure(kBroken) on a channel that has failed before, and in a process that was forked
  // from the rank.
  void begin(std::uint32_t signature, std::string_view text);
  // Announces that all written before is complete. Release.
  void publish(Phase phase, int index = 0);
  // Returns when `peer` has published; what it wrote before is then visible. Acquire.
  void wait(int peer, Phase phase, int index = 0);
  // Waits for whichever of `peers` comes first and returns it.
  int wait_any(const std::vector<int>& peers, Phase phase, int index = 0);
  // A call without data: every rank has started it.
  void barrier();
  // This rank leaves the call without completing it; peers that wait for it fail at once. Another
  // rank may be the culprit (by default this one is).
  void abandon(const std::string& why, FailureKind kind = FailureKind::kPeerLost, int culprit = -1);
  bool broken() const { return broken_; }
  // For a wait outside the channel: throws what `wait` for each peer would throw by now.
  void watch(Phase phase, double waited_s) const;

  // Input that peers read in place lies in a segment, an arena that the user owns. `locate` says
  // where this rank's data of the epoch is (before publish), `data` where a peer's is (after wait).
  void add_segment(std::uint64_t id, std::weak_ptr<Arena> segment);
  void locate(std::uint64_t segment, std::size_t offset);
  const std::byte* data(int peer, std::size_t bytes) const;
  // The segment that holds a peer's data (null: its buffer does) and the offset within its region.
  std::pair<std::shared_ptr<Arena>, std::size_t> segment_of(int peer, std::size_t bytes) const;
  bool in_segment(int peer) const;

  // Called about 50 times a second by a sleeping waiter; may throw (a user's interrupt).
  void set_poll(std::function<void()> poll) { poll_ = std::move(poll); }
  // For a profiler: called on the waiting thread with true and false around each wait for what is
  // not there yet. Must not throw. Null: nobody looks on.
  void set_on_wait(std::function<void(bool)> on_wait) { on_wait_ = std::move(on_wait); }
  void set_chaos(const Chaos& chaos) { chaos_ = std::make_unique<Chaos>(chaos); }

 private:
  Header& header(int rank) const;
  Signal& signal(int rank, Phase phase, int index) const;
  bool arrived(int peer, const Signal& signal) const;
  bool spin(int peer, Phase phase, int index);
  void sleep(Signal& signal, double seconds);
  void sleep_any(const std::vector<int>& peers, Phase phase, int index, double blind_seconds);
  bool forked() const;
  [[noreturn]] void fail_forked() const;
  void check(int peer, const Signal& awaited, double waited_s) const;
  [[noreturn]] void fail(FailureKind kind, int peer, int culprit, const std::string& what) const;
  void check_mismatch(int peer) const;
  void set_fault(FailureKind kind, int culprit, const std::string& what) const;
  std::string call_text(int rank) const;
  std::string peer_name(int rank) const;
  std::string progress(int peer) const;
  bool ended(int peer) const;
  void delay() const;

  std::shared_ptr<Arena> arena_;
  int rank_;
  std::vector<int> pidfds_;
  std::vector<int> pids_;
  ChannelOptions options_;
  std::uint32_t epoch_;
  std::uint32_t signature_ = 0;
  std::uint32_t recorded_[2] = {0, 0};  // signature whose text stands in the record of a parity
  std::size_t limit_;
  std::size_t capacity_;
  std::uint32_t fork_generation_;
  mutable bool broken_ = false;
  mutable std::string broken_by_;
  std::map<std::uint64_t, std::weak_ptr<Arena>> segments_;
  std::function<void()> poll_;
  std::function<void(bool)> on_wait_;
  std::unique_ptr<Chaos> chaos_;
};

}  // namespace tpkernels::host
