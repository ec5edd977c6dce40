// Data that are their own signals: the lines of cuda/low_latency.cuh.
//
// A word holds 4 bytes of data and the epoch of its call, a line two words, and a pack of 16 bytes
// travels as two lines. cuda/low_latency.cuh has the proof that a word with the epoch has its data.
#pragma once

#include "cuda/reduce.cuh"
#include "cuda/sync.cuh"

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

}  // namespace tpkernels::cuda
