// The kernels of kernels.cu on one device: loaded from an image, launched on a stream.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "cuda/arguments.h"
#include "cuda/driver.h"

namespace tpkernels::cuda {

// What the build put into the extension (setup.py writes it): a fat binary where there was nvcc,
// and the sources, which NVRTC compiles where there was none.
struct Image {
  const unsigned char* bytes;
  std::size_t size;                                          // 0: built without nvcc
  const char* architectures;                                 // "sm_80 sm_90 ..."
  std::vector<std::pair<std::string, std::string>> sources;  // name, text; kernels.cu is the last
};
const Image& embedded_image();

enum class Way { kOneShot, kTwoShot, kMultimem };

class Kernels {
 public:
  // `image` is a cubin, a fat binary or PTX. Throws Unavailable.
  Kernels(int device, const void* image);
  ~Kernels();
  Kernels(const Kernels&) = delete;
  Kernels& operator=(const Kernels&) = delete;

  // Calls of one launch.
  void all_reduce(Stream stream, const Space& space, Way way, int blocks, const AllReduce& call);
  void gather(Stream stream, const Space& space, int blocks, const Shards& shards);
  void scatter(Stream stream, const Space& space, int blocks, const Shards& shards);
  void sum_partials(Stream stream, int blocks, const SumPartials& call);
  void barrier(Stream stream, const Space& space);
  void paced_copy(Stream stream, int blocks, const PacedCopy& call);

  // Parts of a call of several launches; see copies.h.
  void begin(Stream stream, const Space& space);
  void publish(Stream stream, const Space& space, const Signal& signal);
  void wait(Stream stream, const Space& space, const Signal& signal);
  void end(Stream stream, const Space& space);
  void poison(Stream stream, const Space& space, const Poison& results);

  Handle context() const { return context_; }

 private:
  Handle function(const char* name) const;
  template <class... Arguments>
  void launch(Handle function, int blocks, int threads, Stream stream,
              const Arguments&... arguments);

  Handle context_ = nullptr;
  Handle module_ = nullptr;
  Handle all_reduce_[3] = {};
  Handle gather_, scatter_, sum_, barrier_, paced_, begin_, publish_, wait_, end_, spoil_;
};

}  // namespace tpkernels::cuda
