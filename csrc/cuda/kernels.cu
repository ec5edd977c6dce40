// The kernels of csrc/cuda. nvcc compiles this file when the package is built; without nvcc, NVRTC
// compiles the same file at first use. So it includes only headers of this folder.
#include "cuda/litmus.cuh"
#include "cuda/normed.cuh"
#include "cuda/routed.cuh"

using namespace tpkernels::cuda;

namespace {

TPK_DEVICE Output output_of(const AllReduce& call, void* normed = nullptr) {
  return {call.out, call.count * size_of(call.epilogue.out_dtype), normed};
}

// A grid that starts after a failure only poisons its output.
template <class Run>
TPK_DEVICE void within_call(const Space& space, const Output& output, const Run& run) {
  const Peers peers = enter(space);
  await_previous();
  if (peers.usable) run(peers);
  if (finish(peers)) poison(output);
}

// The same for those that normalise rows. `run(peers, dtype)` meets the barriers of its clusters
// after a failure too.
template <class Run>
TPK_DEVICE void within_rows(const Space& space, const AllReduce& call, const RmsNorm& norm,
                            const Run& run) {
  const Peers peers = enter(space);
  prefetch_operands(call, norm);
  await_previous();
  for_dtype(call.wire, [&](auto dtype) { run(peers, dtype); });
  if (finish(peers)) poison(output_of(call, norm.normed));
}

// The same for the kernels of cuda/ll.cuh.
template <class Run>
TPK_DEVICE void within_ll_call(const Space& space, const Output& output, const Run& run) {
  const Peers peers = enter_ll(space);
  await_previous();
  if (peers.usable) run(peers);
  if (finish_ll(peers)) poison(output);
}

template <class Run>
TPK_DEVICE void within_ll_rows(const Space& space, const AllReduce& call, const RmsNorm& norm,
                               const Run& run) {
  const Peers peers = enter_ll(space);
  prefetch_operands(call, norm);
  await_previous();
  for_dtype(call.wire, [&](auto dtype) { run(peers, dtype); });
  if (finish_ll(peers)) poison(output_of(call, norm.normed));
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

TPK_KERNEL(kReduceThreads) two_shot_all_reduce(TPK_PARAM Space space, TPK_PARAM AllReduce call) {
  within_call(space, output_of(call), [&](const Peers& peers) {
    for_dtype(call.wire, [&](auto dtype) { two_shot<dtype.value>(peers, call); });
  });
}

#ifdef TPK_SM_90
TPK_KERNEL(kReduceThreads) litmus_bulk(TPK_PARAM Space space, TPK_PARAM Litmus litmus) {
  within_call(space, {}, [&](const Peers& peers) { exchange_in_bulk(peers, litmus); });
}
#endif

TPK_KERNEL(kLLThreads) ll_all_reduce(TPK_PARAM Space space, TPK_PARAM AllReduce call) {
  within_ll_call(space, output_of(call), [&](const Peers& peers) {
    for_dtype(call.wire, [&](auto dtype) { reduce_by_ll<dtype.value>(peers, call); });
  });
}

TPK_KERNEL(kLLThreads) ll_two_shot_all_reduce(TPK_PARAM Space space, TPK_PARAM AllReduce call) {
  within_ll_call(space, output_of(call),
                 [&](const Peers& peers) { reduce_by_ll_in_two_hops(peers, call); });
}

TPK_KERNEL(kRowThreads)
two_shot_all_reduce_rms_norm(TPK_PARAM Space space, TPK_PARAM AllReduce call,
                             TPK_PARAM RmsNorm norm) {
  within_rows(space, call, norm, [&](const Peers& peers, auto dtype) {
    two_shot_rows<dtype.value>(peers, call, norm);
  });
}

TPK_KERNEL(kRowThreads)
ll_all_reduce_rms_norm(TPK_PARAM Space space, TPK_PARAM AllReduce call, TPK_PARAM RmsNorm norm) {
  within_ll_rows(space, call, norm, [&](const Peers& peers, auto dtype) {
    rows_by_ll<dtype.value>(peers, call, norm);
  });
}

TPK_KERNEL(kRowThreads)
ll_two_shot_all_reduce_rms_norm(TPK_PARAM Space space, TPK_PARAM AllReduce call,
                                TPK_PARAM RmsNorm norm) {
  within_ll_rows(space, call, norm, [&](const Peers& peers, auto dtype) {
    rows_by_ll_in_two_hops<dtype.value>(peers, call, norm);
  });
}

TPK_KERNEL(kRowThreads) rms_norm_of_rows(TPK_PARAM Rows rows, TPK_PARAM RmsNorm norm) {
  for_dtype(rows.dtype, [&](auto dtype) { normalise_rows<dtype.value>(rows, norm); });
}

TPK_KERNEL(kReduceThreads) one_shot_all_gather(TPK_PARAM Space space, TPK_PARAM Shards shards) {
  within_call(space, gathered(space, shards), [&](const Peers& peers) { gather(peers, shards); });
}

TPK_KERNEL(kReduceThreads) one_shot_reduce_scatter(TPK_PARAM Space space, TPK_PARAM Shards shards) {
  within_call(space, scattered(space, shards), [&](const Peers& peers) {
    for_dtype(shards.wire, [&](auto dtype) { scatter<dtype.value>(peers, shards); });
  });
}

TPK_KERNEL(kLLThreads) ll_all_gather(TPK_PARAM Space space, TPK_PARAM Shards shards) {
  within_ll_call(space, gathered(space, shards),
                 [&](const Peers& peers) { gather_by_ll(peers, shards); });
}

TPK_KERNEL(kLLThreads) ll_reduce_scatter(TPK_PARAM Space space, TPK_PARAM Shards shards) {
  within_ll_call(space, scattered(space, shards), [&](const Peers& peers) {
    for_dtype(shards.wire, [&](auto dtype) { scatter_by_ll<dtype.value>(peers, shards); });
  });
}

TPK_KERNEL(kReduceThreads) routed_dispatch(TPK_PARAM Space space, TPK_PARAM Routed call) {
  const u64 bytes = call.most * call.row * size_of(call.dtype);
  within_call(space, {call.out, bytes}, [&](const Peers& peers) { dispatch(peers, call); });
}

TPK_KERNEL(kReduceThreads) routed_combine(TPK_PARAM Space space, TPK_PARAM Routed call) {
  const u64 bytes = tokens_of(call, space.rank) * call.row * size_of(call.dtype);
  within_call(space, {call.out, bytes}, [&](const Peers& peers) {
    for_dtype(call.dtype, [&](auto dtype) { combine<dtype.value>(peers, call); });
  });
}

TPK_KERNEL(kSumThreads) sum_of_partials(TPK_PARAM SumPartials call) {
  const auto partials = [&](int r) { return address_of(call.partials[r]); };
  for_dtype(call.wire, [&](auto dtype) {
    sum_range<dtype.value>(partials, call.world, address_of(call.out), call.begin, 0, call.count,
                           call.epilogue, lane(), lanes());
  });
}

TPK_KERNEL(kReduceThreads) litmus_messages(TPK_PARAM Space space, TPK_PARAM Litmus litmus) {
  within_call(space, {}, [&](const Peers& peers) { exchange_messages(peers, litmus); });
}

TPK_KERNEL(kLLThreads) litmus_words(TPK_PARAM Space space, TPK_PARAM Litmus litmus) {
  within_ll_call(space, {}, [&](const Peers& peers) { exchange_words(peers, litmus); });
}

// The kernels below run as one block each; tpkernels/cuda/copies.py describes the calls made of
// them.

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
