// Collectives for few bytes, in which data and flag are one store.
//
// Problem: the collectives of cuda/all_reduce.cuh and cuda/shards.cuh, for tensors so small that
// signaling dominates: a barrier, a release (which waits until the preceding stores have arrived),
// then the latency of the signal.
//
// Algorithm: the LL protocol of NCCL (ncclLLFifoLine in src/device/prims_ll.h).
// - Data is sent in 8-byte pairs, data << 32 | flag. The flag is the epoch of the call. If a flag
//   has arrived, its data has too, so no barrier, fence or separate signal is needed.
// - The cost is twice the bytes.
// - A line is two pairs. A pack of 16 bytes is sent as two lines.
// - A thread stores its packs on all peers. Then it polls the lines of all sources with the same
//   indices. It copies the packs, or sums them in rank order, bitwise identical to
//   cuda/reduce.cuh.
// - A call is one-shot, except for the two-shot all-reduce.
//
// Sync: an 8-byte store is atomic. A 16-byte store may be torn: PTX treats a vector access as
// unordered accesses to its elements. Therefore each pair has a flag. Relaxed order is sufficient,
// because a flag covers only the data in its pair. The pairs share their memory with the signals
// of cuda/sync.cuh (signature << 32 | epoch). Every store of a call has its epoch in the low half.
//
// Invariant 1 (no stale flag): the two parities use separate memory. Memory is initially zero, and
// no epoch is 0. Before epochs repeat, the memory is cleared (`advance`). A rank awaits all pairs
// that peers send it in a call before its call ends, so no pair arrives later.
//
// Invariant 2 (no overwritten read): the proof of kernels/sync.py applies, with the ENTERED signals
// of all peers. Relaxed order is sufficient for them, because the reads that they cover returned
// before the previous kernel ended. LL in NCCL returns its credits similarly (postRecv).
//
// Invariant 3 (mismatch detection): flags do not contain the signature, so data of a peer in a
// different call passes for data of this call. The call still fails: the ENTERED signal of that
// peer has a different signature, and no call ends before it has compared the ENTERED signals of
// all peers.
//
// Invariant 4 (replay): the epoch lives in device memory, so captured graphs replay correctly.
//
// Invariant 5 (no deadlock): a block waits only for blocks with its number, so any number of blocks
// may run at a time.
//
// Failure: as in cuda/sync.cuh. If a wait fails in a different block while this block still pushes,
// the pushed data is valid: it is the complete input of this rank, or sums of arrived data, in a
// call that this rank has entered. A thread stops pushing after its wait has failed.
#pragma once

#include "cuda/all_reduce.cuh"
#include "cuda/shards.cuh"

namespace tpkernels::cuda {

constexpr int kFirstData = 2;  // index of the first LL pair; lines are 16-byte aligned
constexpr int kHalves = 2;     // lines per pack
constexpr int kPackBatch = 8;  // packs in flight per thread in `receive`
// Polls between two calls of `check_for_failure`, which reads the abort flag in host memory.
constexpr int kPollsPerFailureCheck = 1024;

// Data between this rank and a peer.
struct Chunk {
  u64 address;  // in local memory: of the data to send, or of the result to receive
  u64 bytes;
  u64 first_line = 0;  // line index at the receiver
};

struct Lines {
  Line half[kHalves];
};

TPK_DEVICE u64 count_packs(u64 bytes) { return (bytes + sizeof(Pack) - 1) / sizeof(Pack); }
TPK_DEVICE u64 global_thread() { return static_cast<u64>(block()) * threads() + thread(); }
TPK_DEVICE u64 global_threads() { return static_cast<u64>(blocks()) * threads(); }

// Returns line `half` of pack `index` in a chunk from `source`, in the region of `rank`. The first
// lines of all packs are contiguous, and so are the second lines. The threads of a warp therefore
// access contiguous lines.
TPK_DEVICE Line* line_pointer(const Peers& peers, int rank, int source, const Chunk& chunk,
                              u64 index, int half) {
  return reinterpret_cast<Line*>(signal_pointer(peers, rank, source, kFirstData)) +
         chunk.first_line + half * count_packs(chunk.bytes) + index;
}

// Loads the pack at `src`, of which `available` bytes exist.
TPK_DEVICE Pack load_pack_bounded(u64 src, u64 available) {
  if (aligned(src) && available >= sizeof(Pack))
    return load_pack(reinterpret_cast<const void*>(src));
  const auto* halves = reinterpret_cast<const unsigned short*>(src);
  u64 pair[2] = {};
#pragma unroll 1
  for (int i = 0; i < 8 && 2 * static_cast<u64>(i) < available; ++i) {
    const u64 half = static_cast<u64>(halves[i]) << 16 * (i % 4);
    pair[0] |= i < 4 ? half : 0;
    pair[1] |= i < 4 ? 0 : half;
  }
  Pack pack;
#pragma unroll
  for (int i = 0; i < 4; ++i) pack.word[i] = static_cast<unsigned>(pair[i / 2] >> 32 * (i % 2));
  return pack;
}

TPK_DEVICE void store_pack_bounded(u64 dst, const Pack& pack, u64 available) {
  if (aligned(dst) && available >= sizeof(Pack))
    return store_pack(reinterpret_cast<void*>(dst), pack);
  auto* halves = reinterpret_cast<unsigned short*>(dst);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (2 * static_cast<u64>(i) < available) {
      halves[i] = static_cast<unsigned short>(pack.word[i / 2] >> 16 * (i % 2));
    }
  }
}

TPK_DEVICE void send_pack(const Peers& peers, int peer, const Chunk& chunk, u64 index,
                          const Pack& pack) {
  const u64 epoch = peers.signal_value & kEpochMask;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    Line line;
    line.word[0] = static_cast<u64>(pack.word[2 * half]) << 32 | epoch;
    line.word[1] = static_cast<u64>(pack.word[2 * half + 1]) << 32 | epoch;
    store_line_sys(line_pointer(peers, peer, peers.workspace.rank, chunk, index, half), line);
  }
}

TPK_DEVICE Lines load_lines(const Peers& peers, int source, const Chunk& chunk, u64 index) {
  Lines seen;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    seen.half[half] =
        load_line_sys(line_pointer(peers, peers.workspace.rank, source, chunk, index, half));
  }
  return seen;
}

TPK_DEVICE bool has_arrived(const Peers& peers, const Lines& seen) {
  u64 difference = 0;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    difference |= (seen.half[half].word[0] ^ peers.signal_value) |
                  (seen.half[half].word[1] ^ peers.signal_value);
  }
  return (difference & kEpochMask) == 0;
}

TPK_DEVICE Pack to_pack(const Lines& seen) {
  Pack pack;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pack.word[i] = static_cast<unsigned>(seen.half[i / 2].word[i % 2] >> 32);
  }
  return pack;
}

// Pauses after a poll that found lines of `late_source` missing. The first poll was at time
// `begin`. Returns false if a wait has failed.
TPK_DEVICE bool keep_polling(const Peers& peers, int late_source, int polls, u64 begin) {
  const Workspace& workspace = peers.workspace;
  if (polls % kPollsPerCheck == 1 && load_status(workspace) != 0) return false;
  if (polls % kPollsPerFailureCheck == 0) {
    const u64 entered =
        load_relaxed_sys(signal_pointer(peers, workspace.rank, late_source, kEntered));
    check_for_failure(peers, late_source, entered, begin);
  }
  pause();
  return true;
}

// Loads up to P packs of a chunk, starting at pack `first`.
template <int P>
TPK_DEVICE void load_chunk(Pack (&packs)[P], const Chunk& chunk, u64 first) {
#pragma unroll
  for (int p = 0; p < P; ++p) {
    const u64 offset = (first + p) * sizeof(Pack);
    if (offset < chunk.bytes)
      packs[p] = load_pack_bounded(chunk.address + offset, chunk.bytes - offset);
  }
}

// Pushes up to P packs of a chunk to one peer, starting at pack `first`.
template <int P>
TPK_DEVICE void push_packs_to(const Peers& peers, int peer, const Chunk& chunk, u64 first) {
  const u64 num_packs = count_packs(chunk.bytes);
  Pack packs[P];
  load_chunk<P>(packs, chunk, first);
#pragma unroll
  for (int p = 0; p < P; ++p) {
    if (first + p < num_packs) send_pack(peers, peer, chunk, first + p, packs[p]);
  }
}

// Pushes up to P packs of a chunk to every peer, starting at pack `first`.
template <int P>
TPK_DEVICE void push_packs(const Peers& peers, const Chunk& chunk, u64 first) {
  const int rank = peers.workspace.rank, world = peers.workspace.world;
  const u64 num_packs = count_packs(chunk.bytes);
  Pack packs[P];
  load_chunk<P>(packs, chunk, first);
#pragma unroll 4
  for (int i = 1; i < world; ++i) {
#pragma unroll
    for (int p = 0; p < P; ++p) {
      if (first + p < num_packs) send_pack(peers, (rank + i) % world, chunk, first + p, packs[p]);
    }
  }
}

// Pushes a chunk to every peer. A thread processes P packs per iteration. It has the same packs in
// `receive`, so a result may overwrite the sent data.
template <int P>
TPK_DEVICE void push_to_all(const Peers& peers, const Chunk& chunk) {
  const u64 num_packs = count_packs(chunk.bytes);
  delay(peers, thread());
  for (u64 first = global_thread() * P; first < num_packs; first += global_threads() * P)
    push_packs<P>(peers, chunk, first);
}

// Pushes `chunk_for(peer)` to every peer, with the thread assignment of `push_to_all`.
template <int P, class ChunkFor>
TPK_DEVICE void push_per_peer(const Peers& peers, u64 max_packs, const ChunkFor& chunk_for) {
  constexpr int kBatch = 4;
  const int rank = peers.workspace.rank, world = peers.workspace.world;
  delay(peers, thread());
  for (u64 first = global_thread() * P; first < max_packs; first += global_threads() * P) {
#pragma unroll 1
    for (int item = 0; item < P * (world - 1); item += kBatch) {
      Pack packs[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (item + k >= P * (world - 1)) continue;
        const Chunk chunk = chunk_for((rank + 1 + (item + k) / P) % world);
        const u64 offset = (first + (item + k) % P) * sizeof(Pack);
        if (offset < chunk.bytes)
          packs[k] = load_pack_bounded(chunk.address + offset, chunk.bytes - offset);
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (item + k >= P * (world - 1)) continue;
        const int peer = (rank + 1 + (item + k) / P) % world;
        const u64 index = first + (item + k) % P;
        const Chunk chunk = chunk_for(peer);
        if (index < count_packs(chunk.bytes)) send_pack(peers, peer, chunk, index, packs[k]);
      }
    }
  }
}

// Waits for P packs of a chunk from one source, starting at pack `first`. The chunk must contain
// all of them. Returns false if the wait has failed; `packs` is invalid then.
template <int P>
TPK_DEVICE bool receive_from(const Peers& peers, int source, const Chunk& chunk, u64 first,
                             Pack (&packs)[P]) {
  const bool waits = (peers.workspace.chaos & 1) == 0;
  u64 start = 0;
  bool arrived = true;
#pragma unroll 1
  for (int polls = 1;; ++polls) {
    bool all = true;
#pragma unroll
    for (int p = 0; p < P; ++p) {
      const Lines seen = load_lines(peers, source, chunk, first + p);
      all = has_arrived(peers, seen) && all;
      packs[p] = to_pack(seen);
    }
    if (all || !waits) break;
    if (polls == 1) start = clock_ns();
    arrived = keep_polling(peers, source, polls, start);
    if (!arrived) break;
  }
  return arrived;
}

// Loads the lines of P packs per source, starting at pack `first`. `seen` covers the sources from
// `begin` on. Returns a source with a missing pack, or -1 if all packs have arrived.
template <int P, int N, class ChunkFor>
TPK_DEVICE int load_all_lines(const Peers& peers, u64 first, int begin, const ChunkFor& chunk_for,
                              Lines (&seen)[N]) {
  const int rank = peers.workspace.rank, world = peers.workspace.world;
  bool awaited[N];
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const int source = begin + k / P;
    const u64 index = first + k % P;
    awaited[k] = source < world && source != rank && index < count_packs(chunk_for(source).bytes);
    if (awaited[k]) seen[k] = load_lines(peers, source, chunk_for(source), index);
  }
  int late_source = -1;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    if (awaited[k] && !has_arrived(peers, seen[k])) late_source = begin + k / P;
  }
  return late_source;
}

// Calls `consume(source, packs)` for every source in rank order, with P packs of
// `chunk_for(source)`, starting at pack `first`. The local packs are read from the input. Returns
// false if a wait has failed; the packs are invalid then.
template <int P, class ChunkFor, class Consume>
TPK_DEVICE bool receive(const Peers& peers, u64 first, const ChunkFor& chunk_for,
                        const Consume& consume) {
  const int rank = peers.workspace.rank, world = peers.workspace.world;
  const bool waits = (peers.workspace.chaos & 1) == 0;
  bool arrived = true;
  for (int begin = 0; begin < world; begin += kPackBatch / P) {
    Lines seen[kPackBatch];
    u64 start = 0;
#pragma unroll 1
    for (int polls = 1;; ++polls) {
      const int late_source = load_all_lines<P>(peers, first, begin, chunk_for, seen);
      if (late_source < 0 || !waits) break;
      if (polls == 1) start = clock_ns();
      arrived = keep_polling(peers, late_source, polls, start);
      if (!arrived) break;
    }
#pragma unroll
    for (int k = 0; k < kPackBatch; k += P) {
      const int source = begin + k / P;
      if (source >= world) continue;
      const Chunk chunk = chunk_for(source);
      Pack packs[P];
#pragma unroll
      for (int p = 0; p < P; ++p) {
        const u64 offset = (first + p) * sizeof(Pack);
        packs[p] = Pack{};
        if (offset >= chunk.bytes) continue;
        packs[p] = source == rank ? load_pack_bounded(chunk.address + offset, chunk.bytes - offset)
                                  : to_pack(seen[k + p]);
      }
      consume(source, packs);
    }
  }
  return arrived;
}

// Computes acc = vector `v` of sum_r(x_r), where `local_chunk` is the local x. Returns false if a
// wait has failed.
template <int D>
TPK_DEVICE bool accumulate_arriving(float (&acc)[kVector], const Peers& peers,
                                    const Chunk& local_chunk, u64 v) {
  constexpr int kPacks = kVector / kLanes<D>;
  const auto sum = [&](int source, const Pack(&packs)[kPacks]) {
    float next[kVector];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) widen<D>(next, p * kLanes<D>, packs[p]);
    if (source > 0) return add(acc, next);
#pragma unroll
    for (int k = 0; k < kVector; ++k) acc[k] = next[k];
  };
  return receive<kPacks>(peers, v * kPacks, [&](int) { return local_chunk; }, sum);
}

// Computes out = round(acc + bias + residual) for elements [i, min(i + kVector, count)).
TPK_DEVICE void store_sum_bounded(float (&acc)[kVector], u64 out, u64 begin, u64 i, u64 count,
                                  const Epilogue& epilogue) {
  const u64 available = minimum(count - i, kVector);
  if (available == kVector && aligned(out) && aligned(to_address(epilogue.residual))) {
    return store_sum(acc, out, begin, i, epilogue);
  }
#pragma unroll 1
  for (u64 k = 0; k < available; ++k) {
    float element[1] = {acc[0]};
#pragma unroll
    for (int j = 1; j < kVector; ++j) element[0] = k == static_cast<u64>(j) ? acc[j] : element[0];
    store_sum(element, out, begin, i + k, epilogue);
  }
}

// Computes out = round(sum_r(x_r) + bias + residual), where `local_chunk` is the local x. Returns
// false if a wait of this thread has failed.
template <int D>
TPK_DEVICE bool sum_arriving(const Peers& peers, const Chunk& local_chunk, u64 out, u64 begin,
                             const Epilogue& epilogue) {
  const u64 count = local_chunk.bytes / dtype_size(D);
  bool arrived = true;
  delay(peers, thread() + 1);
  for (u64 v = global_thread(); v * kVector < count; v += global_threads()) {
    float acc[kVector] = {};
    arrived = accumulate_arriving<D>(acc, peers, local_chunk, v) && arrived;
    store_sum_bounded(acc, out, begin, v * kVector, count, epilogue);
  }
  return arrived;
}

template <int D>
TPK_DEVICE void ll_reduce(const Peers& peers, const AllReduce& call) {
  const Chunk local_chunk{to_address(call.x), call.count * dtype_size(D)};
  push_to_all<kVector / kLanes<D>>(peers, local_chunk);
  sum_arriving<D>(peers, local_chunk, to_address(call.out), 0, call.epilogue);
}

// Pushes the result of the local segment, which is stored in `out`, to all peers and receives their
// results. `peer_chunk(owner)` is empty for the local rank. A thread pushes the vectors that it
// summed, so a block waits only for blocks with its number.
template <int P, class ChunkFor>
TPK_DEVICE void exchange_results(const Peers& peers, const AllReduce& call,
                                 const Chunk& local_chunk, const ChunkFor& peer_chunk) {
  for (u64 v = global_thread(); v * P < count_packs(local_chunk.bytes); v += global_threads())
    push_packs<P>(peers, local_chunk, v * P);
  delay(peers, thread() + 2);
  for (u64 v = global_thread(); v * kVector < call.segment; v += global_threads()) {
    receive<P>(peers, v * P, peer_chunk, [&](int source, const Pack(&packs)[P]) {
      const Chunk chunk = peer_chunk(source);
#pragma unroll
      for (int p = 0; p < P; ++p) {
        const u64 offset = (v * P + p) * sizeof(Pack);
        if (offset < chunk.bytes)
          store_pack_bounded(chunk.address + offset, packs[p], chunk.bytes - offset);
      }
    });
  }
}

// Chunks of a two-shot all-reduce: partials are sent to the owner of a segment, and its sum to all
// ranks.
struct TwoShotPlan {
  const AllReduce& call;
  u64 sum_line;  // first line of the sums; they follow the lines of the partials

  TPK_DEVICE u64 wire_size() const { return dtype_size(call.wire); }
  TPK_DEVICE u64 out_size() const { return dtype_size(call.epilogue.out_dtype); }

  TPK_DEVICE Chunk partial_chunk(int owner) const {
    const Range segment = segment_range(call, owner);
    return {to_address(call.x) + segment.first * wire_size(), length(segment) * wire_size()};
  }

  TPK_DEVICE Chunk sum_chunk(int owner) const {
    const Range segment = segment_range(call, owner);
    return {to_address(call.out) + segment.first * out_size(), length(segment) * out_size(),
            sum_line};
  }

  // Returns the epilogue for the sum of a segment.
  TPK_DEVICE Epilogue segment_epilogue(int owner) const {
    Epilogue epilogue = call.epilogue;
    if (epilogue.residual != nullptr) {
      const u64 offset = segment_range(call, owner).first * dtype_size(epilogue.residual_dtype);
      epilogue.residual = static_cast<const char*>(epilogue.residual) + offset;
    }
    return epilogue;
  }
};

TPK_DEVICE TwoShotPlan plan_two_shot(const AllReduce& call) {
  return {call, kHalves * count_packs(call.segment * dtype_size(call.wire))};
}

// First shot: pushes the partials and sums the local segment. Returns false if a wait of this
// thread has failed.
template <int D>
TPK_DEVICE bool sum_segment(const Peers& peers, const TwoShotPlan& plan) {
  const AllReduce& call = plan.call;
  const int rank = peers.workspace.rank;
  push_per_peer<kVector / kLanes<D>>(peers, count_packs(call.segment * dtype_size(D)),
                                     [&](int owner) { return plan.partial_chunk(owner); });
  const u64 begin = segment_range(call, rank).first;
  return sum_arriving<D>(peers, plan.partial_chunk(rank), plan.sum_chunk(rank).address, begin,
                         plan.segment_epilogue(rank));
}

// Two-shot: every rank sums a segment and pushes the sum. For three or more ranks this transfers
// fewer bytes than one-shot, but adds a second latency. `out` may be x: a sum overwrites a local
// partial only after the partial has been sent.
TPK_DEVICE void ll_two_shot_reduce(const Peers& peers, const AllReduce& call) {
  const int rank = peers.workspace.rank;
  const TwoShotPlan plan = plan_two_shot(call);
  const auto peer_chunk = [&](int owner) {
    return owner == rank ? Chunk{0, 0} : plan.sum_chunk(owner);
  };
  const bool arrived = call.wire == kF32   ? sum_segment<kF32>(peers, plan)
                       : call.wire == kF16 ? sum_segment<kF16>(peers, plan)
                                           : sum_segment<kBF16>(peers, plan);
  if (!arrived) return;
  if (plan.out_size() == 4)
    return exchange_results<2>(peers, call, plan.sum_chunk(rank), peer_chunk);
  exchange_results<1>(peers, call, plan.sum_chunk(rank), peer_chunk);
}

// Returns the max number of packs of a shard with rows of `row_bytes`.
TPK_DEVICE u64 max_shard_packs(const Peers& peers, const Shards& shards, u64 row_bytes) {
  u64 max_packs = 0;
  for (int r = 0; r < peers.workspace.world; ++r) {
    const u64 num_packs = count_packs(length(shard_range(shards, r, row_bytes)));
    max_packs = num_packs > max_packs ? num_packs : max_packs;
  }
  return max_packs;
}

template <int D>
TPK_DEVICE void ll_scatter(const Peers& peers, const Shards& shards) {
  const u64 row_bytes = shards.cols * dtype_size(D);
  const auto chunk_for = [&](int rank) {
    const Range shard = shard_range(shards, rank, row_bytes);
    return Chunk{to_address(shards.x) + shard.first, length(shard)};
  };
  push_per_peer<kVector / kLanes<D>>(peers, max_shard_packs(peers, shards, row_bytes), chunk_for);
  const int rank = peers.workspace.rank;
  const u64 begin = shard_range(shards, rank, shards.cols).first;
  sum_arriving<D>(peers, chunk_for(rank), to_address(shards.out), begin, shards.epilogue);
}

TPK_DEVICE void ll_gather(const Peers& peers, const Shards& shards) {
  const u64 row_bytes = shards.cols * dtype_size(shards.wire);
  const auto chunk_for = [&](int rank) {
    return Chunk{to_address(shards.x), length(shard_range(shards, rank, row_bytes))};
  };
  const Chunk local_chunk = chunk_for(peers.workspace.rank);
  push_to_all<1>(peers, local_chunk);
  delay(peers, thread() + 1);
  const u64 num_packs = max_shard_packs(peers, shards, row_bytes);
  for (u64 index = global_thread(); index < num_packs; index += global_threads()) {
    receive<1>(peers, index, chunk_for, [&](int source, const Pack(&packs)[1]) {
      const Range shard = shard_range(shards, source, row_bytes);
      const u64 offset = index * sizeof(Pack);
      if (offset >= length(shard)) return;
      const u64 dst = to_address(shards.out) + shard.first + offset;
      store_pack_bounded(dst, packs[0], length(shard) - offset);
    });
  }
}

// Begins a call of one launch without a barrier: `usable` may differ between threads.
TPK_DEVICE Peers enter_ll(const Workspace& workspace) {
  const Peers peers = current_call(workspace, load_status(workspace) == 0);
  if (block() == 0 && peers.usable) {
    for (int i = 1 + thread(); i < workspace.world; i += threads()) {
      const int peer = (workspace.rank + i) % workspace.world;
      store_relaxed_sys(signal_pointer(peers, peer, workspace.rank, kEntered), peers.signal_value);
    }
  }
  return peers;
}

// Ends a call like `finish`, but without an acquire, because no data depends on these signals.
TPK_DEVICE bool finish_ll(const Peers& peers) {
  const Workspace& workspace = peers.workspace;
  if (block() == 0) {
    for (int i = 1 + thread(); i < workspace.world; i += threads()) {
      await_signal(peers, (workspace.rank + i) % workspace.world, kEntered,
                   [](const u64* src) { return load_relaxed_sys(src); });
    }
  }
  sync_block();
  return end_grid(peers);
}

}  // namespace tpkernels::cuda
