// Signals between the CUDA kernels of a group's ranks, over symmetric memory.
//
// Problem: as in tpkernels/kernels/sync.py, and over the same workspace: calls of these kernels and
// of the Triton kernels may follow each other on one group in any order.
//
// Algorithm: regions, words, epochs, parity and what is recorded of a failure are those of
// tpkernels/kernels/sync.py, with its proof. A block is what a program is there. Where one thread
// polls there, here thread i looks after the i-th peer.
//
// Sync: `publish` is a release at system scope after a barrier of the block, so it covers what any
// of its threads wrote. A wait acquires at system scope in one thread and then passes a barrier of
// the block, so all of its threads may read. The last block of a grid to end advances the epoch.
//
// Calls of several launches (`begin_call`, `end_call` below; csrc/cuda/copies.h) hold the same
// epoch from the first launch to the last. A copy engine's addresses are fixed when a graph is
// captured, so they cannot follow the parity. Hence such a call waits on both sides: after
// `begin_call` every peer has ended its call before, so nobody reads any buffer; `end_call` returns
// when every peer has said DONE, so nobody reads what this call wrote. The calls around it see an
// epoch like any other.
//
// Failure: as there, and one thing more. Calls are queued before their failure is known. So a grid
// that starts after a failed wait neither publishes nor stores into a peer's memory: the peer may
// be an epoch further behind than the proof allows for.
#pragma once

#include "cuda/device.cuh"

namespace tpkernels::cuda {

// The names and places of tpkernels/kernels/sync.py.
constexpr int kStateEpoch = 0, kStateEnded = 1, kStateStatus = 2, kStatePeer = 3;
constexpr int kStateExpected = 4, kStateSeen = 5;
constexpr int kAbort = 0, kControlFailed = 1;
constexpr u64 kFailedMismatch = 1, kFailedTimeout = 2, kFailedAbort = 3;
constexpr int kEntered = 0, kTiles = 1;

constexpr u64 kEpochMask = 0xffffffffull;
constexpr int kPolls = 32;  // of the word between two looks at all else

// One call as a block sees it.
struct Peers {
  const Space& space;
  u64 word;
  unsigned parity;
  bool usable;  // no wait has failed before this grid
};

TPK_DEVICE u64 status_of(const Space& space) {
  return load_relaxed_gpu(space.state + kStateStatus);
}

// The call that the device's epoch says is next, or is open. All threads of a block.
TPK_DEVICE Peers join_call(const Space& space) {
  const u64 epoch = (space.state[kStateEpoch] + 1) & kEpochMask;
  const bool failed = sync_block_or(thread() == 0 && status_of(space) != 0);
  return {space, static_cast<u64>(space.signature) << 32 | epoch, static_cast<unsigned>(epoch & 1),
          !failed};
}

TPK_DEVICE u64* word_of(const Peers& peers, int rank, int source, int index) {
  const Space& space = peers.space;
  const u64 row = static_cast<u64>(peers.parity) * space.world + source;
  return reinterpret_cast<u64*>(space.regions[rank]) + row * space.words + index;
}

// Address of the buffer of `rank` in this call.
TPK_DEVICE u64 buffer_of(const Peers& peers, int rank) {
  const Space& space = peers.space;
  return space.regions[rank] + space.buffers_at + peers.parity * space.buffer_stride;
}

// For tests: how long follows from seed, call, block and place.
TPK_DEVICE void delay(const Peers& peers, int place) {
  const u64 longest = peers.space.chaos >> 1;
  if (longest == 0) return;
  u64 mixed = (peers.word + peers.space.seed) * 0x9E3779B1ull + block() * 0x5EBCA6Bull;
  mixed = (mixed ^ (mixed >> 15)) * 0x2C1B3C6Dull + place * 0x297A2D3ull;
  const u64 pause_ns = ((mixed >> 11) & 0x7FFFFFFFull) % longest;
  for (const u64 begin = clock_ns(); clock_ns() - begin < pause_ns;) pause();
}

// Tells `to` that all that happened before is complete; one thread. Nothing is told after a wait
// has failed: what was written since is not the data.
TPK_DEVICE void publish_word(const Peers& peers, int to, int source, int index) {
  delay(peers, index);
  if (status_of(peers.space) != 0) return;
  store_release_sys(word_of(peers, to, source, index), peers.word);
}

// What the block wrote is complete: told to one rank.
TPK_DEVICE void publish(const Peers& peers, int to, int index) {
  sync_block();
  if (thread() == 0) publish_word(peers, to, peers.space.rank, index);
}

// What came from `source` is here: told to kernels of this rank, which wait for it as if the source
// had told them.
TPK_DEVICE void pass_on(const Peers& peers, int source, int index) {
  sync_block();
  if (thread() == 0) publish_word(peers, peers.space.rank, source, index);
}

// The same, to all peers.
TPK_DEVICE void publish_to_all(const Peers& peers, int index) {
  sync_block();
  const int rank = peers.space.rank, world = peers.space.world;
  for (int i = 1 + thread(); i < world; i += threads()) {
    publish_word(peers, (rank + i) % world, rank, index);
  }
}

// Records the first failure of the group.
TPK_DEVICE void fail(const Peers& peers, u64 kind, u64 source, u64 seen) {
  u64* state = peers.space.state;
  if (cas_acq_rel_gpu(state + kStateStatus, 0, kind) != 0) return;
  state[kStatePeer] = source;
  state[kStateExpected] = peers.word;
  state[kStateSeen] = seen;
  store_relaxed_sys(peers.space.control + kControlFailed, 1);  // the host then looks
}

// Whether there is reason to give up, which is recorded then.
TPK_DEVICE void look_around(const Peers& peers, int source, u64 seen, u64 begin) {
  const Space& space = peers.space;
  const u64 came = load_relaxed_sys(word_of(peers, space.rank, source, kEntered));
  const u64 lost = load_relaxed_sys(space.control + kAbort);
  if (came != peers.word && ((came ^ peers.word) & kEpochMask) == 0) {
    fail(peers, kFailedMismatch, source, came);
  } else if (lost != 0) {
    fail(peers, kFailedAbort, lost - 1, came);
  } else if (clock_ns() - begin > space.timeout_ns) {
    fail(peers, kFailedTimeout, source, seen);
  }
}

// Returns when the word `index` from `source` has come, or a wait has failed; one thread.
TPK_DEVICE void await_word(const Peers& peers, int source, int index) {
  delay(peers, index);
  if (peers.space.chaos & 1) return;
  const u64* awaited = word_of(peers, peers.space.rank, source, index);
  u64 seen = load_acquire_sys(awaited);
  if (seen == peers.word) return;
  const u64 begin = clock_ns();
  for (int polls = 1; seen != peers.word && status_of(peers.space) == 0; ++polls) {
    pause();
    if (polls % kPolls == 0) look_around(peers, source, seen, begin);
    seen = load_acquire_sys(awaited);
  }
}

// For all threads of a block.
TPK_DEVICE void wait_for(const Peers& peers, int source, int index) {
  if (thread() == 0) await_word(peers, source, index);
  sync_block();
}

TPK_DEVICE void wait_for_all(const Peers& peers, int index) {
  for (int i = 1 + thread(); i < peers.space.world; i += threads()) {
    await_word(peers, (peers.space.rank + i) % peers.space.world, index);
  }
  sync_block();
}

// Begins a call of one launch: the first block announces it to all peers.
TPK_DEVICE Peers enter(const Space& space) {
  const Peers peers = join_call(space);
  if (block() == 0) publish_to_all(peers, kEntered);
  return peers;
}

TPK_DEVICE void advance(const Peers& peers) {
  u64* state = peers.space.state;
  state[kStateEnded] = 0;
  state[kStateEpoch] = peers.word & kEpochMask;
}

// Ends it: the first block has then heard of every peer, the last one advances the epoch. True for
// the last block of a grid in which, or before which, a wait has failed: it is to `poison` results.
TPK_DEVICE bool finish(const Peers& peers) {
  if (block() == 0) wait_for_all(peers, kEntered);
  sync_block();
  bool broken = false;
  if (thread() == 0) {
    const u64 ended = add_acq_rel_gpu(peers.space.state + kStateEnded, 1);
    if (ended == static_cast<u64>(blocks()) - 1) {
      broken = status_of(peers.space) != 0;
      advance(peers);
    }
  }
  return sync_block_or(broken);
}

// Fills results with ones, which are NaN in every dtype: nobody shall take them for results.
TPK_DEVICE void poison(const Poison& what) {
  auto* out = static_cast<unsigned short*>(what.out);
  for (u64 i = thread(); i < what.bytes / sizeof(*out); i += threads()) out[i] = 0xffff;
}

// Begins a call of several launches, each of one block: no peer is in an earlier call from here on.
TPK_DEVICE void begin_call(const Space& space) { wait_for_all(enter(space), kEntered); }

// Ends it when every peer has: what this rank let them read is its own again.
TPK_DEVICE void end_call(const Space& space) {
  const Peers peers = join_call(space);
  publish_to_all(peers, space.words - 1);
  wait_for_all(peers, space.words - 1);
  if (thread() == 0) advance(peers);
}

}  // namespace tpkernels::cuda
