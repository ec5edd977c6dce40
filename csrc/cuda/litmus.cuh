// Litmus tests of what the protocols rely on, for `tpkernels qualify`.
//
// Problem: an algorithm may give right results by luck. So a great many stores, each with a value
// that nobody else stores, go between all pairs of ranks at once, and every value that has arrived
// with its flag is compared.
//
// Algorithm: all ranks push `bytes` to every peer, in packs that are a function of the round, the
// sender, the receiver and the place, by the very functions of the protocols:
// messages   packs in the peer's buffer, then a word with release semantics (cuda/sync.cuh)
// words      LL: each word of 8 bytes has 4 of data and a flag (cuda/ll.cuh)
// bulk       messages that TMA stores, as `push_tile` in kernels/matmul_reduce_scatter.py has it do
//
// Sync: that of the protocols. A launch is a round; it is a call like any other.
#pragma once

#include "cuda/ll.cuh"

namespace tpkernels::cuda {

constexpr int kFoundChecked = 0, kFoundWrong = 1, kFoundRecords = 2;
constexpr int kRecord = 4;  // sender, place, what was there, what was expected

TPK_DEVICE unsigned mixed(unsigned value) {
  value = (value ^ (value >> 16)) * 0x7FEB352Du;
  value = (value ^ (value >> 15)) * 0x846CA68Bu;
  return value ^ (value >> 16);
}

TPK_DEVICE Pack pattern_of(const Litmus& litmus, int source, int to, u64 at) {
  const unsigned seed = mixed(litmus.round * 131u + source * 73u + to);
  Pack pack;
#pragma unroll
  for (unsigned i = 0; i < 4; ++i) pack.word[i] = mixed(seed + 4 * static_cast<unsigned>(at) + i);
  return pack;
}

// Only a wrong pack is counted at once: an atomic between loads would order them.
TPK_DEVICE void compare(const Litmus& litmus, int source, u64 at, const Pack& seen,
                        const Pack& expected, u64& checked) {
  unsigned got = 0, wanted = 0, first = 4;
#pragma unroll
  for (int i = 3; i >= 0; --i) {
    if (seen.word[i] == expected.word[i]) continue;
    got = seen.word[i];
    wanted = expected.word[i];
    first = i;
  }
  ++checked;
  if (first == 4) return;
  const u64 number = add_acq_rel_gpu(litmus.found + kFoundWrong, 1);
  if (number >= static_cast<u64>(litmus.records)) return;
  u64* record = litmus.found + kFoundRecords + number * kRecord;
  record[0] = static_cast<u64>(source);
  record[1] = 4 * at + first;
  record[2] = got;
  record[3] = wanted;
}

TPK_DEVICE void compare(const Peers& peers, const Litmus& litmus, int source, u64 at,
                        const Pack& seen, u64& checked) {
  compare(litmus, source, at, seen, pattern_of(litmus, source, peers.space.rank, at), checked);
}

// This block's packs of those that a rank sends to another.
TPK_DEVICE Range packs_of(const Litmus& litmus) {
  return part_in({0, packs_in(litmus.bytes)}, packs_in(litmus.bytes));
}

TPK_DEVICE Pack* slot_of(const Peers& peers, const Litmus& litmus, int rank, int source) {
  return reinterpret_cast<Pack*>(buffer_of(peers, rank) + source * litmus.bytes);
}

// `push(to)` stores this block's packs in the buffer of a rank.
template <class Push>
TPK_DEVICE void exchange_by_words(const Peers& peers, const Litmus& litmus, const Push& push) {
  const int rank = peers.space.rank, world = peers.space.world, word = kTiles + block();
  const Range part = packs_of(litmus);
  for (int i = 1; i < world; ++i) push((rank + i) % world);
  publish_to_all(peers, word);
  u64 checked = 0;
  for (int i = 1; i < world; ++i) {
    const int source = (rank + i) % world;
    wait_for(peers, source, word);
    for (u64 at = part.first + thread(); at < part.last; at += threads()) {
      const Pack seen = load_pack(slot_of(peers, litmus, rank, source) + at);
      compare(peers, litmus, source, at, seen, checked);
    }
  }
  add_acq_rel_gpu(litmus.found + kFoundChecked, checked);
}

TPK_DEVICE void exchange_messages(const Peers& peers, const Litmus& litmus) {
  const int rank = peers.space.rank;
  const Range part = packs_of(litmus);
  exchange_by_words(peers, litmus, [&](int to) {
    for (u64 at = part.first + thread(); at < part.last; at += threads()) {
      store_pack(slot_of(peers, litmus, to, rank) + at, pattern_of(litmus, rank, to, at));
    }
  });
}

#ifdef TPK_SM_90
TPK_DEVICE void exchange_in_bulk(const Peers& peers, const Litmus& litmus) {
  constexpr u64 kAtOnce = kScratchFloats / 4;  // packs
  const int rank = peers.space.rank;
  const Range part = packs_of(litmus);
  auto* held = reinterpret_cast<Pack*>(scratch());
  exchange_by_words(peers, litmus, [&](int to) {
    for (u64 first = part.first; first < part.last; first += kAtOnce) {
      const u64 count = least(kAtOnce, part.last - first);
      for (u64 i = thread(); i < count; i += threads()) {
        held[i] = pattern_of(litmus, rank, to, first + i);
      }
      fence_scratch();
      sync_block();
      if (thread() == 0) {
        const u64 there = address_of(slot_of(peers, litmus, to, rank) + first);
        store_scratch(there, scratch(), static_cast<unsigned>(count * sizeof(Pack)));
        await_scratch_stores();
      }
      sync_block();
    }
  });
}
#endif

TPK_DEVICE void exchange_words(const Peers& peers, const Litmus& litmus) {
  const int rank = peers.space.rank, world = peers.space.world;
  const Piece piece{0, litmus.bytes};
  const u64 packs = packs_in(litmus.bytes);
  delay(peers, thread());
  for (u64 at = lane(); at < packs; at += lanes()) {
    for (int i = 1; i < world; ++i) {
      const int to = (rank + i) % world;
      send_pack(peers, to, piece, at, pattern_of(litmus, rank, to, at));
    }
  }
  u64 checked = 0;
  for (u64 at = lane(); at < packs; at += lanes()) {
    for (int i = 1; i < world; ++i) {
      const int source = (rank + i) % world;
      Lines seen = look_at(peers, source, piece, at);
      const u64 since = clock_ns();
      for (int looks = 1; !has_arrived(peers, seen); ++looks) {
        if (!look_again(peers, source, looks, since)) return;
        seen = look_at(peers, source, piece, at);
      }
      compare(peers, litmus, source, at, pack_of(seen), checked);
    }
  }
  add_acq_rel_gpu(litmus.found + kFoundChecked, checked);
}

}  // namespace tpkernels::cuda
