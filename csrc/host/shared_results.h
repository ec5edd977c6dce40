// Problem: a rank that has reduced a part of a tensor can store it straight into its peers'
// results, if these lie in memory that all ranks map.
//
// Memory: an arena with a region for each rank, from which the rank takes blocks for its results.
// The pool (pool.h) keeps those that are idle.
//
// Cost: the kernel makes the pages of a new block one by one, and maps them again for the peer:
// some 30 ms for 32 MiB, where private huge pages take 2 ms and the sum 4 (AMD EPYC Zen 5,
// 2026-11-23). So a size gets memory only once it has been asked for often, and twice as often
// whenever memory had to be given back.
//
// Sync: a rank writes to a peer's block only in a call: after the peer's first word, which says
// where the block is, and before its own last word, for which the peer waits. Outside of a call
// only the owner writes.
//
// Failure: a peer that was stopped in a call may go on writing to the block of that call at any
// later time. So after a failed call the region is retired: no memory of it is handed out again,
// nor is what was in use then given back to the kernel, which could have none when the peer's
// stores need it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "host/arena.h"

namespace tpkernels::host {

// Any thread may call any method.
class SharedResults {
 public:
  // `private_calls`: how often a size is refused at first.
  SharedResults(std::shared_ptr<Arena> arena, int rank, std::uint32_t private_calls);
  SharedResults(const SharedResults&) = delete;
  SharedResults& operator=(const SharedResults&) = delete;

  int world() const { return arena_->world(); }

  // Whole pages of this rank's region, committed. Null if there is no memory, for the first calls
  // with a size, after `close`, and in a fork of the rank's process.
  std::byte* take(std::size_t bytes);
  void give_back(std::byte* data, std::size_t bytes) noexcept;
  // No memory is handed out any more; after `retire` none goes back to the kernel either.
  void close();
  void retire();
  bool closed() const;

  // Where memory lies in this rank's region; none if it does not.
  std::optional<std::size_t> offset_of(const std::byte* data, std::size_t bytes) const;
  // Memory in a rank's region; null if it would leave the region.
  std::byte* at(int rank, std::size_t offset, std::size_t bytes) const;

 private:
  bool forked() const;
  std::optional<std::size_t> carve(std::size_t bytes);
  void join(std::size_t begin, std::size_t bytes);

  std::shared_ptr<Arena> arena_;
  int rank_;
  std::uint32_t fork_generation_;
  mutable std::mutex mutex_;
  std::map<std::size_t, std::size_t> free_;       // offset -> bytes; no two touch
  std::map<std::size_t, std::uint32_t> refused_;  // bytes -> calls
  std::uint32_t private_calls_;
  bool closed_ = false, retired_ = false;
};

}  // namespace tpkernels::host
