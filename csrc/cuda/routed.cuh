// MoE dispatch and combine, one launch each.
//
// Problem: as in csrc/host/routing.h, but the expert-sorted assignments are in device memory, and
// the host has no token counts. The experts of a rank therefore get a fixed capacity of `max_rows`
// rows. Assignments past this capacity, or to an expert id out of range, get no row.
//
// Algorithm:
// - dispatch: every rank copies its tokens into its local buffer. The rank of an expert reads its
//   rows from these buffers and zero-fills the unused rows of its output. So the size of a buffer
//   does not depend on the assignments.
// - combine: every assignment has a slot in the buffer of the rank that owns the token. The rank of
//   the expert pushes the row into that slot. The rank of the token multiplies the slots by the
//   weights and adds them in slot order, in fp32. Each multiplication and addition is rounded
//   separately, as by `weighted_sum` in csrc/host/vector_loops.inc. A token with a dropped
//   assignment becomes NaN.
//
// Sync: a block processes the same columns of all rows on every rank. Signal TILES + b means that
// block b of the source has written its columns. A block waits only for blocks with its number,
// independent of the assignments.
//
// Invariant 1 (no overwritten read): peers read a buffer during a call, and its rank writes it
// again two calls later. That call starts only after every peer has entered the call in between. So
// every peer has ended the call that read the buffer.
#pragma once

#include "cuda/reduce.cuh"
#include "cuda/sync.cuh"

namespace tpkernels::cuda {

TPK_DEVICE u64 num_tokens(const Routed& call, int rank) {
  return call.token_offsets[rank + 1] - call.token_offsets[rank];
}

// Returns the number of expert rows of a rank, limited by the capacity.
TPK_DEVICE u64 num_rows(const Routed& call, int rank) {
  return minimum(call.rank_offsets[rank + 1] - call.rank_offsets[rank], call.max_rows);
}

// Returns the last rank whose range starts at or before `i`.
template <class T>
TPK_DEVICE int find_owner(const T* starts, int world, i64 i) {
  int rank = 0;
  for (int end = world; end - rank > 1;) {
    const int middle = (rank + end) / 2;
    (i < starts[middle] ? end : rank) = middle;
  }
  return rank;
}

// Assigns the units (packs, vectors or elements) of all rows to the threads of a block. Adjacent
// threads get adjacent units.
struct UnitWalk {
  TPK_DEVICE explicit UnitWalk(unsigned units)
      : units(units), row(thread() / units), unit(thread() % units) {}

  TPK_DEVICE void next() {
    row += threads() / units;
    unit += threads() % units;
    if (unit < units) return;
    unit -= units;
    ++row;
  }

  unsigned units;
  u64 row;
  unsigned unit;
};

TPK_DEVICE Pack load_unit(const Pack* src) { return load_pack(src); }
TPK_DEVICE void store_unit(Pack* dst, Pack unit) { store_pack(dst, unit); }
TPK_DEVICE unsigned short load_unit(const unsigned short* src) { return *src; }
TPK_DEVICE void store_unit(unsigned short* dst, unsigned short unit) { *dst = unit; }

// Copies byte range `slice` of each row from address `src(row)` to `dst(row)`. A source address of
// 0 reads as zeros. A destination address of 0 skips the row.
template <class Unit, class Source, class Destination>
TPK_DEVICE void copy_rows_as(u64 rows, Range slice, const Source& src, const Destination& dst) {
  constexpr int kBatch = 4;  // units in flight per thread
  const auto units = static_cast<unsigned>((slice.last - slice.first) / sizeof(Unit));
  if (units == 0) return;
  for (UnitWalk walk(units); walk.row < rows;) {
    Unit values[kBatch];
    u64 targets[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const u64 offset = slice.first + walk.unit * sizeof(Unit);
      const u64 target = walk.row < rows ? dst(walk.row) : 0;
      const u64 source = target != 0 ? src(walk.row) : 0;
      targets[i] = target != 0 ? target + offset : 0;
      values[i] = source != 0 ? load_unit(reinterpret_cast<const Unit*>(source + offset)) : Unit{};
      walk.next();
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (targets[i] != 0) store_unit(reinterpret_cast<Unit*>(targets[i]), values[i]);
    }
  }
}

template <class Source, class Destination>
TPK_DEVICE void copy_rows(bool use_packs, u64 rows, Range slice, const Source& src,
                          const Destination& dst) {
  if (use_packs) return copy_rows_as<Pack>(rows, slice, src, dst);
  copy_rows_as<unsigned short>(rows, slice, src, dst);
}

TPK_DEVICE void dispatch(const Peers& peers, const Routed& call) {
  const int rank = peers.workspace.rank, world = peers.workspace.world, signal = kTiles + block();
  const u64 size = dtype_size(call.dtype), row_bytes = call.cols * size;
  const Range columns = block_slice_in({0, call.cols}, call.cols);
  const Range slice = {columns.first * size, columns.last * size};
  const u64 x = to_address(call.x), out = to_address(call.out),
            local_buffer = buffer_address(peers, rank);
  const u64 rows = num_rows(call, rank);
  const bool use_packs = aligned(x | out | row_bytes);
  copy_rows(
      use_packs, num_tokens(call, rank), slice, [&](u64 token) { return x + token * row_bytes; },
      [&](u64 token) { return local_buffer + token * row_bytes; });
  publish_to_all(peers, signal);
  wait_for_all(peers, signal);
  const i64* assignments = call.permutation + call.rank_offsets[rank];
  const auto token_address = [&](u64 row) -> u64 {
    if (row >= rows) return 0;
    const int token = static_cast<int>(assignments[row]) / call.k;
    const int source = find_owner(call.token_offsets, world, token);
    return buffer_address(peers, source) + (token - call.token_offsets[source]) * row_bytes;
  };
  copy_rows(use_packs, call.max_rows, slice, token_address,
            [&](u64 row) { return out + row * row_bytes; });
}

// Computes out = round(sum over slots of weight * row) for N elements of each token.
template <int D, int N>
TPK_DEVICE void reduce_weighted(const Peers& peers, const Routed& call, Range columns) {
  const int rank = peers.workspace.rank, world = peers.workspace.world;
  const u64 size = dtype_size(D), row_bytes = call.cols * size, tokens = num_tokens(call, rank);
  const auto units = static_cast<unsigned>((columns.last - columns.first) / N);
  if (units == 0) return;
  const i64* positions =
      call.inverse_permutation + static_cast<i64>(call.token_offsets[rank]) * call.k;
  for (UnitWalk walk(units); walk.row < tokens; walk.next()) {
    const u64 offset = (columns.first + walk.unit * N) * size;
    float acc[N] = {};
    for (u64 slot = walk.row * call.k; slot < (walk.row + 1) * call.k; ++slot) {
      const i64 position = positions[slot];
      const int holder = find_owner(call.rank_offsets, world, position);
      const u64 row = position - call.rank_offsets[holder];  // wraps to a huge row before rank 0
      const bool missing = row >= num_rows(call, holder);
      const u64 src = holder == rank && !missing ? to_address(call.x) + row * row_bytes
                                                 : buffer_address(peers, rank) + slot * row_bytes;
      float next[N];
      load<D>(next, src + offset);
      const float weight = missing ? bits_to_float(0x7fffffff) : call.weights[slot];
#pragma unroll
      for (int i = 0; i < N; ++i) acc[i] += multiply(weight, next[i]);
    }
    store<D>(to_address(call.out) + walk.row * row_bytes + offset, acc);
  }
}

template <int D>
TPK_DEVICE void combine(const Peers& peers, const Routed& call) {
  const int rank = peers.workspace.rank, world = peers.workspace.world, signal = kTiles + block();
  const u64 size = dtype_size(D), row_bytes = call.cols * size;
  const Range columns = block_slice_in({0, call.cols}, call.cols);
  const u64 x = to_address(call.x), out = to_address(call.out);
  const i64* assignments = call.permutation + call.rank_offsets[rank];
  const auto slot_address = [&](u64 row) -> u64 {
    const int assignment = static_cast<int>(assignments[row]);
    const int owner = find_owner(call.token_offsets, world, assignment / call.k);
    const u64 slot = assignment - static_cast<u64>(call.token_offsets[owner]) * call.k;
    return owner == rank ? 0 : buffer_address(peers, owner) + slot * row_bytes;
  };
  copy_rows(
      aligned(x | row_bytes), num_rows(call, rank), {columns.first * size, columns.last * size},
      [&](u64 row) { return x + row * row_bytes; }, slot_address);
  publish_to_all(peers, signal);
  wait_for_all(peers, signal);
  if (aligned(x | out) && call.cols % kVector == 0)
    return reduce_weighted<D, kVector>(peers, call, columns);
  reduce_weighted<D, 1>(peers, call, columns);
}

}  // namespace tpkernels::cuda
