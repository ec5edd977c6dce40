#include "cuda/kernels.h"

namespace tpkernels::cuda {
namespace {

constexpr int kMultimemCapability = 90;
// Early launches; captured into graphs since CUDA 12.3.
constexpr int kEarlyCapability = 90, kEarlyDriver = 12030;

Handle stream_handle(Stream stream) { return reinterpret_cast<Handle>(stream); }

}  // namespace

Kernels::Kernels(int device, const void* image) {
  const Driver& d = driver();
  const int capability = compute_capability(device);
  int handle = 0;
  d.check(d.device(&handle, device), "cuDeviceGet");
  d.check(d.retain_context(&context_, handle), "cuDevicePrimaryCtxRetain");
  const ContextGuard guard(context_);
  if (const int code = d.load_module(&module_, image); code != 0) {
    const char* text = nullptr;
    d.error_string(code, &text);
    throw Unsupported("cannot load the CUDA kernels on GPU " + std::to_string(device) + " (sm_" +
                      std::to_string(capability) +
                      "): " + (text != nullptr ? text : "no reason given"));
  }
  streams_write_ = device_attribute(handle, kStreamWrites) != 0;
  launches_early_ = capability >= kEarlyCapability && driver_version() >= kEarlyDriver;
  // Load all functions now: loading one at its first launch would invalidate a stream capture.
  all_reduce_[0] = function("one_shot_all_reduce");
  all_reduce_[1] = function("two_shot_all_reduce");
  if (capability >= kMultimemCapability) all_reduce_[2] = function("multimem_all_reduce");
  all_reduce_[3] = function("low_latency_all_reduce");
  all_reduce_[4] = function("low_latency_two_shot_all_reduce");
  all_reduce_[5] = function("whole_lines_all_reduce");
  normed_[0] = function("one_shot_normed_all_reduce");
  normed_[1] = function("two_shot_normed_all_reduce");
  normed_[3] = function("low_latency_normed_all_reduce");
  normed_[4] = function("low_latency_two_shot_normed_all_reduce");
  norm_ = function("rms_norm_of_rows");
  low_latency_gather_ = function("low_latency_all_gather");
  low_latency_scatter_ = function("low_latency_reduce_scatter");
  gather_ = function("one_shot_gather");
  scatter_ = function("one_shot_scatter");
  sum_ = function("sum_of_partials");
  barrier_ = function("call_barrier");
  paced_ = function("paced_copy");
  begin_ = function("call_begin");
  publish_ = function("call_publish");
  flag_ = function("call_flag");
  wait_ = function("call_wait");
  end_ = function("call_end");
}

// The primary context stays retained, because torch's tensors live in it.
Kernels::~Kernels() {
  try {
    const ContextGuard guard(context_);
    driver().unload_module(module_);
  } catch (const std::exception&) {  // the driver may be gone before the process exits
  }
}

Handle Kernels::function(const char* name) const {
  Handle found = nullptr;
  driver().check(driver().function(&found, module_, name), name);
  return found;
}

template <class... Arguments>
void Kernels::launch(Handle function, int blocks, int threads, Stream stream,
                     const Arguments&... arguments) {
  const Driver& d = driver();
  const ContextGuard guard(context_);
  void* parameters[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  d.check(d.launch(function, blocks, 1, 1, threads, 1, 1, 0, stream_handle(stream), parameters,
                   nullptr),
          "cuLaunchKernel");
}

template <class... Arguments>
void Kernels::launch_as(Handle function, Shape shape, int threads, Stream stream,
                        const Arguments&... arguments) {
  LaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (shape.cluster > 1) {
    LaunchAttribute& cluster = attributes[count++];
    cluster.id = kClusterDimension;
    cluster.value.cluster[0] = shape.cluster;
    cluster.value.cluster[1] = cluster.value.cluster[2] = 1;
  }
  if (shape.early && launches_early_) {
    LaunchAttribute& early = attributes[count++];
    early.id = kProgrammaticSerialization;
    early.value.early = 1;
  }
  if (count == 0) return launch(function, shape.blocks, threads, stream, arguments...);
  const Driver& d = driver();
  const ContextGuard guard(context_);
  void* parameters[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  const LaunchConfig config{{static_cast<unsigned>(shape.blocks), 1, 1},
                            {static_cast<unsigned>(threads), 1, 1},
                            0,
                            stream_handle(stream),
                            attributes,
                            count};
  d.check(d.launch_with(&config, function, parameters, nullptr), "cuLaunchKernelEx");
}

void Kernels::all_reduce(Stream stream, const Space& space, Way way, Shape shape,
                         const AllReduce& call) {
  const Handle kernel = all_reduce_[static_cast<int>(way)];
  if (kernel == nullptr) {
    throw Unsupported("a multimem all-reduce needs a GPU of compute capability 9.0 or higher");
  }
  const int threads = way >= Way::kLowLatency ? kLowLatencyThreads : kReduceThreads;
  launch_as(kernel, shape, threads, stream, space, call);
}

void Kernels::gather(Stream stream, const Space& space, int blocks, const Shards& shards) {
  launch(gather_, blocks, kReduceThreads, stream, space, shards);
}

void Kernels::scatter(Stream stream, const Space& space, int blocks, const Shards& shards) {
  launch(scatter_, blocks, kReduceThreads, stream, space, shards);
}

void Kernels::low_latency_gather(Stream stream, const Space& space, int blocks,
                                 const Shards& shards) {
  launch(low_latency_gather_, blocks, kLowLatencyThreads, stream, space, shards);
}

void Kernels::low_latency_scatter(Stream stream, const Space& space, int blocks,
                                  const Shards& shards) {
  launch(low_latency_scatter_, blocks, kLowLatencyThreads, stream, space, shards);
}

void Kernels::sum_partials(Stream stream, int blocks, const SumPartials& call) {
  launch(sum_, blocks, kSumThreads, stream, call);
}

void Kernels::normed_all_reduce(Stream stream, const Space& space, Way way, Shape shape,
                                const AllReduce& call, const RmsNorm& norm) {
  const Handle kernel = normed_[static_cast<int>(way)];
  if (kernel == nullptr) throw Unsupported("the switch sums, and no kernel normalises its rows");
  launch_as(kernel, shape, kRowThreads, stream, space, call, norm);
}

void Kernels::rms_norm(Stream stream, Shape shape, const Rows& rows, const RmsNorm& norm) {
  launch_as(norm_, shape, kRowThreads, stream, rows, norm);
}

void Kernels::barrier(Stream stream, const Space& space) {
  launch(barrier_, 1, kSignalThreads, stream, space);
}

void Kernels::paced_copy(Stream stream, int blocks, const PacedCopy& call) {
  launch(paced_, blocks, kPacedThreads, stream, call);
}

void Kernels::begin(Stream stream, const Space& space, int flags) {
  launch(begin_, 1, kSignalThreads, stream, space, flags);
}

void Kernels::publish(Stream stream, const Space& space, const Signal& signal) {
  launch(publish_, 1, kSignalThreads, stream, space, signal);
}

void Kernels::flag(Stream stream, const Space& space, int index) {
  launch(flag_, 1, kSignalThreads, stream, space, index);
}

void Kernels::wait(Stream stream, const Space& space, const Signal& signal) {
  launch(wait_, 1, kSignalThreads, stream, space, signal);
}

void Kernels::end(Stream stream, const Space& space, const Results& results) {
  launch(end_, 1, kEndThreads, stream, space, results);
}

}  // namespace tpkernels::cuda
