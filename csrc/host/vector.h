// Arithmetic on blocks of elements. Each vector unit has a table of functions, selected at run
// time.
//
// Three small functions implement every sum of the collectives. `load` and `add` accumulate a block
// of any dtype in fp32 in the L1 cache. `store` rounds once. So "sum W partials, add bias, add
// residual, round" needs no variant per combination of dtypes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "host/attention.h"
#include "host/matmul.h"

namespace tpkernels::host {

// The collectives also move and reduce integers. All other functions take floating-point dtypes.
enum class DType : int {
  kF32 = 0,
  kF16 = 1,
  kBF16 = 2,
  kF64 = 3,
  kU8 = 4,
  kI8 = 5,
  kI16 = 6,
  kI32 = 7,
  kI64 = 8
};

constexpr std::size_t size_of(DType dtype) {
  constexpr std::size_t kSizes[] = {4, 2, 2, 8, 1, 1, 2, 4, 8};
  return kSizes[static_cast<int>(dtype)];
}

struct VectorUnit {
  const char* name;
  // Indexed by DType (fp32, fp16, bf16). Rounding is to nearest even; NaN stays NaN.
  void (*load[3])(float* acc, const void* src, std::size_t count);
  void (*add[3])(float* acc, const void* src, std::size_t count);
  void (*store[3])(void* dst, const float* acc, std::size_t count);
  // dst = round(sum of `world` sources in order), in registers. No bias, no residual, one dtype.
  void (*sum[3])(void* dst, const std::byte* const* sources, std::size_t world, std::size_t count);
  // dst = round(sum over i of weights[i] * sources[i] in order), in registers.
  void (*weighted_sum[3])(void* dst, const std::byte* const* sources, const float* weights,
                          std::size_t terms, std::size_t count);
  // Sum of squares of `count` elements. Only `count` determines the summation order, so all units
  // are bitwise identical.
  float (*sum_squares[3])(const void* src, std::size_t count);
  // dst = round(src * factor * weight). [0]: weight has the dtype of src and dst; [1]: fp32 weight.
  void (*scale[3][2])(void* dst, const void* src, const void* weight, float factor,
                      std::size_t count);
  // Matmul kernels (matmul.h), null if not supported. few_rows: contiguous columns in place,
  // faster than torch up to max_few_rows. panels: packed weights. columns, rows: panels packed on
  // the fly.
  MatmulFn few_rows[3];
  std::size_t max_few_rows[3];
  MatmulFn panels[3];
  MatmulFn int8[3];          // int8 panels, by dtype of x
  AttentionFn attention[3];  // by dtype of q, k and v
  MatmulFn columns[3];
  MatmulFn rows[3];
  // Copies with streaming stores, for results that are not read soon.
  void (*stream)(void* dst, const void* src, std::size_t bytes);
};

const VectorUnit& plain_unit();
#if defined(__x86_64__)
const VectorUnit& avx2_unit();
const VectorUnit& avx512_unit();
const VectorUnit& avx512_vnni_unit();
const VectorUnit& avx512_bf16_unit();
// The AMX units of a processor with AMX-BF16, AMX-INT8 or both.
std::vector<const VectorUnit*> amx_units(bool bf16, bool int8);
#endif
// For tests: the plain unit with the kernels of tiles.inc, on tiles in memory. Bitwise identical to
// AMX.
const VectorUnit& tiled_unit();

// The AMX dtypes that this process may use. The first call requests the permission from Linux.
// `refused`: the reason why AMX is not available, or empty.
struct Amx {
  bool bf16, int8;
  std::string refused;
};
const Amx& amx();

// Whether all matmuls of a unit are exact for the small integers of a test, and its int8 matmuls
// are bitwise identical to the plain unit.
bool multiplies_exactly(const VectorUnit& unit);

// The units that this processor supports, up to ATEN_CPU_CAPABILITY, fastest last. Units that fail
// `multiplies_exactly` are in `failed_units` instead. The check runs once.
const std::vector<const VectorUnit*>& available_units();
const std::vector<const VectorUnit*>& failed_units();
// The unit in use: the fastest unit, or the unit that `use_unit` selected.
const VectorUnit& vector_unit();
// Returns any unit by name. Includes the tiled unit and, on processors with AVX512_BF16, the AMX
// units: tests emulate their instructions. Throws std::invalid_argument if the name is unknown.
const VectorUnit& find_unit(const std::string& name);
void use_unit(const VectorUnit& unit);

// Terms added after the sum. `bias` is fp32, or fp64 for fp64 partials.
struct Epilogue {
  DType out_dtype = DType::kF32;
  const void* bias = nullptr;  // `cols` elements
  std::size_t cols = 1;
  const void* residual = nullptr;
  DType residual_dtype = DType::kF32;
};

// out[i] = round(sum over r of partial_r[i], in rank order, + bias[(begin + i) % cols] +
// residual[i]). `begin` is the index of out[0] in the full output. With `merges` of sum_tree.h, the
// partials are fp32 nodes, and the tree determines the order.
void sum_partials(void* out, const std::vector<const std::byte*>& partials, DType wire,
                  std::size_t begin, std::size_t count, const Epilogue& epilogue,
                  const std::vector<std::size_t>* merges = nullptr);

// out = round(sum over i of weights[i] * sources[i], in order): `count` elements of each. The
// weights are fp32, or fp64 for fp64 rows. Each multiplication and each addition is rounded.
void weighted_sum(void* out, const std::byte* const* sources, const void* weights,
                  std::size_t terms, DType dtype, std::size_t count);

// RMSNorm of rows: y = x / sqrt(mean(x^2) + eps) * weight, in fp32, rounded once. The result of a
// row is bitwise identical for all vector units and any number of rows.
struct RmsNorm {
  std::byte* out = nullptr;           // rows in the dtype of the input; null: no RMSNorm
  const std::byte* weight = nullptr;  // `cols` elements
  DType weight_dtype = DType::kF32;   // dtype of the rows, or fp32
  std::size_t cols = 1;
  double eps = 0;
};

// Normalises rows [first, last) of `rows`. Row 0 corresponds to row 0 of `norm.out`.
void normalise_rows(const RmsNorm& norm, const std::byte* rows, DType dtype, std::size_t first,
                    std::size_t last);

}  // namespace tpkernels::host
