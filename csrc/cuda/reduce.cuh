// Copies and sums by the threads of a block: 16 bytes at a time, and scalars where alignment or
// size rules that out.
//
// Numerics: partials are summed in fp32 in rank order, then bias and residual are added, then the
// sum is rounded once: bit for bit the result of sum_partials in csrc/host/vector.h.
#pragma once

#include "cuda/device.cuh"

namespace tpkernels::cuda {

constexpr int kVector = 8;     // elements that a thread sums at a time
constexpr u64 kPartUnit = 64;  // elements; a multiple of kVector and of a cache line

struct Range {
  u64 first;
  u64 last;
};

TPK_DEVICE bool aligned(u64 address) { return address % sizeof(Pack) == 0; }
TPK_DEVICE u64 address_of(const void* pointer) { return reinterpret_cast<u64>(pointer); }
TPK_DEVICE u64 least(u64 a, u64 b) { return a < b ? a : b; }
TPK_DEVICE u64 size_of(int dtype) { return dtype == kF32 ? 4 : 2; }

// This block's part of a segment. Segments of at most `length` elements are all split at the same
// offsets.
TPK_DEVICE Range part_in(Range segment, u64 length) {
  const u64 units = (length + kPartUnit - 1) / kPartUnit;
  const u64 part = (units + blocks() - 1) / blocks() * kPartUnit;
  const u64 first = least(segment.first + block() * part, segment.last);
  return {first, least(first + part, segment.last)};
}

// Calls `run` with a dtype that is known at compile time: as `dtype.value`.
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
constexpr int kLanes = D == kF32 ? 4 : 8;  // elements of a pack

// The elements of a pack, from to[at] on.
template <int D>
TPK_DEVICE void widen(float (&to)[kVector], int at, const Pack& pack) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned word = pack.word[i];
    if constexpr (D == kF32) {
      to[at + i] = float_of(word);
    } else if constexpr (D == kF16) {
      to[at + 2 * i] = widen_f16(static_cast<unsigned short>(word));
      to[at + 2 * i + 1] = widen_f16(static_cast<unsigned short>(word >> 16));
    } else {
      to[at + 2 * i] = float_of(word << 16);
      to[at + 2 * i + 1] = float_of(word & 0xffff0000u);
    }
  }
}

template <int D, int N>
TPK_DEVICE void load(float (&to)[N], u64 from) {
  static_assert(N == 1 || N == kVector);
  if constexpr (N == 1 && D == kF32) {
    to[0] = *reinterpret_cast<const float*>(from);
  } else if constexpr (N == 1) {
    const auto half = *reinterpret_cast<const unsigned short*>(from);
    to[0] = D == kF16 ? widen_f16(half) : float_of(static_cast<unsigned>(half) << 16);
  } else {
#pragma unroll
    for (int at = 0; at < N; at += kLanes<D>) {
      widen<D>(to, at, load_pack(reinterpret_cast<const void*>(from + at * (16 / kLanes<D>))));
    }
  }
}

template <int D>
TPK_DEVICE unsigned short rounded(float value) {
  return D == kF16 ? round_f16(value) : round_bf16(value);
}

template <int D, int N>
TPK_DEVICE void store(u64 to, const float (&from)[N]) {
  if constexpr (N == 1 && D == kF32) {
    *reinterpret_cast<float*>(to) = from[0];
  } else if constexpr (N == 1) {
    *reinterpret_cast<unsigned short*>(to) = rounded<D>(from[0]);
  } else {
#pragma unroll
    for (int at = 0; at < N; at += kLanes<D>) {
      Pack pack;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (D == kF32) {
          pack.word[i] = bits_of(from[at + i]);
        } else {
          pack.word[i] =
              rounded<D>(from[2 * i]) | static_cast<unsigned>(rounded<D>(from[2 * i + 1])) << 16;
        }
      }
      store_pack(reinterpret_cast<void*>(to + at * (16 / kLanes<D>)), pack);
    }
  }
}

// `dtype` must be the same for all threads.
template <int N>
TPK_DEVICE void load_any(float (&to)[N], u64 from, int dtype) {
  for_dtype(dtype, [&](auto known) { load<known.value>(to, from); });
}

template <int N>
TPK_DEVICE void store_any(u64 to, const float (&from)[N], int dtype) {
  for_dtype(dtype, [&](auto known) { store<known.value>(to, from); });
}

template <int N>
TPK_DEVICE void add(float (&to)[N], const float (&more)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] += more[i];
}

// acc += bias + residual for N elements starting at i.
template <int N>
TPK_DEVICE void add_epilogue(float (&acc)[N], u64 begin, u64 i, const Epilogue& epilogue) {
  if (epilogue.bias != nullptr) {
    u64 column = (begin + i) % epilogue.cols;
    const int dtype = epilogue.bias_dtype;
    const u64 first = address_of(epilogue.bias), size = size_of(dtype);
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
    load_any(next, address_of(epilogue.residual) + i * size_of(dtype), dtype);
    add(acc, next);
  }
}

// out[i] = round(acc + bias + residual) for N elements starting at i.
template <int N>
TPK_DEVICE void store_sum(float (&acc)[N], u64 out, u64 begin, u64 i, const Epilogue& epilogue) {
  add_epilogue(acc, begin, i, epilogue);
  store_any(out + i * size_of(epilogue.out_dtype), acc, epilogue.out_dtype);
}

// acc = sum over r of partials(r)[i] for N elements starting at i. `partials(r)` is the address of
// the first element of rank r.
template <int D, int N, class Partials>
TPK_DEVICE void add_up(float (&acc)[N], const Partials& partials, int world, u64 i) {
  load<D>(acc, partials(0) + i * size_of(D));
#pragma unroll 4
  for (int r = 1; r < world; ++r) {
    float next[N];
    load<D>(next, partials(r) + i * size_of(D));
    add(acc, next);
  }
}

// out[i] = round(sum over r of partials(r)[i] + bias + residual) for N elements starting at i.
template <int D, int N, class Partials>
TPK_DEVICE void sum_elements(const Partials& partials, int world, u64 out, u64 begin, u64 i,
                             const Epilogue& epilogue) {
  float acc[N];
  add_up<D>(acc, partials, world, i);
  store_sum(acc, out, begin, i, epilogue);
}

// The same for elements [first, last), split among `lanes` lanes; `first` is a multiple of kVector.
template <int D, class Partials>
TPK_DEVICE void sum_range(const Partials& partials, int world, u64 out, u64 begin, u64 first,
                          u64 last, const Epilogue& epilogue, u64 lane, u64 lanes) {
  bool vectorized = aligned(out) && aligned(address_of(epilogue.residual));
  for (int r = 0; r < world; ++r) vectorized = vectorized && aligned(partials(r));
  const u64 vectors = vectorized && first < last ? (last - first) / kVector : 0;
  for (u64 v = lane; v < vectors; v += lanes) {
    sum_elements<D, kVector>(partials, world, out, begin, first + v * kVector, epilogue);
  }
#pragma unroll 1
  for (u64 i = first + vectors * kVector + lane; i < last; i += lanes) {
    sum_elements<D, 1>(partials, world, out, begin, i, epilogue);
  }
}

// Copies as much as fits whole units of T; returns the number of bytes copied.
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

// Copies with all threads of a block. Sync the block before others read the copy.
TPK_DEVICE void copy_block(u64 dst, u64 src, u64 bytes) {
  constexpr u64 kAtOnce = 4;  // packs in flight per thread
  u64 done = 0;
  if (aligned(dst | src)) {
    const u64 packs = bytes / sizeof(Pack), stride = threads();
    for (u64 i = thread(); i < packs; i += kAtOnce * stride) {
      Pack held[kAtOnce];
#pragma unroll
      for (u64 k = 0; k < kAtOnce; ++k) {
        if (i + k * stride < packs) {
          held[k] = load_pack(reinterpret_cast<const void*>(src + (i + k * stride) * sizeof(Pack)));
        }
      }
#pragma unroll
      for (u64 k = 0; k < kAtOnce; ++k) {
        if (i + k * stride < packs) {
          store_pack(reinterpret_cast<void*>(dst + (i + k * stride) * sizeof(Pack)), held[k]);
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
