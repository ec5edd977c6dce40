// Arithmetic on blocks of elements: one table of functions per vector unit, chosen at run time.
//
// Three small functions compose into every sum that the collectives need: load (or add) a block of
// any dtype into fp32 accumulators that stay in the L1 cache, then store them with one rounding. So
// "sum W partials, add bias, add residual, round" needs no variant per combination of dtypes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "host/product.h"

namespace tpkernels::host {

enum class DType : int { kF32 = 0, kF16 = 1, kBF16 = 2, kF64 = 3 };

constexpr std::size_t size_of(DType dtype) {
  return dtype == DType::kF64 ? 8 : dtype == DType::kF32 ? 4 : 2;
}

struct VectorUnit {
  const char* name;
  // Indexed by DType (fp32, fp16, bf16). Rounding is to nearest even; NaN stays NaN.
  void (*load[3])(float* acc, const void* src, std::size_t count);
  void (*add[3])(float* acc, const void* src, std::size_t count);
  void (*store[3])(void* dst, const float* acc, std::size_t count);
  // No bias, no residual, one dtype: dst = round(sum of `world` sources in order), in registers.
  void (*sum[3])(void* dst, const std::byte* const* sources, std::size_t world, std::size_t count);
  // dst = round(sum of `weights[i]` times `sources[i]` in order), in registers.
  void (*weigh[3])(void* dst, const std::byte* const* sources, const float* weights,
                   std::size_t terms, std::size_t count);
  // Sum of the squares of `count` elements. The order of its terms follows from `count` alone: the
  // same bits from every unit.
  float (*squares[3])(const void* src, std::size_t count);
  // dst = round(src * factor * weight). The weight has the dtype of the others, or fp32 ([1]).
  void (*scale[3][2])(void* dst, const void* src, const void* weight, float factor,
                      std::size_t count);
  // Products (product.h), null where the unit has none: of columns in place, with how few rows that
  // must be to be faster than torch's; of panels; and with panels made of columns or rows.
  Multiply few_rows[3];
  std::size_t most_few_rows[3];
  Multiply panels[3];
  Multiply int8[3];  // of panels of 8 bits, by the dtype of x
  Multiply columns[3];
  Multiply rows[3];
  // Copies with streaming stores: for results that nobody reads soon.
  void (*stream)(void* dst, const void* src, std::size_t bytes);
};

const VectorUnit& plain_unit();
#if defined(__x86_64__)
const VectorUnit& avx2_unit();
const VectorUnit& avx512_unit();
const VectorUnit& avx512_vnni_unit();
const VectorUnit& avx512_bf16_unit();
// Those with AMX's tiles of a processor that has them for products of bf16, of 8 bits or of both.
std::vector<const VectorUnit*> amx_units(bool bf16, bool int8);
#endif
// The plain one with the loops of tiles.inc on tiles in memory, for tests: bit for bit AMX's.
const VectorUnit& tiled_unit();

// Which products this process may use AMX's tiles for, which Linux permits when asked for the first
// time: it was asked. `refused`: why there are none, or empty.
struct Amx {
  bool bf16, int8;
  std::string refused;
};
const Amx& amx();

// Whether all products of a unit are exact for some small integers, and those of 8 bits as the
// plain unit's.
bool multiplies_exactly(const VectorUnit& unit);

// The units that this processor supports, up to ATEN_CPU_CAPABILITY, the fastest last, without
// those that are not exact, which is tried once.
const std::vector<const VectorUnit*>& available_units();
const std::vector<const VectorUnit*>& failed_units();
// The unit in use: the fastest, unless `use_unit` chose another.
const VectorUnit& vector_unit();
// Any unit, also the tiled one, and on processors with AVX512_BF16 AMX's, whose instructions tests
// emulate. Throws std::invalid_argument if there is none of that name.
const VectorUnit& unit_named(const std::string& name);
void use_unit(const VectorUnit& unit);

// Added after the sum. `bias` is fp32 (fp64 for fp64 partials).
struct Epilogue {
  DType out_dtype = DType::kF32;
  const void* bias = nullptr;  // `cols` elements
  std::size_t cols = 1;
  const void* residual = nullptr;
  DType residual_dtype = DType::kF32;
};

// out[i] = round(sum over r of partial_r[i], in rank order, + bias[(begin + i) % cols] +
// residual[i]). `begin` is the index of out[0] in the whole output.
void sum_partials(void* out, const std::vector<const std::byte*>& partials, DType wire,
                  std::size_t begin, std::size_t count, const Epilogue& epilogue);

// out = round(sum over i of weights[i] * sources[i], in order): `count` elements of each. The
// weights are fp32, or fp64 for rows of fp64. Products and sums are rounded one by one.
void weigh(void* out, const std::byte* const* sources, const void* weights, std::size_t terms,
           DType dtype, std::size_t count);

// RMS normalisation of rows: y = x / sqrt(mean(x^2) + eps) * weight, in fp32 and rounded once. The
// bits depend on the row alone: not on the vector unit, nor on how many rows are normalised at
// once.
struct RmsNorm {
  std::byte* out = nullptr;           // rows of the input's dtype; null: nothing is normalised
  const std::byte* weight = nullptr;  // `cols` elements
  DType weight_dtype = DType::kF32;   // the rows' or fp32
  std::size_t cols = 1;
  double eps = 0;
};

// Normalises rows [first, last) of `rows`, where row 0 is that of `norm.out`.
void normalise_rows(const RmsNorm& norm, const std::byte* rows, DType dtype, std::size_t first,
                    std::size_t last);

}  // namespace tpkernels::host
