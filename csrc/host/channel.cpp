#include "host/channel.h"

#include <poll.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "host/futex.h"

namespace tpkernels::host {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kPage = 4096;
constexpr std::size_t kTextBytes = 448;
constexpr int kPhases = 3;
constexpr double kSlice = 0.02;  // s between looks at peers, while asleep

constexpr std::uint64_t word_of(std::uint32_t signature, std::uint32_t epoch) {
  return std::uint64_t{signature} << 32 | epoch;
}
constexpr std::uint32_t epoch_of(std::uint64_t word) { return static_cast<std::uint32_t>(word); }
constexpr std::uint32_t signature_of(std::uint64_t word) {
  return static_cast<std::uint32_t>(word >> 32);
}

std::size_t round_up(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Text that peers may read. It is bounded and never trusted beyond being printed.
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

}  // namespace

struct alignas(64) Channel::Signal {
  std::atomic<std::uint64_t> word;
  std::atomic<std::uint32_t> sleepers;
};

// The start of a region; the phases' signals follow.
struct alignas(64) Channel::Header {
  struct Call {  // one per parity
    Signal entered;
    std::atomic<std::uint64_t> segment;  // where the data of this epoch is; 0: the data buffer
    std::atomic<std::uint64_t> offset;
    Text text;
  };
  Call calls[2];
  std::atomic<std::uint32_t> fault;  // FailureKind, 0 while all is well; written last
  std::atomic<std::int32_t> culprit;
  Text fault_text;
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "words are shared by processes");

std::size_t Channel::buffer_offset(int parity) const {
  const std::size_t words = 2 * kPhases * static_cast<std::size_t>(world()) * sizeof(Signal);
  return round_up(sizeof(Header) + words, kPage) + static_cast<unsigned>(parity) * capacity_;
}

std::size_t Channel::region_bytes(int world, std::size_t capacity) {
  const std::size_t words = 2 * kPhases * static_cast<std::size_t>(world) * sizeof(Signal);
  return round_up(sizeof(Header) + words, kPage) + 2 * round_up(capacity, kPage);
}

Channel::Channel(std::shared_ptr<Arena> arena, int rank, std::vector<int> pidfds,
                 std::vector<int> pids, ChannelOptions options, std::uint32_t epoch)
    : arena_(std::move(arena)),
      rank_(rank),
      pidfds_(std::move(pidfds)),
      pids_(std::move(pids)),
      options_(options),
      epoch_(epoch) {
  const auto ranks = static_cast<std::size_t>(world());
  if (rank < 0 || rank >= world() || pidfds_.size() != ranks || pids_.size() != ranks) {
    throw std::invalid_argument("rank, pidfds and pids do not fit a world of " +
                                std::to_string(world()));
  }
  capacity_ = 0;
  capacity_ = (arena_->region_bytes() - buffer_offset(0)) / 2 / kPage * kPage;
}

Channel::~Channel() {
  for (const int fd : pidfds_) {
    if (fd >= 0) close(fd);
  }
}

Channel::Header& Channel::header(int rank) const {
  return *reinterpret_cast<Header*>(arena_->region(rank));
}

Channel::Signal& Channel::signal(int rank, Phase phase, int index) const {
  auto* signals = reinterpret_cast<Signal*>(arena_->region(rank) + sizeof(Header));
  const int slot = (parity() * kPhases + static_cast<int>(phase)) * world() + index;
  return signals[slot];
}

std::byte* Channel::buffer(int rank) const {
  const int parity_used = chaos_ && chaos_->single_buffer ? 0 : parity();
  return arena_->region(rank) + buffer_offset(parity_used);
}

void Channel::begin(std::uint32_t signature, std::string_view text) {
  if (broken_) {
    throw Failure(FailureKind::kBroken, -1,
                  "this group is broken and can run no more calls; make a new group. "
                  "It broke with: " +
                      broken_by_);
  }
  ++epoch_;
  signature_ = signature;
  Header::Call& call = header(rank_).calls[parity()];
  if (recorded_[parity()] != signature) {
    call.text.write(text);
    recorded_[parity()] = signature;
  }
  call.segment.store(0, std::memory_order_relaxed);
  call.entered.word.store(word_of(signature_, epoch_), std::memory_order_seq_cst);
}

void Channel::publish(Phase phase, int index) {
  if (chaos_) delay();
  Signal& own = signal(rank_, phase, index);
  own.word.store(word_of(signature_, epoch_), std::memory_order_seq_cst);
  if (own.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(&own.word);
}

bool Channel::arrived(int peer, const Signal& signal) const {
  const std::uint64_t word = signal.word.load(std::memory_order_acquire);
  if (word == word_of(signature_, epoch_)) return true;
  if (epoch_of(word) == epoch_ && word != 0) check_mismatch(peer);
  return false;
}

bool Channel::spin(int peer, Phase phase, int index) {
  const Signal& theirs = signal(peer, phase, index);
  if (arrived(peer, theirs)) return true;
  const auto start = Clock::now();
  while (true) {
    for (int i = 0; i < 32; ++i) {
      cpu_relax();
      if (arrived(peer, theirs)) return true;
    }
    const double waited_us = seconds_since(start) * 1e6;
    if (waited_us >= options_.spin_us) return false;
    // The peer may be waiting for this very core.
    if (waited_us >= options_.yield_us) sched_yield();
  }
}

void Channel::sleep(Signal& signal, double seconds) {
  signal.sleepers.fetch_add(1, std::memory_order_seq_cst);
  const std::uint64_t seen = signal.word.load(std::memory_order_seq_cst);
  if (seen != word_of(signature_, epoch_)) futex_wait(&signal.word, epoch_of(seen), seconds);
  signal.sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

void Channel::wait(int peer, Phase phase, int index) {
  if (chaos_) {
    delay();
    if (chaos_->skip_waits) return;
  }
  if (peer == rank_ || spin(peer, phase, index)) return;
  Signal& theirs = signal(peer, phase, index);
  const auto start = Clock::now();
  while (true) {
    sleep(theirs, std::min(kSlice, options_.timeout_s));
    if (arrived(peer, theirs)) return;
    check(peer, theirs, seconds_since(start));
    if (poll_) poll_();
  }
}

int Channel::wait_any(const std::vector<int>& peers, Phase phase, int index) {
  if (peers.empty()) throw std::invalid_argument("wait_any needs a peer to wait for");
  if (chaos_) {
    delay();
    if (chaos_->skip_waits) return peers.front();
  }
  const auto start = Clock::now();
  while (true) {
    for (const int peer : peers) {
      if (peer == rank_ || arrived(peer, signal(peer, phase, index))) return peer;
    }
    const double waited = seconds_since(start);
    if (waited * 1e6 < options_.spin_us) {
      waited * 1e6 < options_.yield_us ? cpu_relax() : static_cast<void>(sched_yield());
      continue;
    }
    // Sleep on one word only, so briefly that another peer's arrival is not left lying.
    sleep(signal(peers.front(), phase, index), peers.size() == 1 ? kSlice : 5e-4);
    for (const int peer : peers) {
      const Signal& theirs = signal(peer, phase, index);
      if (!arrived(peer, theirs)) check(peer, theirs, waited);
    }
    if (poll_) poll_();
  }
}

void Channel::barrier() {
  publish(Phase::kData);
  for (int peer = 0; peer < world(); ++peer) wait(peer, Phase::kData);
}

// What a waiter that has not been served looks at: is the peer in the same call, has it failed,
// does it live, is there time left.
void Channel::check(int peer, const Signal& awaited, double waited_s) const {
  check_mismatch(peer);
  const Header& theirs = header(peer);
  if (const auto kind = static_cast<FailureKind>(theirs.fault.load(std::memory_order_acquire));
      kind != FailureKind{}) {
    const int culprit = theirs.culprit.load(std::memory_order_relaxed);
    if (kind == FailureKind::kMismatch && culprit != rank_ && culprit >= 0 && culprit < world()) {
      check_mismatch(culprit);
    }
    fail(kind, peer, culprit,
         "rank " + std::to_string(peer) + " failed: " + theirs.fault_text.read());
  }
  if (ended(peer)) {
    if (arrived(peer, awaited)) return;  // it published before it ended
    fail(FailureKind::kPeerLost, peer, peer,
         "waited for " + peer_name(peer) + ", whose process has ended; " + progress(peer));
  }
  if (waited_s >= options_.timeout_s) {
    char waited[32];
    std::snprintf(waited, sizeof(waited), "%.2f s", waited_s);
    fail(FailureKind::kTimeout, peer, peer,
         std::string("waited ") + waited + " for " + peer_name(peer) + ", which lives; " +
             progress(peer));
  }
}

bool Channel::ended(int peer) const {
  pollfd life{pidfds_[static_cast<std::size_t>(peer)], POLLIN, 0};
  return life.fd >= 0 && ::poll(&life, 1, 0) == 1 && (life.revents & POLLIN) != 0;
}

std::string Channel::lost_peer() const {
  for (int peer = 0; peer < world(); ++peer) {
    if (peer != rank_ && ended(peer)) return peer_name(peer);
  }
  return "";
}

void Channel::check_mismatch(int peer) const {
  const std::uint64_t entered =
      header(peer).calls[parity()].entered.word.load(std::memory_order_acquire);
  if (epoch_of(entered) != epoch_ || entered == 0 || signature_of(entered) == signature_) return;
  fail(FailureKind::kMismatch, peer, peer,
       "is in " + call_text(rank_) + ", but " + peer_name(peer) + " is in " + call_text(peer) +
           ", both as call #" + std::to_string(epoch_) + " of the group");
}

void Channel::fail(FailureKind kind, int peer, int culprit, const std::string& what) const {
  std::string message = "rank " + std::to_string(rank_) + " ";
  if (kind != FailureKind::kMismatch) message = call_text(rank_) + ": " + message;
  message += what;
  set_fault(kind, culprit, message);
  throw Failure(kind, kind == FailureKind::kMismatch ? peer : culprit,
                message + ". The group is broken: make a new one.");
}

void Channel::set_fault(FailureKind kind, int culprit, const std::string& what) const {
  broken_ = true;
  broken_by_ = what;
  Header& own = header(rank_);
  own.fault_text.write(what);
  own.culprit.store(culprit, std::memory_order_relaxed);
  own.fault.store(static_cast<std::uint32_t>(kind), std::memory_order_release);
}

void Channel::abandon(const std::string& why) {
  if (!broken_) set_fault(FailureKind::kPeerLost, rank_, "it left the call with " + why);
}

std::string Channel::call_text(int rank) const { return header(rank).calls[parity()].text.read(); }

std::string Channel::peer_name(int rank) const {
  return "rank " + std::to_string(rank) + " (pid " +
         std::to_string(pids_[static_cast<std::size_t>(rank)]) + ")";
}

std::string Channel::progress(int peer) const {
  const Header& theirs = header(peer);
  const std::uint32_t here = epoch_of(theirs.calls[parity()].entered.word.load());
  const std::uint32_t before = epoch_of(theirs.calls[parity() ^ 1].entered.word.load());
  const std::string expected = "expected call #" + std::to_string(epoch_) + ", ";
  if (here == epoch_) return expected + "which it had begun and not completed";
  return expected + "seen #" + std::to_string(before == epoch_ - 1 ? before : here);
}

void Channel::add_segment(std::uint64_t id, std::weak_ptr<Arena> segment) {
  segments_[id] = std::move(segment);
}

void Channel::locate(std::uint64_t segment, std::size_t offset) {
  Header::Call& call = header(rank_).calls[parity()];
  call.offset.store(offset, std::memory_order_relaxed);
  call.segment.store(segment, std::memory_order_relaxed);  // ordered by the publish that follows
}

bool Channel::in_segment(int peer) const {
  return header(peer).calls[parity()].segment.load(std::memory_order_relaxed) != 0;
}

std::pair<std::shared_ptr<Arena>, std::size_t> Channel::segment_of(int peer,
                                                                   std::size_t bytes) const {
  const Header::Call& call = header(peer).calls[parity()];
  const std::uint64_t id = call.segment.load(std::memory_order_relaxed);
  if (id == 0) return {nullptr, 0};
  const auto found = segments_.find(id);
  auto segment = found == segments_.end() ? nullptr : found->second.lock();
  const std::uint64_t offset = call.offset.load(std::memory_order_relaxed);
  if (!segment || offset > segment->region_bytes() || bytes > segment->region_bytes() - offset) {
    fail(FailureKind::kMismatch, peer, peer,
         "is in " + call_text(rank_) + ", for which " + peer_name(peer) +
             " passes a symmetric tensor that this rank has released");
  }
  return {std::move(segment), offset};
}

const std::byte* Channel::data(int peer, std::size_t bytes) const {
  const auto [segment, offset] = segment_of(peer, bytes);
  return segment ? segment->region(peer) + offset : buffer(peer);
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

}  // namespace tpkernels::host
