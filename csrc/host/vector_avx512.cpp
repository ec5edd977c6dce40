// AVX-512 (F, BW, VL, DQ): 16 floats per vector. Conversions to bf16 use integer rounding, because
// the instruction of AVX512_BF16 flushes subnormals.
#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <utility>

#include "host/vector_scalar.h"

// See vector_avx2.cpp.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))), \
                             apply_to = function)
#else
// In GCC 12's own header (PR 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq")
#endif

namespace tpkernels::host {
namespace avx512 {

constexpr std::size_t kLanes = 16;
using Vec = __m512;

inline __m256i load_halves(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}

template <DType D>
inline Vec load_vec(const void* from) {
  if constexpr (D == DType::kF32) {
    return _mm512_loadu_ps(from);
  } else if constexpr (D == DType::kF16) {
    return _mm512_cvtph_ps(load_halves(from));
  } else {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_halves(from)), 16));
  }
}

// scalar::bf16_of on sixteen lanes; the result is the upper half of each.
inline __m512i round_to_bf16(Vec value) {
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  return _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q), quiet);
}

inline __m256i to_bf16(Vec value) {
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(round_to_bf16(value), 16));
}

template <DType D>
inline void store_vec(void* to, Vec value) {
  if constexpr (D == DType::kF32) {
    _mm512_storeu_ps(to, value);
  } else {
    const __m256i halves =
        D == DType::kF16 ? _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT) : to_bf16(value);
    _mm256_storeu_si256(static_cast<__m256i*>(to), halves);
  }
}

struct Pair {
  Vec first;
  Vec second;
};

// A bf16 pair is the even and the odd elements: a shift and a mask separate them, where the natural
// order would need shuffles.
template <DType D>
inline Pair load_pair(const std::byte* from) {
  if constexpr (D == DType::kBF16) {
    const __m512i both = _mm512_loadu_si512(from);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(both, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(~0xffff)))};
  } else {
    return {load_vec<D>(from), load_vec<D>(from + kLanes * size_of(D))};
  }
}

template <DType D>
inline void store_pair(std::byte* to, Pair pair) {
  if constexpr (D == DType::kBF16) {
    const __m512i even = _mm512_srli_epi32(round_to_bf16(pair.first), 16);
    const __m512i odd = _mm512_and_si512(round_to_bf16(pair.second), _mm512_set1_epi32(~0xffff));
    _mm512_storeu_si512(to, _mm512_or_si512(even, odd));
  } else {
    store_vec<D>(to, pair.first);
    store_vec<D>(to + kLanes * size_of(D), pair.second);
  }
}

inline Vec add_vec(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec mul_vec(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec set_vec(float value) { return _mm512_set1_ps(value); }
inline Vec load_acc(const float* from) { return _mm512_loadu_ps(from); }
inline void store_acc(float* to, Vec value) { _mm512_storeu_ps(to, value); }

// clang-format off: each needs those before it
#include "host/vector_loops.inc"
#include "host/product_avx512.inc"
#include "host/few_rows.inc"
#include "host/panels.inc"
#include "host/packing_avx512.inc"
// clang-format on

void stream(void* dst, const void* src, std::size_t bytes) {
  auto* to = static_cast<char*>(dst);
  const auto* from = static_cast<const char*>(src);
  const std::size_t head = (64 - reinterpret_cast<std::uintptr_t>(to) % 64) % 64;
  if (bytes < head + 64) {
    std::memcpy(to, from, bytes);
    return;
  }
  std::memcpy(to, from, head);
  std::size_t i = head;
  for (; i + 64 <= bytes; i += 64) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
  }
  _mm_sfence();
  std::memcpy(to + i, from + i, bytes - i);
}

constexpr std::array<Multiply, 3> kFewRows = {multiply_few_rows<DType::kF32>,
                                              multiply_few_rows<DType::kF16>,
                                              multiply_few_rows<DType::kBF16>};

constexpr VectorUnit make_avx512_unit() {
  VectorUnit unit = make_unit("avx512", stream, kFewRows, 8);
  constexpr int kAt = static_cast<int>(DType::kF32);
  unit.panels[kAt] = multiply_panels<DType::kF32>;
  unit.columns[kAt] = multiply_panels<DType::kF32, FromColumns<DType::kF32>>;
  unit.rows[kAt] = multiply_panels<DType::kF32, FromRows<DType::kF32>>;
  return unit;
}

constexpr VectorUnit kUnit = make_avx512_unit();

}  // namespace avx512

const VectorUnit& avx512_unit() { return avx512::kUnit; }

}  // namespace tpkernels::host

#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")
#endif

namespace tpkernels::host {
// The same with the dot products of AVX512_BF16, which take a subnormal for zero, as oneDNN's do.
namespace avx512_bf16 {

using avx512::add_block;
using avx512::add_lanes;
using avx512::add_vec;
using avx512::kLanes;
using avx512::load_acc;
using avx512::set_vec;
using avx512::store_acc;
using avx512::store_block;
using avx512::store_vec;
using avx512::Vec;

template <DType D>
using Factor = __m512bh;

template <DType D>
constexpr std::size_t kStep = 32;

template <DType D>
constexpr std::size_t kTileRows = 6;

template <DType D>
inline __m512bh load_factor(const std::byte* from) {
  return reinterpret_cast<__m512bh>(_mm512_loadu_si512(from));
}

template <DType D>
inline Vec multiply_add(Vec sum, __m512bh x, __m512bh w) {
  return _mm512_dpbf16_ps(sum, x, w);
}

inline __m512bh broadcast(const std::byte* from) {
  int pair;
  std::memcpy(&pair, from, sizeof(pair));
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
}

// The dot products give no subnormals, so the instruction rounds as store_vec does.
template <DType D>
inline void store_sum(void* to, Vec sum) {
  if constexpr (D == DType::kBF16) {
    _mm256_storeu_si256(static_cast<__m256i*>(to),
                        reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(sum)));
  } else {
    store_vec<D>(to, sum);
  }
}

#include "host/few_rows.inc"
#include "host/panels.inc"

constexpr VectorUnit make_bf16_unit() {
  VectorUnit unit = avx512::kUnit;
  unit.name = "avx512_bf16";
  constexpr int kAt = static_cast<int>(DType::kBF16);
  unit.few_rows[kAt] = multiply_few_rows<DType::kBF16>;
  unit.most_few_rows[kAt] = 16;
  unit.panels[kAt] = multiply_panels<DType::kBF16>;
  unit.columns[kAt] = multiply_panels<DType::kBF16, avx512::FromColumns<DType::kBF16>>;
  unit.rows[kAt] = multiply_panels<DType::kBF16, avx512::FromRows<DType::kBF16>>;
  return unit;
}

constexpr VectorUnit kUnit = make_bf16_unit();

}  // namespace avx512_bf16

const VectorUnit& avx512_bf16_unit() { return avx512_bf16::kUnit; }

}  // namespace tpkernels::host

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // __x86_64__
