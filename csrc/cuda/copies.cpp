#include "cuda/copies.h"

namespace tpkernels::cuda {
namespace {

constexpr int kNotSupported = 801;  // CUDA_ERROR_NOT_SUPPORTED

}  // namespace

void copy(const Kernels& kernels, Stream stream, Address dst, Address src, std::size_t bytes) {
  if (bytes == 0) return;
  const ContextGuard guard(kernels.context());
  driver().check(driver().copy_async(dst, src, bytes, reinterpret_cast<Handle>(stream)),
                 "cuMemcpyAsync");
}

void raise_flag(Kernels& kernels, Stream stream, const Space& space, int index, bool captured) {
  if (captured || !kernels.streams_write()) return kernels.flag(stream, space, index);
  const ContextGuard guard(kernels.context());
  const auto to = reinterpret_cast<Address>(space.state + kStateFlags + index);
  const int code = driver().write_value(reinterpret_cast<Handle>(stream), to, kRaised, 0);
  if (code == kNotSupported) {
    kernels.no_stream_writes();
    return kernels.flag(stream, space, index);
  }
  driver().check(code, "cuStreamWriteValue64");
}

}  // namespace tpkernels::cuda
