// Signals between the CUDA kernels of a group's ranks, over symmetric memory.
//
// Problem: the same as in tpkernels/kernels/sync.py, over the same workspace. Calls of these
// kernels and of the Triton kernels may follow each other on a group in any order.
//
// Algorithm: regions, words, epochs, parity, failure records and the proof are those of
// tpkernels/kernels/sync.py. A block here is a program there. Where one thread polls there, thread
// i polls for the i-th peer here.
//
// Sync: `publish` is a release at system scope after a barrier of the block, so it covers the
// writes of all its threads. A wait acquires at system scope in one thread, then passes a barrier
// of the block, so all its threads may read. The last block of a grid to end advances the epoch.
//
// Calls of several launches (`begin_call`, `end_call` below; tpkernels/cuda/copies.py) keep one
// epoch from the first launch to the last. The addresses of a copy engine are fixed when a graph is
// captured, so they cannot follow the parity. Such a call therefore waits on both sides. After
// `begin_call` every peer has ended its previous call, so nobody reads any buffer. `end_call`
// returns when every peer has published DONE, so nobody reads what this call wrote. The calls
// before and after it see an epoch like any other.
//
// A flag tells kernels of the same rank, within such a call, that data has arrived. Its value is
// constant, so that a stream can write it without a kernel, in replays too. `begin_call` clears the
// flags, not `end_call`: a call that the host gave up in the middle leaves some raised. Nobody
// reads them then, as the calls of a rank run one after the other.
//
// Early launches: an all-reduce behind a product may start while the product still runs. Until
// `await_previous` it only looks at the state, announces itself and prefetches. For this the
// group's previous call must have ended when the product began: both are on one stream, with
// nothing between them that could wait for another stream, and the product was not launched early.
// If a library did that, the product would still begin only when all blocks of the previous call
// have exited, because no kernel here lets the next one begin sooner. So the epoch is read where
// they wrote it, past the caches of the multiprocessor.
//
// Failure: the same as there, with one addition. Calls are queued before their failure is known. So
// a grid that starts after a failed wait neither publishes nor stores into a peer's memory: that
// peer may be one epoch further behind than the proof allows.
#pragma once

#include "cuda/device.cuh"

namespace tpkernels::cuda {

// The names and values of tpkernels/kernels/sync.py.
constexpr int kStateEpoch = 0, kStateEnded = 1, kStateStatus = 2, kStatePeer = 3;
constexpr int kStateExpected = 4, kStateSeen = 5, kStateLost = 7, kStateLooked = 8;
constexpr int kAbort = 0, kControlFailed = 1;
constexpr u64 kFailedMismatch = 1, kFailedTimeout = 2, kFailedAbort = 3;
constexpr int kEntered = 0, kTiles = 1;

constexpr u64 kEpochMask = 0xffffffffull;
// Epochs are 1 to kLastEpoch, then 1 again, which has the other parity.
constexpr u64 kLastEpoch = 0xfffffffeull;
constexpr int kPolls = 32;        // polls of a word between checks for failure
constexpr u64 kLookNs = 1000000;  // between two reads of the host's kAbort

// A call, as seen by one block.
struct Peers {
  const Space& space;
  u64 word;
  unsigned parity;
  bool usable;  // no wait had failed when this grid started
};

TPK_DEVICE u64 status_of(const Space& space) {
  return load_relaxed_gpu(space.state + kStateStatus);
}

// The call that is open, or comes next, by the epoch in device memory.
TPK_DEVICE Peers call_of(const Space& space, bool usable) {
  const u64 ended = load_relaxed_gpu(space.state + kStateEpoch);
  const u64 epoch = ended == kLastEpoch ? 1 : ended + 1;
  return {space, static_cast<u64>(space.signature) << 32 | epoch, static_cast<unsigned>(epoch & 1),
          usable};
}

// The same for all threads of a block, which then agree whether it is usable.
TPK_DEVICE Peers join_call(const Space& space) {
  return call_of(space, !sync_block_or(thread() == 0 && status_of(space) != 0));
}

TPK_DEVICE u64* word_of(const Peers& peers, int rank, int source, int index) {
  const Space& space = peers.space;
  const u64 row = static_cast<u64>(peers.parity) * space.world + source;
  return reinterpret_cast<u64*>(space.regions[rank]) + row * space.words + index;
}

// Address of `rank`'s buffer in this call.
TPK_DEVICE u64 buffer_of(const Peers& peers, int rank) {
  const Space& space = peers.space;
  return space.regions[rank] + space.buffers_at + peers.parity * space.buffer_stride;
}

// For tests: a delay whose length depends on the seed, the call, the block and the place.
TPK_DEVICE void delay(const Peers& peers, int place) {
  const u64 longest = peers.space.chaos >> 1;
  if (longest == 0) return;
  u64 mixed = (peers.word + peers.space.seed) * 0x9E3779B1ull + block() * 0x5EBCA6Bull;
  mixed = (mixed ^ (mixed >> 15)) * 0x2C1B3C6Dull + place * 0x297A2D3ull;
  const u64 pause_ns = ((mixed >> 11) & 0x7FFFFFFFull) % longest;
  for (const u64 begin = clock_ns(); clock_ns() - begin < pause_ns;) pause();
}

// Announces to `to` that everything before this is complete. For one thread. Does nothing once a
// wait has failed: what was written since then is not valid data.
TPK_DEVICE void publish_word(const Peers& peers, int to, int source, int index) {
  delay(peers, index);
  if (status_of(peers.space) != 0) return;
  store_release_sys(word_of(peers, to, source, index), peers.word);
}

// Announces to one rank that the block's writes are complete.
TPK_DEVICE void publish(const Peers& peers, int to, int index) {
  sync_block();
  if (thread() == 0) publish_word(peers, to, peers.space.rank, index);
}

// Raises a flag of this rank. After a failed wait too, as a stream does: its kernels wait no more.
TPK_DEVICE void raise_flag(const Peers& peers, int index) {
  sync_block();
  if (thread() != 0) return;
  delay(peers, index);
  store_release_sys(peers.space.state + kStateFlags + index, kRaised);
}

// `publish` to all peers: one barrier, and a thread for each peer. A release waits until the stores
// before it have arrived, so releases that one thread does in turn would take a round trip each.
TPK_DEVICE void publish_to_all(const Peers& peers, int index) {
  sync_block();
  const int rank = peers.space.rank, world = peers.space.world;
  for (int i = 1 + thread(); i < world; i += threads()) {
    publish_word(peers, (rank + i) % world, rank, index);
  }
}

// Records the first failure of the group. The host may read it while this kernel still runs.
TPK_DEVICE void fail(const Peers& peers, u64 kind, u64 source, u64 seen) {
  u64* state = peers.space.state;
  if (cas_acq_rel_gpu(state + kStateStatus, 0, kind) != 0) return;
  state[kStatePeer] = source;
  state[kStateExpected] = peers.word;
  state[kStateSeen] = seen;
  store_release_sys(peers.space.control + kControlFailed, 1);  // tells the host to read the state
}

// kAbort, as read by the first thread of the device that asks after kLookNs: a read goes over PCIe,
// and many of them hold up the memory accesses of all multiprocessors.
TPK_DEVICE u64 lost_rank(const Space& space, u64 now) {
  u64* state = space.state;
  const u64 looked = load_relaxed_gpu(state + kStateLooked);
  if (now > looked + kLookNs && max_relaxed_gpu(state + kStateLooked, now) == looked) {
    const u64 lost = load_relaxed_sys(space.control + kAbort);
    if (lost != 0) store_relaxed_sys(state + kStateLost, lost);
  }
  return load_relaxed_gpu(state + kStateLost);
}

// Records a failure if there is a reason to give up.
TPK_DEVICE void look_around(const Peers& peers, int source, u64 seen, u64 begin) {
  const Space& space = peers.space;
  const u64 entered = load_relaxed_sys(word_of(peers, space.rank, source, kEntered));
  const u64 now = clock_ns(), lost = lost_rank(space, now);
  if (entered != peers.word && ((entered ^ peers.word) & kEpochMask) == 0) {
    fail(peers, kFailedMismatch, source, entered);
  } else if (lost != 0) {
    fail(peers, kFailedAbort, lost - 1, entered);
  } else if (now - begin > space.timeout_ns) {
    fail(peers, kFailedTimeout, source, seen);
  }
}

// Returns when the word `index` from `source` has arrived or a wait has failed. For one thread;
// `load` has the memory order.
template <class Load>
TPK_DEVICE void await_word(const Peers& peers, int source, int index, const Load& load) {
  delay(peers, index);
  if (peers.space.chaos & 1) return;
  const u64* awaited = word_of(peers, peers.space.rank, source, index);
  u64 seen = load(awaited);
  if (seen == peers.word) return;
  const u64 begin = clock_ns();
  for (int polls = 1; seen != peers.word && status_of(peers.space) == 0; ++polls) {
    pause();
    if (polls % kPolls == 0) look_around(peers, source, seen, begin);
    seen = load(awaited);
  }
}

TPK_DEVICE void await_word(const Peers& peers, int source, int index) {
  await_word(peers, source, index, [](const u64* from) { return load_acquire_sys(from); });
}

// The same for all threads of a block.
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

// The last two calls before epochs begin anew clear the words of their parity in this rank's
// region. So no word is left whose epoch comes again. Peers store words of that parity again only
// once they have seen that this rank has entered the next call.
TPK_DEVICE void advance(const Peers& peers) {
  const Space& space = peers.space;
  const u64 epoch = peers.word & kEpochMask;
  space.state[kStateEnded] = 0;
  space.state[kStateEpoch] = epoch;
  if (epoch < kLastEpoch - 1) return;
  u64* words = word_of(peers, space.rank, 0, 0);
  for (u64 i = 0; i < static_cast<u64>(space.world) * space.words; ++i) words[i] = 0;
}

// The end of a grid whose first block has awaited the ENTERED word of every peer, after a barrier
// of each block. The last block to end advances the epoch. Returns true in that block if a wait has
// failed, in this grid or before.
TPK_DEVICE bool end_grid(const Peers& peers) {
  bool broken = false;
  if (thread() == 0) {
    u64* ended = peers.space.state + kStateEnded;
    if (blocks() == 1 || add_acq_rel_gpu(ended, 1) == static_cast<u64>(blocks()) - 1) {
      broken = status_of(peers.space) != 0;
      advance(peers);
    }
  }
  return sync_block_or(broken);
}

// Ends a call of one launch. The first block waits until every peer has entered it. Returns true in
// the last block to end if a wait has failed: the block must then `poison` the output.
TPK_DEVICE bool finish(const Peers& peers) {
  if (block() == 0) {
    wait_for_all(peers, kEntered);
  } else {
    sync_block();
  }
  return end_grid(peers);
}

// Sets all bits of the output, which is NaN in every dtype but fp4, so it cannot be mistaken for a
// result. fp4 has no NaN: a gathered fp4 tensor is full of -6, and only the error tells.
TPK_DEVICE void poison(const Output& output) {
  for (void* each : {output.out, output.more}) {
    auto* out = static_cast<unsigned short*>(each);
    const u64 count = each == nullptr ? 0 : output.bytes / sizeof(*out);
    for (u64 i = thread(); i < count; i += threads()) out[i] = 0xffff;
  }
}

// Begins a call of several launches of one block each, which raises the first `flags` flags. When
// it returns, no peer is in an earlier call.
TPK_DEVICE void begin_call(const Space& space, int flags) {
  for (int i = thread(); i < flags; i += threads()) space.state[kStateFlags + i] = 0;
  wait_for_all(enter(space), kEntered);
}

// Returns when every peer has reached it too: nobody reads what this rank published any more.
// Poisons the results if a wait has failed.
TPK_DEVICE void end_call(const Space& space, const Results& results) {
  const Peers peers = join_call(space);
  publish_to_all(peers, space.words - 1);
  wait_for_all(peers, space.words - 1);
  if (sync_block_or(thread() == 0 && status_of(space) != 0)) {
    for (int i = 0; i < results.count; ++i) poison(results.outputs[i]);
  }
  if (thread() == 0) advance(peers);
}

}  // namespace tpkernels::cuda
