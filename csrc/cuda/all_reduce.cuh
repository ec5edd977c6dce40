// All-reduces on symmetric memory.
//
// Problem: out = round(sum_r(x_r) + bias + residual) on every rank.
//
// Algorithm: the elements are cut into segments and each segment into one part per block. One-shot:
// one segment, pushed to all ranks, summed by all. Two-shot: a segment per rank, pushed to its
// owner, summed there, and the result pushed to all. Both sum in rank order: the same bits
// everywhere. Multimem: every rank lays its x out, the owner of a segment has the switch add it,
// and stores the result in all ranks' memory at once. The switch adds in an order of its own and
// rounds to the dtype of x: the numerics contract (fixed rank order) does NOT hold, so nothing
// chooses it by default.
//
// Sync: the word TILES + b says that block b of the source has laid its shards down here (multimem:
// at its own place), TILES + blocks + b that its result is here. Blocks wait for namesakes only.
#pragma once

#include "cuda/reduce.cuh"
#include "cuda/sync.cuh"

namespace tpkernels::cuda {

// Where the segment of `owner` begins and ends.
TPK_DEVICE Range segment_of(const AllReduce& call, int owner) {
  const u64 first = least(owner * call.segment, call.count);
  return {first, least(first + call.segment, call.count)};
}

// What this block has of a segment.
TPK_DEVICE Range shard_of(const AllReduce& call, int owner) {
  return share_in(segment_of(call, owner), call.segment);
}

// Copies elements [range) of x to where element range.first is to be.
TPK_DEVICE void push_share(const AllReduce& call, u64 to, Range range) {
  const u64 size = size_of(call.wire);
  copy_block(to, address_of(call.x) + range.first * size, (range.last - range.first) * size);
}

// Where the partials from `source` are in the buffer of `rank`; those of a segment begin there.
TPK_DEVICE u64 slot_of(const Peers& peers, const AllReduce& call, int rank, int source) {
  return buffer_of(peers, rank) + source * call.slot_bytes;
}

// Sums this block's shard of the segment, out of the slots and of x.
template <int D>
TPK_DEVICE void sum_share(const Peers& peers, const AllReduce& call, Range segment, Range shard) {
  const u64 in = size_of(D), out = size_of(call.epilogue.out_dtype);
  const auto partials = [&](int r) {
    return r == peers.space.rank ? address_of(call.x) + segment.first * in
                                 : slot_of(peers, call, peers.space.rank, r);
  };
  Epilogue epilogue = call.epilogue;
  if (epilogue.residual != nullptr) {
    const u64 size = size_of(epilogue.residual_dtype);
    epilogue.residual = static_cast<const char*>(epilogue.residual) + segment.first * size;
  }
  sum_range<D>(partials, peers.space.world, address_of(call.out) + segment.first * out,
               call.begin + segment.first, shard.first - segment.first, shard.last - segment.first,
               epilogue, thread(), threads());
}

template <int D>
TPK_DEVICE void one_shot(const Peers& peers, const AllReduce& call) {
  const int rank = peers.space.rank, world = peers.space.world, word = kTiles + block();
  const Range all = segment_of(call, 0), shard = shard_of(call, 0);
  for (int i = 1; i < world; ++i) {
    const int to = (rank + i) % world;
    push_share(call, slot_of(peers, call, to, rank) + shard.first * size_of(D), shard);
    publish(peers, to, word);
  }
  wait_for_all(peers, word);
  sum_share<D>(peers, call, all, shard);
}

// Where the result that begins at element `first` stands in the buffer of `rank`.
TPK_DEVICE u64 result_of(const Peers& peers, const AllReduce& call, int rank, u64 first) {
  return buffer_of(peers, rank) + call.results_at + first * size_of(call.epilogue.out_dtype);
}

template <int D>
TPK_DEVICE void two_shot(const Peers& peers, const AllReduce& call) {
  const int rank = peers.space.rank, world = peers.space.world;
  const int word = kTiles + block(), result = word + blocks();
  const u64 size = size_of(call.epilogue.out_dtype);
  const Range own = shard_of(call, rank);
  for (int i = 1; i < world; ++i) {
    const int to = (rank + i) % world;
    const Range shard = shard_of(call, to);
    const u64 offset = (shard.first - segment_of(call, to).first) * size_of(D);
    push_share(call, slot_of(peers, call, to, rank) + offset, shard);
    publish(peers, to, word);
  }
  wait_for_all(peers, word);
  sum_share<D>(peers, call, segment_of(call, rank), own);
  sync_block();
  const u64 from = address_of(call.out) + own.first * size, bytes = (own.last - own.first) * size;
  for (int i = 1; i < world; ++i) {
    const int to = (rank + i) % world;
    copy_block(result_of(peers, call, to, own.first), from, bytes);
    publish(peers, to, result);
  }
  for (int i = 1; i < world; ++i) {
    const int owner = (rank + i) % world;
    wait_for(peers, owner, result);
    const Range shard = shard_of(call, owner);
    copy_block(address_of(call.out) + shard.first * size, result_of(peers, call, rank, shard.first),
               (shard.last - shard.first) * size);
  }
}

#ifdef TPK_MULTIMEM
template <int D>
TPK_DEVICE void multimem(const Peers& peers, const AllReduce& call) {
  const Space& space = peers.space;
  const int word = kTiles + block(), result = word + blocks();
  const u64 size = size_of(D), here = buffer_of(peers, space.rank);
  for (int owner = 0; owner < space.world; ++owner) {
    const Range shard = shard_of(call, owner);
    push_share(call, here + shard.first * size, shard);
  }
  fence_aliases();
  publish_to_all(peers, word);
  wait_for_all(peers, word);
  fence_aliases();
  const u64 everywhere = call.multicast + (here - space.regions[space.rank]);
  const Range own = shard_of(call, space.rank);
  // The last pack may hold bytes behind the end; nobody copies them out.
  const u64 last = everywhere + own.last * size, stride = threads() * sizeof(Pack);
  for (u64 at = everywhere + own.first * size + thread() * sizeof(Pack); at < last; at += stride) {
    multimem_store(at, multimem_sum<D>(at));
  }
  fence_aliases();
  publish_to_all(peers, result);
  wait_for_all(peers, result);
  fence_aliases();
  for (int owner = 0; owner < space.world; ++owner) {
    const Range shard = shard_of(call, owner);
    copy_block(address_of(call.out) + shard.first * size, here + shard.first * size,
               (shard.last - shard.first) * size);
  }
}
#endif

}  // namespace tpkernels::cuda
