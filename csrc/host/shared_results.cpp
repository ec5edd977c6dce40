#include "host/shared_results.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <utility>

#include "host/fork.h"

namespace tpkernels::host {

// After so many refusals no doubling changes anything.
constexpr std::uint32_t kMostPrivateCalls = 1U << 30;

SharedResults::SharedResults(std::shared_ptr<Arena> arena, int rank, std::uint32_t private_calls)
    : arena_(std::move(arena)),
      rank_(rank),
      fork_generation_(fork_generation()),
      private_calls_(private_calls) {
  if (rank < 0 || rank >= world()) {
    throw std::invalid_argument("no rank " + std::to_string(rank) + " in an arena of " +
                                std::to_string(world()) + " ranks");
  }
  free_[0] = arena_->region_bytes();
}

// The mutex may then have been copied from a thread that held it.
bool SharedResults::forked() const { return fork_generation() != fork_generation_; }

std::byte* SharedResults::take(std::size_t bytes) {
  if (forked()) return nullptr;
  const std::optional<std::size_t> offset = carve(bytes);
  if (!offset) return nullptr;
  try {
    arena_->commit(rank_, *offset, bytes);
  } catch (const std::runtime_error&) {
    const std::lock_guard<std::mutex> lock(mutex_);
    join(*offset, bytes);
    return nullptr;
  }
  return arena_->region(rank_) + *offset;
}

void SharedResults::give_back(std::byte* data, std::size_t bytes) noexcept {
  const auto offset = static_cast<std::size_t>(data - arena_->region(rank_));
  const std::lock_guard<std::mutex> lock(mutex_);
  if (retired_) return;
  try {
    arena_->give_back(rank_, offset, bytes);
    join(offset, bytes);
    private_calls_ = std::min(2 * private_calls_, kMostPrivateCalls);
    refused_.clear();
  } catch (const std::exception&) {  // without memory to note it: it stays
  }
}

void SharedResults::close() {
  if (forked()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
}

void SharedResults::retire() {
  if (forked()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  closed_ = retired_ = true;
}

bool SharedResults::closed() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return closed_;
}

std::optional<std::size_t> SharedResults::offset_of(const std::byte* data,
                                                    std::size_t bytes) const {
  const auto begin = reinterpret_cast<std::uintptr_t>(arena_->region(rank_));
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  if (address < begin || address - begin > arena_->region_bytes()) return std::nullopt;
  const std::size_t offset = address - begin;
  if (bytes > arena_->region_bytes() - offset) return std::nullopt;
  return offset;
}

std::byte* SharedResults::at(int rank, std::size_t offset, std::size_t bytes) const {
  const std::size_t size = arena_->region_bytes();
  return offset > size || bytes > size - offset ? nullptr : arena_->region(rank) + offset;
}

std::optional<std::size_t> SharedResults::carve(std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return std::nullopt;
  if (std::uint32_t& refused = refused_[bytes]; refused < private_calls_) {
    ++refused;
    return std::nullopt;
  }
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const auto [offset, size] = *it;
    if (size < bytes) continue;
    if (size > bytes) free_[offset + bytes] = size - bytes;
    free_.erase(it);
    return offset;
  }
  return std::nullopt;
}

void SharedResults::join(std::size_t begin, std::size_t bytes) {
  auto next = free_.lower_bound(begin);
  if (next != free_.end() && next->first == begin + bytes) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == begin) {
      before->second += bytes;
      return;
    }
  }
  free_[begin] = bytes;
}

}  // namespace tpkernels::host
