// The kernels of csrc/cuda. nvcc compiles this file when the package is built, NVRTC the very same
// at first use where there was no nvcc; hence no headers but those beside it.
#include "cuda/all_reduce.cuh"
#include "cuda/paced_copy.cuh"
#include "cuda/shards.cuh"

using namespace tpkernels::cuda;

namespace {

// A grid that starts after a failure only poisons its results.
template <class Run>
TPK_DEVICE void within_call(const Space& space, const Poison& results, const Run& run) {
  const Peers peers = enter(space);
  if (peers.usable) run(peers);
  if (finish(peers)) poison(results);
}

TPK_DEVICE Poison results_of(const AllReduce& call) {
  return {call.out, call.count * size_of(call.epilogue.out_dtype)};
}

TPK_DEVICE u64 elements(const Shards& shards, int first, int last) {
  return static_cast<u64>(shards.starts[last] - shards.starts[first]) * shards.row;
}

}  // namespace

TPK_KERNEL(kReduceThreads) one_shot_all_reduce(TPK_GIVEN Space space, TPK_GIVEN AllReduce call) {
  within_call(space, results_of(call), [&](const Peers& peers) {
    if (call.wire == kF32) return one_shot<kF32>(peers, call);
    if (call.wire == kF16) return one_shot<kF16>(peers, call);
    one_shot<kBF16>(peers, call);
  });
}

TPK_KERNEL(kReduceThreads) two_shot_all_reduce(TPK_GIVEN Space space, TPK_GIVEN AllReduce call) {
  within_call(space, results_of(call), [&](const Peers& peers) {
    if (call.wire == kF32) return two_shot<kF32>(peers, call);
    if (call.wire == kF16) return two_shot<kF16>(peers, call);
    two_shot<kBF16>(peers, call);
  });
}

#ifdef TPK_MULTIMEM
TPK_KERNEL(kReduceThreads) multimem_all_reduce(TPK_GIVEN Space space, TPK_GIVEN AllReduce call) {
  within_call(space, results_of(call), [&](const Peers& peers) {
    if (call.wire == kF32) return multimem<kF32>(peers, call);
    if (call.wire == kF16) return multimem<kF16>(peers, call);
    multimem<kBF16>(peers, call);
  });
}
#endif

TPK_KERNEL(kReduceThreads) one_shot_gather(TPK_GIVEN Space space, TPK_GIVEN Shards shards) {
  const u64 bytes = elements(shards, 0, space.world) * size_of(shards.wire);
  within_call(space, {shards.out, bytes}, [&](const Peers& peers) { gather(peers, shards); });
}

TPK_KERNEL(kReduceThreads) one_shot_scatter(TPK_GIVEN Space space, TPK_GIVEN Shards shards) {
  const u64 count = elements(shards, space.rank, space.rank + 1);
  const Poison results{shards.out, count * size_of(shards.epilogue.out_dtype)};
  within_call(space, results, [&](const Peers& peers) {
    if (shards.wire == kF32) return scatter<kF32>(peers, shards);
    if (shards.wire == kF16) return scatter<kF16>(peers, shards);
    scatter<kBF16>(peers, shards);
  });
}

TPK_KERNEL(kSumThreads) sum_of_partials(TPK_GIVEN SumPartials call) {
  const auto partials = [&](int r) { return address_of(call.partials[r]); };
  const u64 lane = static_cast<u64>(block()) * threads() + thread();
  const u64 lanes = static_cast<u64>(blocks()) * threads();
  const u64 out = address_of(call.out);
  const int world = call.world;
  const Epilogue& epilogue = call.epilogue;
  if (call.wire == kF32) {
    sum_range<kF32>(partials, world, out, call.begin, 0, call.count, epilogue, lane, lanes);
  } else if (call.wire == kF16) {
    sum_range<kF16>(partials, world, out, call.begin, 0, call.count, epilogue, lane, lanes);
  } else {
    sum_range<kBF16>(partials, world, out, call.begin, 0, call.count, epilogue, lane, lanes);
  }
}

TPK_KERNEL(kPacedThreads) paced_copy(TPK_GIVEN PacedCopy call) { paced_copy_pieces(call); }

// Of one block each; see cuda/copies.h for the calls that they make up.

TPK_KERNEL(kSignalThreads) call_barrier(TPK_GIVEN Space space) { finish(enter(space)); }

TPK_KERNEL(kSignalThreads) call_begin(TPK_GIVEN Space space) { begin_call(space); }

TPK_KERNEL(kSignalThreads) call_publish(TPK_GIVEN Space space, TPK_GIVEN Signal signal) {
  const Peers peers = join_call(space);
  if (signal.rank < 0) return publish_to_all(peers, signal.index);
  if (signal.rank == space.rank) return pass_on(peers, signal.source, signal.index);
  publish(peers, signal.rank, signal.index);
}

TPK_KERNEL(kSignalThreads) call_wait(TPK_GIVEN Space space, TPK_GIVEN Signal signal) {
  wait_for(join_call(space), signal.rank, signal.index);
}

TPK_KERNEL(kSignalThreads) call_end(TPK_GIVEN Space space) { end_call(space); }

// Behind the end of a call: its results, if a wait has failed.
TPK_KERNEL(kPoisonThreads) call_spoil(TPK_GIVEN Space space, TPK_GIVEN Poison results) {
  if (!join_call(space).usable) poison(results);
}
