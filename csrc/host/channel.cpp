#include "host/channel.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <thread>

#include "host/futex.h"
#include "host/region.h"

namespace tpkernels::host {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kPage = 4096;
constexpr double kSlice = 0.02;  // s between looks at peers, while asleep

std::size_t round_up(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// A wait that somebody wants to know of: see set_on_wait.
class Noted {
 public:
  explicit Noted(const std::function<void(bool)>& on_wait) : on_wait_(on_wait) {
    if (on_wait_) on_wait_(true);
  }
  ~Noted() {
    if (on_wait_) on_wait_(false);
  }
  Noted(const Noted&) = delete;
  Noted& operator=(const Noted&) = delete;

 private:
  const std::function<void(bool)>& on_wait_;
};

}  // namespace

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

Header& Channel::header(int rank) const { return *reinterpret_cast<Header*>(arena_->region(rank)); }

Signal& Channel::signal(int rank, Phase phase, int index) const {
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
  Signal& theirs = signal(peer, phase, index);
  if (peer == rank_ || arrived(peer, theirs)) return;
  const Noted noted(on_wait_);
  if (spin(peer, phase, index)) return;
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
  std::optional<Noted> noted;
  while (true) {
    for (const int peer : peers) {
      if (peer == rank_ || arrived(peer, signal(peer, phase, index))) return peer;
    }
    if (!noted) noted.emplace(on_wait_);
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
