// The kernels of csrc/cuda. nvcc compiles this file when the package is built; without nvcc, NVRTC
// compiles the same file at first use. So it includes only headers of this folder.
#include "cuda/all_reduce.cuh"
#include "cuda/low_latency.cuh"
#include "cuda/normed.cuh"
#include "cuda/paced_copy.cuh"
#include "cuda/shards.cuh"
#include "cuda/whole_lines.cuh"

using namespace tpkernels::cuda;

namespace {

// A grid that starts after a failure only poisons its output.
template <class Run>
TPK_DEVICE void within_call(const Space& space, const Output& output, const Run& run) {
  const Peers peers = enter(space);
  await_previous();
  if (peers.usable) run(peers);
  if (finish(peers)) poison(output);
}

// The same for the kernels of cuda/low_latency.cuh.
template <class Run>
TPK_DEVICE void within_low_latency_call(const Space& space, const Output& output, const Run& run) {
  const Peers peers = enter_low_latency(space);
  await_previous();
  if (peers.usable) run(peers);
  if (finish_low_latency(peers)) poison(output);
}

TPK_DEVICE Output output_of(const AllReduce& call) {
  return {call.out, call.count * size_of(call.epilogue.out_dtype)};
}

TPK_DEVICE Output output_of(const AllReduce& call, const RmsNorm& norm) {
  return {call.out, call.count * size_of(call.wire), norm.normed};
}

TPK_DEVICE u64 elements(const Shards& shards, int first, int last) {
  return static_cast<u64>(shards.starts[last] - shards.starts[first]) * shards.row;
}

TPK_DEVICE Output gathered(const Space& space, const Shards& shards) {
  return {shards.out, elements(shards, 0, space.world) * size_of(shards.wire)};
}

TPK_DEVICE Output scattered(const Space& space, const Shards& shards) {
  const u64 count = elements(shards, space.rank, space.rank + 1);
  return {shards.out, count * size_of(shards.epilogue.out_dtype)};
}

}  // namespace

TPK_KERNEL(kReduceThreads) one_shot_all_reduce(TPK_PARAM Space space, TPK_PARAM AllReduce call) {
  within_call(space, output_of(call), [&](const Peers& peers) {
    if (call.wire == kF32) return one_shot<kF32>(peers, call);
    if (call.wire == kF16) return one_shot<kF16>(peers, call);
    one_shot<kBF16>(peers, call);
  });
}

TPK_KERNEL(kReduceThreads) two_shot_all_reduce(TPK_PARAM Space space, TPK_PARAM AllReduce call) {
  within_call(space, output_of(call), [&](const Peers& peers) {
    if (call.wire == kF32) return two_shot<kF32>(peers, call);
    if (call.wire == kF16) return two_shot<kF16>(peers, call);
    two_shot<kBF16>(peers, call);
  });
}

#ifdef TPK_MULTIMEM
TPK_KERNEL(kReduceThreads) multimem_all_reduce(TPK_PARAM Space space, TPK_PARAM AllReduce call) {
  within_call(space, output_of(call), [&](const Peers& peers) {
    if (call.wire == kF32) return multimem<kF32>(peers, call);
    if (call.wire == kF16) return multimem<kF16>(peers, call);
    multimem<kBF16>(peers, call);
  });
}
#endif

TPK_KERNEL(kReduceThreads) one_shot_gather(TPK_PARAM Space space, TPK_PARAM Shards shards) {
  within_call(space, gathered(space, shards), [&](const Peers& peers) { gather(peers, shards); });
}

TPK_KERNEL(kReduceThreads) one_shot_scatter(TPK_PARAM Space space, TPK_PARAM Shards shards) {
  within_call(space, scattered(space, shards), [&](const Peers& peers) {
    if (shards.wire == kF32) return scatter<kF32>(peers, shards);
    if (shards.wire == kF16) return scatter<kF16>(peers, shards);
    scatter<kBF16>(peers, shards);
  });
}

TPK_KERNEL(kLowLatencyThreads)
low_latency_all_reduce(TPK_PARAM Space space, TPK_PARAM AllReduce call) {
  within_low_latency_call(space, output_of(call), [&](const Peers& peers) {
    if (call.wire == kF32) return low_latency_reduce<kF32>(peers, call);
    if (call.wire == kF16) return low_latency_reduce<kF16>(peers, call);
    low_latency_reduce<kBF16>(peers, call);
  });
}

TPK_KERNEL(kLowLatencyThreads)
low_latency_two_shot_all_reduce(TPK_PARAM Space space, TPK_PARAM AllReduce call) {
  within_low_latency_call(space, output_of(call),
                          [&](const Peers& peers) { low_latency_two_shot(peers, call); });
}

TPK_KERNEL(kLowLatencyThreads)
whole_lines_all_reduce(TPK_PARAM Space space, TPK_PARAM AllReduce call) {
  within_low_latency_call(space, output_of(call),
                          [&](const Peers& peers) { whole_lines(peers, call); });
}

TPK_KERNEL(kLowLatencyThreads)
low_latency_all_gather(TPK_PARAM Space space, TPK_PARAM Shards shards) {
  within_low_latency_call(space, gathered(space, shards),
                          [&](const Peers& peers) { low_latency_gather(peers, shards); });
}

TPK_KERNEL(kLowLatencyThreads)
low_latency_reduce_scatter(TPK_PARAM Space space, TPK_PARAM Shards shards) {
  within_low_latency_call(space, scattered(space, shards), [&](const Peers& peers) {
    if (shards.wire == kF32) return low_latency_scatter<kF32>(peers, shards);
    if (shards.wire == kF16) return low_latency_scatter<kF16>(peers, shards);
    low_latency_scatter<kBF16>(peers, shards);
  });
}

TPK_KERNEL(kRowThreads)
low_latency_normed_all_reduce(TPK_PARAM Space space, TPK_PARAM AllReduce call,
                              TPK_PARAM RmsNorm norm) {
  const Peers peers = enter_low_latency(space);
  prefetch_operands(call, norm);
  await_previous();
  if (call.wire == kF32) low_latency_normed<kF32>(peers, call, norm);
  if (call.wire == kF16) low_latency_normed<kF16>(peers, call, norm);
  if (call.wire == kBF16) low_latency_normed<kBF16>(peers, call, norm);
  if (finish_low_latency(peers)) poison(output_of(call, norm));
}

TPK_KERNEL(kRowThreads)
low_latency_two_shot_normed_all_reduce(TPK_PARAM Space space, TPK_PARAM AllReduce call,
                                       TPK_PARAM RmsNorm norm) {
  const Peers peers = enter_low_latency(space);
  prefetch_operands(call, norm);
  await_previous();
  if (call.wire == kF32) low_latency_two_shot_normed<kF32>(peers, call, norm);
  if (call.wire == kF16) low_latency_two_shot_normed<kF16>(peers, call, norm);
  if (call.wire == kBF16) low_latency_two_shot_normed<kBF16>(peers, call, norm);
  if (finish_low_latency(peers)) poison(output_of(call, norm));
}

TPK_KERNEL(kRowThreads)
one_shot_normed_all_reduce(TPK_PARAM Space space, TPK_PARAM AllReduce call,
                           TPK_PARAM RmsNorm norm) {
  const Peers peers = enter(space);
  prefetch_operands(call, norm);
  await_previous();
  if (call.wire == kF32) one_shot_normed<kF32>(peers, call, norm);
  if (call.wire == kF16) one_shot_normed<kF16>(peers, call, norm);
  if (call.wire == kBF16) one_shot_normed<kBF16>(peers, call, norm);
  if (finish(peers)) poison(output_of(call, norm));
}

TPK_KERNEL(kRowThreads)
two_shot_normed_all_reduce(TPK_PARAM Space space, TPK_PARAM AllReduce call,
                           TPK_PARAM RmsNorm norm) {
  const Peers peers = enter(space);
  prefetch_operands(call, norm);
  await_previous();
  if (call.wire == kF32) two_shot_normed<kF32>(peers, call, norm);
  if (call.wire == kF16) two_shot_normed<kF16>(peers, call, norm);
  if (call.wire == kBF16) two_shot_normed<kBF16>(peers, call, norm);
  if (finish(peers)) poison(output_of(call, norm));
}

TPK_KERNEL(kRowThreads) rms_norm_of_rows(TPK_PARAM Rows rows, TPK_PARAM RmsNorm norm) {
  if (rows.dtype == kF32) return normalise_rows<kF32>(rows, norm);
  if (rows.dtype == kF16) return normalise_rows<kF16>(rows, norm);
  normalise_rows<kBF16>(rows, norm);
}

TPK_KERNEL(kSumThreads) sum_of_partials(TPK_PARAM SumPartials call) {
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

TPK_KERNEL(kPacedThreads) paced_copy(TPK_PARAM PacedCopy call) { paced_copy_pieces(call); }

// The kernels below run as one block each; cuda/copies.h describes the calls made of them.

TPK_KERNEL(kSignalThreads) call_barrier(TPK_PARAM Space space) { finish(enter(space)); }

TPK_KERNEL(kSignalThreads) call_begin(TPK_PARAM Space space, TPK_PARAM int flags) {
  begin_call(space, flags);
}

TPK_KERNEL(kSignalThreads) call_publish(TPK_PARAM Space space, TPK_PARAM Signal signal) {
  const Peers peers = join_call(space);
  if (signal.rank < 0) return publish_to_all(peers, signal.index);
  publish(peers, signal.rank, signal.index);
}

// Where a stream cannot write it.
TPK_KERNEL(kSignalThreads) call_flag(TPK_PARAM Space space, TPK_PARAM int index) {
  raise_flag(join_call(space), index);
}

TPK_KERNEL(kSignalThreads) call_wait(TPK_PARAM Space space, TPK_PARAM Signal signal) {
  wait_for(join_call(space), signal.rank, signal.index);
}

TPK_KERNEL(kEndThreads) call_end(TPK_PARAM Space space, TPK_PARAM Results results) {
  end_call(space, results);
}
