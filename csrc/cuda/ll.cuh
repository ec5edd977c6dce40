// Collectives of few bytes, in which data and signal are one store.
//
// Problem: the all-reduce, all-gather and reduce-scatter of cuda/all_reduce.cuh and
// cuda/shards.cuh, for tensors so small that signals take most of the time: a barrier, a release,
// which waits until the stores before it have arrived, and then the flight of the word.
//
// Algorithm: NCCL's protocol LL (ncclLLFifoLine in src/device/prims_ll.h). Data travels in words of
// 8 bytes: data << 32 | epoch. A word that has the epoch of the call also has its data, so there is
// no barrier, no fence and no other flag. The price is twice the bytes. A line is two words, and a
// pack of 16 bytes travels as two lines. A thread stores its packs at all peers. Then it polls the
// lines of all sources at the same places, and sums them in rank order, to the bits of
// cuda/reduce.cuh, or copies them. A call is one hop.
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
#include "cuda/shards.cuh"

namespace tpkernels::cuda {

constexpr int kFirstData = 2;  // the first word with data; a line is aligned
constexpr int kHalves = 2;     // lines of a pack
constexpr int kPacksAtOnce = 8;
// A thread's looks at lines for each look for failure, which reads the host's memory.
constexpr int kLooksAlone = 1024;

// What a rank sends to another: `from` is its address at the sender, `begin` the line at which its
// lines begin at the receiver.
struct Piece {
  u64 from;
  u64 bytes;
  u64 begin = 0;
};

struct Lines {
  Line half[kHalves];
};

TPK_DEVICE u64 packs_in(u64 bytes) { return (bytes + sizeof(Pack) - 1) / sizeof(Pack); }
TPK_DEVICE u64 lane() { return static_cast<u64>(block()) * threads() + thread(); }
TPK_DEVICE u64 lanes() { return static_cast<u64>(blocks()) * threads(); }

// The half of pack `at` in a piece from `source`, in the region of `rank`. The same halves of all
// packs are neighbours, so that the threads of a warp access neighbouring lines.
TPK_DEVICE Line* line_of(const Peers& peers, int rank, int source, const Piece& piece, u64 at,
                         int half) {
  return reinterpret_cast<Line*>(word_of(peers, rank, source, kFirstData)) + piece.begin +
         half * packs_in(piece.bytes) + at;
}

// The pack at `from`; `left` bytes are there.
TPK_DEVICE Pack load_some(u64 from, u64 left) {
  if (aligned(from) && left >= sizeof(Pack)) return load_pack(reinterpret_cast<const void*>(from));
  const auto* halves = reinterpret_cast<const unsigned short*>(from);
  u64 pair[2] = {};
#pragma unroll 1
  for (int i = 0; i < 8 && 2 * static_cast<u64>(i) < left; ++i) {
    const u64 half = static_cast<u64>(halves[i]) << 16 * (i % 4);
    pair[0] |= i < 4 ? half : 0;
    pair[1] |= i < 4 ? 0 : half;
  }
  Pack pack;
#pragma unroll
  for (int i = 0; i < 4; ++i) pack.word[i] = static_cast<unsigned>(pair[i / 2] >> 32 * (i % 2));
  return pack;
}

TPK_DEVICE void store_some(u64 to, const Pack& pack, u64 left) {
  if (aligned(to) && left >= sizeof(Pack)) return store_pack(reinterpret_cast<void*>(to), pack);
  auto* halves = reinterpret_cast<unsigned short*>(to);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (2 * static_cast<u64>(i) < left) {
      halves[i] = static_cast<unsigned short>(pack.word[i / 2] >> 16 * (i % 2));
    }
  }
}

TPK_DEVICE void send_pack(const Peers& peers, int to, const Piece& piece, u64 at,
                          const Pack& pack) {
  const u64 epoch = peers.word & kEpochMask;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    Line line;
    line.word[0] = static_cast<u64>(pack.word[2 * half]) << 32 | epoch;
    line.word[1] = static_cast<u64>(pack.word[2 * half + 1]) << 32 | epoch;
    store_line_sys(line_of(peers, to, peers.space.rank, piece, at, half), line);
  }
}

TPK_DEVICE Lines look_at(const Peers& peers, int source, const Piece& piece, u64 at) {
  Lines seen;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    seen.half[half] = load_line_sys(line_of(peers, peers.space.rank, source, piece, at, half));
  }
  return seen;
}

TPK_DEVICE bool has_arrived(const Peers& peers, const Lines& seen) {
  u64 difference = 0;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    difference |= (seen.half[half].word[0] ^ peers.word) | (seen.half[half].word[1] ^ peers.word);
  }
  return (difference & kEpochMask) == 0;
}

TPK_DEVICE Pack pack_of(const Lines& seen) {
  Pack pack;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pack.word[i] = static_cast<unsigned>(seen.half[i / 2].word[i % 2] >> 32);
  }
  return pack;
}

// A pause between looks at lines of `late`, the first of which was at `begin`. Returns false once a
// wait has failed.
TPK_DEVICE bool look_again(const Peers& peers, int late, int looks, u64 begin) {
  const Space& space = peers.space;
  if (looks % kPolls == 1 && status_of(space) != 0) return false;
  if (looks % kLooksAlone == 0) {
    const u64 entered = load_relaxed_sys(word_of(peers, space.rank, late, kEntered));
    look_around(peers, late, entered, begin);
  }
  pause();
  return true;
}

// The P packs of a piece from `first` on, as far as there are any.
template <int P>
TPK_DEVICE void load_piece(Pack (&held)[P], const Piece& piece, u64 first) {
#pragma unroll
  for (int p = 0; p < P; ++p) {
    const u64 at = (first + p) * sizeof(Pack);
    if (at < piece.bytes) held[p] = load_some(piece.from + at, piece.bytes - at);
  }
}

// Pushes the P packs of a piece from `first` on to one peer.
template <int P>
TPK_DEVICE void push_packs_to(const Peers& peers, int to, const Piece& piece, u64 first) {
  const u64 packs = packs_in(piece.bytes);
  Pack held[P];
  load_piece<P>(held, piece, first);
#pragma unroll
  for (int p = 0; p < P; ++p) {
    if (first + p < packs) send_pack(peers, to, piece, first + p, held[p]);
  }
}

// Pushes the P packs of a piece from `first` on to every peer.
template <int P>
TPK_DEVICE void push_packs(const Peers& peers, const Piece& piece, u64 first) {
  const int rank = peers.space.rank, world = peers.space.world;
  const u64 packs = packs_in(piece.bytes);
  Pack held[P];
  load_piece<P>(held, piece, first);
#pragma unroll 4
  for (int i = 1; i < world; ++i) {
#pragma unroll
    for (int p = 0; p < P; ++p) {
      if (first + p < packs) send_pack(peers, (rank + i) % world, piece, first + p, held[p]);
    }
  }
}

// Pushes a piece to every peer. A lane takes P packs at a time. It has the same packs in `receive`,
// so a result may replace what was sent.
template <int P>
TPK_DEVICE void push_to_all(const Peers& peers, const Piece& piece) {
  const u64 packs = packs_in(piece.bytes);
  delay(peers, thread());
  for (u64 first = lane() * P; first < packs; first += lanes() * P)
    push_packs<P>(peers, piece, first);
}

// Pushes `piece_for(to)` to every peer; the lanes as above.
template <int P, class PieceFor>
TPK_DEVICE void push_each(const Peers& peers, u64 most, const PieceFor& piece_for) {
  constexpr int kAtOnce = 4;
  const int rank = peers.space.rank, world = peers.space.world;
  delay(peers, thread());
  for (u64 first = lane() * P; first < most; first += lanes() * P) {
#pragma unroll 1
    for (int turn = 0; turn < P * (world - 1); turn += kAtOnce) {
      Pack held[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (turn + k >= P * (world - 1)) continue;
        const Piece piece = piece_for((rank + 1 + (turn + k) / P) % world);
        const u64 at = (first + (turn + k) % P) * sizeof(Pack);
        if (at < piece.bytes) held[k] = load_some(piece.from + at, piece.bytes - at);
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (turn + k >= P * (world - 1)) continue;
        const int to = (rank + 1 + (turn + k) / P) % world;
        const u64 at = first + (turn + k) % P;
        const Piece piece = piece_for(to);
        if (at < packs_in(piece.bytes)) send_pack(peers, to, piece, at, held[k]);
      }
    }
  }
}

// Waits for the P packs from `first` on of a piece from one source, all of which are in it. Returns
// false if the wait has failed: they may be anything then.
template <int P>
TPK_DEVICE bool receive_from(const Peers& peers, int source, const Piece& piece, u64 first,
                             Pack (&found)[P]) {
  const bool waits = (peers.space.chaos & 1) == 0;
  u64 since = 0;
  bool arrived = true;
#pragma unroll 1
  for (int looks = 1;; ++looks) {
    bool all = true;
#pragma unroll
    for (int p = 0; p < P; ++p) {
      const Lines seen = look_at(peers, source, piece, first + p);
      all = has_arrived(peers, seen) && all;
      found[p] = pack_of(seen);
    }
    if (all || !waits) break;
    if (looks == 1) since = clock_ns();
    arrived = look_again(peers, source, looks, since);
    if (!arrived) break;
  }
  return arrived;
}

// Looks at the P packs from `first` on of as many sources as `seen` holds, from `begin` on. Returns
// a source of which one has not arrived; -1: all have.
template <int P, int N, class PieceFor>
TPK_DEVICE int look_at_all(const Peers& peers, u64 first, int begin, const PieceFor& piece_for,
                           Lines (&seen)[N]) {
  const int rank = peers.space.rank, world = peers.space.world;
  bool awaited[N];
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const int source = begin + k / P;
    const u64 at = first + k % P;
    awaited[k] = source < world && source != rank && at < packs_in(piece_for(source).bytes);
    if (awaited[k]) seen[k] = look_at(peers, source, piece_for(source), at);
  }
  int late = -1;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    if (awaited[k] && !has_arrived(peers, seen[k])) late = begin + k / P;
  }
  return late;
}

// Calls `take(source, packs)` for every source in rank order, with the P packs from `first` on of
// `piece_for(source)`; this rank's own are read where they are. Returns false if a wait has failed:
// they may be anything then.
template <int P, class PieceFor, class Take>
TPK_DEVICE bool receive(const Peers& peers, u64 first, const PieceFor& piece_for,
                        const Take& take) {
  const int rank = peers.space.rank, world = peers.space.world;
  const bool waits = (peers.space.chaos & 1) == 0;
  bool arrived = true;
  for (int begin = 0; begin < world; begin += kPacksAtOnce / P) {
    Lines seen[kPacksAtOnce];
    u64 since = 0;
#pragma unroll 1
    for (int looks = 1;; ++looks) {
      const int late = look_at_all<P>(peers, first, begin, piece_for, seen);
      if (late < 0 || !waits) break;
      if (looks == 1) since = clock_ns();
      arrived = look_again(peers, late, looks, since);
      if (!arrived) break;
    }
#pragma unroll
    for (int k = 0; k < kPacksAtOnce; k += P) {
      const int source = begin + k / P;
      if (source >= world) continue;
      const Piece piece = piece_for(source);
      Pack found[P];
#pragma unroll
      for (int p = 0; p < P; ++p) {
        const u64 at = (first + p) * sizeof(Pack);
        found[p] = Pack{};
        if (at >= piece.bytes) continue;
        found[p] =
            source == rank ? load_some(piece.from + at, piece.bytes - at) : pack_of(seen[k + p]);
      }
      take(source, found);
    }
  }
  return arrived;
}

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
TPK_DEVICE void reduce_by_ll(const Peers& peers, const AllReduce& call) {
  const Piece own{address_of(call.x), call.count * size_of(D)};
  push_to_all<kVector / kLanes<D>>(peers, own);
  sum_arriving<D>(peers, own, address_of(call.out), 0, call.epilogue);
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
  const u64 begin = segment_of(call, rank).first;
  return sum_arriving<D>(peers, hops.partial_for(rank), hops.sum_of(rank).from, begin,
                         hops.epilogue_of(rank));
}

// Every rank sums a segment and pushes its sum: fewer bytes than in one hop, from three ranks on,
// for two hops. `out` may be x: a sum arrives only where this rank's partial has been sent.
TPK_DEVICE void reduce_by_ll_in_two_hops(const Peers& peers, const AllReduce& call) {
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
TPK_DEVICE void scatter_by_ll(const Peers& peers, const Shards& shards) {
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

TPK_DEVICE void gather_by_ll(const Peers& peers, const Shards& shards) {
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
TPK_DEVICE Peers enter_ll(const Space& space) {
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
TPK_DEVICE bool finish_ll(const Peers& peers) {
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
