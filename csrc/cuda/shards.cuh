// All-gather and reduce-scatter on symmetric memory, in one launch each.
//
// Problem: rank r holds (all-gather), or receives (reduce-scatter), rows [starts[r], starts[r+1])
// of a tensor: its shard.
//
// Algorithm: every rank has a slot in each peer's buffer. It pushes its shard there (all-gather),
// or its partial of the peer's shard (reduce-scatter). The peer copies the slots out, or sums them
// in rank order. Each shard is split into one part per block.
//
// Sync: the word TILES + b says that block b of the source has written its part into this rank's
// buffer. A block waits only for blocks of the same number.
#pragma once

#include "cuda/reduce.cuh"
#include "cuda/sync.cuh"

namespace tpkernels::cuda {

// The shard of `rank`, in units of which each row has `row`.
TPK_DEVICE Range shard_of(const Shards& shards, int rank, u64 row) {
  return {shards.starts[rank] * row, shards.starts[rank + 1] * row};
}

TPK_DEVICE u64 length(Range range) { return range.last - range.first; }

// This block's part of a shard, relative to the shard's start.
TPK_DEVICE Range part_of(Range shard) { return part_in({0, length(shard)}, length(shard)); }

TPK_DEVICE u64 slot_of(const Peers& peers, const Shards& shards, int rank, int source) {
  return buffer_of(peers, rank) + source * shards.slot_bytes;
}

TPK_DEVICE void gather(const Peers& peers, const Shards& shards) {
  const int rank = peers.space.rank, world = peers.space.world, word = kTiles + block();
  const u64 row_bytes = shards.row * size_of(shards.wire);
  const Range own = shard_of(shards, rank, row_bytes), part = part_of(own);
  const u64 from = address_of(shards.x) + part.first;
  for (int i = 1; i < world; ++i) {
    const int to = (rank + i) % world;
    copy_block(slot_of(peers, shards, to, rank) + part.first, from, length(part));
  }
  publish_to_all(peers, word);
  copy_block(address_of(shards.out) + own.first + part.first, from, length(part));
  for (int i = 1; i < world; ++i) {
    const int source = (rank + i) % world;
    const Range theirs = shard_of(shards, source, row_bytes), piece = part_of(theirs);
    wait_for(peers, source, word);
    copy_block(address_of(shards.out) + theirs.first + piece.first,
               slot_of(peers, shards, rank, source) + piece.first, length(piece));
  }
}

template <int D>
TPK_DEVICE void scatter(const Peers& peers, const Shards& shards) {
  const int rank = peers.space.rank, world = peers.space.world, word = kTiles + block();
  const u64 size = size_of(D);
  for (int i = 1; i < world; ++i) {
    const int to = (rank + i) % world;
    const Range theirs = shard_of(shards, to, shards.row), part = part_of(theirs);
    copy_block(slot_of(peers, shards, to, rank) + part.first * size,
               address_of(shards.x) + (theirs.first + part.first) * size, length(part) * size);
  }
  publish_to_all(peers, word);
  wait_for_all(peers, word);
  const Range own = shard_of(shards, rank, shards.row), part = part_of(own);
  const auto partials = [&](int r) {
    return r == rank ? address_of(shards.x) + own.first * size : slot_of(peers, shards, rank, r);
  };
  sum_range<D>(partials, world, address_of(shards.out), own.first, part.first, part.last,
               shards.epilogue, thread(), threads());
}

}  // namespace tpkernels::cuda
