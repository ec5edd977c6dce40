// AVX2 + F16C + FMA: 8 floats per vector.
#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "host/vector_scalar.h"

// Only the code from here to the end of the file is compiled for AVX2. If inline functions of
// shared headers were, the linker could pick those copies for other translation units.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c,fma")
#endif

namespace tpkernels::host {
namespace avx2 {

constexpr std::size_t kLanes = 8;
using Vec = __m256;

inline __m128i load_halves(const void* from) {
  return _mm_loadu_si128(static_cast<const __m128i*>(from));
}

template <DType D>
inline Vec load_vec(const void* from) {
  if constexpr (D == DType::kF32) {
    return _mm256_loadu_ps(static_cast<const float*>(from));
  } else if constexpr (D == DType::kF16) {
    return _mm256_cvtph_ps(load_halves(from));
  } else {
    const __m256i wide = _mm256_cvtepu16_epi32(load_halves(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
}

// scalar::bf16_of on eight lanes; the result is the upper half of each.
inline __m256i round_to_bf16(Vec value) {
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, quiet, nan);
}

inline __m128i to_bf16(Vec value) {
  const __m256i high = _mm256_srli_epi32(round_to_bf16(value), 16);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08));
}

template <DType D>
inline void store_vec(void* to, Vec value) {
  if constexpr (D == DType::kF32) {
    _mm256_storeu_ps(static_cast<float*>(to), value);
  } else {
    const __m128i halves =
        D == DType::kF16 ? _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT) : to_bf16(value);
    _mm_storeu_si128(static_cast<__m128i*>(to), halves);
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
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(~0xffff)))};
  } else {
    return {load_vec<D>(from), load_vec<D>(from + kLanes * size_of(D))};
  }
}

template <DType D>
inline void store_pair(std::byte* to, Pair pair) {
  if constexpr (D == DType::kBF16) {
    const __m256i even = _mm256_srli_epi32(round_to_bf16(pair.first), 16);
    const __m256i odd = _mm256_and_si256(round_to_bf16(pair.second), _mm256_set1_epi32(~0xffff));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_or_si256(even, odd));
  } else {
    store_vec<D>(to, pair.first);
    store_vec<D>(to + kLanes * size_of(D), pair.second);
  }
}

inline Vec add_vec(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec mul_vec(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec set_vec(float value) { return _mm256_set1_ps(value); }
inline Vec load_acc(const float* from) { return _mm256_loadu_ps(from); }
inline void store_acc(float* to, Vec value) { _mm256_storeu_ps(to, value); }

#include "host/vector_loops.inc"

template <DType D>
using Factor = Pair;

template <DType D>
constexpr std::size_t kStep = 2 * kLanes;

// 8 sums and 3 pairs of factors, of 16 registers.
template <DType D>
constexpr std::size_t kTileRows = 2;

template <DType D>
inline Pair load_factor(const std::byte* from) {
  return load_pair<D>(from);
}

template <DType D>
inline Vec multiply_add(Vec sum, Pair x, Pair w) {
  sum = _mm256_fmadd_ps(x.first, w.first, sum);
  return _mm256_fmadd_ps(x.second, w.second, sum);
}

inline __m128 half(Vec value) {
  return _mm_add_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
}

inline void add_lanes(Vec a, Vec b, Vec c, Vec d, float* to) {
  __m128 first = half(a), second = half(b), third = half(c), fourth = half(d);
  _MM_TRANSPOSE4_PS(first, second, third, fourth);
  _mm_storeu_ps(to, _mm_add_ps(_mm_add_ps(first, second), _mm_add_ps(third, fourth)));
}

#include "host/few_rows.inc"

void stream(void* dst, const void* src, std::size_t bytes) {
  stream_lines(dst, src, bytes, 32, [](std::byte* to, const std::byte* from) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  });
  _mm_sfence();
}

constexpr std::array<Multiply, 3> kFewRows = {multiply_few_rows<DType::kF32>,
                                              multiply_few_rows<DType::kF16>,
                                              multiply_few_rows<DType::kBF16>};
constexpr VectorUnit kUnit = make_unit("avx2", stream, kFewRows, 8);

}  // namespace avx2

const VectorUnit& avx2_unit() { return avx2::kUnit; }

}  // namespace tpkernels::host

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // __x86_64__
