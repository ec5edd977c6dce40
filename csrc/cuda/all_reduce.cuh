// All-reduces on symmetric memory.
//
// Problem: out = round(sum_r(x_r) + bias + residual) on every rank.
//
// Algorithm: the elements are split into a segment per rank, and each segment into one part per
// block. Two-shot: a segment is pushed to its owner and summed there, in rank order; the owner
// pushes the result to all. Multimem: every rank copies x into its own buffer; the owner of a
// segment has the switch sum it and stores the result in all ranks' memory at once. The switch adds
// in an order of its own and rounds to the dtype of x. The numerics contract (fixed rank order)
// does NOT hold, so multimem is never chosen by default.
//
// Sync: the word TILES + b says that block b of the source has written its parts into this rank's
// buffer (multimem: into its own), TILES + blocks + b that its result is there. A block waits only
// for blocks of the same number.
#pragma once

#include "cuda/reduce.cuh"
#include "cuda/sync.cuh"

namespace tpkernels::cuda {

// The segment of `owner`.
TPK_DEVICE Range segment_of(const AllReduce& call, int owner) {
  const u64 first = least(owner * call.segment, call.count);
  return {first, least(first + call.segment, call.count)};
}

// This block's part of the segment of `owner`.
TPK_DEVICE Range part_of(const AllReduce& call, int owner) {
  return part_in(segment_of(call, owner), call.segment);
}

// Copies `part` of x to address `to`.
TPK_DEVICE void push_part(const AllReduce& call, u64 to, Range part) {
  const u64 size = size_of(call.wire);
  copy_block(to, address_of(call.x) + part.first * size, (part.last - part.first) * size);
}

// Address of the slot for the partials from `source` in the buffer of `rank`.
TPK_DEVICE u64 slot_of(const Peers& peers, const AllReduce& call, int rank, int source) {
  return buffer_of(peers, rank) + source * call.slot_bytes;
}

// Sums `part`, this block's part of `segment`, from the slots and from x.
template <int D>
TPK_DEVICE void sum_part(const Peers& peers, const AllReduce& call, Range segment, Range part) {
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
               call.begin + segment.first, part.first - segment.first, part.last - segment.first,
               epilogue, thread(), threads());
}

// Address, in the buffer of `rank`, of the result that starts at element `first`.
TPK_DEVICE u64 result_of(const Peers& peers, const AllReduce& call, int rank, u64 first) {
  return buffer_of(peers, rank) + call.results_at + first * size_of(call.epilogue.out_dtype);
}

template <int D>
TPK_DEVICE void two_shot(const Peers& peers, const AllReduce& call) {
  const int rank = peers.space.rank, world = peers.space.world;
  const int word = kTiles + block(), result = word + blocks();
  const u64 size = size_of(call.epilogue.out_dtype);
  const Range own = part_of(call, rank);
  for (int i = 1; i < world; ++i) {
    const int to = (rank + i) % world;
    const Range part = part_of(call, to);
    const u64 offset = (part.first - segment_of(call, to).first) * size_of(D);
    push_part(call, slot_of(peers, call, to, rank) + offset, part);
  }
  publish_to_all(peers, word);
  wait_for_all(peers, word);
  sum_part<D>(peers, call, segment_of(call, rank), own);
  sync_block();
  const u64 from = address_of(call.out) + own.first * size, bytes = (own.last - own.first) * size;
  for (int i = 1; i < world; ++i) {
    const int to = (rank + i) % world;
    copy_block(result_of(peers, call, to, own.first), from, bytes);
  }
  publish_to_all(peers, result);
  for (int i = 1; i < world; ++i) {
    const int owner = (rank + i) % world;
    wait_for(peers, owner, result);
    const Range part = part_of(call, owner);
    copy_block(address_of(call.out) + part.first * size, result_of(peers, call, rank, part.first),
               (part.last - part.first) * size);
  }
}

#ifdef TPK_MULTIMEM
template <int D>
TPK_DEVICE void multimem(const Peers& peers, const AllReduce& call) {
  const Space& space = peers.space;
  const int word = kTiles + block(), result = word + blocks();
  const u64 size = size_of(D), here = buffer_of(peers, space.rank);
  for (int owner = 0; owner < space.world; ++owner) {
    const Range part = part_of(call, owner);
    push_part(call, here + part.first * size, part);
  }
  fence_aliases();
  publish_to_all(peers, word);
  wait_for_all(peers, word);
  fence_aliases();
  const u64 everywhere = call.multicast + (here - space.regions[space.rank]);
  const Range own = part_of(call, space.rank);
  // The last pack may extend past the end; those bytes are never copied out.
  const u64 last = everywhere + own.last * size, stride = threads() * sizeof(Pack);
  for (u64 at = everywhere + own.first * size + thread() * sizeof(Pack); at < last; at += stride) {
    multimem_store(at, multimem_sum<D>(at));
  }
  fence_aliases();
  publish_to_all(peers, result);
  wait_for_all(peers, result);
  fence_aliases();
  for (int owner = 0; owner < space.world; ++owner) {
    const Range part = part_of(call, owner);
    copy_block(address_of(call.out) + part.first * size, here + part.first * size,
               (part.last - part.first) * size);
  }
}
#endif

}  // namespace tpkernels::cuda
