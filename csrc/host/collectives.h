// Problem: all-gather, reduce-scatter, all-to-all, all-reduce and barrier of CPU tensors over a
// channel, and MoE dispatch and combine.
//
// Algorithm: data moves in chunks. Each chunk is one call of the channel (one epoch).
//   all_gather       Write the local chunk; copy the chunk of every peer. A broadcast is an
//                    all-gather in which only the shard of the root has elements. A gather is an
//                    all-gather in which only the root copies.
//   reduce_scatter   For each peer, write its slice of the local partial; sum the slices for this
//                    rank.
//   all_to_all       For each peer, write its slice of the local shard; copy the slices of peers.
//   all_reduce       One-shot (small, or two ranks): write the local chunk; every rank sums the
//                    full chunks. Two-shot: write the local chunk; sum 1/W of it and write the
//                    result; copy the results of the peers. In both, every rank applies RMSNorm to
//                    all rows, if requested (benchmarks/results/cpu-2core-rms-norm.md).
//   dispatch         Write the local tokens that peers need; copy tokens of peers to their rows.
//   combine          For each peer, write the rows of its tokens; for each local token, compute the
//                    weighted sum of its k rows.
//   barrier          Signal; wait for the signal of every peer.
//
// Invariant 1 (safe reads): a chunk is a call, so the invariants of the channel cover it.
//
// Invariant 2 (bounded memory): two data buffers suffice for tensors of any size, because a chunk
// never exceeds a buffer.
//
// Invariant 3 (bitwise identical): sums run over ranks 0..W-1, or over the nodes of a tree
// (sum_tree.h), in fp32 and round once. So one-shot and two-shot results are bitwise identical, on
// every rank. The other reductions (reduce_ops.h) run over ranks 0..W-1 as well.
//
// Invariant 4 (symmetric tensors): peers read input in a symmetric tensor in place. The last chunk
// ends with a `kRead` signal from every peer. The user may write to the tensor after that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include "host/channel.h"
#include "host/reduce_ops.h"
#include "host/routing.h"
#include "host/sum_tree.h"
#include "host/vector.h"

namespace tpkernels::host {

// Signature and description of a call, as in `Channel::begin`.
struct CallId {
  std::uint32_t signature;
  std::string_view description;
};

// Input of this rank. `segment` is 0 if the input is not in a segment. Otherwise `offset` is its
// offset within the region of this rank.
struct Source {
  const std::byte* data;
  std::uint64_t segment = 0;
  std::size_t offset = 0;
};

// Registry of the symmetric tensors that the user created in this process. Requires the GIL.
class Segments {
 public:
  // Registers the region of this rank in a new segment. Returns its identity, equal on all ranks.
  std::uint64_t add(std::uintptr_t address, std::size_t bytes) {
    segments_[address] = {++count_, bytes};
    return count_;
  }

  void forget(std::uint64_t identity) {
    for (auto it = segments_.begin(); it != segments_.end(); ++it) {
      if (it->second.identity == identity) {
        segments_.erase(it);
        return;
      }
    }
  }

  void clear() { segments_.clear(); }
  std::size_t size() const { return segments_.size(); }

  // Returns (identity, offset in bytes) of the memory. Identity 0: the memory is not in a segment.
  std::pair<std::uint64_t, std::size_t> locate(std::uintptr_t address, std::size_t bytes) const {
    auto it = segments_.upper_bound(address);
    if (it == segments_.begin()) return {0, 0};
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
  std::uint64_t count_ = 0;
  std::map<std::uintptr_t, Segment> segments_;  // by address
};

// A tensor viewed along the gathered or scattered dim: `outer` blocks of `sum(sizes)` rows of
// `inner` elements. The shard of rank r is `sizes[r]` rows of every block.
struct ShardLayout {
  std::size_t outer;
  std::size_t inner;
  std::vector<std::size_t> sizes;
};

// AMD EPYC (Zen 3, 512 KiB L2, 32 MiB L3), 2 ranks x 1 thread, 2026-11-21; see
// benchmarks/results/cpu-2core-zen3.md for the sweep.
inline constexpr std::size_t kOneShotBytes = 16 << 10;
inline constexpr std::size_t kChunkBytes = 512 << 10;

// Arguments of a collective.
struct CollectiveArgs {
  Source in;
  std::byte* out;
  std::size_t count;  // elements of the input; of a node if there is a tree
  DType dtype;        // dtype of the input, and communication dtype
  Epilogue epilogue;  // applied after a sum of floating-point elements; else only `out_dtype`
  RmsNorm norm{};
  const SumTree* tree = nullptr;       // of an all-reduce: the input has the local fp32 nodes
  const Routing* routing = nullptr;    // for dispatch and combine
  const std::byte* weights = nullptr;  // for combine: [tokens, k], fp64 for fp64 rows, else fp32
  ReduceOp op = ReduceOp::kSum;
  // For an all-gather with `outer` = 1, instead of `out`: the output of the shard of each rank.
  // Null for shards that this rank does not need.
  const std::vector<std::byte*>* shard_outs = nullptr;
};

// Shard layouts of a collective. Empty for an all-reduce and a barrier. Dispatch and combine use
// only `layout.inner`, the elements of a row.
struct Shards {
  ShardLayout layout{};             // gathered or scattered tensor; input of an all-to-all
  ShardLayout out_layout{};         // output of an all-to-all
  std::size_t max_slice_numel = 0;  // all-to-all: elements of the largest slice over all ranks
};

using Collective = void (*)(Channel&, const CallId&, const CollectiveArgs&, const Shards&);

// Returns the collective with this name. Throws std::invalid_argument if the name is unknown or
// `shards` lacks a required layout.
Collective collective(std::string_view name, const Shards& shards);

}  // namespace tpkernels::host
