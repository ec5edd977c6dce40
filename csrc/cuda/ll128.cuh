// An all-reduce of few bytes in lines of 128 bytes with one flag.
//
// Problem: that of cuda/ll.cuh, whose words of 8 bytes carry 4 bytes of data: half of what
// crosses the links is flags.
//
// Algorithm: NCCL's protocol LL128. Eight neighbouring threads store a line of 128 bytes at a time:
// seven packs of data (16 bytes), and a flag, the word of the call, twice. They load it at a time
// as well, and take the data once the thread with the flag has seen it. So 16 bytes out of 128 are
// no data. (NCCL's flag takes 8; then data would not be aligned.) The all-reduce has two hops:
// every rank sums a segment and pushes its sum, as in `ll_two_shot`, to the same bits.
//
// Sync: PTX does not promise it, but where stores of a warp to a line leave its SM together they
// arrive together: over NVLink, on the GPUs that NCCL lists (compute capability 7.0 and newer), not
// over PCIe. Hence it is chosen only where NVLink connects all GPUs (tpkernels/symm/nvlink.py).
// - A store or a load of a line is one instruction of its eight threads: it is behind no condition
//   that differs between them, and `__syncwarp` brings them together.
// - Relaxed order is enough: data and flag are one access, whose result the eight share by a vote.
// - Lines take the places of the words of cuda/ll.cuh and cuda/sync.cuh, where a later
//   call must not find data that it takes for a word. So whoever has read a line clears it. No peer
//   stores there again before this kernel has ended (the proof of kernels/sync.py).
// - The place of a flag holds zero, a flag or a word of an earlier call: data never are there.
// The rest of the proof is that of cuda/ll.cuh.
//
// Failure: as there. The eight threads of a line share the end of a wait too: if it has failed,
// none of them pushes its sums.
#pragma once

#include "cuda/ll.cuh"

namespace tpkernels::cuda {

constexpr int kLinePacks = 8, kDataPacks = 7;  // the last is the flag
constexpr int kFirstLineWord = 16, kLineWords = 16;
constexpr int kShare = kLinePacks / kLineLanes;  // packs of a line that a thread has
constexpr int kLinesAtOnce = 8;                  // that are looked at

// The packs that a thread has of P neighbouring lines: of vector v of P packs, which are at the
// same place of each.
template <int P>
struct Share {
  Pack pack[P][kShare];
};

// Eight threads take seven vectors at a time: the group of threads `group`, of `groups`.
TPK_DEVICE u64 group() { return lane() / kLineLanes; }
TPK_DEVICE u64 groups() { return lanes() / kLineLanes; }
TPK_DEVICE int place(int s) { return line_lane() * kShare + s; }
TPK_DEVICE bool is_flag(int s) { return place(s) == kDataPacks; }
TPK_DEVICE u64 vector_of(u64 turn, int s) { return turn * kDataPacks + place(s); }

// The lines of a piece of so many bytes, P for each turn.
template <int P>
TPK_DEVICE u64 turns_in(u64 bytes) {
  const u64 vectors = (packs_in(bytes) + P - 1) / P;
  return (vectors + kDataPacks - 1) / kDataPacks;
}

template <int P>
TPK_DEVICE Pack* lines_of(const Peers& peers, int rank, int source, const Piece& piece, u64 turn) {
  const u64 line = piece.begin + turn * P;
  return reinterpret_cast<Pack*>(word_of(peers, rank, source, kFirstLineWord) + line * kLineWords);
}

// What this rank sends of a piece in a turn; zeros where it has ended.
template <int P>
TPK_DEVICE Share<P> load_turn(const Peers& peers, const Piece& piece, u64 turn) {
  Share<P> share;
  const auto half = [&](int i) { return static_cast<unsigned>(peers.word >> 32 * (i % 2)); };
#pragma unroll
  for (int p = 0; p < P; ++p) {
#pragma unroll
    for (int s = 0; s < kShare; ++s) {
      Pack& pack = share.pack[p][s];
      pack = Pack{};
      const u64 at = (vector_of(turn, s) * P + p) * sizeof(Pack);
      if (is_flag(s)) {
        for (int i = 0; i < 4; ++i) pack.word[i] = half(i);
      } else if (at < piece.bytes) {
        pack = load_some(piece.from + at, piece.bytes - at);
      }
    }
  }
  return share;
}

template <int P>
TPK_DEVICE void send_turn(const Peers& peers, int to, const Piece& piece, u64 turn,
                          const Share<P>& share) {
  Pack* lines = lines_of<P>(peers, to, peers.space.rank, piece, turn);
#pragma unroll
  for (int p = 0; p < P; ++p) store_share(lines + p * kLinePacks, share.pack[p]);
}

// Whether the flags of a turn, those that this thread has, are the call's.
template <int P>
TPK_DEVICE bool look_at_turn(const Peers& peers, int source, const Piece& piece, u64 turn,
                             Share<P>& seen) {
  const Pack* lines = lines_of<P>(peers, peers.space.rank, source, piece, turn);
  u64 difference = 0;
#pragma unroll
  for (int p = 0; p < P; ++p) {
    load_share(seen.pack[p], lines + p * kLinePacks);
#pragma unroll
    for (int s = 0; s < kShare; ++s) {
      const Pack& pack = seen.pack[p][s];
      const u64 flag = static_cast<u64>(pack.word[1]) << 32 | pack.word[0];
      if (is_flag(s)) difference |= flag ^ peers.word;
    }
  }
  return difference == 0;
}

template <int P>
TPK_DEVICE void clear_turn(const Peers& peers, int source, const Piece& piece, u64 turn) {
  Share<P> zeros = {};
  Pack* lines = lines_of<P>(peers, peers.space.rank, source, piece, turn);
#pragma unroll
  for (int p = 0; p < P; ++p) store_share(lines + p * kLinePacks, zeros.pack[p]);
}

// Waits for a turn of the sources from `begin` on, as many as `seen` holds. Returns, to all threads
// of a line alike, whether it has arrived; if not, the wait has failed.
template <int P, int N, class PieceFor>
TPK_DEVICE bool await_turn(const Peers& peers, u64 turn, int begin, const PieceFor& piece_for,
                           Share<P> (&seen)[N]) {
  const int rank = peers.space.rank, world = peers.space.world;
  const bool waits = (peers.space.chaos & 1) == 0;
  u64 since = 0;
#pragma unroll 1
  for (int looks = 1;; ++looks) {
    int late = -1;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const int source = begin + k;
      if (source >= world || source == rank) continue;
      const Piece piece = piece_for(source);
      if (turn >= turns_in<P>(piece.bytes)) continue;
      if (!look_at_turn(peers, source, piece, turn, seen[k])) late = source;
    }
    if (all_of_line(late < 0) || !waits) return true;
    if (looks == 1) since = clock_ns();
    const bool goes_on = late < 0 || look_again(peers, late, looks, since);
    if (!all_of_line(goes_on)) return false;
  }
}

// Calls `take(source, s, packs)` for every source in rank order and every vector that this thread
// has in a turn. This rank's own packs are read where they are. Returns false, to all threads of a
// line, if a wait has failed: packs may be anything then.
template <int P, class PieceFor, class Take>
TPK_DEVICE bool receive_turn(const Peers& peers, u64 turn, const PieceFor& piece_for,
                             const Take& take) {
  constexpr int kAtOnce = kLinesAtOnce / P;
  const int rank = peers.space.rank, world = peers.space.world;
  const Share<P> own = load_turn<P>(peers, piece_for(rank), turn);
  bool arrived = true;
#pragma unroll 1
  for (int begin = 0; begin < world; begin += kAtOnce) {
    Share<P> seen[kAtOnce];
    arrived = await_turn(peers, turn, begin, piece_for, seen) && arrived;
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int source = begin + k;
      if (source >= world) continue;
      const Piece piece = piece_for(source);
      if (turn >= turns_in<P>(piece.bytes)) continue;
      if (source == rank) seen[k] = own;
      if (source != rank) clear_turn<P>(peers, source, piece, turn);
#pragma unroll
      for (int s = 0; s < kShare; ++s) {
        if (is_flag(s)) continue;
        Pack found[P];
#pragma unroll
        for (int p = 0; p < P; ++p) found[p] = seen[k].pack[p][s];
        take(source, s, found);
      }
    }
  }
  return arrived;
}

// Pushes the partials of every peer's segment to that peer.
template <int P>
TPK_DEVICE void push_partials(const Peers& peers, const TwoHops& hops, u64 turns) {
  const int rank = peers.space.rank, world = peers.space.world;
  delay(peers, thread());
  for (u64 turn = group(); turn < turns; turn += groups()) {
#pragma unroll 4
    for (int i = 1; i < world; ++i) {
      const int to = (rank + i) % world;
      const Piece piece = hops.partial_for(to);
      if (turn >= turns_in<P>(piece.bytes)) continue;
      send_turn(peers, to, piece, turn, load_turn<P>(peers, piece, turn));
    }
  }
}

// Sums this rank's segment. Returns false, to all threads of a line, if a wait of theirs has
// failed.
template <int D>
TPK_DEVICE bool sum_turns(const Peers& peers, const TwoHops& hops) {
  constexpr int kPacks = kVector / kLanes<D>;
  const int rank = peers.space.rank;
  const Piece own = hops.partial_for(rank);
  const u64 count = own.bytes / size_of(D), out = hops.sum_of(rank).from;
  const u64 begin = hops.call.begin + segment_of(hops.call, rank).first;
  const Epilogue epilogue = hops.epilogue_of(rank);
  bool arrived = true;
  delay(peers, thread() + 1);
  for (u64 turn = group(); turn < turns_in<kPacks>(own.bytes); turn += groups()) {
    float acc[kShare][kVector] = {};
    const auto sum = [&](int source, int s, const Pack(&packs)[kPacks]) {
      float next[kVector];
#pragma unroll
      for (int p = 0; p < kPacks; ++p) widen<D>(next, p * kLanes<D>, packs[p]);
#pragma unroll
      for (int k = 0; k < kVector; ++k) acc[s][k] = source == 0 ? next[k] : acc[s][k] + next[k];
    };
    arrived = receive_turn<kPacks>(peers, turn, [&](int) { return own; }, sum) && arrived;
#pragma unroll
    for (int s = 0; s < kShare; ++s) {
      const u64 i = vector_of(turn, s) * kVector;
      if (!is_flag(s) && i < count) store_arrived(acc[s], out, begin, i, count, epilogue);
    }
  }
  return arrived;
}

// Pushes this rank's sum to all peers, and receives theirs. A thread has the vectors that it
// summed.
template <int P>
TPK_DEVICE void exchange_turns(const Peers& peers, const TwoHops& hops, u64 turns) {
  const int rank = peers.space.rank, world = peers.space.world;
  const Piece sum = hops.sum_of(rank);
  for (u64 turn = group(); turn < turns_in<P>(sum.bytes); turn += groups()) {
    const Share<P> share = load_turn<P>(peers, sum, turn);
    for (int i = 1; i < world; ++i) send_turn(peers, (rank + i) % world, sum, turn, share);
  }
  delay(peers, thread() + 2);
  const auto theirs = [&](int owner) { return owner == rank ? Piece{0, 0} : hops.sum_of(owner); };
  for (u64 turn = group(); turn < turns; turn += groups()) {
    receive_turn<P>(peers, turn, theirs, [&](int source, int s, const Pack(&found)[P]) {
      const Piece piece = theirs(source);
#pragma unroll
      for (int p = 0; p < P; ++p) {
        const u64 at = (vector_of(turn, s) * P + p) * sizeof(Pack);
        if (at < piece.bytes) store_some(piece.from + at, found[p], piece.bytes - at);
      }
    });
  }
}

TPK_DEVICE void reduce_by_ll128(const Peers& peers, const AllReduce& call) {
  const u64 bytes = call.segment * size_of(call.wire);
  const bool wide = call.wire == kF32;
  const u64 turns = wide ? turns_in<2>(bytes) : turns_in<1>(bytes);
  const TwoHops hops{call, wide ? 2 * turns : turns};
  bool arrived = false;
  if (wide) {
    push_partials<2>(peers, hops, turns);
    arrived = sum_turns<kF32>(peers, hops);
  } else {
    push_partials<1>(peers, hops, turns);
    arrived = call.wire == kF16 ? sum_turns<kF16>(peers, hops) : sum_turns<kBF16>(peers, hops);
  }
  if (!arrived) return;
  if (hops.out() == 4) return exchange_turns<2>(peers, hops, turns);
  exchange_turns<1>(peers, hops, turns);
}

}  // namespace tpkernels::cuda
