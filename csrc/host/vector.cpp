#include "host/vector.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <type_traits>
#include <utility>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "host/vector_scalar.h"

namespace tpkernels::host {

// The fallback for any processor.
namespace plain {

constexpr std::size_t kLanes = 4;

#include "host/vector_loops.inc"

using Halves = std::uint16_t __attribute__((vector_size(2 * kLanes)));

inline Vec load_f16(const void* from) {
  const auto halves = load_bits<Halves>(from);
  Vec value;
  for (std::size_t i = 0; i < kLanes; ++i) value[i] = scalar::f16_to_float(halves[i]);
  return value;
}
inline void store_f16(void* to, Vec value) {
  Halves halves;
  for (std::size_t i = 0; i < kLanes; ++i) halves[i] = scalar::float_to_f16(value[i]);
  store_bits(to, halves);
}
inline UInts load_u16(const void* from) {
  return __builtin_convertvector(load_bits<Halves>(from), UInts);
}
inline void store_u16(void* to, UInts ints) {
  store_bits(to, __builtin_convertvector(ints, Halves));
}

void stream(void* dst, const void* src, std::size_t bytes) { std::memcpy(dst, src, bytes); }

inline Vec fused_multiply_add(Vec x, Vec w, Vec sum) { return x * w + sum; }

#include "host/factors.inc"
#include "host/panels.inc"
#include "host/widened.inc"

using Ints = std::int32_t __attribute__((vector_size(4 * kLanes)));
constexpr int kOffset = 0;
inline Ints add_dots(Ints sums, const std::byte* w, const std::uint8_t* x) {
  for (std::size_t i = 0; i < 4 * kLanes; ++i) {
    sums[i / 4] += static_cast<std::int8_t>(w[i]) * static_cast<std::int8_t>(x[i % 4]);
  }
  return sums;
}

#include "host/int8.inc"

inline Vec exact_multiply_add(Vec x, Vec w, Vec sum) {
  for (std::size_t i = 0; i < kLanes; ++i) sum[i] = std::fma(x[i], w[i], sum[i]);
  return sum;
}
inline void load_words(const std::byte* const (&rows)[kLanes], std::size_t offset,
                       UInts (&words)[8]) {
  for (std::size_t word = 0; word < 8; ++word) {
    std::uint32_t lanes[kLanes];
    for (std::size_t i = 0; i < kLanes; ++i)
      lanes[i] = load_bits<std::uint32_t>(rows[i] + offset + 4 * word);
    words[word] = load_bits<UInts>(lanes);
  }
}

#include "host/attention.inc"

constexpr VectorUnit kUnit = make_unit("plain", stream, kPanels, kInt8, kAttention);

// Emulation of AMX tiles as Intel documents them. TDPBF16PS accumulates the products of the first
// and of the second elements of pairs separately, with fused multiply-add, then adds both sums.
// Subnormals are zero. TDPBSSD multiplies signed bytes.
struct Tiles {
  std::size_t rows[8];
  std::byte bytes[8][16][64];
};
thread_local Tiles tiles;

float flush_subnormals(float value) {
  return std::fabs(value) < 0x1p-126f ? std::copysign(0.0f, value) : value;
}

float get_factor(std::size_t tile, std::size_t row, std::size_t index) {
  return flush_subnormals(scalar::to_float<DType::kBF16>(tiles.bytes[tile][row] + 2 * index));
}

void configure_tiles(std::size_t top, std::size_t bottom) {
  for (const int tile : {0, 1, 4}) tiles.rows[tile] = top;
  for (const int tile : {2, 3, 5}) tiles.rows[tile] = bottom ? bottom : top;
  for (const int tile : {6, 7}) tiles.rows[tile] = 16;
}
void release_tiles() { tiles = {}; }

template <int T>
void zero_tile() {
  std::memset(tiles.bytes[T], 0, sizeof(tiles.bytes[T]));
}
template <int T>
void load_tile(const void* from, std::size_t pitch) {
  for (std::size_t row = 0; row < tiles.rows[T]; ++row) {
    std::memcpy(tiles.bytes[T][row], static_cast<const std::byte*>(from) + row * pitch, 64);
  }
}
template <int T>
void store_tile(void* to, std::size_t pitch) {
  for (std::size_t row = 0; row < tiles.rows[T]; ++row) {
    std::memcpy(static_cast<std::byte*>(to) + row * pitch, tiles.bytes[T][row], 64);
  }
}
template <WeightLayout F, int C, int A, int B>
void multiply_tiles() {
  for (std::size_t row = 0; row < tiles.rows[C]; ++row) {
    for (std::size_t column = 0; column < 16; ++column) {
      std::byte* const acc = tiles.bytes[C][row] + 4 * column;
      if constexpr (F == WeightLayout::kInt8Panels) {
        auto sum = load_bits<std::int32_t>(acc);
        for (std::size_t k = 0; k < 64; ++k) {
          sum += static_cast<std::int8_t>(tiles.bytes[A][row][k]) *
                 static_cast<std::int8_t>(tiles.bytes[B][k / 4][4 * column + k % 4]);
        }
        store_bits(acc, sum);
      } else {
        float sums[2] = {};
        for (std::size_t group = 0; group < 16; ++group) {
          for (std::size_t i = 0; i < 2; ++i) {
            const float x = get_factor(A, row, 2 * group + i);
            const float w = get_factor(B, group, 2 * column + i);
            sums[i] = flush_subnormals(std::fma(x, w, sums[i]));
          }
        }
        const float sum = flush_subnormals(sums[0] + sums[1]);
        store_bits(acc, flush_subnormals(load_bits<float>(acc) + sum));
      }
    }
  }
}

constexpr MatmulFn kVectorPanels = multiply_widened<DType::kBF16>;

#include "host/tiles.inc"

constexpr VectorUnit kTiledUnit = with_tiles(kUnit, "tiles", true, true);

}  // namespace plain

const VectorUnit& plain_unit() { return plain::kUnit; }
const VectorUnit& tiled_unit() { return plain::kTiledUnit; }

namespace {

std::atomic<const VectorUnit*> chosen{nullptr};

// Accumulators of one block: 8 KiB, a quarter of a 32 KiB L1 cache.
constexpr std::size_t kBlock = 2048;

template <class Add>
void add_bias(std::size_t begin, std::size_t count, std::size_t cols, Add&& add) {
  for (std::size_t i = 0; i < count;) {
    const std::size_t col = (begin + i) % cols;
    const std::size_t n = std::min(count - i, cols - col);
    add(i, col, n);
    i += n;
  }
}

// fp64 serves gradient checks: simple rather than fast.
void sum_fp64(void* out, const std::vector<const std::byte*>& partials, std::size_t begin,
              std::size_t count, const Epilogue& epilogue) {
  auto* to = static_cast<double*>(out);
  const auto load = [](const void* base, std::size_t i) {
    return static_cast<const double*>(base)[i];
  };
  for (std::size_t i = 0; i < count; ++i) {
    double sum = load(partials[0], i);
    for (std::size_t r = 1; r < partials.size(); ++r) sum += load(partials[r], i);
    if (epilogue.bias) sum += load(epilogue.bias, (begin + i) % epilogue.cols);
    if (epilogue.residual) sum += load(epilogue.residual, i);
    to[i] = sum;
  }
}

// fp64 RMSNorm of one row.
void normalise_fp64(const RmsNorm& norm, double* out, const double* row) {
  const auto* weight = reinterpret_cast<const double*>(norm.weight);
  double sum = 0;
  for (std::size_t i = 0; i < norm.cols; ++i) sum += row[i] * row[i];
  const double factor = 1 / std::sqrt(sum / static_cast<double>(norm.cols) + norm.eps);
  for (std::size_t i = 0; i < norm.cols; ++i) out[i] = row[i] * factor * weight[i];
}

}  // namespace

const Amx& amx() {
  static const Amx amx = []() -> Amx {
#if defined(__x86_64__) && defined(__linux__)
    unsigned a = 0, b = 0, c = 0, d = 0;
    constexpr unsigned kBF16 = 1u << 22, kTiles = 1u << 24, kInt8 = 1u << 25;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kTiles) == 0 ||
        (d & (kBF16 | kInt8)) == 0) {
      return {false, false, "the processor does not support it"};
    }
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // asm/prctl.h, Linux 5.16
    if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0) {
      return {(d & kBF16) != 0, (d & kInt8) != 0, ""};
    }
    return {false, false, std::string("arch_prctl: ") + std::strerror(errno)};
#else
    return {false, false, "not built for this system"};
#endif
  }();
  return amx;
}

namespace {

std::vector<const VectorUnit*> supported_units() {
  std::vector<const VectorUnit*> units{&plain_unit()};
#if defined(__x86_64__)
  // This torch variable limits the units as well. torch warns about unknown values.
  const char* const variable = std::getenv("ATEN_CPU_CAPABILITY");
  const std::string capability = variable == nullptr ? "" : variable;
  if (capability == "default") return units;
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") &&
      __builtin_cpu_supports("fma")) {
    units.push_back(&avx2_unit());
  }
  if (capability == "avx2") return units;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    units.push_back(&avx512_unit());
    if (__builtin_cpu_supports("avx512vnni")) units.push_back(&avx512_vnni_unit());
    if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16")) {
      units.push_back(&avx512_bf16_unit());
      for (const VectorUnit* unit : amx_units(amx().bf16, amx().int8)) units.push_back(unit);
    }
  }
#endif
  return units;
}

// [0]: units that failed the check; [1]: units that passed.
const std::array<std::vector<const VectorUnit*>, 2>& checked_units() {
  static const auto checked = [] {
    std::array<std::vector<const VectorUnit*>, 2> units;
    for (const VectorUnit* unit : supported_units()) {
      units[unit == &plain_unit() || multiplies_exactly(*unit)].push_back(unit);
    }
    return units;
  }();
  return checked;
}

}  // namespace

const std::vector<const VectorUnit*>& available_units() { return checked_units()[1]; }
const std::vector<const VectorUnit*>& failed_units() { return checked_units()[0]; }

const VectorUnit& vector_unit() {
  const VectorUnit* unit = chosen.load(std::memory_order_acquire);
  if (unit == nullptr) {
    unit = available_units().back();
    chosen.store(unit, std::memory_order_release);
  }
  return *unit;
}

const VectorUnit& find_unit(const std::string& name) {
  std::vector<const VectorUnit*> units = supported_units();
  units.push_back(&tiled_unit());
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512bf16")) {
    for (const VectorUnit* unit : amx_units(true, true)) units.push_back(unit);
  }
#endif
  std::string names;
  for (const VectorUnit* unit : units) {
    if (name == unit->name) return *unit;
    names += (names.empty() ? "" : ", ") + std::string(unit->name);
  }
  throw std::invalid_argument("vector unit '" + name +
                              "' is not available on this processor; choose from " + names);
}

void use_unit(const VectorUnit& unit) { chosen.store(&unit, std::memory_order_release); }

void sum_partials(void* out, const std::vector<const std::byte*>& partials, DType wire,
                  std::size_t begin, std::size_t count, const Epilogue& epilogue,
                  const std::vector<std::size_t>* merges) {
  const bool only_sums = !epilogue.bias && !epilogue.residual && epilogue.out_dtype == wire;
  if (partials.size() == 1 && only_sums) {
    if (out != partials[0]) std::memcpy(out, partials[0], count * size_of(wire));
    return;
  }
  if (wire == DType::kF64) {
    sum_fp64(out, partials, begin, count, epilogue);
    return;
  }
  const VectorUnit& unit = vector_unit();
  if (only_sums && !merges) {
    unit.sum[static_cast<int>(wire)](out, partials.data(), partials.size(), count);
    return;
  }
  const auto load = unit.load[static_cast<int>(wire)];
  const auto add = unit.add[static_cast<int>(wire)];
  const auto store = unit.store[static_cast<int>(epilogue.out_dtype)];
  alignas(64) float first_acc[kBlock];
  std::vector<float> more_accs;  // for nodes above the first on the stack
  const auto acc_at = [&](std::size_t depth) {
    if (depth == 0) return first_acc;
    if (more_accs.size() < depth * kBlock) more_accs.resize(depth * kBlock);
    return more_accs.data() + (depth - 1) * kBlock;
  };
  float* const acc = first_acc;
  auto* to = static_cast<std::byte*>(out);
  for (std::size_t i = 0; i < count; i += kBlock) {
    const std::size_t n = std::min(kBlock, count - i);
    std::size_t depth = 0;
    for (std::size_t p = 0; p < partials.size(); ++p) {
      const std::byte* const partial = partials[p] + i * size_of(wire);
      const std::size_t count_merges = merges ? (*merges)[p] : std::size_t{p != 0};
      if (count_merges == 0) {
        load(acc_at(depth++), partial, n);
      } else {
        add(acc_at(depth - 1), partial, n);
        for (std::size_t m = 1; m < count_merges; ++m, --depth) {
          unit.add[0](acc_at(depth - 2), acc_at(depth - 1), n);
        }
      }
    }
    if (epilogue.bias) {
      add_bias(begin + i, n, epilogue.cols,
               [&](std::size_t offset, std::size_t col, std::size_t len) {
                 unit.add[0](acc + offset, static_cast<const float*>(epilogue.bias) + col, len);
               });
    }
    if (epilogue.residual) {
      const auto* residual = static_cast<const std::byte*>(epilogue.residual);
      unit.add[static_cast<int>(epilogue.residual_dtype)](
          acc, residual + i * size_of(epilogue.residual_dtype), n);
    }
    store(to + i * size_of(epilogue.out_dtype), acc, n);
  }
}

void weighted_sum(void* out, const std::byte* const* sources, const void* weights,
                  std::size_t terms, DType dtype, std::size_t count) {
  if (dtype != DType::kF64) {
    const auto weighted_sum = vector_unit().weighted_sum[static_cast<int>(dtype)];
    weighted_sum(out, sources, static_cast<const float*>(weights), terms, count);
    return;
  }
  for (std::size_t i = 0; i < count; ++i) {
    double sum = 0;
    for (std::size_t j = 0; j < terms; ++j) {
      const auto* const row = reinterpret_cast<const double*>(sources[j]);
      sum += static_cast<const double*>(weights)[j] * row[i];
    }
    static_cast<double*>(out)[i] = sum;
  }
}

void normalise_rows(const RmsNorm& norm, const std::byte* rows, DType dtype, std::size_t first,
                    std::size_t last) {
  const std::size_t row_bytes = norm.cols * size_of(dtype);
  const VectorUnit& unit = vector_unit();
  for (std::size_t row = first; row < last; ++row) {
    const std::byte* from = rows + row * row_bytes;
    std::byte* to = norm.out + row * row_bytes;
    if (dtype == DType::kF64) {
      normalise_fp64(norm, reinterpret_cast<double*>(to), reinterpret_cast<const double*>(from));
      continue;
    }
    const auto d = static_cast<int>(dtype);
    const float mean = unit.sum_squares[d](from, norm.cols) / static_cast<float>(norm.cols);
    const float factor = 1.0f / std::sqrt(mean + static_cast<float>(norm.eps));
    unit.scale[d][norm.weight_dtype != dtype](to, from, norm.weight, factor, norm.cols);
  }
}

}  // namespace tpkernels::host
