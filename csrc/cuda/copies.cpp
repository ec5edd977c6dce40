#include "cuda/copies.h"

namespace tpkernels::cuda {

void copy(const Kernels& kernels, Stream stream, Address dst, Address src, std::size_t bytes) {
  if (bytes == 0) return;
  const ContextGuard guard(kernels.context());
  driver().check(driver().copy_async(dst, src, bytes, reinterpret_cast<Handle>(stream)),
                 "cuMemcpyAsync");
}

}  // namespace tpkernels::cuda
