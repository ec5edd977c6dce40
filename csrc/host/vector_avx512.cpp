// AVX-512 (F, BW, VL, DQ): 16 floats per vector. Conversions to bf16 round with integers, because
// the AVX512_BF16 instruction flushes subnormals.
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

// See vector_avx2.cpp.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))), \
                             apply_to = function)
#else
// False positives in a header of GCC 12 (PR 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq")
#endif

namespace tpkernels::host {
namespace avx512 {

constexpr std::size_t kLanes = 16;

#include "host/vector_loops.inc"

inline Vec load_f16(const void* from) { return _mm512_cvtph_ps(load_bits<__m256i>(from)); }
inline void store_f16(void* to, Vec value) {
  store_bits(to, _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}
inline UInts load_u16(const void* from) {
  return reinterpret_cast<UInts>(_mm512_cvtepu16_epi32(load_bits<__m256i>(from)));
}
inline void store_u16(void* to, UInts ints) {
  store_bits(to, _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(ints)));
}

inline Vec fused_multiply_add(Vec x, Vec w, Vec sum) { return _mm512_fmadd_ps(x, w, sum); }

// The 32 registers hold 24 sums and 7 factors (fp32), or 16 sums and 5 pairs (16-bit dtypes).
template <DType D>
constexpr std::size_t kTileRows = D == DType::kF32 ? 6 : 4;

#include "host/factors.inc"

inline __m128 quarter(Vec value) {
  const __m256 half =
      _mm256_add_ps(_mm512_castps512_ps256(value), _mm512_extractf32x8_ps(value, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

inline void add_lanes(Vec a, Vec b, Vec c, Vec d, float* to) {
  __m128 first = quarter(a), second = quarter(b), third = quarter(c), fourth = quarter(d);
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
  const __m512i factors = load_bits<__m512i>(w), rows = _mm512_set1_epi32(load_bits<int>(x));
  const __m512i signs =
      _mm512_mask_sub_epi8(rows, _mm512_movepi8_mask(factors), _mm512_setzero_si512(), rows);
  const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(factors), signs);
  return sums + reinterpret_cast<Ints>(_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}

#include "host/int8.inc"

// Two sources for panels.inc that pack plain weights on the fly. A group is 4 bytes of K for every
// dtype.

// Mask of the first `count` of 16 lanes.
inline __mmask16 first_lanes(std::size_t count) {
  return static_cast<__mmask16>(count >= 16 ? 0xffffu : (1u << count) - 1);
}

inline std::size_t remaining(std::size_t total, std::size_t begin) {
  return total > begin ? total - begin : 0;
}

// Prefetch distances for plain weights: cache lines of a column, or groups of rows.
constexpr std::size_t kLinesAhead = 4;
constexpr std::size_t kGroupsAhead = 8;

inline void transpose(__m512i (&lines)[16]) {
  __m512i pairs[16], fours[16], eights[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(lines[i], lines[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(lines[i], lines[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    fours[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
    fours[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
    fours[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
    fours[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
  }
  for (int i = 0; i < 16; i += 8) {
    for (int j = i; j < i + 4; ++j) {
      eights[j] = _mm512_shuffle_i32x4(fours[j], fours[j + 4], 0x88);
      eights[j + 4] = _mm512_shuffle_i32x4(fours[j], fours[j + 4], 0xdd);
    }
  }
  for (int i = 0; i < 8; ++i) {
    lines[i] = _mm512_shuffle_i32x4(eights[i], eights[i + 8], 0x88);
    lines[i + 8] = _mm512_shuffle_i32x4(eights[i], eights[i + 8], 0xdd);
  }
}

template <DType D>
struct FromColumns {
  static const std::byte* groups(const Matmul& gemm, std::size_t first, std::size_t begin_group,
                                 std::size_t count, std::byte* out) {
    constexpr std::size_t kSquare = 16;
    const std::size_t columns = remaining(gemm.columns, first);
    const std::size_t bytes = gemm.k * size_of(D);
    const auto* const w = static_cast<const std::byte*>(gemm.w) + first * gemm.w_pitch;
    for (std::size_t group = 0; group < count; group += kSquare) {
      const std::size_t begin = (begin_group + group) * kGroupBytes;
      const std::size_t num_bytes = std::min<std::size_t>(remaining(bytes, begin), 64);
      const __mmask64 column_mask = num_bytes == 64 ? ~0ull : (1ull << num_bytes) - 1;
      for (std::size_t column = 0; column < Matmul::kPanelColumns; column += kSquare) {
        __m512i lines[kSquare];
        for (std::size_t i = 0; i < kSquare; ++i) {
          const std::byte* const from = w + (column + i) * gemm.w_pitch + begin;
          _mm_prefetch(reinterpret_cast<const char*>(from + kLinesAhead * 64), _MM_HINT_T0);
          lines[i] = _mm512_maskz_loadu_epi8(column + i < columns ? column_mask : 0, from);
        }
        transpose(lines);
        for (std::size_t i = 0; i < std::min(kSquare, count - group); ++i) {
          _mm512_store_si512(out + (group + i) * kPanelGroupBytes + column * kGroupBytes, lines[i]);
        }
      }
    }
    return out;
  }
};

template <DType D>
struct FromRows {
  static const std::byte* groups(const Matmul& gemm, std::size_t first, std::size_t begin_group,
                                 std::size_t count, std::byte* out) {
    const std::size_t columns = remaining(gemm.columns, first);
    const auto* const w = static_cast<const std::byte*>(gemm.w) + first * size_of(D);
    constexpr std::size_t kRows = kGroupBytes / size_of(D);  // rows of a group
    for (std::size_t group = 0; group < count; ++group) {
      const std::size_t row = (begin_group + group) * kRows;
      const std::byte* const from = w + row * gemm.w_pitch;
      for (std::size_t column = 0; column < Matmul::kPanelColumns; column += kLanes) {
        const std::byte* const lanes = from + column * size_of(D);
        const __mmask16 mask = first_lanes(remaining(columns, column));
        for (std::size_t i = 0; i < kRows; ++i) {
          _mm_prefetch(
              reinterpret_cast<const char*>(lanes + (kGroupsAhead * kRows + i) * gemm.w_pitch),
              _MM_HINT_T0);
        }
        __m512i packed;
        if constexpr (D == DType::kF32) {
          packed = _mm512_maskz_loadu_epi32(mask, lanes);
        } else {
          const __mmask16 second = row + 1 < gemm.k ? mask : 0;
          const __m256i low = _mm256_maskz_loadu_epi16(mask, lanes);
          const __m256i high = _mm256_maskz_loadu_epi16(second, lanes + gemm.w_pitch);
          packed = _mm512_or_si512(_mm512_cvtepu16_epi32(low),
                                   _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
        }
        _mm512_store_si512(out + group * kPanelGroupBytes + column * kGroupBytes, packed);
      }
    }
    return out;
  }
};

void stream(void* dst, const void* src, std::size_t bytes) {
  stream_lines(dst, src, bytes, 64, [](std::byte* to, const std::byte* from) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
  });
  _mm_sfence();
}

inline Vec exact_multiply_add(Vec x, Vec w, Vec sum) { return _mm512_fmadd_ps(x, w, sum); }
inline void load_words(const std::byte* const (&rows)[kLanes], std::size_t offset,
                       UInts (&words)[8]) {
  for (int half = 0; half < 2; ++half) {
    __m512i a[4];  // lane 4 * l + j of a[i]: word j of row 4 * l + i
    for (int i = 0; i < 4; ++i) {
      const auto load = [&](int row) {
        return load_bits<__m128i>(rows[row] + offset + static_cast<std::size_t>(16 * half));
      };
      a[i] = _mm512_broadcast_i32x4(load(i));
      a[i] = _mm512_mask_broadcast_i32x4(a[i], 0x00f0, load(i + 4));
      a[i] = _mm512_mask_broadcast_i32x4(a[i], 0x0f00, load(i + 8));
      a[i] = _mm512_mask_broadcast_i32x4(a[i], 0xf000, load(i + 12));
    }
    const __m512i low[] = {_mm512_unpacklo_epi32(a[0], a[1]), _mm512_unpacklo_epi32(a[2], a[3])};
    const __m512i high[] = {_mm512_unpackhi_epi32(a[0], a[1]), _mm512_unpackhi_epi32(a[2], a[3])};
    UInts* const to = words + 4 * half;
    to[0] = reinterpret_cast<UInts>(_mm512_unpacklo_epi64(low[0], low[1]));
    to[1] = reinterpret_cast<UInts>(_mm512_unpackhi_epi64(low[0], low[1]));
    to[2] = reinterpret_cast<UInts>(_mm512_unpacklo_epi64(high[0], high[1]));
    to[3] = reinterpret_cast<UInts>(_mm512_unpackhi_epi64(high[0], high[1]));
  }
}

#include "host/attention.inc"

constexpr std::array<MatmulFn, 3> kFewRowsKernels = {multiply_few_rows<DType::kF32>,
                                                     multiply_few_rows<DType::kF16>,
                                                     multiply_few_rows<DType::kBF16>};

constexpr VectorUnit make_avx512_unit() {
  VectorUnit unit = make_unit("avx512", stream, kPanels, kInt8, kAttention, kFewRowsKernels, 8);
  constexpr int kIndex = static_cast<int>(DType::kF32);
  unit.columns[kIndex] = multiply_panels<DType::kF32, FromColumns<DType::kF32>>;
  unit.rows[kIndex] = multiply_panels<DType::kF32, FromRows<DType::kF32>>;
  return unit;
}

constexpr VectorUnit kUnit = make_avx512_unit();

}  // namespace avx512

const VectorUnit& avx512_unit() { return avx512::kUnit; }

}  // namespace tpkernels::host

#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")
#endif

namespace tpkernels::host {
// AVX-512 with the byte dot products of AVX512_VNNI, which interpret x as unsigned.
namespace avx512_vnni {

using avx512::add_unit;
using avx512::InPlace;
using avx512::kLanes;
using avx512::kPrefetchBytes;
using avx512::load_acc;
using avx512::load_bits;
using avx512::load_block;
using avx512::set_vec;
using avx512::store_acc;
using avx512::store_bits;
using avx512::store_nodes;
using avx512::store_row;
using avx512::tree_stack;
using avx512::TreeNode;
using avx512::UInts;
using avx512::Vec;

using Ints = avx512::Ints;
constexpr int kOffset = 128;
inline Ints add_dots(Ints sums, const std::byte* w, const std::uint8_t* x) {
  return reinterpret_cast<Ints>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sums),
                                                    _mm512_set1_epi32(load_bits<int>(x)),
                                                    load_bits<__m512i>(w)));
}

#include "host/int8.inc"

constexpr VectorUnit make_vnni_unit() {
  VectorUnit unit = avx512::kUnit;
  unit.name = "avx512_vnni";
  for (std::size_t dtype = 0; dtype < kInt8.size(); ++dtype) unit.int8[dtype] = kInt8[dtype];
  return unit;
}

constexpr VectorUnit kUnit = make_vnni_unit();

}  // namespace avx512_vnni

const VectorUnit& avx512_vnni_unit() { return avx512_vnni::kUnit; }

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
// AVX-512 with the dot products of AVX512_BF16. They treat subnormals as zero, like oneDNN.
namespace avx512_bf16 {

using avx512::add_block;
using avx512::add_lanes;
using avx512::Ints;
using avx512::kLanes;
using avx512::kOffset;
using avx512::load_acc;
using avx512::load_bits;
using avx512::multiply_int8;
using avx512::QuantisedRows;
using avx512::scaled;
using avx512::set_vec;
using avx512::store_acc;
using avx512::store_block;
using avx512::store_row;
using avx512::store_vec;
using avx512::Vec;
using avx512_vnni::kInt8;

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

template <DType D>
inline __m512bh broadcast(const std::byte* from) {
  int pair;
  std::memcpy(&pair, from, sizeof(pair));
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
}

// The dot products never return subnormals, so the instruction rounds like store_vec.
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
  VectorUnit unit = avx512_vnni::kUnit;
  unit.name = "avx512_bf16";
  constexpr int kIndex = static_cast<int>(DType::kBF16);
  unit.few_rows[kIndex] = multiply_few_rows<DType::kBF16>;
  unit.max_few_rows[kIndex] = 16;
  unit.panels[kIndex] = multiply_panels<DType::kBF16>;
  unit.columns[kIndex] = multiply_panels<DType::kBF16, avx512::FromColumns<DType::kBF16>>;
  unit.rows[kIndex] = multiply_panels<DType::kBF16, avx512::FromRows<DType::kBF16>>;
  return unit;
}

constexpr VectorUnit kUnit = make_bf16_unit();

// AMX tiles in assembly: a register number may be a template argument there.

inline void configure_tiles(std::size_t top, std::size_t bottom) {
  struct alignas(64) Configuration {  // palette 1: eight tiles of up to 16 rows of 64 bytes
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {};
  } configuration;
  const auto first = static_cast<std::uint8_t>(top);
  const auto second = static_cast<std::uint8_t>(bottom ? bottom : top);
  const std::uint8_t rows[] = {first, first, second, second, first, second, 16, 16};
  std::memcpy(configuration.rows, rows, sizeof(rows));
  asm volatile("ldtilecfg %0" : : "m"(configuration));
}
inline void release_tiles() { asm volatile("tilerelease"); }

template <int T>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(T));
}
template <int T>
inline void load_tile(const void* from, std::size_t pitch) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(pitch), "i"(T) : "memory");
}
template <int T>
inline void store_tile(void* to, std::size_t pitch) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(pitch), "i"(T) : "memory");
}
template <WeightLayout F, int C, int A, int B>
inline void multiply_tiles() {
  if constexpr (F == WeightLayout::kInt8Panels) {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
  } else {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
  }
}

constexpr MatmulFn kVectorPanels = multiply_panels<DType::kBF16>;

#include "host/tiles.inc"

constexpr VectorUnit kAmxBF16Unit = with_tiles(kUnit, "amx_bf16", true, false);
constexpr VectorUnit kAmxInt8Unit = with_tiles(kUnit, "amx_int8", false, true);
constexpr VectorUnit kAmxUnit = with_tiles(kUnit, "amx_int8", true, true);

}  // namespace avx512_bf16

const VectorUnit& avx512_bf16_unit() { return avx512_bf16::kUnit; }

}  // namespace tpkernels::host

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace tpkernels::host {

std::vector<const VectorUnit*> amx_units(bool bf16, bool int8) {
  using namespace avx512_bf16;
  std::vector<const VectorUnit*> units;
  if (bf16) units.push_back(&kAmxBF16Unit);
  if (int8) units.push_back(bf16 ? &kAmxUnit : &kAmxInt8Unit);
  return units;
}

}  // namespace tpkernels::host

#endif  // __x86_64__
