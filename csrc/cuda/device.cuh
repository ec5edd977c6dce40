// Everything that needs a GPU, as named functions: memory orderings, the clock, vector accesses,
// conversions. tests/native/emulated/cuda/device.cuh has the same functions for a CPU, so the code
// built on them also runs without a GPU.
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

// The same. Returns whether any thread of the block passed true.
TPK_DEVICE bool sync_block_or(bool value) { return __syncthreads_or(value) != 0; }

// Shared memory of a block, for the kernels that normalise rows.
constexpr int kScratchFloats = 1120;
TPK_DEVICE float* scratch() {
  __shared__ alignas(16) float memory[kScratchFloats];
  return memory;
}

// A cluster's blocks run at the same time, and have consecutive numbers.
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

// A barrier of all threads of the cluster, which covers what they stored in each other's blocks.
TPK_DEVICE void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}

// Stores to the scratch of another block of the cluster, where this block has `to`.
TPK_DEVICE void store_in_block(float* to, int block, float value) {
  const auto here = static_cast<unsigned>(__cvta_generic_to_shared(to));
  unsigned there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(block));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(value) : "memory");
}
#else
TPK_DEVICE int cluster_blocks() { return 1; }
TPK_DEVICE int block_in_cluster() { return 0; }
TPK_DEVICE void sync_cluster() { sync_block(); }
TPK_DEVICE void store_in_block(float* to, int, float value) { *to = value; }
#endif

// Returns when the kernels queued before this one have ended and their results are visible. Unless
// a kernel was launched early (Shape in cuda/kernels.h), that was so when it started.
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

#define TPK_LOAD(name, order)                                                               \
  TPK_DEVICE u64 name(const u64* from) {                                                    \
    u64 value;                                                                              \
    asm volatile("ld." order ".global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory"); \
    return value;                                                                           \
  }
TPK_LOAD(load_acquire_sys, "acquire.sys")
TPK_LOAD(load_relaxed_sys, "relaxed.sys")
TPK_LOAD(load_relaxed_gpu, "relaxed.gpu")
#undef TPK_LOAD

TPK_DEVICE void store_relaxed_sys(u64* to, u64 value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

TPK_DEVICE void store_release_sys(u64* to, u64 value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

TPK_DEVICE u64 add_acq_rel_gpu(u64* to, u64 value) {
  u64 before;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(to), "l"(value)
               : "memory");
  return before;
}

TPK_DEVICE u64 max_relaxed_gpu(u64* to, u64 value) {
  u64 before;
  asm volatile("atom.relaxed.gpu.global.max.u64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(to), "l"(value)
               : "memory");
  return before;
}

TPK_DEVICE u64 cas_acq_rel_gpu(u64* to, u64 expected, u64 value) {
  u64 before;
  asm volatile("atom.acq_rel.gpu.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(before)
               : "l"(to), "l"(expected), "l"(value)
               : "memory");
  return before;
}

struct alignas(16) Pack {
  unsigned word[4];
};

// Never through the read-only cache: peers write this memory while the kernel runs.
TPK_DEVICE Pack load_pack(const void* from) {
  Pack pack;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(pack.word[0]), "=r"(pack.word[1]), "=r"(pack.word[2]), "=r"(pack.word[3])
               : "l"(from)
               : "memory");
  return pack;
}

TPK_DEVICE void store_pack(void* to, Pack pack) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(pack.word[0]),
               "r"(pack.word[1]), "r"(pack.word[2]), "r"(pack.word[3])
               : "memory");
}

// Brings a line near, for a load that comes much later.
TPK_DEVICE void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// Two words that are stored at a time. Each is whole or not there yet; which comes first is open:
// to PTX, an access to a vector is one access to each element, in no order.
struct alignas(16) Line {
  u64 word[2];
};

TPK_DEVICE Line load_line_sys(const Line* from) {
  Line line;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(line.word[0]), "=l"(line.word[1])
               : "l"(from)
               : "memory");
  return line;
}

TPK_DEVICE void store_line_sys(Line* to, Line line) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(line.word[0]),
               "l"(line.word[1])
               : "memory");
}

TPK_DEVICE float float_of(unsigned bits) { return __uint_as_float(bits); }
TPK_DEVICE unsigned bits_of(float value) { return __float_as_uint(value); }

// Never becomes a part of a `multiply_add`.
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
// A bulk copy (TMA) of scratch, a multiple of 16 bytes, to memory of any rank. For one thread,
// after a barrier behind every thread's `fence_scratch`.
TPK_DEVICE void fence_scratch() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
TPK_DEVICE void store_scratch(u64 to, const float* from, unsigned bytes) {
  const auto here = static_cast<unsigned>(__cvta_generic_to_shared(from));
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n\t"
      "cp.async.bulk.commit_group;" ::"l"(to),
      "r"(here), "r"(bytes)
      : "memory");
}

// Returns when the thread's bulk copies are complete: `await_bulk_stores` of kernels/words.py.
TPK_DEVICE void await_scratch_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

#define TPK_SM_90 1
#endif

}  // namespace tpkernels::cuda
