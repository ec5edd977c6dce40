// The layout of a region, calls, waits, and the detection and reporting of failures.
#include "host/channel.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <thread>

namespace tpkernels::host {

constexpr std::size_t kTextBytes = 448;
constexpr int kPhases = 3;

constexpr std::uint64_t signal_value(std::uint32_t signature, std::uint32_t epoch) {
  return std::uint64_t{signature} << 32 | epoch;
}
constexpr std::uint32_t get_epoch(std::uint64_t value) { return static_cast<std::uint32_t>(value); }
constexpr std::uint32_t get_signature(std::uint64_t value) {
  return static_cast<std::uint32_t>(value >> 32);
}

// Text that peers may read. Its length is bounded, and readers only print it.
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

// The state that a rank publishes about a call. One slot per parity of the epoch.
struct CallSlot {
  Signal entered;
  std::atomic<std::uint64_t> segment;  // segment with the data of this call; 0: data buffer
  std::atomic<std::uint64_t> offset;
  std::atomic<std::uint32_t> calls_since_last;  // see invariant 6
  Text description;
};

// The start of a region. The signals of the phases follow: [parity][phase][rank], then the
// CallRing.
struct alignas(64) Header {
  RankInfo info;
  CallSlot calls[2];
  std::atomic<std::uint32_t> fault;  // FailureKind, or 0 without a fault; written last
  std::atomic<std::int32_t> culprit;
  Text fault_text;
};

// Invariant 7 for a rank that leaves a call early: it may overwrite data that peers read in place.
// The rank stores the fault first, then overwrites. The peer reads the data first, then checks for
// a fault. So a peer that finds no fault has read no overwritten data.
//
// Release stores and acquire loads do not suffice: a later store may move before a release, and an
// earlier load may move after an acquire. ThreadSanitizer does not support fences. It reports such
// a race on user data, although the peer discards the data.
#ifdef __SANITIZE_THREAD__
inline void fence_before_overwrites() {}
inline void fence_after_reads() {}
#else
inline void fence_before_overwrites() { std::atomic_thread_fence(std::memory_order_release); }
inline void fence_after_reads() { std::atomic_thread_fence(std::memory_order_acquire); }
#endif

static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "processes share the words");

namespace {

constexpr std::size_t kPage = 4096;
std::size_t round_up(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

std::size_t ring_offset(int world) {
  return sizeof(Header) + 2 * kPhases * static_cast<std::size_t>(world) * sizeof(Signal);
}

// Bytes before the data buffers.
std::size_t signal_pad_bytes(int world) {
  return round_up(ring_offset(world) + sizeof(CallRing), kPage);
}

std::size_t compute_max_capacity(int world, std::size_t region_bytes) {
  return (region_bytes - signal_pad_bytes(world)) / 2 / kPage * kPage;
}

}  // namespace

std::size_t Channel::buffer_offset(int parity) const {
  return signal_pad_bytes(world()) + static_cast<unsigned>(parity) * max_capacity_;
}

std::size_t Channel::region_bytes(int world, std::size_t max_capacity) {
  return signal_pad_bytes(world) + 2 * round_up(max_capacity, kPage);
}

std::vector<std::pair<std::size_t, std::size_t>> Channel::commit_ranges(int world,
                                                                        std::size_t region_bytes,
                                                                        std::size_t begin_bytes,
                                                                        std::size_t end_bytes) {
  const std::size_t pad_bytes = signal_pad_bytes(world);
  const std::size_t max_capacity = compute_max_capacity(world, region_bytes);
  const std::size_t begin = begin_bytes == 0 ? 0 : pad_bytes + begin_bytes;
  return {{begin, pad_bytes + end_bytes - begin},
          {pad_bytes + max_capacity + begin_bytes, end_bytes - begin_bytes}};
}

void Channel::grow(std::size_t capacity) {
  if (capacity < capacity_ || capacity > max_capacity_) {
    throw std::invalid_argument("buffers of " + std::to_string(capacity_) +
                                " bytes cannot grow to " + std::to_string(capacity) +
                                " bytes: the limit is " + std::to_string(max_capacity_));
  }
  capacity_ = capacity;
}

Channel::Channel(std::shared_ptr<Arena> arena, int rank, std::vector<int> pidfds,
                 std::vector<int> pids, ChannelOptions options, std::size_t capacity,
                 std::uint32_t epoch)
    : arena_(std::move(arena)),
      rank_(rank),
      pidfds_(std::move(pidfds)),
      pids_(std::move(pids)),
      options_(std::move(options)),
      spin_budget_(options_.spin_us),
      epoch_(epoch),
      max_capacity_(compute_max_capacity(arena_->world(), arena_->region_bytes())),
      capacity_(capacity),
      fork_generation_(fork_generation()) {
  const auto ranks = static_cast<std::size_t>(world());
  segments_read_.resize(ranks);
  if (options_.group_ranks.empty()) {
    options_.group_ranks.resize(ranks);
    std::iota(options_.group_ranks.begin(), options_.group_ranks.end(), 0);
  }
  if (rank < 0 || rank >= world() || pidfds_.size() != ranks || pids_.size() != ranks ||
      options_.group_ranks.size() != ranks) {
    throw std::invalid_argument("rank, pidfds, pids or group_ranks do not match world_size=" +
                                std::to_string(world()));
  }
  if (capacity > max_capacity_) {
    throw std::invalid_argument("buffers of " + std::to_string(capacity) +
                                " bytes exceed the region's limit of " +
                                std::to_string(max_capacity_));
  }
  RankInfo& info = header(rank_).info;
  info.world.store(world(), std::memory_order_relaxed);
  info.group_rank.store(group_rank(rank_), std::memory_order_relaxed);
  info.pid.store(pids_[static_cast<std::size_t>(rank_)], std::memory_order_relaxed);
  info.ring_offset.store(static_cast<std::uint32_t>(ring_offset(world())),
                         std::memory_order_relaxed);
  info.group.write(options_.group);
  info.magic.store(RankInfo::kMagic, std::memory_order_release);
}

Channel::~Channel() {
  for (const int fd : pidfds_) {
    if (fd >= 0) close(fd);
  }
}

Header& Channel::header(int rank) const { return *reinterpret_cast<Header*>(arena_->region(rank)); }

CallRing& Channel::call_ring(int rank) const {
  return *reinterpret_cast<CallRing*>(arena_->region(rank) + ring_offset(world()));
}

Signal& Channel::signal(int rank, Phase phase, int index) const {
  auto* signals = reinterpret_cast<Signal*>(arena_->region(rank) + sizeof(Header));
  const int slot = (parity() * kPhases + static_cast<int>(phase)) * world() + index;
  return signals[slot];
}

std::byte* Channel::buffer(int rank) const {
  const int buffer_parity = chaos_ && chaos_->single_buffer ? 0 : parity();
  return arena_->region(rank) + buffer_offset(buffer_parity);
}

void Channel::begin(std::uint32_t signature, std::string_view description) {
  if (is_forked()) fail_forked();
  if (broken_) {
    throw Failure(FailureKind::kBroken, -1,
                  "this group is broken and cannot run more calls; create a new group. "
                  "It broke with: " +
                      broken_by_);
  }
  ++epoch_;
  const std::string_view caller = take_caller();
  const bool is_chunk = is_recorded_ && signature == signature_ && caller.empty();
  signature_ = signature;
  CallSlot& slot = header(rank_).calls[parity()];
  if (slot_signatures_[parity()] != signature) {
    slot.description.write(description);
    slot_signatures_[parity()] = signature;
  }
  slot.segment.store(0, std::memory_order_relaxed);
  calls_since_last_ = caller_id == 0 ? 0 : calls_since_last();
  slot.calls_since_last.store(calls_since_last_, std::memory_order_relaxed);
  slot.entered.value.store(signal_value(signature_, epoch_), std::memory_order_seq_cst);
  // After that store, which would otherwise wait until the caches have taken the record.
  if (is_chunk) return call_ring(rank_).advance(epoch_);
  end_call();
  call_ring(rank_).begin(epoch_, description, caller);
  is_recorded_ = true;
}

void Channel::end_call(bool completed) {
  if (is_recorded_) call_ring(rank_).end(completed ? CallState::kCompleted : CallState::kFailed);
  is_recorded_ = false;
}

// Returns how many calls ago this thread made its previous call, or kFirstCall.
std::uint32_t Channel::calls_since_last() {
  constexpr std::uint32_t kFirstCall = 0xFFFFFFFF;
  constexpr std::size_t kMaxThreads = 4096;  // forgotten threads count as new
  if (last_calls_.size() >= kMaxThreads) last_calls_.clear();
  const auto [last, is_first] = last_calls_.try_emplace(caller_id, epoch_);
  const std::uint32_t since = is_first ? kFirstCall : epoch_ - last->second;
  last->second = epoch_;
  return since;
}

void Channel::publish(Phase phase, int index) {
  if (chaos_) delay();
  Signal& local_signal = signal(rank_, phase, index);
  local_signal.value.store(signal_value(signature_, epoch_), std::memory_order_seq_cst);
  local_signal.wake();
}

void Channel::add_segment(std::uint64_t id, std::weak_ptr<Arena> segment) {
  segments_[id] = std::move(segment);
}

void Channel::set_location(std::uint64_t segment, std::size_t offset) {
  CallSlot& slot = header(rank_).calls[parity()];
  slot.offset.store(offset, std::memory_order_relaxed);
  slot.segment.store(segment, std::memory_order_relaxed);  // ordered by the next publish
}

std::pair<std::uint64_t, std::size_t> Channel::location(int peer) const {
  const CallSlot& slot = header(peer).calls[parity()];
  return {slot.segment.load(std::memory_order_relaxed),
          slot.offset.load(std::memory_order_relaxed)};
}

bool Channel::in_segment(int peer) const { return location(peer).first != 0; }

std::pair<std::shared_ptr<Arena>, std::size_t> Channel::peer_segment(int peer,
                                                                     std::size_t bytes) const {
  const auto [id, offset] = location(peer);
  if (id == 0) return {nullptr, 0};
  const auto it = segments_.find(id);
  auto segment = it == segments_.end() ? nullptr : it->second.lock();
  if (!segment || offset > segment->region_bytes() || bytes > segment->region_bytes() - offset) {
    fail(FailureKind::kMismatch, peer, group_rank(peer),
         "is in " + call_description(rank_) + ", to which " + peer_name(peer) +
             " passes a symmetric tensor that this rank has released");
  }
  return {std::move(segment), offset};
}

const std::byte* Channel::data(int peer, std::size_t bytes) {
  auto [segment, offset] = peer_segment(peer, bytes);
  if (!segment) return buffer(peer);
  auto& read_segment = segments_read_[static_cast<std::size_t>(peer)] = std::move(segment);
  return read_segment->region(peer) + offset;
}

void Channel::delay() const {
  if (chaos_->max_delay_us == 0) return;
  std::uint64_t& state = chaos_->seed;  // xorshift64
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  if (state % 4 == 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(state / 4 % chaos_->max_delay_us));
  }
}

// Waits.

namespace {

constexpr double kCheckInterval = 0.02;   // s between checks of the peers while asleep
constexpr double kStoppedInterval = 1.0;  // s before a waiter looks for a stopped process
constexpr std::size_t kListedCalls = 3;   // per rank, in the message of a timeout
// s between checks of signals that the waiter cannot sleep on: initial and maximum.
constexpr double kFallbackInterval = 5e-4, kMaxFallbackInterval = 5e-3;

// Reports a wait to the set_on_wait callback.
class WaitReport {
 public:
  explicit WaitReport(const std::function<void(bool)>& on_wait) : on_wait_(on_wait) {
    if (on_wait_) on_wait_(true);
  }
  ~WaitReport() {
    if (on_wait_) on_wait_(false);
  }
  WaitReport(const WaitReport&) = delete;
  WaitReport& operator=(const WaitReport&) = delete;

 private:
  const std::function<void(bool)>& on_wait_;
};

}  // namespace

bool Channel::has_arrived(int peer, const Signal& signal) const {
  const std::uint64_t value = signal.value.load(std::memory_order_acquire);
  if (value == signal_value(signature_, epoch_)) {
    if (calls_since_last_ != 0) check_thread(peer);
    return true;
  }
  if (get_epoch(value) == epoch_ && value != 0) check_mismatch(peer);
  return false;
}

void Channel::wait(int peer, Phase phase, int index) {
  if (chaos_) {
    delay();
    if (chaos_->skip_waits) return;
  }
  if (peer != rank_ && !has_arrived(peer, signal(peer, phase, index)))
    block(&peer, 1, phase, index);
}

int Channel::wait_any(const std::vector<int>& peers, Phase phase, int index) {
  if (peers.empty()) throw std::invalid_argument("wait_any needs at least one peer");
  if (chaos_) {
    delay();
    if (chaos_->skip_waits) return peers.front();
  }
  for (const int peer : peers) {
    if (peer == rank_ || has_arrived(peer, signal(peer, phase, index))) return peer;
  }
  return block(peers.data(), peers.size(), phase, index);
}

int Channel::block(const int* peers, std::size_t count, Phase phase, int index) {
  int arrived_peer = peers[0];
  const auto poll_peers = [&] {
    const int* const signalled = std::find_if(peers, peers + count, [&](int peer) {
      return has_arrived(peer, signal(peer, phase, index));
    });
    if (signalled != peers + count) arrived_peer = *signalled;
    return signalled != peers + count;
  };
  const WaitReport report(on_wait_);
  double fallback_s = kFallbackInterval;
  wait_until(spin_budget_, options_.yield_us, poll_peers, [&](double start_us) {
    std::vector<Signal*> signals;
    for (std::size_t i = 0; i < count; ++i) signals.push_back(&signal(peers[i], phase, index));
    sleep_on(signals, std::min(kCheckInterval, options_.timeout_s), fallback_s,
             [&](std::uint64_t value) { return value == signal_value(signature_, epoch_); });
    fallback_s = std::min(2 * fallback_s, kMaxFallbackInterval);
    if (poll_peers()) return true;
    const double waited_s = (now_us() - start_us) / 1e6;
    for (std::size_t i = 0; i < count; ++i) check(peers[i], *signals[i], waited_s);
    if (const auto poll = std::atomic_load(&poll_)) (*poll)();
    return true;
  });
  return arrived_peer;
}

void Channel::barrier() {
  publish(Phase::kData);
  for (int peer = 0; peer < world(); ++peer) wait(peer, Phase::kData);
}

// Failure. The channel is broken from then on.

// Checks of a waiter whose signal has not arrived. Throws if the peer is in a different call, has
// failed or has exited, or if the wait has timed out.
void Channel::check(int peer, const Signal& awaited, double waited_s) const {
  if (is_forked()) fail_forked();
  check_mismatch(peer);
  const Header& peer_header = header(peer);
  if (const auto kind = static_cast<FailureKind>(peer_header.fault.load(std::memory_order_acquire));
      kind != FailureKind{}) {
    if (has_arrived(peer, awaited)) return;  // published before it failed or left
    const int culprit = peer_header.culprit.load(std::memory_order_relaxed);
    if (kind == FailureKind::kMismatch && culprit != group_rank(rank_)) {
      const auto& group_ranks = options_.group_ranks;
      const auto it = std::find(group_ranks.begin(), group_ranks.end(), culprit);
      if (it != group_ranks.end()) check_mismatch(static_cast<int>(it - group_ranks.begin()));
    }
    fail(kind, peer, culprit,
         "waited for " + peer_name(peer) + ", which failed: " + peer_header.fault_text.read());
  }
  if (has_exited(peer)) {
    if (has_arrived(peer, awaited)) return;  // published before it exited
    fail(FailureKind::kPeerLost, peer, group_rank(peer),
         "waited for " + peer_name(peer) + ", whose process has ended; " + progress(peer));
  }
  if (waited_s >= options_.timeout_s) {
    char waited[32];
    std::snprintf(waited, sizeof(waited), "%.2f s", waited_s);
    fail(FailureKind::kTimeout, peer, group_rank(peer),
         std::string("waited ") + waited + " for " + peer_name(peer) + ", which is alive; " +
             progress(peer),
         format_calls());
  }
  warn_if_stopped(peer, waited_s);  // may wait for the GIL
}

void Channel::warn_if_stopped(int peer, double waited_s) const {
  if (waited_s < kStoppedInterval || warned_epoch_ == epoch_ ||
      !is_stopped(pidfd_state(pidfds_[static_cast<std::size_t>(peer)]))) {
    return;
  }
  warned_epoch_ = epoch_;
  char waited[64];
  std::snprintf(waited, sizeof(waited), " has waited %.1f s of %g s for ", waited_s,
                options_.timeout_s);
  const std::string text = call_description(rank_) + ": rank " + std::to_string(group_rank(rank_)) +
                           waited + peer_name(peer) +
                           ", whose process is stopped (SIGSTOP or a debugger)";
  if (warn_) return warn_(text);
  std::fprintf(stderr, "tpkernels: %s\n", text.c_str());
}

std::string Channel::format_calls() const {
  std::vector<RankCalls> ranks;
  for (int rank = 0; rank < world(); ++rank) {
    ranks.push_back(read_rank(arena_->region(rank), ring_offset(world()), kListedCalls));
    ranks.back().process_state = pidfd_state(pidfds_[static_cast<std::size_t>(rank)]);
  }
  return format_records(ranks);
}

void Channel::end_read(int peer) {
  segments_read_[static_cast<std::size_t>(peer)] = nullptr;
  fence_after_reads();
  check_fault(peer, "has read the memory of ");
  publish(Phase::kRead, peer);
}

void Channel::check_fault(int peer, const char* action) const {
  const Header& peer_header = header(peer);
  const auto kind = static_cast<FailureKind>(peer_header.fault.load(std::memory_order_acquire));
  if (kind == FailureKind{}) return;
  fail(kind, peer, peer_header.culprit.load(std::memory_order_relaxed),
       action + peer_name(peer) + ", which has failed: " + peer_header.fault_text.read());
}

bool Channel::has_exited(int peer) const {
  pollfd life{pidfds_[static_cast<std::size_t>(peer)], POLLIN, 0};
  return life.fd >= 0 && ::poll(&life, 1, 0) == 1 && (life.revents & POLLIN) != 0;
}

void Channel::watch(Phase phase, double waited_s) const {
  for (int peer = 0; peer < world(); ++peer) {
    const Signal& peer_signal = signal(peer, phase, 0);
    if (peer != rank_ && !has_arrived(peer, peer_signal)) check(peer, peer_signal, waited_s);
  }
}

void Channel::check_peers() const {
  if (is_forked()) fail_forked();
  for (int peer = 0; peer < world(); ++peer) {
    if (peer == rank_) continue;
    check_fault(peer, "checked ");
    if (has_exited(peer)) {
      fail(FailureKind::kPeerLost, peer, group_rank(peer),
           "found that the process of " + peer_name(peer) + " has ended");
    }
  }
}

void Channel::check_mismatch(int peer) const {
  const std::uint64_t entered =
      header(peer).calls[parity()].entered.value.load(std::memory_order_acquire);
  if (get_epoch(entered) != epoch_ || entered == 0 || get_signature(entered) == signature_) return;
  fail(FailureKind::kMismatch, peer, group_rank(peer),
       "is in " + call_description(rank_) + ", but " + peer_name(peer) + " is in " +
           call_description(peer) + ", both as call #" + std::to_string(epoch_) + " of the group");
}

void Channel::check_thread(int peer) const {
  const std::uint32_t peer_calls_since_last =
      header(peer).calls[parity()].calls_since_last.load(std::memory_order_relaxed);
  if (peer_calls_since_last == 0 || peer_calls_since_last == calls_since_last_) return;
  fail(FailureKind::kMismatch, peer, group_rank(peer),
       "is in " + call_description(rank_) + " as call #" + std::to_string(epoch_) +
           " of the group, but " + peer_name(peer) +
           " makes this call on a different thread: the threads that share a group must make their "
           "calls in the same order on all ranks, or use a separate group per thread");
}

void Channel::fail(FailureKind kind, int peer, int culprit, const std::string& what,
                   const std::string& records) const {
  std::string message = "rank " + std::to_string(group_rank(rank_)) + " ";
  const std::string call = call_description(rank_);  // empty before the first call
  if (kind != FailureKind::kMismatch && !call.empty()) message = call + ": " + message;
  message += what;
  set_fault(kind, culprit, message);
  throw Failure(kind, kind == FailureKind::kMismatch ? group_rank(peer) : culprit,
                message + ". The group is broken; create a new group." +
                    (records.empty() ? "" : "\n\n" + records));
}

void Channel::set_fault(FailureKind kind, int culprit, const std::string& what) const {
  broken_ = true;
  broken_by_ = what;
  if (is_forked()) return;  // the region belongs to the parent
  if (is_recorded_) call_ring(rank_).end(CallState::kFailed);
  Header& local_header = header(rank_);
  local_header.fault_text.write(what);
  local_header.culprit.store(culprit, std::memory_order_relaxed);
  local_header.fault.store(static_cast<std::uint32_t>(kind), std::memory_order_release);
  fence_before_overwrites();  // peers may read user data in place
}

void Channel::abandon(const std::string& reason, FailureKind kind, int culprit) {
  if (broken_) return;
  set_fault(kind, culprit < 0 ? group_rank(rank_) : culprit, "it left the call with " + reason);
}

bool Channel::is_forked() const { return fork_generation() != fork_generation_; }

void Channel::fail_forked() const {
  throw Failure(FailureKind::kBroken, -1,
                "process " + std::to_string(getpid()) + " is a fork of " + peer_name(rank_) +
                    " and cannot make calls in its group; create a new process group in the fork");
}

std::string Channel::call_description(int rank) const {
  return header(rank).calls[parity()].description.read();
}

std::string Channel::peer_name(int rank) const {
  return "rank " + std::to_string(group_rank(rank)) + " (pid " +
         std::to_string(pids_[static_cast<std::size_t>(rank)]) + ")";
}

std::string Channel::progress(int peer) const {
  const Header& peer_header = header(peer);
  const std::uint32_t current = get_epoch(peer_header.calls[parity()].entered.value.load());
  const std::uint32_t previous = get_epoch(peer_header.calls[parity() ^ 1].entered.value.load());
  const std::string expected = "expected call #" + std::to_string(epoch_) + ", ";
  if (current == epoch_) return expected + "which it had begun but not completed";
  return expected + "seen #" + std::to_string(previous == epoch_ - 1 ? previous : current);
}

}  // namespace tpkernels::host
