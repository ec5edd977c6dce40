// Litmus tests of the guarantees that the protocols rely on, for `tpkernels qualify`.
//
// Problem: an algorithm may give correct results by chance. A litmus test therefore sends many
// stores between all pairs of ranks concurrently, each with a unique value. When a flag has
// arrived, it checks all values that the flag covers.
//
// Algorithm: all ranks push `bytes` to every peer. The packs are a function of the round, the
// sender, the receiver and the index. The tests use the functions of the protocols:
// messages   packs in the buffer of the peer, then a signal with release order (cuda/sync.cuh)
// words      LL: each 8-byte store contains 4 bytes of data and a flag (cuda/ll.cuh)
// bulk       messages stored by TMA, like `push_tile` in kernels/matmul_reduce_scatter.py
//
// Sync: as in the protocols. A launch is one round, and a regular call.
#pragma once

#include "cuda/ll.cuh"

namespace tpkernels::cuda {

constexpr int kReportChecked = 0, kReportWrong = 1, kReportRecords = 2;
constexpr int kRecordSize = 4;  // sender, index of the 4-byte value, value seen, value expected

TPK_DEVICE unsigned hash(unsigned value) {
  value = (value ^ (value >> 16)) * 0x7FEB352Du;
  value = (value ^ (value >> 15)) * 0x846CA68Bu;
  return value ^ (value >> 16);
}

TPK_DEVICE Pack make_pattern(const Litmus& litmus, int source, int dst, u64 index) {
  const unsigned seed = hash(litmus.round * 131u + source * 73u + dst);
  Pack pack;
#pragma unroll
  for (unsigned i = 0; i < 4; ++i) pack.word[i] = hash(seed + 4 * static_cast<unsigned>(index) + i);
  return pack;
}

// Compares a pack. Only wrong packs are counted with an atomic, because an atomic would order the
// loads before and after it.
TPK_DEVICE void compare(const Litmus& litmus, int source, u64 index, const Pack& seen,
                        const Pack& expected, u64& checked) {
  unsigned seen_word = 0, expected_word = 0, wrong_word = 4;
#pragma unroll
  for (int i = 3; i >= 0; --i) {
    if (seen.word[i] == expected.word[i]) continue;
    seen_word = seen.word[i];
    expected_word = expected.word[i];
    wrong_word = i;
  }
  ++checked;
  if (wrong_word == 4) return;
  const u64 record_index = add_acq_rel_gpu(litmus.report + kReportWrong, 1);
  if (record_index >= static_cast<u64>(litmus.records)) return;
  u64* record = litmus.report + kReportRecords + record_index * kRecordSize;
  record[0] = static_cast<u64>(source);
  record[1] = 4 * index + wrong_word;
  record[2] = seen_word;
  record[3] = expected_word;
}

TPK_DEVICE void compare(const Peers& peers, const Litmus& litmus, int source, u64 index,
                        const Pack& seen, u64& checked) {
  compare(litmus, source, index, seen, make_pattern(litmus, source, peers.workspace.rank, index),
          checked);
}

// Returns the slice of this block in the packs between two ranks.
TPK_DEVICE Range block_packs(const Litmus& litmus) {
  return block_slice_in({0, count_packs(litmus.bytes)}, count_packs(litmus.bytes));
}

TPK_DEVICE Pack* slot_packs(const Peers& peers, const Litmus& litmus, int rank, int source) {
  return reinterpret_cast<Pack*>(buffer_address(peers, rank) + source * litmus.bytes);
}

// Exchanges packs with signals. `push(peer)` stores the packs of this block in the buffer of a
// peer.
template <class Push>
TPK_DEVICE void exchange_with_signals(const Peers& peers, const Litmus& litmus, const Push& push) {
  const int rank = peers.workspace.rank, world = peers.workspace.world, signal = kTiles + block();
  const Range slice = block_packs(litmus);
  for (int i = 1; i < world; ++i) push((rank + i) % world);
  publish_to_all(peers, signal);
  u64 checked = 0;
  for (int i = 1; i < world; ++i) {
    const int source = (rank + i) % world;
    wait_for(peers, source, signal);
    for (u64 index = slice.first + thread(); index < slice.last; index += threads()) {
      const Pack seen = load_pack(slot_packs(peers, litmus, rank, source) + index);
      compare(peers, litmus, source, index, seen, checked);
    }
  }
  add_acq_rel_gpu(litmus.report + kReportChecked, checked);
}

TPK_DEVICE void exchange_messages(const Peers& peers, const Litmus& litmus) {
  const int rank = peers.workspace.rank;
  const Range slice = block_packs(litmus);
  exchange_with_signals(peers, litmus, [&](int peer) {
    for (u64 index = slice.first + thread(); index < slice.last; index += threads()) {
      store_pack(slot_packs(peers, litmus, peer, rank) + index,
                 make_pattern(litmus, rank, peer, index));
    }
  });
}

#ifdef TPK_SM_90
TPK_DEVICE void exchange_bulk(const Peers& peers, const Litmus& litmus) {
  constexpr u64 kBatch = kScratchFloats / 4;  // packs per bulk copy
  const int rank = peers.workspace.rank;
  const Range slice = block_packs(litmus);
  auto* batch = reinterpret_cast<Pack*>(scratch());
  exchange_with_signals(peers, litmus, [&](int peer) {
    for (u64 first = slice.first; first < slice.last; first += kBatch) {
      const u64 count = minimum(kBatch, slice.last - first);
      for (u64 i = thread(); i < count; i += threads()) {
        batch[i] = make_pattern(litmus, rank, peer, first + i);
      }
      fence_scratch();
      sync_block();
      if (thread() == 0) {
        const u64 address = to_address(slot_packs(peers, litmus, peer, rank) + first);
        store_scratch(address, scratch(), static_cast<unsigned>(count * sizeof(Pack)));
        await_scratch_stores();
      }
      sync_block();
    }
  });
}
#endif

TPK_DEVICE void exchange_ll_packs(const Peers& peers, const Litmus& litmus) {
  const int rank = peers.workspace.rank, world = peers.workspace.world;
  const Chunk chunk{0, litmus.bytes};
  const u64 num_packs = count_packs(litmus.bytes);
  delay(peers, thread());
  for (u64 index = global_thread(); index < num_packs; index += global_threads()) {
    for (int i = 1; i < world; ++i) {
      const int peer = (rank + i) % world;
      send_pack(peers, peer, chunk, index, make_pattern(litmus, rank, peer, index));
    }
  }
  u64 checked = 0;
  for (u64 index = global_thread(); index < num_packs; index += global_threads()) {
    for (int i = 1; i < world; ++i) {
      const int source = (rank + i) % world;
      Lines seen = load_lines(peers, source, chunk, index);
      const u64 begin = clock_ns();
      for (int polls = 1; !has_arrived(peers, seen); ++polls) {
        if (!keep_polling(peers, source, polls, begin)) return;
        seen = load_lines(peers, source, chunk, index);
      }
      compare(peers, litmus, source, index, to_pack(seen), checked);
    }
  }
  add_acq_rel_gpu(litmus.report + kReportChecked, checked);
}

}  // namespace tpkernels::cuda
