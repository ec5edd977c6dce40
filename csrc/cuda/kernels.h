// The kernels of kernels.cu on one device: loads them from an image, launches them on a stream.
#pragma once

#include <atomic>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "cuda/arguments.h"
#include "cuda/driver.h"

namespace tpkernels::cuda {

// What setup.py embeds in the extension: a fat binary if there was nvcc, and the sources, which
// NVRTC compiles otherwise.
struct Image {
  const unsigned char* bytes;
  std::size_t size;                                          // 0: built without nvcc
  const char* architectures;                                 // "sm_80 sm_90 ..."
  std::vector<std::pair<std::string, std::string>> sources;  // name, text; kernels.cu comes last
};
const Image& embedded_image();

enum class Way { kOneShot, kTwoShot, kMultimem, kLowLatency, kLowLatencyTwoShot, kWholeLines };

// Of a launch. An early one may start while the kernel queued before it still runs, where the GPU
// and the driver can do that; see cuda/sync.cuh for what it needs.
struct Shape {
  int blocks;
  int cluster;  // 1 below compute capability 9.0
  bool early;
};

class Kernels {
 public:
  // `image` is a cubin, a fat binary or PTX. Throws Unsupported.
  Kernels(int device, const void* image);
  ~Kernels();
  Kernels(const Kernels&) = delete;
  Kernels& operator=(const Kernels&) = delete;

  // Calls that are a single launch.
  void all_reduce(Stream stream, const Space& space, Way way, Shape shape, const AllReduce& call);
  void gather(Stream stream, const Space& space, int blocks, const Shards& shards);
  void scatter(Stream stream, const Space& space, int blocks, const Shards& shards);
  void low_latency_gather(Stream stream, const Space& space, int blocks, const Shards& shards);
  void low_latency_scatter(Stream stream, const Space& space, int blocks, const Shards& shards);
  void sum_partials(Stream stream, int blocks, const SumPartials& call);
  // `call.segment` is whole rows in two-shot. Blocks come in clusters, whose size divides `blocks`.
  // Everything is aligned to 16 bytes.
  void normed_all_reduce(Stream stream, const Space& space, Way way, Shape shape,
                         const AllReduce& call, const RmsNorm& norm);
  void rms_norm(Stream stream, Shape shape, const Rows& rows, const RmsNorm& norm);
  void barrier(Stream stream, const Space& space);
  void paced_copy(Stream stream, int blocks, const PacedCopy& call);

  // The launches that make up longer calls; see copies.h.
  void begin(Stream stream, const Space& space, int flags);
  void publish(Stream stream, const Space& space, const Signal& signal);
  void flag(Stream stream, const Space& space, int index);
  void wait(Stream stream, const Space& space, const Signal& signal);
  void end(Stream stream, const Space& space, const Results& results);

  Handle context() const { return context_; }
  // Whether streams write words of 8 bytes without a kernel, now or in a capture. Eager writes: the
  // attribute of the device says so; where one is refused all the same, nobody tries again. In
  // captures: only once a trial has shown it.
  bool streams_write(bool captured) const {
    return streams_write_ && (!captured || captured_writes_ == CapturedWrites::kTaken);
  }
  void no_stream_writes() { streams_write_ = false; }
  bool tried_captured_writes() const { return captured_writes_ != CapturedWrites::kUntried; }
  void captured_writes(bool taken) {
    captured_writes_ = taken ? CapturedWrites::kTaken : CapturedWrites::kRefused;
  }

 private:
  Handle function(const char* name) const;
  template <class... Arguments>
  void launch(Handle function, int blocks, int threads, Stream stream,
              const Arguments&... arguments);
  template <class... Arguments>
  void launch_as(Handle function, Shape shape, int threads, Stream stream,
                 const Arguments&... arguments);

  Handle context_ = nullptr;
  Handle module_ = nullptr;
  bool launches_early_ = false;
  std::atomic<bool> streams_write_{false};
  enum class CapturedWrites { kUntried, kRefused, kTaken };
  std::atomic<CapturedWrites> captured_writes_{CapturedWrites::kUntried};
  Handle all_reduce_[6] = {}, normed_[5] = {};
  Handle gather_, scatter_, low_latency_gather_, low_latency_scatter_, sum_, barrier_, paced_,
      begin_, publish_, flag_, wait_, end_, norm_;
};

}  // namespace tpkernels::cuda
