#include "host/channel.h"

#include <unistd.h>

#include <chrono>
#include <numeric>
#include <thread>

#include "host/fork.h"
#include "host/futex.h"
#include "host/region.h"

namespace tpkernels::host {
namespace {

constexpr std::size_t kPage = 4096;
std::size_t round_up(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

std::size_t words_bytes(int world) {
  const std::size_t words = 2 * kPhases * static_cast<std::size_t>(world) * sizeof(Signal);
  return round_up(sizeof(Header) + words, kPage);
}

std::size_t limit_of(int world, std::size_t region_bytes) {
  return (region_bytes - words_bytes(world)) / 2 / kPage * kPage;
}

}  // namespace

std::size_t Channel::buffer_offset(int parity) const {
  return words_bytes(world()) + static_cast<unsigned>(parity) * limit_;
}

std::size_t Channel::region_bytes(int world, std::size_t limit) {
  return words_bytes(world) + 2 * round_up(limit, kPage);
}

std::vector<std::pair<std::size_t, std::size_t>> Channel::parts(int world, std::size_t region_bytes,
                                                                std::size_t from, std::size_t to) {
  const std::size_t words = words_bytes(world);
  const std::size_t limit = limit_of(world, region_bytes);
  const std::size_t begin = from == 0 ? 0 : words + from;
  return {{begin, words + to - begin}, {words + limit + from, to - from}};
}

void Channel::grow(std::size_t capacity) {
  if (capacity < capacity_ || capacity > limit_) {
    throw std::invalid_argument("buffers of " + std::to_string(capacity_) +
                                " bytes cannot grow to " + std::to_string(capacity) +
                                ": the limit is " + std::to_string(limit_));
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
      patience_(options_.spin_us),
      epoch_(epoch),
      limit_(limit_of(arena_->world(), arena_->region_bytes())),
      capacity_(capacity),
      fork_generation_(fork_generation()) {
  const auto ranks = static_cast<std::size_t>(world());
  held_.resize(ranks);
  if (options_.names.empty()) {
    options_.names.resize(ranks);
    std::iota(options_.names.begin(), options_.names.end(), 0);
  }
  if (rank < 0 || rank >= world() || pidfds_.size() != ranks || pids_.size() != ranks ||
      options_.names.size() != ranks) {
    throw std::invalid_argument("rank, pidfds, pids or names do not match a world of " +
                                std::to_string(world()));
  }
  if (capacity > limit_) {
    throw std::invalid_argument("buffers of " + std::to_string(capacity) +
                                " bytes exceed the region's limit of " + std::to_string(limit_));
  }
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
  if (forked()) fail_forked();
  if (broken_) {
    throw Failure(FailureKind::kBroken, -1,
                  "this group is broken and can run no more calls; make a new group. "
                  "It broke with: " +
                      broken_by_);
  }
  ++epoch_;
  signature_ = signature;
  CallSlot& slot = header(rank_).calls[parity()];
  if (recorded_[parity()] != signature) {
    slot.text.write(text);
    recorded_[parity()] = signature;
  }
  slot.segment.store(0, std::memory_order_relaxed);
  slot.entered.word.store(word_of(signature_, epoch_), std::memory_order_seq_cst);
}

void Channel::publish(Phase phase, int index) {
  if (chaos_) delay();
  Signal& own = signal(rank_, phase, index);
  own.word.store(word_of(signature_, epoch_), std::memory_order_seq_cst);
  if (own.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(&own.word);
}

void Channel::add_segment(std::uint64_t id, std::weak_ptr<Arena> segment) {
  segments_[id] = std::move(segment);
}

void Channel::locate(std::uint64_t segment, std::size_t offset) {
  CallSlot& slot = header(rank_).calls[parity()];
  slot.offset.store(offset, std::memory_order_relaxed);
  slot.segment.store(segment, std::memory_order_relaxed);  // ordered by the following publish
}

std::pair<std::uint64_t, std::size_t> Channel::located(int peer) const {
  const CallSlot& slot = header(peer).calls[parity()];
  return {slot.segment.load(std::memory_order_relaxed),
          slot.offset.load(std::memory_order_relaxed)};
}

bool Channel::in_segment(int peer) const { return located(peer).first != 0; }

std::pair<std::shared_ptr<Arena>, std::size_t> Channel::segment_of(int peer,
                                                                   std::size_t bytes) const {
  const auto [id, offset] = located(peer);
  if (id == 0) return {nullptr, 0};
  const auto found = segments_.find(id);
  auto segment = found == segments_.end() ? nullptr : found->second.lock();
  if (!segment || offset > segment->region_bytes() || bytes > segment->region_bytes() - offset) {
    fail(FailureKind::kMismatch, peer, name(peer),
         "is in " + call_text(rank_) + ", to which " + peer_name(peer) +
             " passes a symmetric tensor that this rank has released");
  }
  return {std::move(segment), offset};
}

const std::byte* Channel::data(int peer, std::size_t bytes) {
  auto [segment, offset] = segment_of(peer, bytes);
  if (!segment) return buffer(peer);
  auto& held = held_[static_cast<std::size_t>(peer)] = std::move(segment);
  return held->region(peer) + offset;
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
