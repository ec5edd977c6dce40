// Problem: all-gather, reduce-scatter, all-to-all and all-reduce of CPU tensors over a channel, and
// dispatch and combine of the tokens of experts.
//
// Algorithm: data moves in chunks. Each chunk is one call of the channel (one epoch). So the
// channel's proof covers it, and the two data buffers are all the memory needed, however large the
// tensors.
//   all_gather       Write own chunk; copy every peer's chunk out.
//   reduce_scatter   For each peer, write its piece of own partial; sum the pieces for this rank.
//   all_to_all       For each peer, write its piece of own shard; copy the peers' pieces out.
//   all_reduce       One-shot (small, or two ranks): write own chunk; every rank sums all of it.
//                    Two-shot: write own chunk; sum this rank's 1/W of it and write the result;
//                    copy the peers' results out. Either way every rank normalises all rows by
//                    itself, if asked to (benchmarks/results/cpu-2core-rms-norm.md).
//   dispatch         Write own tokens that peers take; copy every peer's to the rows that they are.
//   combine          For each peer, write the rows of its tokens; sum each token's k rows by
//   weight.
// Sums run over ranks 0..W-1 in fp32 and round once, so both all-reduces give the same bits on
// every rank. Peers read input in a symmetric tensor in place. The last chunk then ends with a word
// from each of them (`kRead`), after which the memory is the user's again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include "host/channel.h"
#include "host/routing.h"
#include "host/vector.h"

namespace tpkernels::host {

// Identifies a call to the peers.
struct CallId {
  std::uint32_t signature;
  std::string_view text;
};

// This rank's input. If it lies in a segment (0: none), `offset` is its offset in this rank's
// region.
struct Source {
  const std::byte* data;
  std::uint64_t segment = 0;
  std::size_t offset = 0;
};

// Which memory of this process lies in symmetric tensors that users made. Under the GIL.
class Segments {
 public:
  // The identity of a new segment, the same on all ranks, with this rank's region of it.
  std::uint64_t add(std::uintptr_t address, std::size_t bytes) {
    living_[address] = {++made_, bytes};
    return made_;
  }

  void forget(std::uint64_t identity) {
    for (auto it = living_.begin(); it != living_.end(); ++it) {
      if (it->second.identity == identity) {
        living_.erase(it);
        return;
      }
    }
  }

  void clear() { living_.clear(); }
  std::size_t size() const { return living_.size(); }

  // (identity, offset in bytes) of memory that lies in a segment; identity 0 where it does not.
  std::pair<std::uint64_t, std::size_t> locate(std::uintptr_t address, std::size_t bytes) const {
    auto it = living_.upper_bound(address);
    if (it == living_.begin()) return {0, 0};
    --it;
    const std::size_t offset = address - it->first;
    if (bytes > it->second.bytes || offset > it->second.bytes - bytes) return {0, 0};
    return {it->second.identity, offset};
  }

 private:
  struct Segment {
    std::uint64_t identity;
    std::size_t bytes;
  };
  std::uint64_t made_ = 0;
  std::map<std::uintptr_t, Segment> living_;  // by address
};

// A tensor viewed along the dim that is gathered or scattered: `outer` blocks of `sum(sizes)` rows
// of `inner` elements each. Rank r's shard is `sizes[r]` rows of every block.
struct ShardLayout {
  std::size_t outer;
  std::size_t inner;
  std::vector<std::size_t> sizes;
};

// AMD EPYC (Zen 3, 512 KiB L2, 32 MiB L3), 2 ranks x 1 thread, 2026-11-21; see
// benchmarks/results/cpu-2core-zen3.md for the sweep.
inline constexpr std::size_t kOneShotBytes = 16 << 10;
inline constexpr std::size_t kChunkBytes = 512 << 10;

// What a call gives a collective.
struct Operands {
  Source in;
  std::byte* out;
  std::size_t count;  // elements of the input
  DType dtype;        // of the input, as the ranks exchange it
  Epilogue epilogue;  // what follows a sum
  RmsNorm norm{};
  const Routing* routing = nullptr;    // of dispatch and combine
  const std::byte* weights = nullptr;  // of combine: [tokens, k] in fp32, or fp64
};

// How the ranks split what they exchange; for a collective of whole tensors empty.
struct Shards {
  ShardLayout layout{};     // of the gathered or scattered tensor
  ShardLayout taken{};      // an exchange has another layout after it; `layout` is that before it
  std::size_t largest = 0;  // elements of the largest piece of an exchange, the same on all ranks
};

using Collective = void (*)(Channel&, const CallId&, const Operands&, const Shards&);

// One of those that collectives.cpp lists. Throws std::invalid_argument if there is none of that
// name, or if `shards` lacks a layout that it needs.
Collective collective(std::string_view name, const Shards& shards);

}  // namespace tpkernels::host
