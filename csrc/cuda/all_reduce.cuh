// All-reduces over symmetric memory.
//
// Problem: out = round(sum_r(x_r) + bias + residual) on every rank.
//
// Algorithm: two-shot. The elements are divided into one segment per rank, and each segment into
// one slice per block. Every rank pushes its partial of a segment to the owner. The owner sums the
// partials in rank order and pushes the result to all ranks.
//
// Sync: signal TILES + b means that block b of the source has written its slices into the local
// buffer. Signal TILES + blocks + b means that its result has been written. A block waits only for
// blocks with its number.
#pragma once

#include "cuda/reduce.cuh"
#include "cuda/sync.cuh"

namespace tpkernels::cuda {

// Returns the segment of `owner`.
TPK_DEVICE Range segment_range(const AllReduce& call, int owner) {
  const u64 first = minimum(owner * call.segment, call.count);
  return {first, minimum(first + call.segment, call.count)};
}

// Returns the slice of this block in the segment of `owner`.
TPK_DEVICE Range block_slice(const AllReduce& call, int owner) {
  return block_slice_in(segment_range(call, owner), call.segment);
}

// Copies a slice of x to address `dst`.
TPK_DEVICE void push_slice(const AllReduce& call, u64 dst, Range slice) {
  const u64 size = dtype_size(call.wire);
  copy_block(dst, to_address(call.x) + slice.first * size, (slice.last - slice.first) * size);
}

// Returns the address of the slot for `source` in the buffer of `rank`.
TPK_DEVICE u64 slot_address(const Peers& peers, const AllReduce& call, int rank, int source) {
  return buffer_address(peers, rank) + source * call.slot_bytes;
}

// Sums the slice of this block in `segment` over the slots and x.
template <int D>
TPK_DEVICE void sum_slice(const Peers& peers, const AllReduce& call, Range segment, Range slice) {
  const u64 in = dtype_size(D), out = dtype_size(call.epilogue.out_dtype);
  const auto partials = [&](int r) {
    return r == peers.workspace.rank ? to_address(call.x) + segment.first * in
                                     : slot_address(peers, call, peers.workspace.rank, r);
  };
  Epilogue epilogue = call.epilogue;
  if (epilogue.residual != nullptr) {
    const u64 size = dtype_size(epilogue.residual_dtype);
    epilogue.residual = static_cast<const char*>(epilogue.residual) + segment.first * size;
  }
  sum_range<D>(partials, peers.workspace.world, to_address(call.out) + segment.first * out,
               segment.first, slice.first - segment.first, slice.last - segment.first, epilogue,
               thread(), threads());
}

// Returns the address of result element `first` in the buffer of `rank`.
TPK_DEVICE u64 result_address(const Peers& peers, const AllReduce& call, int rank, u64 first) {
  return buffer_address(peers, rank) + call.results_offset +
         first * dtype_size(call.epilogue.out_dtype);
}

template <int D>
TPK_DEVICE void two_shot_reduce(const Peers& peers, const AllReduce& call) {
  const int rank = peers.workspace.rank, world = peers.workspace.world;
  const int partials_signal = kTiles + block(), results_signal = partials_signal + blocks();
  const u64 size = dtype_size(call.epilogue.out_dtype);
  const Range local_slice = block_slice(call, rank);
  for (int i = 1; i < world; ++i) {
    const int peer = (rank + i) % world;
    const Range slice = block_slice(call, peer);
    const u64 offset = (slice.first - segment_range(call, peer).first) * dtype_size(D);
    push_slice(call, slot_address(peers, call, peer, rank) + offset, slice);
  }
  publish_to_all(peers, partials_signal);
  wait_for_all(peers, partials_signal);
  sum_slice<D>(peers, call, segment_range(call, rank), local_slice);
  sync_block();
  const u64 src = to_address(call.out) + local_slice.first * size,
            bytes = (local_slice.last - local_slice.first) * size;
  for (int i = 1; i < world; ++i) {
    const int peer = (rank + i) % world;
    copy_block(result_address(peers, call, peer, local_slice.first), src, bytes);
  }
  publish_to_all(peers, results_signal);
  for (int i = 1; i < world; ++i) {
    const int owner = (rank + i) % world;
    wait_for(peers, owner, results_signal);
    const Range slice = block_slice(call, owner);
    copy_block(to_address(call.out) + slice.first * size,
               result_address(peers, call, rank, slice.first), (slice.last - slice.first) * size);
  }
}

}  // namespace tpkernels::cuda
