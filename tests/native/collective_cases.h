// Collectives on integers small enough that every sum is exact in every dtype.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "check.h"
#include "host/collectives.h"
#include "host/vector.h"

namespace tpkernels::test {

enum class Op { kAllGather, kReduceScatter, kAllReduce };

// One call, identical on all ranks. For `kAllReduce` the layout is a flat tensor of `inner`
// elements.
struct Collective {
  Op op;
  host::ShardLayout layout;
  host::DType wire = host::DType::kF32;
  host::DType out = host::DType::kF32;
  bool bias = false;
  bool residual = false;
  bool norm = false;
  bool in_place = false;        // all-reduce only
  std::uint32_t symmetric = 0;  // bit r: rank r's input lies in the segment
  int round = 0;                // distinguishes calls
};

std::string text_of(const Collective& call);

// Size of a symmetric tensor: a segment that all ranks of a group map, registered as segment 1.
constexpr std::size_t kSegmentBytes = 1 << 18;

// Runs one call on this rank. CHECKs every element of the result, and that nothing around it was
// written. `segment` may be null if no rank's input is symmetric.
void run_collective(host::Channel& channel, const Collective& call,
                    const std::shared_ptr<host::Arena>& segment = nullptr);

// `count` calls of random ops, layouts and dtypes, the same on all ranks.
void run_random_collectives(host::Channel& channel, std::uint64_t seed, int count,
                            const std::shared_ptr<host::Arena>& segment = nullptr);

}  // namespace tpkernels::test
