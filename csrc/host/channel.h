// Problem: ranks on one host exchange data buffers call after call. A rank must never read a buffer
// before it is written, overwrite a buffer that a peer still reads, or wait forever.
//
// Algorithm: each rank owns one region of an arena: a signal pad, then the records of the last
// calls (call_records.h), then two data buffers. Calls are numbered by an epoch. Even and odd
// epochs use different signals and different buffers.
//
// Sync: only the owner of a region writes to it. The owner writes data, then a signal (release). A
// peer waits for the signal (acquire), then reads the data. A signal is (signature << 32 | epoch).
// The signature identifies the call: op, shapes, dtypes, options.
//
// Invariant 1 (data before signal): a peer that has seen a signal sees all data written before it.
//
// Invariant 2 (one epoch ahead): a peer is at most one epoch ahead. In every call, each rank waits
// for a signal of that epoch from every peer, even if the peer sends no data.
//
// Invariant 3 (no overwritten read): no peer reads the buffer of epoch e when its owner writes the
// buffer of e+2, which uses the same memory. The owner has finished e+1, so it has seen a signal of
// e+1 from every peer. The peer stored that signal after it finished e.
//
// Invariant 4 (no stale signal): a signal of an earlier epoch never matches. By invariant 2, no
// signal is two epochs ahead of a waiter, so signals are compared for equality. Equality survives
// wrap-around: a signal of 2^31 epochs ago does not match.
//
// Invariant 5 (mismatch): the first wait on a peer in a different call detects the mismatch. Every
// call first stores its signature and epoch in `CallSlot::entered`. A waiter compares them with its
// call if the awaited signal has the epoch and a different signature, and at every check between
// sleeps.
//
// Invariant 6 (crossed threads): if two threads make equal calls, and the threads of a peer make
// them in a different order, the first such call is detected. A call publishes how many calls ago
// its thread made its previous call, if the thread has an id. The numbers agree while the threads
// of all ranks make their calls in one order, and differ at the first call that crosses.
//
// Invariant 7 (symmetric tensors): no peer uses data of a segment that was modified during the
// read. The owner waits for `kRead` from every peer before it returns. A rank that leaves early
// stores its fault before it overwrites data, and a peer checks for faults after reading
// (channel.cpp).
//
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
#include "host/call_records.h"
#include "host/sharing.h"
#include "host/wait.h"

namespace tpkernels::host {

enum class FailureKind : std::uint32_t { kPeerLost = 1, kTimeout = 2, kMismatch = 3, kBroken = 4 };

// A collective that cannot complete. The message names the op, the ranks, and the expected and the
// observed state.
class Failure : public std::runtime_error {
 public:
  Failure(FailureKind kind, int peer, const std::string& what)
      : std::runtime_error(what), kind(kind), peer(peer) {}
  FailureKind kind;
  int peer;
};

// The meaning of a signal. Each phase has one signal per rank, selected by an index. For `kData`
// the index is the destination rank, or 0 if the data is for all ranks. For `kRead` it is the rank
// whose data has been read.
enum class Phase : int { kData = 0, kResult = 1, kRead = 2 };

struct ChannelOptions {
  double timeout_s = 30.0;  // limit of one wait
  double spin_us = 100.0;   // maximum polling time before the waiter sleeps (wait.h)
  double yield_us = 5.0;    // polling time after which the waiter yields the core between polls
  // Ranks to name in errors, if these ranks belong to a larger group. Empty: 0, 1, ...
  std::vector<int> group_ranks = {};
  std::string group = {};  // name of the group, for the records of calls
};

// For tests: random delays, and two violations of the protocol as negative controls.
struct Chaos {
  std::uint64_t seed = 0;
  unsigned max_delay_us = 0;
  bool single_buffer = false;
  bool skip_waits = false;
};

struct Header;  // the start of a region

// Id of this thread for invariant 6. 0: the thread has no id and is not checked.
inline thread_local std::uint64_t caller_id = 0;

class Channel {
 public:
  // `pidfds[r]` becomes readable when the process of rank r exits. The channel closes the pidfds.
  // Buffers of `capacity` bytes must be committed. The first call has epoch `epoch` + 1. `capacity`
  // and `epoch` must be equal on all ranks.
  Channel(std::shared_ptr<Arena> arena, int rank, std::vector<int> pidfds, std::vector<int> pids,
          ChannelOptions options, std::size_t capacity, std::uint32_t epoch);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  int rank() const { return rank_; }
  int world() const { return arena_->world(); }
  std::uint32_t epoch() const { return epoch_; }
  int parity() const { return static_cast<int>(epoch_ & 1u); }

  // Usable bytes of one data buffer.
  std::size_t capacity() const { return capacity_; }
  // Address of the data buffer of `rank` in this epoch.
  std::byte* buffer(int rank) const;
  // Offset of a data buffer within a region.
  std::size_t buffer_offset(int parity) const;
  // Minimum size of a region whose data buffers can each grow to `max_capacity` bytes.
  static std::size_t region_bytes(int world, std::size_t max_capacity);
  // The ranges (offset, bytes) of a region to commit before its buffers grow from `begin_bytes` to
  // `end_bytes` each. With `begin_bytes` = 0 they include the signal pad.
  static std::vector<std::pair<std::size_t, std::size_t>> commit_ranges(int world,
                                                                        std::size_t region_bytes,
                                                                        std::size_t begin_bytes,
                                                                        std::size_t end_bytes);
  // Changes the capacity. All ranks call it between the same two calls, after all ranks have
  // committed their ranges.
  void grow(std::size_t capacity);

  // Starts the next call. Error messages quote `description`, also on peers in a different call.
  // Throws Failure(kBroken) if the channel has failed before, or in a fork of the process.
  // Repeated calls with one signature count as chunks of one recorded call, until `end_call`, or
  // until a caller is set. A call with a different signature ends the recorded call.
  void begin(std::uint32_t signature, std::string_view description);
  // Records the end of the call. It has failed unless `completed`.
  void end_call(bool completed = true);
  // Signals that all earlier writes are complete. Release.
  void publish(Phase phase, int index = 0);
  // Waits until `peer` has published. Its earlier writes are then visible. Acquire.
  void wait(int peer, Phase phase, int index = 0);
  // Waits until one of `peers` has published and returns that peer.
  int wait_any(const std::vector<int>& peers, Phase phase, int index = 0);
  // Waits until every rank has started this call. Carries no data.
  void barrier();
  // Leaves the call without completing it. Peers that wait for this rank fail immediately. Their
  // errors blame rank `culprit`, by default this rank.
  void abandon(const std::string& reason, FailureKind kind = FailureKind::kPeerLost,
               int culprit = -1);
  bool broken() const { return broken_; }
  Sharing& sharing() { return sharing_; }
  // Limit of one wait in seconds. A new value applies from the next wait on.
  double timeout() const { return options_.timeout_s; }
  void set_timeout(double seconds) { options_.timeout_s = seconds; }
  // Between calls: throws if a peer has failed or its process has exited.
  void check_peers() const;
  // For waits outside the channel: throws the error that `wait` would throw after `waited_s`, for
  // any peer.
  void watch(Phase phase, double waited_s) const;

  // Peers read input in place if it is in a segment, an arena that the user owns.
  // 1. `set_location` stores the location of the input for this epoch. Call it before `publish`.
  // 2. `data` returns the address of the data of a peer. Call it after `wait`. The segment stays
  //    mapped until `end_read`.
  // 3. `end_read` sends `kRead` to the peer, and the peer waits for it. It throws if the peer has
  //    failed, because the peer may have overwritten the data.
  void add_segment(std::uint64_t id, std::weak_ptr<Arena> segment);
  void set_location(std::uint64_t segment, std::size_t offset);
  const std::byte* data(int peer, std::size_t bytes);
  void end_read(int peer);
  // The segment with the data of `peer`, and the offset within its region. Null if the data is in
  // the data buffer of `peer`.
  std::pair<std::shared_ptr<Arena>, std::size_t> peer_segment(int peer, std::size_t bytes) const;
  bool in_segment(int peer) const;
  // The arguments of `set_location` on `peer` in this epoch. Segment 0 if it has not been called.
  std::pair<std::uint64_t, std::size_t> location(int peer) const;

  // A sleeping waiter calls `poll` about 50 times per second. `poll` may throw, e.g. on Ctrl-C.
  void set_poll(std::function<void()> poll) {
    std::atomic_store(&poll_, std::make_shared<const std::function<void()>>(std::move(poll)));
  }
  // A waiter calls `warn` once per call if it has waited 1 s for a rank whose process is stopped.
  // `warn` must not throw. By default the text is printed to stderr.
  void set_warn(std::function<void(const std::string&)> warn) { warn_ = std::move(warn); }
  // For profilers: the waiting thread calls `on_wait(true)` before and `on_wait(false)` after each
  // wait that blocks. `on_wait` must not throw. It may be null.
  void set_on_wait(std::function<void(bool)> on_wait) { on_wait_ = std::move(on_wait); }
  void set_chaos(const Chaos& chaos) { chaos_ = std::make_unique<Chaos>(chaos); }

 private:
  Header& header(int rank) const;
  Signal& signal(int rank, Phase phase, int index) const;
  bool has_arrived(int peer, const Signal& signal) const;
  int block(const int* peers, std::size_t count, Phase phase, int index);
  bool is_forked() const;
  [[noreturn]] void fail_forked() const;
  void check(int peer, const Signal& awaited, double waited_s) const;
  [[noreturn]] void fail(FailureKind kind, int peer, int culprit, const std::string& what,
                         const std::string& records = "") const;
  void warn_if_stopped(int peer, double waited_s) const;
  std::string format_calls() const;
  CallRing& call_ring(int rank) const;
  void check_fault(int peer, const char* action) const;
  void check_mismatch(int peer) const;
  void check_thread(int peer) const;
  std::uint32_t calls_since_last();
  void set_fault(FailureKind kind, int culprit, const std::string& what) const;
  std::string call_description(int rank) const;
  int group_rank(int rank) const { return options_.group_ranks[static_cast<std::size_t>(rank)]; }
  std::string peer_name(int rank) const;
  std::string progress(int peer) const;
  bool has_exited(int peer) const;
  void delay() const;

  std::shared_ptr<Arena> arena_;
  int rank_;
  std::vector<int> pidfds_;
  std::vector<int> pids_;
  ChannelOptions options_;
  SpinBudget spin_budget_;
  Sharing sharing_;
  std::uint32_t epoch_;
  std::uint32_t signature_ = 0;
  bool is_recorded_ = false;  // the ring holds the call in progress
  std::uint32_t calls_since_last_ = 0;
  std::map<std::uint64_t, std::uint32_t> last_calls_;  // epoch of the last call, by thread id
  std::uint32_t slot_signatures_[2] = {0, 0};          // of the description in each call slot
  std::size_t max_capacity_;
  std::size_t capacity_;
  std::uint32_t fork_generation_;
  mutable bool broken_ = false;
  mutable std::string broken_by_;
  std::map<std::uint64_t, std::weak_ptr<Arena>> segments_;
  // By peer: the segment that this rank reads. The user may free the tensor meanwhile.
  std::vector<std::shared_ptr<Arena>> segments_read_;
  std::shared_ptr<const std::function<void()>> poll_;  // may be set while a different thread waits
  std::function<void(bool)> on_wait_;
  std::function<void(const std::string&)> warn_;
  mutable std::uint32_t warned_epoch_ = 0;
  std::unique_ptr<Chaos> chaos_;
};

}  // namespace tpkernels::host
