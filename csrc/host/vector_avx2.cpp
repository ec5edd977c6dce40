// AVX2 + F16C + FMA: 8 floats per vector.
#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "host/vector_scalar.h"

// Only the code below is compiled for AVX2. If inline functions of shared headers were compiled for
// AVX2, the linker could select those copies for other translation units.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c,fma")
#endif

namespace tpkernels::host {
namespace avx2 {

constexpr std::size_t kLanes = 8;

#include "host/vector_loops.inc"

inline Vec load_f16(const void* from) { return _mm256_cvtph_ps(load_bits<__m128i>(from)); }
inline void store_f16(void* to, Vec value) {
  store_bits(to, _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}
inline UInts load_u16(const void* from) {
  return reinterpret_cast<UInts>(_mm256_cvtepu16_epi32(load_bits<__m128i>(from)));
}
inline void store_u16(void* to, UInts ints) {
  const auto ints32 = reinterpret_cast<__m256i>(ints);
  const __m256i ints16 = _mm256_permute4x64_epi64(_mm256_packus_epi32(ints32, ints32), 0x08);
  store_bits(to, _mm256_castsi256_si128(ints16));
}

inline Vec fused_multiply_add(Vec x, Vec w, Vec sum) { return _mm256_fmadd_ps(x, w, sum); }

// The 16 registers hold 8 sums and 3 factors. A 16-bit factor is a pair of vectors.
template <DType D>
constexpr std::size_t kTileRows = 2;

#include "host/factors.inc"

inline __m128 half(Vec value) {
  return _mm_add_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
}

inline void add_lanes(Vec a, Vec b, Vec c, Vec d, float* to) {
  __m128 first = half(a), second = half(b), third = half(c), fourth = half(d);
  _MM_TRANSPOSE4_PS(first, second, third, fourth);
  _mm_storeu_ps(to, _mm_add_ps(_mm_add_ps(first, second), _mm_add_ps(third, fourth)));
}

#include "host/few_rows.inc"
#include "host/panels.inc"
#include "host/widened.inc"

using Ints = std::int32_t __attribute__((vector_size(4 * kLanes)));
constexpr int kOffset = 0;
// No element of a row is -128. So the sum of two products fits 16 bits, and an element can be
// negated.
inline Ints add_dots(Ints sums, const std::byte* w, const std::uint8_t* x) {
  const __m256i factors = load_bits<__m256i>(w), rows = _mm256_set1_epi32(load_bits<int>(x));
  const __m256i pairs =
      _mm256_maddubs_epi16(_mm256_abs_epi8(factors), _mm256_sign_epi8(rows, factors));
  return sums + reinterpret_cast<Ints>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

#include "host/int8.inc"

inline Vec exact_multiply_add(Vec x, Vec w, Vec sum) { return _mm256_fmadd_ps(x, w, sum); }
inline void load_words(const std::byte* const (&rows)[kLanes], std::size_t offset,
                       UInts (&words)[8]) {
  for (int half = 0; half < 2; ++half) {
    __m256 a[4];  // lane 4 * l + j of a[i]: word j of row 4 * l + i
    for (int i = 0; i < 4; ++i) {
      const auto load = [&](int row) {
        const std::byte* const from = rows[row] + offset + static_cast<std::size_t>(16 * half);
        return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(from));
      };
      a[i] = _mm256_blend_ps(load(i), load(i + 4), 0xf0);
    }
    const __m256 low[] = {_mm256_unpacklo_ps(a[0], a[1]), _mm256_unpacklo_ps(a[2], a[3])};
    const __m256 high[] = {_mm256_unpackhi_ps(a[0], a[1]), _mm256_unpackhi_ps(a[2], a[3])};
    UInts* const to = words + 4 * half;
    to[0] = reinterpret_cast<UInts>(_mm256_shuffle_ps(low[0], low[1], 0x44));
    to[1] = reinterpret_cast<UInts>(_mm256_shuffle_ps(low[0], low[1], 0xee));
    to[2] = reinterpret_cast<UInts>(_mm256_shuffle_ps(high[0], high[1], 0x44));
    to[3] = reinterpret_cast<UInts>(_mm256_shuffle_ps(high[0], high[1], 0xee));
  }
}

#include "host/attention.inc"

void stream(void* dst, const void* src, std::size_t bytes) {
  stream_lines(dst, src, bytes, 32, [](std::byte* to, const std::byte* from) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  });
  _mm_sfence();
}

constexpr std::array<MatmulFn, 3> kFewRowsKernels = {multiply_few_rows<DType::kF32>,
                                                     multiply_few_rows<DType::kF16>,
                                                     multiply_few_rows<DType::kBF16>};
constexpr VectorUnit kUnit =
    make_unit("avx2", stream, kPanels, kInt8, kAttention, kFewRowsKernels, 8);

}  // namespace avx2

const VectorUnit& avx2_unit() { return avx2::kUnit; }

}  // namespace tpkernels::host

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // __x86_64__
