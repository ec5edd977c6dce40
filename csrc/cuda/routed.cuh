// Tokens to the experts that a router chose for them, and back, in one launch each.
//
// Problem: that of csrc/host/routing.h. The routes, sorted by expert, are in device memory, and the
// host knows no counts. So a rank has room for `most` rows; routes beyond it have none, nor have
// routes to an expert that there is not.
//
// Algorithm: dispatch: every rank copies its tokens into its own buffer; the experts' rank reads
// its rows there, and clears the rows that nobody fills. So a buffer has a rank's tokens, whatever
// the routes are. Combine: every route has a slot in the buffer of its token's rank. The experts'
// rank pushes its rows there. The token's rank sums the slots by weight, in their order, in fp32:
// products and sums are rounded each, as by `weigh` in csrc/host/vector_loops.inc. A token that has
// a route without a row becomes NaN.
//
// Sync: a block has the same columns of all rows on every rank. The word TILES + b says that block
// b of the source has written its columns. So a block waits only for blocks of the same number,
// whatever the routes are. A rank writes a buffer that peers read two calls later, which it begins
// when every peer has entered the call in between, and so has ended the one that read it.
#pragma once

#include "cuda/reduce.cuh"
#include "cuda/sync.cuh"

namespace tpkernels::cuda {

TPK_DEVICE u64 tokens_of(const Routed& call, int rank) {
  return call.tokens[rank + 1] - call.tokens[rank];
}

// The experts' rows of a rank that have room.
TPK_DEVICE u64 rows_of(const Routed& call, int rank) {
  return least(call.rows[rank + 1] - call.rows[rank], call.most);
}

// The last rank whose part begins at `i` or before.
template <class T>
TPK_DEVICE int owner_of(const T* starts, int world, i64 i) {
  int rank = 0;
  for (int end = world; end - rank > 1;) {
    const int middle = (rank + end) / 2;
    (i < starts[middle] ? end : rank) = middle;
  }
  return rank;
}

// Deals the pieces of rows out to the threads of a block; each has some of the same row in turn.
struct Walk {
  TPK_DEVICE explicit Walk(unsigned pieces)
      : pieces(pieces), row(thread() / pieces), piece(thread() % pieces) {}

  TPK_DEVICE void next() {
    row += threads() / pieces;
    piece += threads() % pieces;
    if (piece < pieces) return;
    piece -= pieces;
    ++row;
  }

  unsigned pieces;
  u64 row;
  unsigned piece;
};

TPK_DEVICE Pack load_piece(const Pack* from) { return load_pack(from); }
TPK_DEVICE void store_piece(Pack* to, Pack piece) { store_pack(to, piece); }
TPK_DEVICE unsigned short load_piece(const unsigned short* from) { return *from; }
TPK_DEVICE void store_piece(unsigned short* to, unsigned short piece) { *to = piece; }

// Copies bytes `part` of each row from address `from(row)` to `to(row)`. From address 0 come zeros;
// to address 0 goes nothing.
template <class Piece, class From, class To>
TPK_DEVICE void copy_pieces(u64 rows, Range part, const From& from, const To& to) {
  constexpr int kAtOnce = 4;  // pieces in flight per thread
  const auto pieces = static_cast<unsigned>((part.last - part.first) / sizeof(Piece));
  if (pieces == 0) return;
  for (Walk walk(pieces); walk.row < rows;) {
    Piece held[kAtOnce];
    u64 targets[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const u64 at = part.first + walk.piece * sizeof(Piece);
      const u64 target = walk.row < rows ? to(walk.row) : 0;
      const u64 source = target != 0 ? from(walk.row) : 0;
      targets[i] = target != 0 ? target + at : 0;
      held[i] = source != 0 ? load_piece(reinterpret_cast<const Piece*>(source + at)) : Piece{};
      walk.next();
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (targets[i] != 0) store_piece(reinterpret_cast<Piece*>(targets[i]), held[i]);
    }
  }
}

template <class From, class To>
TPK_DEVICE void copy_rows(bool in_packs, u64 rows, Range part, const From& from, const To& to) {
  if (in_packs) return copy_pieces<Pack>(rows, part, from, to);
  copy_pieces<unsigned short>(rows, part, from, to);
}

TPK_DEVICE void dispatch(const Peers& peers, const Routed& call) {
  const int rank = peers.space.rank, world = peers.space.world, word = kTiles + block();
  const u64 size = size_of(call.dtype), row_bytes = call.row * size;
  const Range columns = part_in({0, call.row}, call.row);
  const Range part = {columns.first * size, columns.last * size};
  const u64 x = address_of(call.x), out = address_of(call.out), own = buffer_of(peers, rank);
  const u64 rows = rows_of(call, rank);
  const bool in_packs = aligned(x | out | row_bytes);
  copy_rows(
      in_packs, tokens_of(call, rank), part, [&](u64 token) { return x + token * row_bytes; },
      [&](u64 token) { return own + token * row_bytes; });
  publish_to_all(peers, word);
  wait_for_all(peers, word);
  const i64* routes = call.order + call.rows[rank];
  const auto token_of = [&](u64 row) -> u64 {
    if (row >= rows) return 0;
    const int token = static_cast<int>(routes[row]) / call.k;
    const int source = owner_of(call.tokens, world, token);
    return buffer_of(peers, source) + (token - call.tokens[source]) * row_bytes;
  };
  copy_rows(in_packs, call.most, part, token_of, [&](u64 row) { return out + row * row_bytes; });
}

// out = round(sum over slots of weight * row) for N elements of each token.
template <int D, int N>
TPK_DEVICE void weigh(const Peers& peers, const Routed& call, Range columns) {
  const int rank = peers.space.rank, world = peers.space.world;
  const u64 size = size_of(D), row_bytes = call.row * size, tokens = tokens_of(call, rank);
  const auto pieces = static_cast<unsigned>((columns.last - columns.first) / N);
  if (pieces == 0) return;
  const i64* places = call.places + static_cast<i64>(call.tokens[rank]) * call.k;
  for (Walk walk(pieces); walk.row < tokens; walk.next()) {
    const u64 at = (columns.first + walk.piece * N) * size;
    float acc[N] = {};
    for (u64 slot = walk.row * call.k; slot < (walk.row + 1) * call.k; ++slot) {
      const i64 place = places[slot];
      const int holder = owner_of(call.rows, world, place);
      const u64 row = place - call.rows[holder];  // past every room before the first rank's
      const bool missing = row >= rows_of(call, holder);
      const u64 from = holder == rank && !missing ? address_of(call.x) + row * row_bytes
                                                  : buffer_of(peers, rank) + slot * row_bytes;
      float next[N];
      load<D>(next, from + at);
      const float weight = missing ? float_of(0x7fffffff) : call.weights[slot];
#pragma unroll
      for (int i = 0; i < N; ++i) acc[i] += multiply(weight, next[i]);
    }
    store<D>(address_of(call.out) + walk.row * row_bytes + at, acc);
  }
}

template <int D>
TPK_DEVICE void combine(const Peers& peers, const Routed& call) {
  const int rank = peers.space.rank, world = peers.space.world, word = kTiles + block();
  const u64 size = size_of(D), row_bytes = call.row * size;
  const Range columns = part_in({0, call.row}, call.row);
  const u64 x = address_of(call.x), out = address_of(call.out);
  const i64* routes = call.order + call.rows[rank];
  const auto slot_of = [&](u64 row) -> u64 {
    const int route = static_cast<int>(routes[row]);
    const int owner = owner_of(call.tokens, world, route / call.k);
    const u64 slot = route - static_cast<u64>(call.tokens[owner]) * call.k;
    return owner == rank ? 0 : buffer_of(peers, owner) + slot * row_bytes;
  };
  copy_rows(
      aligned(x | row_bytes), rows_of(call, rank), {columns.first * size, columns.last * size},
      [&](u64 row) { return x + row * row_bytes; }, slot_of);
  publish_to_all(peers, word);
  wait_for_all(peers, word);
  if (aligned(x | out) && call.row % kVector == 0) return weigh<D, kVector>(peers, call, columns);
  weigh<D, 1>(peers, call, columns);
}

}  // namespace tpkernels::cuda
