// Copies and sums by the threads of a block: 16 bytes at a time, or scalars if the alignment or
// size does not allow vectors.
//
// Numerics: partials are summed in fp32 in rank order. Then bias and residual are added, and the
// sum is rounded once. The result is bitwise identical to sum_partials in csrc/host/vector.h.
#pragma once

#include "cuda/device.cuh"

namespace tpkernels::cuda {

constexpr int kVector = 8;      // elements per thread and iteration of a sum
constexpr u64 kSliceUnit = 64;  // elements; a multiple of kVector and of a cache line

struct Range {
  u64 first;
  u64 last;
};

TPK_DEVICE bool aligned(u64 address) { return address % sizeof(Pack) == 0; }
TPK_DEVICE u64 to_address(const void* pointer) { return reinterpret_cast<u64>(pointer); }
TPK_DEVICE u64 minimum(u64 a, u64 b) { return a < b ? a : b; }
TPK_DEVICE u64 dtype_size(int dtype) { return dtype == kF32 ? 4 : 2; }

// Returns the slice of this block in a segment. All segments of at most `length` elements are split
// at the same offsets.
TPK_DEVICE Range block_slice_in(Range segment, u64 length) {
  const u64 units = (length + kSliceUnit - 1) / kSliceUnit;
  const u64 slice_length = (units + blocks() - 1) / blocks() * kSliceUnit;
  const u64 first = minimum(segment.first + block() * slice_length, segment.last);
  return {first, minimum(first + slice_length, segment.last)};
}

// Calls `run(dtype)`, where `dtype.value` is a compile-time constant.
template <int D>
struct Dtype {
  static constexpr int value = D;
};
template <class Run>
TPK_DEVICE void for_dtype(int dtype, const Run& run) {
  if (dtype == kF32) return run(Dtype<kF32>{});
  if (dtype == kF16) return run(Dtype<kF16>{});
  run(Dtype<kBF16>{});
}

template <int D>
constexpr int kLanes = D == kF32 ? 4 : 8;  // elements per pack

// Converts the elements of a pack to fp32, into dst[offset], dst[offset + 1], ...
template <int D>
TPK_DEVICE void widen(float (&dst)[kVector], int offset, const Pack& pack) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned word = pack.word[i];
    if constexpr (D == kF32) {
      dst[offset + i] = bits_to_float(word);
    } else if constexpr (D == kF16) {
      dst[offset + 2 * i] = widen_f16(static_cast<unsigned short>(word));
      dst[offset + 2 * i + 1] = widen_f16(static_cast<unsigned short>(word >> 16));
    } else {
      dst[offset + 2 * i] = bits_to_float(word << 16);
      dst[offset + 2 * i + 1] = bits_to_float(word & 0xffff0000u);
    }
  }
}

template <int D, int N>
TPK_DEVICE void load(float (&dst)[N], u64 src) {
  static_assert(N == 1 || N == kVector);
  if constexpr (N == 1 && D == kF32) {
    dst[0] = *reinterpret_cast<const float*>(src);
  } else if constexpr (N == 1) {
    const auto half = *reinterpret_cast<const unsigned short*>(src);
    dst[0] = D == kF16 ? widen_f16(half) : bits_to_float(static_cast<unsigned>(half) << 16);
  } else {
#pragma unroll
    for (int offset = 0; offset < N; offset += kLanes<D>) {
      widen<D>(dst, offset,
               load_pack(reinterpret_cast<const void*>(src + offset * (16 / kLanes<D>))));
    }
  }
}

template <int D>
TPK_DEVICE unsigned short rounded(float value) {
  return D == kF16 ? round_f16(value) : round_bf16(value);
}

template <int D, int N>
TPK_DEVICE void store(u64 dst, const float (&src)[N]) {
  if constexpr (N == 1 && D == kF32) {
    *reinterpret_cast<float*>(dst) = src[0];
  } else if constexpr (N == 1) {
    *reinterpret_cast<unsigned short*>(dst) = rounded<D>(src[0]);
  } else {
#pragma unroll
    for (int offset = 0; offset < N; offset += kLanes<D>) {
      Pack pack;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (D == kF32) {
          pack.word[i] = float_to_bits(src[offset + i]);
        } else {
          pack.word[i] = rounded<D>(src[2 * i]) | static_cast<unsigned>(rounded<D>(src[2 * i + 1]))
                                                      << 16;
        }
      }
      store_pack(reinterpret_cast<void*>(dst + offset * (16 / kLanes<D>)), pack);
    }
  }
}

// `dtype` must be uniform across threads.
template <int N>
TPK_DEVICE void load_any(float (&dst)[N], u64 src, int dtype) {
  for_dtype(dtype, [&](auto constant) { load<constant.value>(dst, src); });
}

template <int N>
TPK_DEVICE void store_any(u64 dst, const float (&src)[N], int dtype) {
  for_dtype(dtype, [&](auto constant) { store<constant.value>(dst, src); });
}

template <int N>
TPK_DEVICE void add(float (&acc)[N], const float (&addend)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) acc[i] += addend[i];
}

// Computes acc += bias + residual for N elements starting at i.
template <int N>
TPK_DEVICE void add_epilogue(float (&acc)[N], u64 begin, u64 i, const Epilogue& epilogue) {
  if (epilogue.bias != nullptr) {
    u64 column = (begin + i) % epilogue.cols;
    const int dtype = epilogue.bias_dtype;
    const u64 first = to_address(epilogue.bias), size = dtype_size(dtype);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      float value[1];
      load_any(value, first + column * size, dtype);
      acc[k] += value[0];
      column = column + 1 == epilogue.cols ? 0 : column + 1;
    }
  }
  if (epilogue.residual != nullptr) {
    float next[N];
    const int dtype = epilogue.residual_dtype;
    load_any(next, to_address(epilogue.residual) + i * dtype_size(dtype), dtype);
    add(acc, next);
  }
}

// Computes out[i] = round(acc + bias + residual) for N elements starting at i.
template <int N>
TPK_DEVICE void store_sum(float (&acc)[N], u64 out, u64 begin, u64 i, const Epilogue& epilogue) {
  add_epilogue(acc, begin, i, epilogue);
  store_any(out + i * dtype_size(epilogue.out_dtype), acc, epilogue.out_dtype);
}

// Computes acc = sum over r of partials(r)[i] for N elements starting at i. `partials(r)` is the
// address of the first element of rank r.
template <int D, int N, class Partials>
TPK_DEVICE void accumulate(float (&acc)[N], const Partials& partials, int world, u64 i) {
  load<D>(acc, partials(0) + i * dtype_size(D));
#pragma unroll 4
  for (int r = 1; r < world; ++r) {
    float next[N];
    load<D>(next, partials(r) + i * dtype_size(D));
    add(acc, next);
  }
}

// Computes out[i] = round(sum over r of partials(r)[i] + bias + residual) for N elements starting
// at i.
template <int D, int N, class Partials>
TPK_DEVICE void sum_elements(const Partials& partials, int world, u64 out, u64 begin, u64 i,
                             const Epilogue& epilogue) {
  float acc[N];
  accumulate<D>(acc, partials, world, i);
  store_sum(acc, out, begin, i, epilogue);
}

// Computes `sum_elements` for elements [first, last), divided among `num_workers` threads. `first`
// is a multiple of kVector.
template <int D, class Partials>
TPK_DEVICE void sum_range(const Partials& partials, int world, u64 out, u64 begin, u64 first,
                          u64 last, const Epilogue& epilogue, u64 worker, u64 num_workers) {
  bool vectorized = aligned(out) && aligned(to_address(epilogue.residual));
  for (int r = 0; r < world; ++r) vectorized = vectorized && aligned(partials(r));
  const u64 vectors = vectorized && first < last ? (last - first) / kVector : 0;
  for (u64 v = worker; v < vectors; v += num_workers) {
    sum_elements<D, kVector>(partials, world, out, begin, first + v * kVector, epilogue);
  }
#pragma unroll 1
  for (u64 i = first + vectors * kVector + worker; i < last; i += num_workers) {
    sum_elements<D, 1>(partials, world, out, begin, i, epilogue);
  }
}

// Copies full units of T and returns the number of bytes copied.
template <class T>
TPK_DEVICE u64 copy_units(u64 dst, u64 src, u64 bytes) {
  if (((dst | src) % sizeof(T)) != 0) return 0;
  const u64 units = bytes / sizeof(T);
#pragma unroll 1
  for (u64 i = thread(); i < units; i += threads()) {
    reinterpret_cast<T*>(dst)[i] = reinterpret_cast<const T*>(src)[i];
  }
  return units * sizeof(T);
}

// Copies with all threads of a block. A barrier must precede reads of the copy by other threads.
TPK_DEVICE void copy_block(u64 dst, u64 src, u64 bytes) {
  constexpr u64 kBatch = 4;  // packs in flight per thread
  u64 done = 0;
  if (aligned(dst | src)) {
    const u64 packs = bytes / sizeof(Pack), stride = threads();
    for (u64 i = thread(); i < packs; i += kBatch * stride) {
      Pack batch[kBatch];
#pragma unroll
      for (u64 k = 0; k < kBatch; ++k) {
        if (i + k * stride < packs) {
          batch[k] =
              load_pack(reinterpret_cast<const void*>(src + (i + k * stride) * sizeof(Pack)));
        }
      }
#pragma unroll
      for (u64 k = 0; k < kBatch; ++k) {
        if (i + k * stride < packs) {
          store_pack(reinterpret_cast<void*>(dst + (i + k * stride) * sizeof(Pack)), batch[k]);
        }
      }
    }
    done = packs * sizeof(Pack);
  }
  done += copy_units<unsigned>(dst + done, src + done, bytes - done);
  done += copy_units<unsigned short>(dst + done, src + done, bytes - done);
  copy_units<unsigned char>(dst + done, src + done, bytes - done);
}

}  // namespace tpkernels::cuda
