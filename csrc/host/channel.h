// Problem: ranks on one host exchange buffers call after call. A rank must never read a buffer
// before it is written, overwrite one that a peer still reads, or wait forever.
//
// Algorithm: each rank owns one region of an arena: signal words, then two data buffers. Calls are
// numbered by an epoch. Even epochs use one set of words and one buffer, odd epochs the other.
//
// Sync: only the owner of a region writes to it. The owner writes data, then a word (release). A
// peer waits for the word (acquire), then reads the data. A word is (signature << 32 | epoch),
// where the signature identifies the call: op, shapes, dtypes, options. The first wait on a peer
// that is in a different call therefore detects the mismatch.
//
// Threads: two threads of a rank may make equal calls, and those of a peer in another order. So a
// call also says how many calls ago its thread made its last one, if the thread is told apart.
// These numbers agree while the threads of all ranks take turns in one order. They differ at the
// first call that a peer makes on another thread.
//
// Invariant (no overwritten read): in every call, each rank waits for a word of that epoch from
// every peer, even if that peer sends no data. When rank A starts epoch e+2 it has finished e+1, so
// it has seen a word of e+1 from every peer B, and B published that word after finishing e. So no
// peer still reads A's buffer of epoch e when A writes the buffer of e+2, which is the same buffer.
// For the same reason a word can never be two epochs ahead of a waiter. Words are therefore
// compared for equality, which survives wrap-around and cannot mistake a word from 2^31 epochs ago
// for an arrival.
// Wake-up: wait.h.
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
#include "host/sharing.h"
#include "host/wait.h"

namespace tpkernels::host {

enum class FailureKind : std::uint32_t { kPeerLost = 1, kTimeout = 2, kMismatch = 3, kBroken = 4 };

// A collective that cannot complete. The message names the op, the ranks, and what was expected and
// seen.
class Failure : public std::runtime_error {
 public:
  Failure(FailureKind kind, int peer, const std::string& what)
      : std::runtime_error(what), kind(kind), peer(peer) {}
  FailureKind kind;
  int peer;
};

// What a word announces. Every phase has one word per rank. For `kData` the index is the rank that
// the data is for, 0 if it is for all. For `kRead` it is the rank whose buffer has been read.
enum class Phase : int { kData = 0, kResult = 1, kRead = 2 };

struct ChannelOptions {
  double timeout_s = 30.0;  // limit of one wait
  double spin_us = 100.0;   // poll at most this long before going to sleep (wait.h)
  double yield_us = 5.0;    // after this, yield the core between polls
  // The ranks' numbers in errors, where they are part of a larger group; empty: 0, 1, ...
  std::vector<int> names = {};
};

// For tests: random delays, and two ways to break the protocol as negative controls.
struct Chaos {
  std::uint64_t seed = 0;
  unsigned max_delay_us = 0;
  bool single_buffer = false;
  bool skip_waits = false;
};

struct Header;  // the start of a region

// This thread among those of its process whose calls a channel tells apart; 0: it is not told
// apart.
inline thread_local std::uint64_t caller = 0;

class Channel {
 public:
  // `pidfds[r]` becomes readable when rank r's process exits; the channel takes ownership of the
  // descriptors. Buffers of `capacity` bytes must be committed already. The first call has epoch
  // `epoch` + 1. `capacity` and `epoch` must be the same on all ranks.
  Channel(std::shared_ptr<Arena> arena, int rank, std::vector<int> pidfds, std::vector<int> pids,
          ChannelOptions options, std::size_t capacity, std::uint32_t epoch);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  int rank() const { return rank_; }
  int world() const { return arena_->world(); }
  std::uint32_t epoch() const { return epoch_; }
  int parity() const { return static_cast<int>(epoch_ & 1u); }

  // Usable bytes of one data buffer, and the address of `rank`'s buffer in this epoch.
  std::size_t capacity() const { return capacity_; }
  std::byte* buffer(int rank) const;
  // Offset of a data buffer within a region.
  std::size_t buffer_offset(int parity) const;
  // Size of the smallest region whose data buffers can each grow to `limit` bytes.
  static std::size_t region_bytes(int world, std::size_t limit);
  // The parts (offset, bytes) of a region to commit before its buffers grow from `from` to `to`
  // bytes each. With `from` = 0 they include the words.
  static std::vector<std::pair<std::size_t, std::size_t>> parts(int world, std::size_t region_bytes,
                                                                std::size_t from, std::size_t to);
  // Ranks do this between the same two calls, once all of them have committed their parts.
  void grow(std::size_t capacity);

  // Starts the next call. `text` describes it to peers that are in a different call. Throws
  // Failure(kBroken) if the channel has failed before, or in a fork of the rank's process.
  void begin(std::uint32_t signature, std::string_view text);
  // Announces that everything written so far is complete. Release.
  void publish(Phase phase, int index = 0);
  // Returns when `peer` has published; what it wrote before that is then visible. Acquire.
  void wait(int peer, Phase phase, int index = 0);
  // Waits until one of `peers` has published and returns that peer.
  int wait_any(const std::vector<int>& peers, Phase phase, int index = 0);
  // Returns when every rank has started this call. Carries no data.
  void barrier();
  // Leaves the call without completing it; peers that wait for this rank fail at once. They blame
  // the rank named `culprit`, by default this one.
  void abandon(const std::string& why, FailureKind kind = FailureKind::kPeerLost, int culprit = -1);
  bool broken() const { return broken_; }
  Sharing& sharing() { return sharing_; }
  // Limit of one wait, in seconds, from the next wait on.
  double timeout() const { return options_.timeout_s; }
  void set_timeout(double seconds) { options_.timeout_s = seconds; }
  // Between calls: throws if a peer has failed or its process has ended.
  void check_peers() const;
  // For waits outside the channel: throws what `wait` on any of the peers would throw by now.
  void watch(Phase phase, double waited_s) const;

  // Input that peers read in place lies in a segment, an arena that the user owns. `locate`
  // announces where this rank's data for the epoch is (call it before publish); `data` returns
  // where a peer's is (call it after wait), which stays mapped until `end_read`. That tells the
  // peer, which waits for it; it throws if the peer has failed, and so may have overwritten what
  // was read.
  void add_segment(std::uint64_t id, std::weak_ptr<Arena> segment);
  void locate(std::uint64_t segment, std::size_t offset);
  const std::byte* data(int peer, std::size_t bytes);
  void end_read(int peer);
  // The segment that holds a peer's data, and the offset within its region. Null if the data is in
  // the peer's buffer.
  std::pair<std::shared_ptr<Arena>, std::size_t> segment_of(int peer, std::size_t bytes) const;
  bool in_segment(int peer) const;
  // What a peer has passed to `locate`; 0 as the segment if it has not called it.
  std::pair<std::uint64_t, std::size_t> located(int peer) const;

  // A sleeping waiter calls `poll` about 50 times a second. It may throw, for example on Ctrl-C.
  void set_poll(std::function<void()> poll) {
    std::atomic_store(&poll_, std::make_shared<const std::function<void()>>(std::move(poll)));
  }
  // For profilers: called on the waiting thread with true before, and false after, each wait that
  // has to block. Must not throw. May be null.
  void set_on_wait(std::function<void(bool)> on_wait) { on_wait_ = std::move(on_wait); }
  void set_chaos(const Chaos& chaos) { chaos_ = std::make_unique<Chaos>(chaos); }

 private:
  Header& header(int rank) const;
  Signal& signal(int rank, Phase phase, int index) const;
  bool arrived(int peer, const Signal& signal) const;
  int block(const int* peers, std::size_t count, Phase phase, int index);
  bool forked() const;
  [[noreturn]] void fail_forked() const;
  void check(int peer, const Signal& awaited, double waited_s) const;
  [[noreturn]] void fail(FailureKind kind, int peer, int culprit, const std::string& what) const;
  void check_fault(int peer, const char* what) const;
  void check_mismatch(int peer) const;
  void check_thread(int peer) const;
  std::uint32_t calls_since_last();
  void set_fault(FailureKind kind, int culprit, const std::string& what) const;
  std::string call_text(int rank) const;
  int name(int rank) const { return options_.names[static_cast<std::size_t>(rank)]; }
  std::string peer_name(int rank) const;
  std::string progress(int peer) const;
  bool ended(int peer) const;
  void delay() const;

  std::shared_ptr<Arena> arena_;
  int rank_;
  std::vector<int> pidfds_;
  std::vector<int> pids_;
  ChannelOptions options_;
  Patience patience_;
  Sharing sharing_;
  std::uint32_t epoch_;
  std::uint32_t signature_ = 0;
  std::uint32_t calls_since_last_ = 0;
  std::map<std::uint64_t, std::uint32_t> last_calls_;  // epochs, by thread
  std::uint32_t recorded_[2] = {0, 0};                 // signature of the text in each slot
  std::size_t limit_;
  std::size_t capacity_;
  std::uint32_t fork_generation_;
  mutable bool broken_ = false;
  mutable std::string broken_by_;
  std::map<std::uint64_t, std::weak_ptr<Arena>> segments_;
  std::vector<std::shared_ptr<Arena>> held_;  // what is read of each peer; its user may free it
  std::shared_ptr<const std::function<void()>> poll_;  // may be set while another thread waits
  std::function<void(bool)> on_wait_;
  std::unique_ptr<Chaos> chaos_;
};

}  // namespace tpkernels::host
