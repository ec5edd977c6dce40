// All kernels of csrc/cuda. nvcc compiles this file when the package is built. Without nvcc, NVRTC
// compiles the same file at first use; it therefore includes only headers of this folder.
#include "cuda/litmus.cuh"
#include "cuda/normed.cuh"
#include "cuda/routed.cuh"

using namespace tpkernels::cuda;

namespace {

TPK_DEVICE Output all_reduce_output(const AllReduce& call, void* normed = nullptr) {
  return {call.out, call.count * dtype_size(call.epilogue.out_dtype), normed};
}

// Runs a single-launch call. A grid that starts after a failure only poisons its output.
template <class Run>
TPK_DEVICE void run_call(const Workspace& workspace, const Output& output, const Run& run) {
  const Peers peers = enter(workspace);
  await_previous();
  if (peers.usable) run(peers);
  if (finish(peers)) poison(output);
}

// Runs a single-launch call with RMSNorm. `run(peers, dtype)` reaches its cluster barriers even
// after a failure.
template <class Run>
TPK_DEVICE void run_rows(const Workspace& workspace, const AllReduce& call, const RmsNorm& norm,
                         const Run& run) {
  const Peers peers = enter(workspace);
  prefetch_operands(call, norm);
  await_previous();
  for_dtype(call.wire, [&](auto dtype) { run(peers, dtype); });
  if (finish(peers)) poison(all_reduce_output(call, norm.normed));
}

// Runs a single-launch call with LL (cuda/ll.cuh).
template <class Run>
TPK_DEVICE void run_ll_call(const Workspace& workspace, const Output& output, const Run& run) {
  const Peers peers = enter_ll(workspace);
  await_previous();
  if (peers.usable) run(peers);
  if (finish_ll(peers)) poison(output);
}

template <class Run>
TPK_DEVICE void run_ll_rows(const Workspace& workspace, const AllReduce& call, const RmsNorm& norm,
                            const Run& run) {
  const Peers peers = enter_ll(workspace);
  prefetch_operands(call, norm);
  await_previous();
  for_dtype(call.wire, [&](auto dtype) { run(peers, dtype); });
  if (finish_ll(peers)) poison(all_reduce_output(call, norm.normed));
}

TPK_DEVICE u64 count_elements(const Shards& shards, int first, int last) {
  return static_cast<u64>(shards.starts[last] - shards.starts[first]) * shards.cols;
}

TPK_DEVICE Output gather_output(const Workspace& workspace, const Shards& shards) {
  return {shards.out, count_elements(shards, 0, workspace.world) * dtype_size(shards.wire)};
}

TPK_DEVICE Output scatter_output(const Workspace& workspace, const Shards& shards) {
  const u64 count = count_elements(shards, workspace.rank, workspace.rank + 1);
  return {shards.out, count * dtype_size(shards.epilogue.out_dtype)};
}

}  // namespace

TPK_KERNEL(kReduceThreads)
two_shot_all_reduce(TPK_PARAM Workspace workspace, TPK_PARAM AllReduce call) {
  run_call(workspace, all_reduce_output(call), [&](const Peers& peers) {
    for_dtype(call.wire, [&](auto dtype) { two_shot_reduce<dtype.value>(peers, call); });
  });
}

#ifdef TPK_SM_90
TPK_KERNEL(kReduceThreads) litmus_bulk(TPK_PARAM Workspace workspace, TPK_PARAM Litmus litmus) {
  run_call(workspace, {}, [&](const Peers& peers) { exchange_bulk(peers, litmus); });
}
#endif

TPK_KERNEL(kLLThreads) ll_all_reduce(TPK_PARAM Workspace workspace, TPK_PARAM AllReduce call) {
  run_ll_call(workspace, all_reduce_output(call), [&](const Peers& peers) {
    for_dtype(call.wire, [&](auto dtype) { ll_reduce<dtype.value>(peers, call); });
  });
}

TPK_KERNEL(kLLThreads)
ll_two_shot_all_reduce(TPK_PARAM Workspace workspace, TPK_PARAM AllReduce call) {
  run_ll_call(workspace, all_reduce_output(call),
              [&](const Peers& peers) { ll_two_shot_reduce(peers, call); });
}

TPK_KERNEL(kRowThreads)
two_shot_all_reduce_rms_norm(TPK_PARAM Workspace workspace, TPK_PARAM AllReduce call,
                             TPK_PARAM RmsNorm norm) {
  run_rows(workspace, call, norm, [&](const Peers& peers, auto dtype) {
    two_shot_reduce_rows<dtype.value>(peers, call, norm);
  });
}

TPK_KERNEL(kRowThreads)
ll_all_reduce_rms_norm(TPK_PARAM Workspace workspace, TPK_PARAM AllReduce call,
                       TPK_PARAM RmsNorm norm) {
  run_ll_rows(workspace, call, norm, [&](const Peers& peers, auto dtype) {
    ll_reduce_rows<dtype.value>(peers, call, norm);
  });
}

TPK_KERNEL(kRowThreads)
ll_two_shot_all_reduce_rms_norm(TPK_PARAM Workspace workspace, TPK_PARAM AllReduce call,
                                TPK_PARAM RmsNorm norm) {
  run_ll_rows(workspace, call, norm, [&](const Peers& peers, auto dtype) {
    ll_two_shot_reduce_rows<dtype.value>(peers, call, norm);
  });
}

TPK_KERNEL(kRowThreads) rms_norm_of_rows(TPK_PARAM Rows rows, TPK_PARAM RmsNorm norm) {
  for_dtype(rows.dtype, [&](auto dtype) { normalise_rows<dtype.value>(rows, norm); });
}

TPK_KERNEL(kReduceThreads)
one_shot_all_gather(TPK_PARAM Workspace workspace, TPK_PARAM Shards shards) {
  run_call(workspace, gather_output(workspace, shards),
           [&](const Peers& peers) { gather(peers, shards); });
}

TPK_KERNEL(kReduceThreads)
one_shot_reduce_scatter(TPK_PARAM Workspace workspace, TPK_PARAM Shards shards) {
  run_call(workspace, scatter_output(workspace, shards), [&](const Peers& peers) {
    for_dtype(shards.wire, [&](auto dtype) { scatter<dtype.value>(peers, shards); });
  });
}

TPK_KERNEL(kLLThreads) ll_all_gather(TPK_PARAM Workspace workspace, TPK_PARAM Shards shards) {
  run_ll_call(workspace, gather_output(workspace, shards),
              [&](const Peers& peers) { ll_gather(peers, shards); });
}

TPK_KERNEL(kLLThreads) ll_reduce_scatter(TPK_PARAM Workspace workspace, TPK_PARAM Shards shards) {
  run_ll_call(workspace, scatter_output(workspace, shards), [&](const Peers& peers) {
    for_dtype(shards.wire, [&](auto dtype) { ll_scatter<dtype.value>(peers, shards); });
  });
}

TPK_KERNEL(kReduceThreads) routed_dispatch(TPK_PARAM Workspace workspace, TPK_PARAM Routed call) {
  const u64 bytes = call.max_rows * call.cols * dtype_size(call.dtype);
  run_call(workspace, {call.out, bytes}, [&](const Peers& peers) { dispatch(peers, call); });
}

TPK_KERNEL(kReduceThreads) routed_combine(TPK_PARAM Workspace workspace, TPK_PARAM Routed call) {
  const u64 bytes = num_tokens(call, workspace.rank) * call.cols * dtype_size(call.dtype);
  run_call(workspace, {call.out, bytes}, [&](const Peers& peers) {
    for_dtype(call.dtype, [&](auto dtype) { combine<dtype.value>(peers, call); });
  });
}

TPK_KERNEL(kSumThreads) sum_of_partials(TPK_PARAM SumPartials call) {
  const auto partials = [&](int r) { return to_address(call.partials[r]); };
  for_dtype(call.wire, [&](auto dtype) {
    sum_range<dtype.value>(partials, call.world, to_address(call.out), call.begin, 0, call.count,
                           call.epilogue, global_thread(), global_threads());
  });
}

TPK_KERNEL(kReduceThreads) litmus_messages(TPK_PARAM Workspace workspace, TPK_PARAM Litmus litmus) {
  run_call(workspace, {}, [&](const Peers& peers) { exchange_messages(peers, litmus); });
}

TPK_KERNEL(kLLThreads) litmus_words(TPK_PARAM Workspace workspace, TPK_PARAM Litmus litmus) {
  run_ll_call(workspace, {}, [&](const Peers& peers) { exchange_ll_packs(peers, litmus); });
}

// The following kernels are launched with one block each. tpkernels/cuda/copies.py describes the
// calls that consist of them.

TPK_KERNEL(kSignalThreads) call_barrier(TPK_PARAM Workspace workspace) { finish(enter(workspace)); }

TPK_KERNEL(kSignalThreads) call_begin(TPK_PARAM Workspace workspace, TPK_PARAM int flags) {
  begin_call(workspace, flags);
}

TPK_KERNEL(kSignalThreads) call_publish(TPK_PARAM Workspace workspace, TPK_PARAM Signal signal) {
  const Peers peers = join_call(workspace);
  if (signal.rank < 0) return publish_to_all(peers, signal.index);
  publish(peers, signal.rank, signal.index);
}

// Sets a flag if the stream does not write it (`Kernels::set_flag`).
TPK_KERNEL(kSignalThreads) call_flag(TPK_PARAM Workspace workspace, TPK_PARAM int index) {
  set_flag(join_call(workspace), index);
}

TPK_KERNEL(kSignalThreads) call_wait(TPK_PARAM Workspace workspace, TPK_PARAM Signal signal) {
  wait_for(join_call(workspace), signal.rank, signal.index);
}

TPK_KERNEL(kEndThreads) call_end(TPK_PARAM Workspace workspace, TPK_PARAM Results results) {
  end_call(workspace, results);
}
