// Collectives through a multicast address, which stands for the same place in the memory of all
// ranks: an NVSwitch adds what it reads there, or stores at all ranks at once (NVLink SHARP).
//
// Problem: that of cuda/all_reduce.cuh, cuda/normed.cuh and cuda/shards.cuh.
//
// Algorithm: a reduction's partials lie at the same place in all ranks' memory: each rank copies x
// into its own buffer, or x is a symmetric tensor. The owner of a segment, or of a shard, has the
// switch add it. In an all-reduce it stores the result in all ranks' memory at once, from where
// each copies it; in an all-gather each rank so stores its shard. A rank sends (1 + 1/W) S bytes of
// an all-reduce of S, where two-shot sends 2 (W - 1)/W S.
//
// Numerics: the switch adds fp16 and bf16 in fp32, in an order of its own, and rounds to the dtype
// of x; bias and residual are added to that in fp32. So numerics="ordered" does NOT hold.
//
// Sync: the words are those of cuda/all_reduce.cuh, but TILES + b says that block b's parts lie in
// the source's own memory. What a word orders is shown there; multicast adds two questions.
// - Order. `multimem.*` is weak unless it says otherwise: here it is relaxed at system scope, so
//   that it is no data race beside words. To PTX a multicast address is an alias, and aliases are
//   ordered as if they were other proxies: only by a `fence.proxy.alias` on the way from one access
//   to the other. So a thread fences between its accesses of one kind and of the other, and all
//   that stands between is in the generic proxy: fence, barrier, release; acquire, barrier, fence.
//   The first access by multicast comes after a fence, and after the last there is one. Hence calls
//   that follow, or came before, need none: the words of the calls between order the fences.
//   What the previous kernel on the stream wrote into a symmetric x is ordered by the first fence.
// - No overwritten read. A store by multicast goes into buffers of this call's parity, at all
//   ranks, and the invariant of kernels/sync.py lets this rank write there: in places that no other
//   rank writes, as segments and slots have one owner. Every rank awaits a word for each store
//   into its memory. Buffers that the switch reads are those that the invariant covers: the kernel
//   that reads them ends after the reads. A symmetric x has no parity. So its call ends only when
//   the words of all owners say that they have read it: of an all-reduce those of the results, of a
//   reduce-scatter a third kind, TILES + blocks + b. A release orders the reads before it, too.
// This rank's own results arrive through the switch as well: they are read after its releases of
// their words, hence after the stores. In rows they are read where the owner has put them itself.
//
// Failure: as in cuda/sync.cuh. A grid that starts after a failure stores nothing by multicast.
#pragma once

#include "cuda/normed.cuh"

#ifdef TPK_SM_90
namespace tpkernels::cuda {

// The multicast address of this call's buffers.
TPK_DEVICE u64 buffers_of(const Peers& peers, const Multicast& everywhere) {
  const Space& space = peers.space;
  return everywhere.regions + (buffer_of(peers, space.rank) - space.regions[space.rank]);
}

// The sum of the partials at `from` and behind.
template <int D>
TPK_DEVICE void sum_everywhere(float (&x)[kVector], u64 from) {
#pragma unroll
  for (int at = 0; at < kVector; at += kLanes<D>) {
    widen<D>(x, at, multimem_sum<D>(from + at * (16 / kLanes<D>)));
  }
}

template <int D>
TPK_DEVICE void store_everywhere(u64 to, const float (&x)[kVector]) {
  for_packs<D>(x, [&](u64 offset, const Pack& pack) { multimem_store(to + offset, pack); });
}

template <int D>
TPK_DEVICE void multimem(const Peers& peers, const AllReduce& call) {
  const Epilogue& after = call.epilogue;
  const int world = peers.space.world, word = kTiles + block(), result = word + blocks();
  const u64 size = size_of(after.out_dtype), here = buffer_of(peers, peers.space.rank);
  const u64 buffers = buffers_of(peers, call.everywhere);
  for (int owner = 0; owner < world && call.everywhere.x == 0; ++owner) {
    const Range part = part_of(call, owner);
    push_part(call, here + part.first * size_of(D), part);
  }
  fence_aliases();
  publish_to_all(peers, word);
  wait_for_all(peers, word);
  fence_aliases();
  const u64 partials = call.everywhere.x != 0 ? call.everywhere.x : buffers;
  const Range own = part_of(call, peers.space.rank);
  // The last vector may extend past the end; what is there is never copied out.
  for (u64 i = own.first + thread() * kVector; i < own.last; i += threads() * kVector) {
    float x[kVector];
    sum_everywhere<D>(x, partials + i * size_of(D));
    if (i + kVector <= own.last) {
      add_epilogue(x, call.begin, i, after);
    } else {
      for_some(x, own.last - i,
               [&](int k, float (&one)[1]) { add_epilogue(one, call.begin, i + k, after); });
    }
    for_dtype(after.out_dtype, [&](auto out) {
      store_everywhere<out.value>(buffers + call.results_at + i * size, x);
    });
  }
  fence_aliases();
  publish_to_all(peers, result);
  wait_for_all(peers, result);
  fence_aliases();
  for (int owner = 0; owner < world; ++owner) {
    const Range part = part_of(call, owner);
    copy_block(address_of(call.out) + part.first * size, here + call.results_at + part.first * size,
               (part.last - part.first) * size);
  }
}

template <int D>
TPK_DEVICE void multimem_rows(const Peers& peers, const AllReduce& call, const RmsNorm& norm) {
  const u64 buffers = buffers_of(peers, call.everywhere), cols = norm.cols;
  const u64 partials = call.everywhere.x != 0 ? call.everywhere.x : buffers;
  const auto copy_own = [&] {
    for (int owner = 0; owner < peers.space.world && call.everywhere.x == 0; ++owner) {
      const Range segment = segment_of(call, owner);
      for_rows((segment.last - segment.first) / cols, [&](u64 row) {
        for_vectors(cols, [&](u64 v) {
          const u64 at = (segment.first + row * cols + v * kVector) * size_of(D);
          Pack held[kVectorPacks<D>];
          load_packs<D>(held, address_of(call.x) + at);
          store_packs<D>(buffer_of(peers, peers.space.rank) + at, held);
        });
      });
    }
  };
  const auto sum = [&](Range own, u64 i, float (&x)[kVector]) {
    sum_everywhere<D>(x, partials + (own.first + i) * size_of(D));
    add_epilogue(x, call.begin, own.first + i, call.epilogue);
    round_to<D>(x);
  };
  const auto share = [&](u64 first, const float (&x)[kVector]) {
    store_everywhere<D>(buffers + call.results_at + first * size_of(D), x);
  };
  rows_by_segments<D>(peers, call, norm, copy_own, sum, share, [] { fence_aliases(); });
}

TPK_DEVICE void gather_by_multimem(const Peers& peers, const Shards& shards) {
  const int rank = peers.space.rank, world = peers.space.world, word = kTiles + block();
  const u64 row_bytes = shards.row * size_of(shards.wire);
  const Range part = part_of(shard_of(shards, rank, row_bytes));
  const u64 from = address_of(shards.x);
  const u64 to = buffers_of(peers, shards.everywhere) + rank * shards.slot_bytes;
  fence_aliases();
  constexpr u64 kPack = sizeof(Pack);
  for (u64 at = part.first + thread() * kPack; at < part.last; at += threads() * kPack) {
    multimem_store(to + at, load_some(from + at, part.last - at));
  }
  fence_aliases();
  publish_to_all(peers, word);
  wait_for_all(peers, word);
  fence_aliases();
  for (int source = 0; source < world; ++source) {
    const Range theirs = shard_of(shards, source, row_bytes), piece = part_of(theirs);
    copy_block(address_of(shards.out) + theirs.first + piece.first,
               slot_of(peers, shards, rank, source) + piece.first, length(piece));
  }
}

template <int D>
TPK_DEVICE void scatter_by_multimem(const Peers& peers, const Shards& shards) {
  const int rank = peers.space.rank, word = kTiles + block();
  const u64 size = size_of(D), out = address_of(shards.out), in_place = shards.everywhere.x;
  for (int owner = 0; owner < peers.space.world && in_place == 0; ++owner) {
    const Range theirs = shard_of(shards, owner, shards.row), part = part_of(theirs);
    copy_block(slot_of(peers, shards, rank, owner) + part.first * size,
               address_of(shards.x) + (theirs.first + part.first) * size, length(part) * size);
  }
  fence_aliases();
  publish_to_all(peers, word);
  wait_for_all(peers, word);
  fence_aliases();
  const Range own = shard_of(shards, rank, shards.row), part = part_of(own);
  const u64 partials = in_place != 0
                           ? in_place + own.first * size
                           : buffers_of(peers, shards.everywhere) + rank * shards.slot_bytes;
  const Epilogue& after = shards.epilogue;
  const bool vectors = aligned(out) && aligned(address_of(after.residual));
  for (u64 i = part.first + thread() * kVector; i < part.last; i += threads() * kVector) {
    float x[kVector];
    sum_everywhere<D>(x, partials + i * size);
    if (vectors && i + kVector <= part.last) {
      store_sum(x, out, own.first, i, after);
    } else {
      for_some(x, part.last - i,
               [&](int k, float (&one)[1]) { store_sum(one, out, own.first, i + k, after); });
    }
  }
  fence_aliases();
  if (in_place == 0) return;
  publish_to_all(peers, word + blocks());
  wait_for_all(peers, word + blocks());
}

}  // namespace tpkernels::cuda
#endif
