// Element-wise reductions over the ranks, in rank order: the operations of
// torch.distributed.ReduceOp on floating-point numbers and integers. Sums of floating-point numbers
// without a mean are in vector.h.
#pragma once

#include <cstddef>
#include <vector>

#include "host/vector.h"

namespace tpkernels::host {

enum class ReduceOp : int { kSum, kMean, kMin, kMax, kProduct, kAnd, kOr, kXor };

constexpr bool is_floating(DType dtype) { return dtype <= DType::kF64; }

// out[i] = partials[0][i] op partials[1][i] op ... `out` may be one of the partials. fp16 and bf16
// are reduced in fp32 and rounded once. Integers wrap. A minimum or maximum with a NaN is NaN.
// Throws std::invalid_argument for a mean of integers and for bitwise operations on floating-point
// numbers.
void reduce_partials(void* out, const std::vector<const std::byte*>& partials, DType dtype,
                     ReduceOp op, std::size_t count);

}  // namespace tpkernels::host
