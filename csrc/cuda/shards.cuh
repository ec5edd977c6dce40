// All-gather and reduce-scatter over symmetric memory, one launch each.
//
// Problem: rank r holds (all-gather) or receives (reduce-scatter) its shard, rows
// [starts[r], starts[r+1]) of a tensor.
//
// Algorithm: every rank has a slot in the buffer of each peer. All-gather: it pushes its shard into
// the slots, and the peers copy the slots out. Reduce-scatter: it pushes its partial of the peer
// shard, and the peer sums the slots in rank order. Each shard is divided into one slice per block.
//
// Sync: signal TILES + b means that block b of the source has written its slice into the local
// buffer. A block waits only for blocks with its number.
#pragma once

#include "cuda/reduce.cuh"
#include "cuda/sync.cuh"

namespace tpkernels::cuda {

// Returns the shard of `rank` in units; a row has `row_units` units.
TPK_DEVICE Range shard_range(const Shards& shards, int rank, u64 row_units) {
  return {shards.starts[rank] * row_units, shards.starts[rank + 1] * row_units};
}

TPK_DEVICE u64 length(Range range) { return range.last - range.first; }

// Returns the slice of this block, relative to the start of the shard.
TPK_DEVICE Range block_slice(Range shard) {
  return block_slice_in({0, length(shard)}, length(shard));
}

TPK_DEVICE u64 slot_address(const Peers& peers, const Shards& shards, int rank, int source) {
  return buffer_address(peers, rank) + source * shards.slot_bytes;
}

TPK_DEVICE void gather(const Peers& peers, const Shards& shards) {
  const int rank = peers.workspace.rank, world = peers.workspace.world, signal = kTiles + block();
  const u64 row_bytes = shards.cols * dtype_size(shards.wire);
  const Range local_shard = shard_range(shards, rank, row_bytes), slice = block_slice(local_shard);
  const u64 src = to_address(shards.x) + slice.first;
  for (int i = 1; i < world; ++i) {
    const int peer = (rank + i) % world;
    copy_block(slot_address(peers, shards, peer, rank) + slice.first, src, length(slice));
  }
  publish_to_all(peers, signal);
  copy_block(to_address(shards.out) + local_shard.first + slice.first, src, length(slice));
  for (int i = 1; i < world; ++i) {
    const int source = (rank + i) % world;
    const Range peer_shard = shard_range(shards, source, row_bytes),
                peer_slice = block_slice(peer_shard);
    wait_for(peers, source, signal);
    copy_block(to_address(shards.out) + peer_shard.first + peer_slice.first,
               slot_address(peers, shards, rank, source) + peer_slice.first, length(peer_slice));
  }
}

template <int D>
TPK_DEVICE void scatter(const Peers& peers, const Shards& shards) {
  const int rank = peers.workspace.rank, world = peers.workspace.world, signal = kTiles + block();
  const u64 size = dtype_size(D);
  for (int i = 1; i < world; ++i) {
    const int peer = (rank + i) % world;
    const Range peer_shard = shard_range(shards, peer, shards.cols),
                slice = block_slice(peer_shard);
    copy_block(slot_address(peers, shards, peer, rank) + slice.first * size,
               to_address(shards.x) + (peer_shard.first + slice.first) * size,
               length(slice) * size);
  }
  publish_to_all(peers, signal);
  wait_for_all(peers, signal);
  const Range local_shard = shard_range(shards, rank, shards.cols),
              slice = block_slice(local_shard);
  const auto partials = [&](int r) {
    return r == rank ? to_address(shards.x) + local_shard.first * size
                     : slot_address(peers, shards, rank, r);
  };
  sum_range<D>(partials, world, to_address(shards.out), local_shard.first, slice.first, slice.last,
               shards.epilogue, thread(), threads());
}

}  // namespace tpkernels::cuda
