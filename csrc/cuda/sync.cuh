// Signals between the CUDA kernels of a group, over symmetric memory.
//
// Problem: see tpkernels/kernels/sync.py. These kernels use the same workspace, and their calls may
// follow calls of the Triton kernels in any order.
//
// Algorithm: regions, signals, epochs, parity, failure records and the proof of
// tpkernels/kernels/sync.py apply. A block corresponds to a Triton program. Where one thread polls
// there, thread i polls for the i-th peer here.
//
// Sync:
// - `publish` passes a barrier of the block, then stores with release order at system scope. It
//   therefore covers the writes of all threads of the block.
// - A wait acquires at system scope in one thread, then passes a barrier of the block. All threads
//   may read after that.
// - The last block of a grid to end advances the epoch.
//
// Calls of several launches (`begin_call`, `end_call`, tpkernels/cuda/copies.py): one epoch covers
// all launches. A captured graph fixes the addresses of copy engines, so they cannot follow the
// parity. Such a call therefore waits at both ends:
// - After `begin_call` every peer has ended its previous call, so no rank reads any buffer.
// - `end_call` returns when every peer has published DONE. Peers have then read all data of this
//   call.
// Preceding and following calls treat it as an ordinary epoch.
//
// Flags tell kernels of the same rank, within such a call, that data has arrived. The flag value is
// constant, so a stream can write it without a kernel, also in replays. `begin_call` clears the
// flags. `end_call` could not: if the host abandons a call, some flags stay set. That is safe,
// because a rank runs one call at a time and no kernel reads a flag before `begin_call` has cleared
// it.
//
// Early launches (programmatic dependent launch): an all-reduce that follows a matmul may start
// while the matmul runs. Until `await_previous` it only reads the state, sends ENTERED and
// prefetches. Requirement: the previous call of the group ended before the matmul began. Both must
// be on one stream, without an intermediate wait for a different stream, and the matmul must not be
// launched early. If a library launches the matmul early, it still starts only after all blocks of
// the previous call have exited, because no kernel here triggers its dependents sooner. These
// blocks wrote the epoch, so it is read at gpu scope, bypassing the caches of the SM.
//
// Failure: as in tpkernels/kernels/sync.py, with one addition. Calls are queued before the host
// sees a failure. A grid that starts after a failed wait neither publishes signals nor stores into
// peer memory, because the peer may be one epoch further behind than the proof allows.
#pragma once

#include "cuda/device.cuh"

namespace tpkernels::cuda {

// Names and values of tpkernels/kernels/sync.py.
constexpr int kStateEpoch = 0, kStateEnded = 1, kStateStatus = 2, kStatePeer = 3;
constexpr int kStateExpected = 4, kStateSeen = 5, kStateLost = 7, kStateLastCheck = 8;
constexpr int kAbort = 0, kControlFailed = 1;
constexpr u64 kFailedMismatch = 1, kFailedTimeout = 2, kFailedAbort = 3;
constexpr int kEntered = 0, kTiles = 1;

constexpr u64 kEpochMask = 0xffffffffull;
// Epochs are 1 to kLastEpoch, then 1 again, which flips the parity.
constexpr u64 kLastEpoch = 0xfffffffeull;
constexpr int kPollsPerCheck = 32;         // polls of a signal between checks for failure
constexpr u64 kCheckIntervalNs = 1000000;  // between two reads of kAbort in host memory

// The handle of a call in one block, through which it signals its peers.
struct Peers {
  const Workspace& workspace;
  u64 signal_value;  // value of all signals of this call
  unsigned parity;
  bool usable;  // no wait had failed when this grid started
};

TPK_DEVICE u64 load_status(const Workspace& workspace) {
  return load_relaxed_gpu(workspace.state + kStateStatus);
}

// Returns the open call or, between calls, the next call, from the epoch in device memory.
TPK_DEVICE Peers current_call(const Workspace& workspace, bool usable) {
  const u64 ended = load_relaxed_gpu(workspace.state + kStateEpoch);
  const u64 epoch = ended == kLastEpoch ? 1 : ended + 1;
  return {workspace, static_cast<u64>(workspace.signature) << 32 | epoch,
          static_cast<unsigned>(epoch & 1), usable};
}

// Returns the current call for all threads of a block, with a uniform value of `usable`.
TPK_DEVICE Peers join_call(const Workspace& workspace) {
  return current_call(workspace, !sync_block_or(thread() == 0 && load_status(workspace) != 0));
}

TPK_DEVICE u64* signal_pointer(const Peers& peers, int rank, int source, int index) {
  const Workspace& workspace = peers.workspace;
  const u64 row = static_cast<u64>(peers.parity) * workspace.world + source;
  return reinterpret_cast<u64*>(workspace.regions[rank]) + row * workspace.signals + index;
}

// Returns the buffer address of `rank` in this call.
TPK_DEVICE u64 buffer_address(const Peers& peers, int rank) {
  const Workspace& workspace = peers.workspace;
  return workspace.regions[rank] + workspace.buffers_offset +
         peers.parity * workspace.buffer_stride;
}

// Pauses, for tests. The delay depends on the seed, the call, the block and `salt`.
TPK_DEVICE void delay(const Peers& peers, int salt) {
  const u64 max_delay_ns = peers.workspace.chaos >> 1;
  if (max_delay_ns == 0) return;
  u64 mixed = (peers.signal_value + peers.workspace.seed) * 0x9E3779B1ull + block() * 0x5EBCA6Bull;
  mixed = (mixed ^ (mixed >> 15)) * 0x2C1B3C6Dull + salt * 0x297A2D3ull;
  const u64 delay_ns = ((mixed >> 11) & 0x7FFFFFFFull) % max_delay_ns;
  for (const u64 begin = clock_ns(); clock_ns() - begin < delay_ns;) pause();
}

// Signals rank `dst` that all preceding writes are complete. For one thread. Does nothing after a
// failed wait, because later writes are not valid data.
TPK_DEVICE void publish_signal(const Peers& peers, int dst, int source, int index) {
  delay(peers, index);
  if (load_status(peers.workspace) != 0) return;
  store_release_sys(signal_pointer(peers, dst, source, index), peers.signal_value);
}

// Signals one rank that the writes of the block are complete.
TPK_DEVICE void publish(const Peers& peers, int dst, int index) {
  sync_block();
  if (thread() == 0) publish_signal(peers, dst, peers.workspace.rank, index);
}

// Sets a flag of this rank, even after a failed wait, as a stream write does. Kernels no longer
// wait then.
TPK_DEVICE void set_flag(const Peers& peers, int index) {
  sync_block();
  if (thread() != 0) return;
  delay(peers, index);
  store_release_sys(peers.workspace.state + kStateFlags + index, kFlagSet);
}

// Signals all peers: one barrier, then one thread per peer. A release waits until the preceding
// stores have arrived, so sequential releases in one thread would cost a round trip each.
TPK_DEVICE void publish_to_all(const Peers& peers, int index) {
  sync_block();
  const int rank = peers.workspace.rank, world = peers.workspace.world;
  for (int i = 1 + thread(); i < world; i += threads()) {
    publish_signal(peers, (rank + i) % world, rank, index);
  }
}

// Records the first failure of the group. The host may read it while this kernel still runs.
TPK_DEVICE void fail(const Peers& peers, u64 kind, u64 source, u64 seen) {
  u64* state = peers.workspace.state;
  if (cas_acq_rel_gpu(state + kStateStatus, 0, kind) != 0) return;
  state[kStatePeer] = source;
  state[kStateExpected] = peers.signal_value;
  state[kStateSeen] = seen;
  store_release_sys(peers.workspace.control + kControlFailed, 1);  // the host reads `state` next
}

// Returns the cached value of kAbort: 1 + the lost rank, or 0. The first thread that calls this
// after kCheckIntervalNs reads host memory and updates the cache. Such a read crosses PCIe, and
// frequent reads stall the memory accesses of all multiprocessors.
TPK_DEVICE u64 read_abort(const Workspace& workspace, u64 now) {
  u64* state = workspace.state;
  const u64 last_check = load_relaxed_gpu(state + kStateLastCheck);
  if (now > last_check + kCheckIntervalNs &&
      max_relaxed_gpu(state + kStateLastCheck, now) == last_check) {
    const u64 abort_value = load_relaxed_sys(workspace.control + kAbort);
    if (abort_value != 0) store_relaxed_sys(state + kStateLost, abort_value);
  }
  return load_relaxed_gpu(state + kStateLost);
}

// Checks for a mismatch, an abort and the deadline, and records a failure.
TPK_DEVICE void check_for_failure(const Peers& peers, int source, u64 seen, u64 begin) {
  const Workspace& workspace = peers.workspace;
  const u64 entered = load_relaxed_sys(signal_pointer(peers, workspace.rank, source, kEntered));
  const u64 now = clock_ns(), abort_value = read_abort(workspace, now);
  if (entered != peers.signal_value && ((entered ^ peers.signal_value) & kEpochMask) == 0) {
    fail(peers, kFailedMismatch, source, entered);
  } else if (abort_value != 0) {
    fail(peers, kFailedAbort, abort_value - 1, entered);
  } else if (now - begin > workspace.timeout_ns) {
    fail(peers, kFailedTimeout, source, seen);
  }
}

// Waits until signal `index` from `source` has arrived or a wait has failed. For one thread. `load`
// determines the memory order.
template <class Load>
TPK_DEVICE void await_signal(const Peers& peers, int source, int index, const Load& load) {
  delay(peers, index);
  if (peers.workspace.chaos & 1) return;
  const u64* awaited = signal_pointer(peers, peers.workspace.rank, source, index);
  u64 seen = load(awaited);
  if (seen == peers.signal_value) return;
  const u64 begin = clock_ns();
  for (int polls = 1; seen != peers.signal_value && load_status(peers.workspace) == 0; ++polls) {
    pause();
    if (polls % kPollsPerCheck == 0) check_for_failure(peers, source, seen, begin);
    seen = load(awaited);
  }
}

TPK_DEVICE void await_signal(const Peers& peers, int source, int index) {
  await_signal(peers, source, index, [](const u64* src) { return load_acquire_sys(src); });
}

// Waits for a signal in all threads of a block.
TPK_DEVICE void wait_for(const Peers& peers, int source, int index) {
  if (thread() == 0) await_signal(peers, source, index);
  sync_block();
}

TPK_DEVICE void wait_for_all(const Peers& peers, int index) {
  for (int i = 1 + thread(); i < peers.workspace.world; i += threads()) {
    await_signal(peers, (peers.workspace.rank + i) % peers.workspace.world, index);
  }
  sync_block();
}

// Begins a call of one launch: the first block sends ENTERED to all peers.
TPK_DEVICE Peers enter(const Workspace& workspace) {
  const Peers peers = join_call(workspace);
  if (block() == 0) publish_to_all(peers, kEntered);
  return peers;
}

// Advances the epoch. The last two calls before epochs repeat clear the local signals of their
// parity, so no stored signal has an epoch that repeats. Peers store signals of that parity again
// only after they have seen ENTERED of the next call from this rank.
TPK_DEVICE void advance(const Peers& peers) {
  const Workspace& workspace = peers.workspace;
  const u64 epoch = peers.signal_value & kEpochMask;
  workspace.state[kStateEnded] = 0;
  workspace.state[kStateEpoch] = epoch;
  if (epoch < kLastEpoch - 1) return;
  u64* signals = signal_pointer(peers, workspace.rank, 0, 0);
  for (u64 i = 0; i < static_cast<u64>(workspace.world) * workspace.signals; ++i) signals[i] = 0;
}

// Ends a grid. The first block must have awaited ENTERED of every peer, and each block must have
// passed a barrier. The last block to end advances the epoch. Returns true in that block if a wait
// has failed, in this grid or before.
TPK_DEVICE bool end_grid(const Peers& peers) {
  bool failed = false;
  if (thread() == 0) {
    u64* ended = peers.workspace.state + kStateEnded;
    if (blocks() == 1 || add_acq_rel_gpu(ended, 1) == static_cast<u64>(blocks()) - 1) {
      failed = load_status(peers.workspace) != 0;
      advance(peers);
    }
  }
  return sync_block_or(failed);
}

// Ends a call of one launch. The first block waits until every peer has entered the call. Returns
// true in the last block to end if a wait has failed. That block must then `poison` the output.
TPK_DEVICE bool finish(const Peers& peers) {
  if (block() == 0) {
    wait_for_all(peers, kEntered);
  } else {
    sync_block();
  }
  return end_grid(peers);
}

// Sets all bits of the output, which is NaN in every dtype except fp4. fp4 has no NaN: a gathered
// fp4 tensor is filled with -6, and only the error reports the failure.
TPK_DEVICE void poison(const Output& output) {
  for (void* output_pointer : {output.out, output.second}) {
    auto* out = static_cast<unsigned short*>(output_pointer);
    const u64 count = output_pointer == nullptr ? 0 : output.bytes / sizeof(*out);
    for (u64 i = thread(); i < count; i += threads()) out[i] = 0xffff;
  }
}

// Begins a call of several one-block launches that uses the first `flags` flags. When it returns,
// no peer is in an earlier call.
TPK_DEVICE void begin_call(const Workspace& workspace, int flags) {
  for (int i = thread(); i < flags; i += threads()) workspace.state[kStateFlags + i] = 0;
  wait_for_all(enter(workspace), kEntered);
}

// Ends a call of several launches. Returns when every peer has reached `end_call`: all reads of the
// published data have completed. Poisons the results if a wait has failed.
TPK_DEVICE void end_call(const Workspace& workspace, const Results& results) {
  const Peers peers = join_call(workspace);
  publish_to_all(peers, workspace.signals - 1);
  wait_for_all(peers, workspace.signals - 1);
  if (sync_block_or(thread() == 0 && load_status(workspace) != 0)) {
    for (int i = 0; i < results.count; ++i) poison(results.outputs[i]);
  }
  if (thread() == 0) advance(peers);
}

}  // namespace tpkernels::cuda
