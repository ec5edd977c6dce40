// Arguments that the host passes to the kernels by value. No includes, because NVRTC compiles this
// file too.
#pragma once

namespace tpkernels::cuda {

using u64 = unsigned long long;
using i64 = long long;

// The codes of host/vector.h.
constexpr int kF32 = 0, kF16 = 1, kBF16 = 2;

// A group's workspace: DeviceWorkspace of tpkernels/symm/device.py.
struct Space {
  const u64* regions;  // the ranks' regions: a table of addresses
  u64* state;
  u64* control;
  int rank;
  int world;
  unsigned signature;
  int words;  // per source
  u64 timeout_ns;
  u64 buffers_at;     // byte offset within a region
  u64 buffer_stride;  // bytes between the two buffers
  u64 seed;
  u64 chaos;  // 2 * the longest delay in ns (0: none), + 1 if waits return at once
};

// After the sum: + bias[(begin + i) % cols] + residual[i], then one rounding.
struct Epilogue {
  const void* bias;  // null: none
  u64 cols;
  const void* residual;  // null: none
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
  u64 segment;     // elements that a rank reduces; `count` in one hop
  u64 slot_bytes;  // buffer space for the partials from one rank
  u64 results_at;  // byte offset within a buffer
};

// The normalisation of rows: y = round(x / sqrt(mean(x^2) + eps) * weight).
struct RmsNorm {
  void* normed;  // of the rows' dtype
  const void* weight;
  u64 cols;  // a multiple of kVector
  int weight_dtype;
  float eps;
};

struct Rows {
  const void* x;
  u64 count;  // of elements
  int dtype;
};

// The shards of a tensor with rows of `row` elements: rank r holds, or receives, rows [starts[r],
// starts[r+1]).
struct Shards {
  const void* x;      // all-gather: this rank's rows; reduce-scatter: its partial of all rows
  void* out;          // all-gather: all rows; reduce-scatter: this rank's
  const int* starts;  // world + 1 entries
  u64 row;
  int wire;           // dtype of x
  u64 slot_bytes;     // buffer space for the data from one rank
  Epilogue epilogue;  // of the sum
};

// Rows of `row` elements between tokens and their experts: rank r has the tokens [tokens[r],
// tokens[r+1]) and, by place, the experts' rows [rows[r], rows[r+1]). A route is token * k + slot.
struct Routed {
  const void* x;         // dispatch: this rank's tokens; combine: its experts' rows
  void* out;             // dispatch: its experts' rows; combine: its tokens
  const i64* order;      // the route of each place
  const i64* places;     // combine: the place of each route
  const float* weights;  // combine: of the routes of this rank's tokens
  const i64* rows;       // world + 1 entries
  const int* tokens;     // world + 1 entries
  int k;
  u64 most;  // rows of its experts that a rank has room for
  u64 row;
  int dtype;
};

constexpr int kMaxWorld = 72;  // the most GPUs in one NVLink domain

struct SumPartials {
  const void* partials[kMaxWorld];
  int world;
  int wire;
  void* out;
  u64 begin;
  u64 count;
  Epilogue epilogue;
};

// A word to publish or to wait for.
struct Signal {
  int rank;  // the receiver, or the source to wait for; -1: all peers receive it
  int index;
};

// The flags of a rank follow the words of its state. A call clears those that it uses when it
// begins; each is raised once.
constexpr int kStateFlags = 16;
constexpr u64 kRaised = 1;

// The output of a call, which `poison` fills with NaN if the call has failed.
struct Output {
  void* out;
  u64 bytes;
  void* more = nullptr;  // another of the same size
};

constexpr int kMostResults = 64;

// The same of a call of several launches.
struct Results {
  Output outputs[kMostResults];
  int count;
};

// A round of a litmus test (cuda/litmus.cuh): this many bytes to each peer, a multiple of 16.
struct Litmus {
  u64* found;   // how many packs were checked, how many were wrong, and records of the first
  int records;  // most of those
  unsigned round;
  u64 bytes;
};

constexpr int kReduceThreads = 512;
constexpr int kLLThreads = 256;
constexpr int kRowThreads = 256;
constexpr int kSumThreads = 256;
constexpr int kSignalThreads = 32;
constexpr int kEndThreads = 256;

}  // namespace tpkernels::cuda
