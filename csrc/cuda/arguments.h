// Arguments that the host passes to kernels by value. No includes, because NVRTC also compiles this
// file.
#pragma once

namespace tpkernels::cuda {

using u64 = unsigned long long;
using i64 = long long;

// Dtype codes of host/vector.h.
constexpr int kF32 = 0, kF16 = 1, kBF16 = 2;

// The workspace of a group: DeviceWorkspace in tpkernels/symm/device.py.
struct Workspace {
  const u64* regions;  // address of the region of each rank
  u64* state;
  u64* control;
  int rank;
  int world;
  unsigned signature;
  int signals;  // per source rank
  u64 timeout_ns;
  u64 buffers_offset;  // byte offset within a region
  u64 buffer_stride;   // bytes between the two buffers
  u64 seed;
  u64 chaos;  // 2 * max delay in ns, + 1 if waits return immediately
};

// Epilogue of a sum: add bias[(begin + i) % cols] and residual[i], then round once.
struct Epilogue {
  const void* bias;  // nullable
  u64 cols;
  const void* residual;  // nullable
  int bias_dtype;
  int residual_dtype;
  int out_dtype;
};

struct AllReduce {
  const void* x;
  void* out;
  u64 count;
  int wire;  // dtype of x
  Epilogue epilogue;
  u64 segment;         // elements reduced per rank; `count` for one-shot
  u64 slot_bytes;      // buffer space for the partials from one rank
  u64 results_offset;  // byte offset within a buffer
};

// RMSNorm of rows: y = round(x / sqrt(mean(x^2) + eps) * weight).
struct RmsNorm {
  void* normed;  // same dtype as the rows
  const void* weight;
  u64 cols;  // a multiple of kVector
  int weight_dtype;
  float eps;
};

struct Rows {
  const void* x;
  u64 count;  // elements
  int dtype;
};

// Shards of a tensor with `cols` columns. Rank r holds or receives rows
// [starts[r], starts[r+1]).
struct Shards {
  const void* x;      // all-gather: local rows; reduce-scatter: partial of all rows
  void* out;          // all-gather: all rows; reduce-scatter: local rows
  const int* starts;  // world + 1 entries
  u64 cols;
  int wire;           // dtype of x
  u64 slot_bytes;     // buffer space for the data from one rank
  Epilogue epilogue;  // reduce-scatter only
};

// MoE dispatch and combine of rows with `cols` elements. Rank r owns tokens
// [token_offsets[r], token_offsets[r+1]). Its experts own the positions
// [rank_offsets[r], rank_offsets[r+1]) of the expert-sorted order. An assignment is
// token * k + slot.
struct Routed {
  const void* x;                   // dispatch: local tokens; combine: rows of the local experts
  void* out;                       // dispatch: rows of the local experts; combine: local tokens
  const i64* permutation;          // assignment at each position
  const i64* inverse_permutation;  // combine: position of each assignment
  const float* weights;            // combine: [local tokens, k]
  const i64* rank_offsets;         // world + 1 entries
  const int* token_offsets;        // world + 1 entries
  int k;
  u64 max_rows;  // capacity in rows of the experts of a rank
  u64 cols;
  int dtype;
};

constexpr int kMaxWorld = 72;  // max GPUs in an NVLink domain

struct SumPartials {
  const void* partials[kMaxWorld];
  int world;
  int wire;
  void* out;
  u64 begin;
  u64 count;
  Epilogue epilogue;
};

// A signal to publish or to wait for.
struct Signal {
  int rank;  // destination or awaited source; -1: publish to all peers
  int index;
};

// The flags of a rank follow the fixed entries of its state. A call clears its flags when it begins
// and sets each flag once.
constexpr int kStateFlags = 16;
constexpr u64 kFlagSet = 1;

// The output of a call. `poison` fills it with NaN if the call has failed.
struct Output {
  void* out;
  u64 bytes;
  void* second = nullptr;  // optional second output of the same size
};

constexpr int kMaxResults = 64;

// The outputs of a call of several launches.
struct Results {
  Output outputs[kMaxResults];
  int count;
};

// One round of a litmus test (cuda/litmus.cuh).
struct Litmus {
  u64* report;  // packs checked, packs wrong, then records of the first wrong packs
  int records;  // max records
  unsigned round;
  u64 bytes;  // per peer; a multiple of 16
};

constexpr int kReduceThreads = 512;
constexpr int kLLThreads = 256;
constexpr int kRowThreads = 256;
constexpr int kSumThreads = 256;
constexpr int kSignalThreads = 32;
constexpr int kEndThreads = 256;

}  // namespace tpkernels::cuda
