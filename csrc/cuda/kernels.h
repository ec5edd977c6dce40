// Loads the kernels of kernels.cu on one device and launches them on a stream.
#pragma once

#include <atomic>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "cuda/arguments.h"
#include "cuda/driver.h"

namespace tpkernels::cuda {

// Data that setup.py embeds in the extension: a fat binary if nvcc was available, and the sources,
// which NVRTC compiles otherwise.
struct Image {
  const unsigned char* bytes;
  std::size_t size;                                          // 0: built without nvcc
  const char* architectures;                                 // "sm_80 sm_90 ..."
  std::vector<std::pair<std::string, std::string>> sources;  // (name, content); kernels.cu is last
};
const Image& embedded_image();

// Kernels: name, threads per block, argument types.
// clang-format off
#define TPK_KERNELS(each)                                                           \
  each(two_shot_all_reduce, kReduceThreads, Workspace, AllReduce)                   \
  each(ll_all_reduce, kLLThreads, Workspace, AllReduce)                             \
  each(ll_two_shot_all_reduce, kLLThreads, Workspace, AllReduce)                    \
  each(two_shot_all_reduce_rms_norm, kRowThreads, Workspace, AllReduce, RmsNorm)    \
  each(ll_all_reduce_rms_norm, kRowThreads, Workspace, AllReduce, RmsNorm)          \
  each(ll_two_shot_all_reduce_rms_norm, kRowThreads, Workspace, AllReduce, RmsNorm) \
  each(rms_norm_of_rows, kRowThreads, Rows, RmsNorm)                                \
  each(one_shot_all_gather, kReduceThreads, Workspace, Shards)                      \
  each(one_shot_reduce_scatter, kReduceThreads, Workspace, Shards)                  \
  each(ll_all_gather, kLLThreads, Workspace, Shards)                                \
  each(ll_reduce_scatter, kLLThreads, Workspace, Shards)                            \
  each(routed_dispatch, kReduceThreads, Workspace, Routed)                          \
  each(routed_combine, kReduceThreads, Workspace, Routed)                           \
  each(sum_of_partials, kSumThreads, SumPartials)                                   \
  each(litmus_messages, kReduceThreads, Workspace, Litmus)                          \
  each(litmus_words, kLLThreads, Workspace, Litmus)                                 \
  each(litmus_bulk, kReduceThreads, Workspace, Litmus)                              \
  each(call_barrier, kSignalThreads, Workspace)                                     \
  each(call_begin, kSignalThreads, Workspace, int)                                  \
  each(call_publish, kSignalThreads, Workspace, Signal)                             \
  each(call_flag, kSignalThreads, Workspace, int)                                   \
  each(call_wait, kSignalThreads, Workspace, Signal)                                \
  each(call_end, kEndThreads, Workspace, Results)
// clang-format on

// Shape of a launch. An early launch (programmatic dependent launch) may start while the preceding
// kernel still runs, if the GPU and the driver support it. cuda/sync.cuh lists its requirements.
struct Shape {
  int blocks = 1;
  int cluster = 1;  // divides `blocks`; 1 below compute capability 9.0
  bool early = false;
};

class Kernels {
 public:
  // `image` is a cubin, a fat binary or PTX. Throws Unsupported.
  Kernels(int device, const void* image);
  ~Kernels();
  Kernels(const Kernels&) = delete;
  Kernels& operator=(const Kernels&) = delete;

  // Queues a kernel of the table with its arguments. Throws Unsupported if the GPU lacks it.
  template <class... Arguments>
  void launch(const char* name, Stream stream, Shape shape, const Arguments&... arguments) {
    void* parameters[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
    launch_with(name, stream, shape, parameters);
  }

  // Queues a copy with a copy engine; for a copy within one device, the driver selects the method.
  // The two devices must have peer access.
  void copy(Stream stream, Address dst, Address src, std::size_t bytes) const;

  // Sets a flag after the preceding work of the stream (cuda/sync.cuh): with a stream write if the
  // device supports it, otherwise with a kernel. Captures always use a kernel, because a driver
  // that cannot record stream writes would invalidate the capture.
  void set_flag(Stream stream, const Workspace& workspace, int index, bool captured);

  // Whether streams write flags outside captures. Initialized from the device attribute; false
  // after the driver has rejected a write.
  bool streams_write() const { return streams_write_; }

 private:
  struct Kernel {
    const char* name;
    int threads;
    Handle function;  // null if the GPU lacks it
  };
  void launch_with(const char* name, Stream stream, Shape shape, void** parameters);

  Handle context_ = nullptr;
  Handle module_ = nullptr;
  bool launches_early_ = false;
  std::vector<Kernel> kernels_;
  std::atomic<bool> streams_write_{false};
};

}  // namespace tpkernels::cuda
