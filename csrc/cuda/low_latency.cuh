// Collectives of few bytes, in which data and signal are one store.
//
// Problem: the all-reduce, all-gather and reduce-scatter of cuda/all_reduce.cuh and
// cuda/shards.cuh, for tensors so small that signals take most of the time: a barrier, a release,
// which waits until the stores before it have arrived, and then the flight of the word.
//
// Algorithm: NCCL's protocol LL (ncclLLFifoLine in src/device/prims_ll.h). Data travels in words of
// 8 bytes: data << 32 | epoch. A word that has the epoch of the call also has its data, so there is
// no barrier, no fence and no other flag. The price is twice the bytes. A thread stores its packs
// (16 bytes, as two lines of two words) at all peers. Then it polls the lines of all sources at the
// same places, and sums them in rank order, to the bits of cuda/reduce.cuh, or copies them. A call
// is one hop.
//
// Sync: an 8-byte store is never seen half. A 16-byte store may be: to PTX, an access to a vector
// is one access to each element, in no order. So each word has the epoch. Relaxed order is enough,
// because a word tells nothing about other data. The words share their places with those of
// cuda/sync.cuh, signature << 32 | epoch: whatever a call stores there has its epoch in the low
// half.
// - An old word never matches. Words of the other parity have other places. Memory begins as zeros,
//   and no epoch is 0. When epochs begin anew, the words have been cleared (`advance`): a rank
//   awaits every word that peers send it in a call before its call ends, so none arrives later.
// - No word is overwritten before it is read. The proof is that of kernels/sync.py, by the ENTERED
//   words of all peers. These are relaxed too: the reads that they stand for returned before the
//   previous kernel ended. (NCCL's LL returns credits in the same way, in postRecv.)
// - A peer in another call may have stored words of this epoch here, which pass for data. But its
//   ENTERED word has another signature, and no call ends before it has compared them all.
// - The epoch lives in device memory, so a captured graph replays.
// A block waits only for blocks of the same number, so any number of them may run at a time.
//
// Failure: as in cuda/sync.cuh. If a wait fails in another block while this one still pushes, no
// harm is done: it pushes this rank's input, which is complete, or sums of what has arrived, in a
// call that this rank has entered. A thread whose own wait has failed pushes no more.
#pragma once

#include "cuda/all_reduce.cuh"
#include "cuda/lines.cuh"
#include "cuda/shards.cuh"
#include "cuda/sync.cuh"

namespace tpkernels::cuda {

// acc = the elements of vector `v` of sum_r(x_r), where `own` is this rank's x. Returns false if a
// wait has failed.
template <int D>
TPK_DEVICE bool add_up_arriving(float (&acc)[kVector], const Peers& peers, const Piece& own,
                                u64 v) {
  constexpr int kPacks = kVector / kLanes<D>;
  const auto sum = [&](int source, const Pack(&packs)[kPacks]) {
    float next[kVector];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) widen<D>(next, p * kLanes<D>, packs[p]);
    if (source > 0) return add(acc, next);
#pragma unroll
    for (int k = 0; k < kVector; ++k) acc[k] = next[k];
  };
  return receive<kPacks>(peers, v * kPacks, [&](int) { return own; }, sum);
}

// out[i] = round(acc + bias + residual) for as many elements from i on as there are of `count`.
TPK_DEVICE void store_arrived(float (&acc)[kVector], u64 out, u64 begin, u64 i, u64 count,
                              const Epilogue& epilogue) {
  const u64 left = least(count - i, kVector);
  if (left == kVector && aligned(out) && aligned(address_of(epilogue.residual))) {
    return store_sum(acc, out, begin, i, epilogue);
  }
#pragma unroll 1
  for (u64 k = 0; k < left; ++k) {
    float one[1] = {acc[0]};
#pragma unroll
    for (int j = 1; j < kVector; ++j) one[0] = k == static_cast<u64>(j) ? acc[j] : one[0];
    store_sum(one, out, begin, i + k, epilogue);
  }
}

// out = round(sum_r(x_r) + bias + residual), where `own` is this rank's x. Returns false if a wait
// of this thread has failed.
template <int D>
TPK_DEVICE bool sum_arriving(const Peers& peers, const Piece& own, u64 out, u64 begin,
                             const Epilogue& epilogue) {
  const u64 count = own.bytes / size_of(D);
  bool arrived = true;
  delay(peers, thread() + 1);
  for (u64 v = lane(); v * kVector < count; v += lanes()) {
    float acc[kVector] = {};
    arrived = add_up_arriving<D>(acc, peers, own, v) && arrived;
    store_arrived(acc, out, begin, v * kVector, count, epilogue);
  }
  return arrived;
}

template <int D>
TPK_DEVICE void low_latency_reduce(const Peers& peers, const AllReduce& call) {
  const Piece own{address_of(call.x), call.count * size_of(D)};
  push_to_all<kVector / kLanes<D>>(peers, own);
  sum_arriving<D>(peers, own, address_of(call.out), call.begin, call.epilogue);
}

// Of this rank's segment, whose sum is at its place in `out`: pushes it to all peers, and receives
// theirs. `theirs(owner)` has no bytes for this rank itself. A lane takes the vectors that it
// summed, so a block waits only for blocks of the same number.
template <int P, class PieceFor>
TPK_DEVICE void exchange_sums(const Peers& peers, const AllReduce& call, const Piece& own,
                              const PieceFor& theirs) {
  for (u64 v = lane(); v * P < packs_in(own.bytes); v += lanes()) push_packs<P>(peers, own, v * P);
  delay(peers, thread() + 2);
  for (u64 v = lane(); v * kVector < call.segment; v += lanes()) {
    receive<P>(peers, v * P, theirs, [&](int source, const Pack(&found)[P]) {
      const Piece piece = theirs(source);
#pragma unroll
      for (int p = 0; p < P; ++p) {
        const u64 at = (v * P + p) * sizeof(Pack);
        if (at < piece.bytes) store_some(piece.from + at, found[p], piece.bytes - at);
      }
    });
  }
}

// What goes to whom in two hops: partials to the owner of a segment, whose sum goes to all. Lines
// of sums are `behind` those of partials.
struct TwoHops {
  const AllReduce& call;
  u64 behind;

  TPK_DEVICE u64 in() const { return size_of(call.wire); }
  TPK_DEVICE u64 out() const { return size_of(call.epilogue.out_dtype); }

  TPK_DEVICE Piece partial_for(int owner) const {
    const Range segment = segment_of(call, owner);
    return {address_of(call.x) + segment.first * in(), length(segment) * in()};
  }

  TPK_DEVICE Piece sum_of(int owner) const {
    const Range segment = segment_of(call, owner);
    return {address_of(call.out) + segment.first * out(), length(segment) * out(), behind};
  }

  // After the sum of a segment.
  TPK_DEVICE Epilogue epilogue_of(int owner) const {
    Epilogue epilogue = call.epilogue;
    if (epilogue.residual != nullptr) {
      const u64 offset = segment_of(call, owner).first * size_of(epilogue.residual_dtype);
      epilogue.residual = static_cast<const char*>(epilogue.residual) + offset;
    }
    return epilogue;
  }
};

TPK_DEVICE TwoHops two_hops(const AllReduce& call) {
  return {call, kHalves * packs_in(call.segment * size_of(call.wire))};
}

// The first hop: pushes partials and sums this rank's segment. Returns false if a wait of this
// thread has failed.
template <int D>
TPK_DEVICE bool sum_segment(const Peers& peers, const TwoHops& hops) {
  const AllReduce& call = hops.call;
  const int rank = peers.space.rank;
  push_each<kVector / kLanes<D>>(peers, packs_in(call.segment * size_of(D)),
                                 [&](int owner) { return hops.partial_for(owner); });
  const u64 begin = call.begin + segment_of(call, rank).first;
  return sum_arriving<D>(peers, hops.partial_for(rank), hops.sum_of(rank).from, begin,
                         hops.epilogue_of(rank));
}

// Every rank sums a segment and pushes its sum: fewer bytes than in one hop, from three ranks on,
// for two hops. `out` may be x: a sum arrives only where this rank's partial has been sent.
TPK_DEVICE void low_latency_two_shot(const Peers& peers, const AllReduce& call) {
  const int rank = peers.space.rank;
  const TwoHops hops = two_hops(call);
  const auto theirs = [&](int owner) { return owner == rank ? Piece{0, 0} : hops.sum_of(owner); };
  const bool arrived = call.wire == kF32   ? sum_segment<kF32>(peers, hops)
                       : call.wire == kF16 ? sum_segment<kF16>(peers, hops)
                                           : sum_segment<kBF16>(peers, hops);
  if (!arrived) return;
  if (hops.out() == 4) return exchange_sums<2>(peers, call, hops.sum_of(rank), theirs);
  exchange_sums<1>(peers, call, hops.sum_of(rank), theirs);
}

// The most packs of a shard with rows of `row_bytes`.
TPK_DEVICE u64 most_packs(const Peers& peers, const Shards& shards, u64 row_bytes) {
  u64 most = 0;
  for (int r = 0; r < peers.space.world; ++r) {
    const u64 packs = packs_in(length(shard_of(shards, r, row_bytes)));
    most = packs > most ? packs : most;
  }
  return most;
}

template <int D>
TPK_DEVICE void low_latency_scatter(const Peers& peers, const Shards& shards) {
  const u64 row_bytes = shards.row * size_of(D);
  const auto piece_for = [&](int rank) {
    const Range shard = shard_of(shards, rank, row_bytes);
    return Piece{address_of(shards.x) + shard.first, length(shard)};
  };
  push_each<kVector / kLanes<D>>(peers, most_packs(peers, shards, row_bytes), piece_for);
  const int rank = peers.space.rank;
  const u64 begin = shard_of(shards, rank, shards.row).first;
  sum_arriving<D>(peers, piece_for(rank), address_of(shards.out), begin, shards.epilogue);
}

TPK_DEVICE void low_latency_gather(const Peers& peers, const Shards& shards) {
  const u64 row_bytes = shards.row * size_of(shards.wire);
  const auto piece_for = [&](int rank) {
    return Piece{address_of(shards.x), length(shard_of(shards, rank, row_bytes))};
  };
  const Piece own = piece_for(peers.space.rank);
  push_to_all<1>(peers, own);
  delay(peers, thread() + 1);
  const u64 packs = most_packs(peers, shards, row_bytes);
  for (u64 at = lane(); at < packs; at += lanes()) {
    receive<1>(peers, at, piece_for, [&](int source, const Pack(&found)[1]) {
      const Range shard = shard_of(shards, source, row_bytes);
      const u64 begins = at * sizeof(Pack);
      if (begins >= length(shard)) return;
      const u64 to = address_of(shards.out) + shard.first + begins;
      store_some(to, found[0], length(shard) - begins);
    });
  }
}

// Begins a call of one launch without a barrier: the threads need not agree whether it is usable.
TPK_DEVICE Peers enter_low_latency(const Space& space) {
  const Peers peers = call_of(space, status_of(space) == 0);
  if (block() == 0 && peers.usable) {
    for (int i = 1 + thread(); i < space.world; i += threads()) {
      const int to = (space.rank + i) % space.world;
      store_relaxed_sys(word_of(peers, to, space.rank, kEntered), peers.word);
    }
  }
  return peers;
}

// `finish` without an acquire: no data is read on account of these words.
TPK_DEVICE bool finish_low_latency(const Peers& peers) {
  const Space& space = peers.space;
  if (block() == 0) {
    for (int i = 1 + thread(); i < space.world; i += threads()) {
      await_word(peers, (space.rank + i) % space.world, kEntered,
                 [](const u64* from) { return load_relaxed_sys(from); });
    }
  }
  sync_block();
  return end_grid(peers);
}

}  // namespace tpkernels::cuda
