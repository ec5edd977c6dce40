// What the host gives the kernels, by value. Free of headers: NVRTC compiles it too.
#pragma once

namespace tpkernels::cuda {

using u64 = unsigned long long;
using i64 = long long;

// The codes of host/vector.h.
constexpr int kF32 = 0, kF16 = 1, kBF16 = 2;

// A group's workspace as DeviceWorkspace.arguments() of tpkernels/symm/device.py tells it.
struct Space {
  const u64* regions;  // the ranks' regions: a table of addresses
  u64* state;
  u64* control;
  int rank;
  int world;
  unsigned signature;
  int words;  // from one source
  u64 timeout_ns;
  u64 buffers_at;     // bytes from the begin of a region
  u64 buffer_stride;  // bytes from one buffer to the other
  u64 seed;
  u64 chaos;  // 2 * the longest delay in ns (0: none), + 1 if waits return at once
};

// After the sum: + bias[(begin + i) % cols] + residual[i], then one rounding.
struct Epilogue {
  const float* bias;  // null: none
  u64 cols;
  const void* residual;  // null: none
  int residual_dtype;
  int out_dtype;
};

struct AllReduce {
  const void* x;
  void* out;
  u64 count;
  u64 begin;  // where x and out stand within the whole output, for the bias
  int wire;   // dtype of x
  Epilogue epilogue;
  u64 segment;     // elements that a rank reduces; count in one-shot
  u64 slot_bytes;  // of the buffer, for the partials from one rank
  u64 results_at;  // bytes from the begin of a buffer
  u64 multicast;   // address of all ranks' regions at once
};

// Of a tensor of rows of `row` elements, rank r has, or is to have, rows [starts[r], starts[r+1]).
struct Shards {
  const void* x;      // all-gather: this rank's rows; reduce-scatter: its partial of all rows
  void* out;          // all-gather: all rows; reduce-scatter: this rank's
  const int* starts;  // world + 1 of them
  u64 row;
  int wire;           // dtype of x
  u64 slot_bytes;     // of the buffer, for what comes from one rank
  Epilogue epilogue;  // of the sum
};

constexpr int kMaxWorld = 72;  // GPUs that one NVLink domain connects

struct SumPartials {
  const void* partials[kMaxWorld];
  int world;
  int wire;
  void* out;
  u64 begin;
  u64 count;
  Epilogue epilogue;
};

struct Signal {
  int rank;  // the receiver, or the source that is waited for; -1: all receivers
  int index;
  int source;  // of a word to this rank itself: whose data it tells of
};

// What a failed call leaves behind.
struct Poison {
  void* out;
  u64 bytes;
};

struct PacedCopy {
  void* dst;
  const void* src;
  u64 bytes;
  u64 latency_ns;
  double ns_per_byte;
};

constexpr int kReduceThreads = 512;
constexpr int kSumThreads = 256;
constexpr int kSignalThreads = 32;
constexpr int kPacedThreads = 1024;
constexpr int kPoisonThreads = 256;

}  // namespace tpkernels::cuda
