// All-reduces on symmetric memory.
//
// Problem: out = round(sum_r(x_r) + bias + residual) on every rank.
//
// Algorithm: the elements are split into a segment per rank, and each segment into one part per
// block. A segment is pushed to its owner and summed there, in rank order; the owner pushes the
// result to all.
//
// Sync: the word TILES + b says that block b of the source has written its parts into this rank's
// buffer, TILES + blocks + b that its result is there. A block waits only for blocks of the same
// number.
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
               segment.first, part.first - segment.first, part.last - segment.first, epilogue,
               thread(), threads());
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

}  // namespace tpkernels::cuda
