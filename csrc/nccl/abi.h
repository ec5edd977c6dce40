// The part of NCCL's ABI that is used here, so that building needs no NCCL header. The ABI is
// stable throughout 2.x: values are never reused, and structs grow only at the end.
#pragma once

#include <climits>
#include <cstddef>

#include "host/vector.h"

namespace tpkernels::nccl {

struct Comm;  // opaque

struct UniqueId {
  char bytes[128];
};

enum Result : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
  kTimeout = 8,  // since 2.30
};

constexpr int kUnset = INT_MIN;
constexpr int kSum = 0;       // ncclRedOp_t
constexpr int kNoColor = -1;  // ncclCommSplit: no communicator for this rank

// ncclConfig_t as of 2.27. `size` and `version` tell the library which fields the caller knows:
// newer libraries use defaults for the rest, older ones read only the fields that they know.
struct Config {
  std::size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 22700;
  int blocking = kUnset;
  int cga_cluster_size = kUnset;
  int min_ctas = kUnset;  // 2.17
  int max_ctas = kUnset;  // 2.17
  const char* net_name = nullptr;
  int split_share = kUnset;
  int traffic_class = kUnset;
  const char* comm_name = nullptr;  // 2.27; NCCL keeps the pointer
  int collnet_enable = kUnset;
  int cta_policy = kUnset;  // 2.27
  int shrink_share = kUnset;
  int nvls_ctas = kUnset;
};
static_assert(sizeof(Config) == 72 && offsetof(Config, blocking) == 16 &&
                  offsetof(Config, net_name) == 32 && offsetof(Config, comm_name) == 48 &&
                  offsetof(Config, cta_policy) == 60,
              "the layout of ncclConfig_t");

// ncclDataType_t.
constexpr int data_type(host::DType dtype) {
  switch (dtype) {
    case host::DType::kF16:
      return 6;
    case host::DType::kF64:
      return 8;
    case host::DType::kBF16:
      return 9;
    case host::DType::kF32:
      break;
  }
  return 7;
}

}  // namespace tpkernels::nccl
