// Device-specific operations as named functions: memory orderings, the clock, vector accesses,
// conversions. tests/native/emulated/cuda/device.cuh implements the same functions for a CPU, so
// the kernels also run without a GPU.
#pragma once

#include "cuda/arguments.h"

#define TPK_DEVICE __device__ __forceinline__
#define TPK_KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads, 1)
#define TPK_PARAM const __grid_constant__

namespace tpkernels::cuda {

TPK_DEVICE int thread() { return threadIdx.x; }
TPK_DEVICE int threads() { return blockDim.x; }
TPK_DEVICE int block() { return blockIdx.x; }
TPK_DEVICE int blocks() { return gridDim.x; }

TPK_DEVICE void sync_block() { __syncthreads(); }

// Barrier of the block. Returns whether any thread passed true.
TPK_DEVICE bool sync_block_or(bool value) { return __syncthreads_or(value) != 0; }

// Shared memory of a block for the RMSNorm kernels.
constexpr int kScratchFloats = 1120;
TPK_DEVICE float* scratch() {
  __shared__ alignas(16) float memory[kScratchFloats];
  return memory;
}

// The blocks of a cluster run concurrently and have consecutive numbers.
#if __CUDA_ARCH__ >= 900
TPK_DEVICE int cluster_blocks() {
  unsigned count;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
  return count;
}

TPK_DEVICE int block_in_cluster() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Barrier of all threads of the cluster. It also orders their stores into the scratch of peer
// blocks.
TPK_DEVICE void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}

// Stores into the scratch of a block of the cluster, at the offset of the local address `dst`.
TPK_DEVICE void store_in_block(float* dst, int block, float value) {
  const auto local = static_cast<unsigned>(__cvta_generic_to_shared(dst));
  unsigned remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(block));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(value) : "memory");
}
#else
TPK_DEVICE int cluster_blocks() { return 1; }
TPK_DEVICE int block_in_cluster() { return 0; }
TPK_DEVICE void sync_cluster() { sync_block(); }
TPK_DEVICE void store_in_block(float* dst, int, float value) { *dst = value; }
#endif

// Waits until all preceding kernels of the stream have ended and their results are visible. Only
// an early launch (Shape in cuda/kernels.h) starts before that.
TPK_DEVICE void await_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

TPK_DEVICE u64 clock_ns() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

TPK_DEVICE void pause() { __nanosleep(20); }

#define TPK_LOAD(name, order)                                                              \
  TPK_DEVICE u64 name(const u64* src) {                                                    \
    u64 value;                                                                             \
    asm volatile("ld." order ".global.u64 %0, [%1];" : "=l"(value) : "l"(src) : "memory"); \
    return value;                                                                          \
  }
TPK_LOAD(load_acquire_sys, "acquire.sys")
TPK_LOAD(load_relaxed_sys, "relaxed.sys")
TPK_LOAD(load_relaxed_gpu, "relaxed.gpu")
#undef TPK_LOAD

TPK_DEVICE void store_relaxed_sys(u64* dst, u64 value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(dst), "l"(value) : "memory");
}

TPK_DEVICE void store_release_sys(u64* dst, u64 value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(dst), "l"(value) : "memory");
}

TPK_DEVICE u64 add_acq_rel_gpu(u64* dst, u64 value) {
  u64 previous;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;"
               : "=l"(previous)
               : "l"(dst), "l"(value)
               : "memory");
  return previous;
}

TPK_DEVICE u64 max_relaxed_gpu(u64* dst, u64 value) {
  u64 previous;
  asm volatile("atom.relaxed.gpu.global.max.u64 %0, [%1], %2;"
               : "=l"(previous)
               : "l"(dst), "l"(value)
               : "memory");
  return previous;
}

TPK_DEVICE u64 cas_acq_rel_gpu(u64* dst, u64 expected, u64 value) {
  u64 previous;
  asm volatile("atom.acq_rel.gpu.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(previous)
               : "l"(dst), "l"(expected), "l"(value)
               : "memory");
  return previous;
}

struct alignas(16) Pack {
  unsigned word[4];
};

// The read-only cache must not be used, because peers write this memory while the kernel runs.
TPK_DEVICE Pack load_pack(const void* src) {
  Pack pack;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(pack.word[0]), "=r"(pack.word[1]), "=r"(pack.word[2]), "=r"(pack.word[3])
               : "l"(src)
               : "memory");
  return pack;
}

TPK_DEVICE void store_pack(void* dst, Pack pack) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(dst), "r"(pack.word[0]),
               "r"(pack.word[1]), "r"(pack.word[2]), "r"(pack.word[3])
               : "memory");
}

// Prefetches a cache line into L2.
TPK_DEVICE void prefetch(const void* src) { asm volatile("prefetch.global.L2 [%0];" ::"l"(src)); }

// Two 8-byte elements, stored with one instruction. Each element is written atomically, but their
// order is unspecified: PTX treats a vector access as unordered accesses to its elements.
struct alignas(16) Line {
  u64 word[2];
};

TPK_DEVICE Line load_line_sys(const Line* src) {
  Line line;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(line.word[0]), "=l"(line.word[1])
               : "l"(src)
               : "memory");
  return line;
}

TPK_DEVICE void store_line_sys(Line* dst, Line line) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(dst), "l"(line.word[0]),
               "l"(line.word[1])
               : "memory");
}

TPK_DEVICE float bits_to_float(unsigned bits) { return __uint_as_float(bits); }
TPK_DEVICE unsigned float_to_bits(float value) { return __float_as_uint(value); }

// The compiler never contracts this multiplication into a fused multiply-add.
TPK_DEVICE float multiply(float a, float b) { return __fmul_rn(a, b); }
TPK_DEVICE float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
TPK_DEVICE float divide(float a, float b) { return __fdiv_rn(a, b); }
TPK_DEVICE float square_root(float value) { return __fsqrt_rn(value); }

TPK_DEVICE float widen_f16(unsigned short half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
}

TPK_DEVICE unsigned short round_f16(float value) {
  unsigned short half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return half;
}

TPK_DEVICE unsigned short round_bf16(float value) {
  unsigned short half;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return half;
}

#if __CUDA_ARCH__ >= 900
// TMA bulk copy of scratch to memory of any rank; `bytes` is a multiple of 16. For one thread,
// after every thread has called `fence_scratch` and passed a barrier.
TPK_DEVICE void fence_scratch() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
TPK_DEVICE void store_scratch(u64 dst, const float* src, unsigned bytes) {
  const auto local = static_cast<unsigned>(__cvta_generic_to_shared(src));
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n\t"
      "cp.async.bulk.commit_group;" ::"l"(dst),
      "r"(local), "r"(bytes)
      : "memory");
}

// Waits until the bulk copies of this thread are complete; see `await_bulk_stores` in
// kernels/signals.py.
TPK_DEVICE void await_scratch_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

#define TPK_SM_90 1
#endif

}  // namespace tpkernels::cuda
