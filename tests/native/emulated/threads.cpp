// Runs the CUDA kernels with ranks as threads of one process, for ThreadSanitizer and
// AddressSanitizer: call after call, with random delays. All results are checked.
#include <cstring>

#include "../../../csrc/cuda/kernels.cu"
#include "ranks.h"

namespace {

constexpr int kWorld = 3, kCalls = 24, kBlocks = 3, kThreads = 2, kMaxBlocks = 2;
constexpr int kRows = 128, kTotalRows = kWorld * kRows;  // rows of a reduce-scatter
constexpr u64 kCount = 3 * 64 * 2 + 5, kBufferBytes = 8192;
constexpr int kSignals = (kFirstData + 4 * ((kCount * 4 + 15) / 16) + 15) / 16 * 16;
constexpr u64 kBuffersOffset = (2 * kWorld * kSignals * 8 + 255) / 256 * 256;

struct Rank : Memory<kBuffersOffset, kBufferBytes> {};

void launch(int blocks, const std::function<void()>& kernel) {
  emulated::run({blocks, kThreads}, kMaxBlocks, kernel);
}

// Returns x[i] of a rank in a call. Small enough to be exact in any dtype.
float value(int call, int rank, u64 i) { return static_cast<float>((call + 2 * rank + i) % 7); }

void all_reduce(Rank& local, const Workspace& workspace, int call) {
  const int variant = (call - call / 4) % 3;
  const u64 segment = variant == 1 ? kCount : (kCount / kWorld + 64) / 64 * 64;
  const u64 slot = (segment * 4 + 255) / 256 * 256;
  alignas(16) float x[kCount], out[kCount];
  for (u64 i = 0; i < kCount; ++i) x[i] = value(call, workspace.rank, i);
  const AllReduce args{x,       out,  kCount,       kF32, {nullptr, 1, nullptr, kF32, kF32},
                       segment, slot, kWorld * slot};
  launch(kBlocks, [&] {
    if (variant == 0) return two_shot_all_reduce(workspace, args);
    if (variant == 1) return ll_all_reduce(workspace, args);
    ll_two_shot_all_reduce(workspace, args);
  });
  for (u64 i = 0; i < kCount; ++i) {
    float sum = 0;
    for (int r = 0; r < kWorld; ++r) sum += value(call, r, i);
    local.wrong += out[i] != sum;
  }
}

// Runs two calls in sequence that send no signal after reading the buffers.
void reduce_scatters(Rank& local, const Workspace& workspace, int call) {
  const int starts[] = {0, kRows, 2 * kRows, kTotalRows};
  alignas(16) float x[kTotalRows], out[kRows];
  for (int step = 0; step < 2; ++step) {
    for (int i = 0; i < kTotalRows; ++i) x[i] = value(call + step, workspace.rank, i);
    const Shards shards{x, out, starts, 1, kF32, 4 * kRows, {nullptr, 1, nullptr, kF32, kF32}};
    launch(kBlocks, [&] { one_shot_reduce_scatter(workspace, shards); });
    for (int i = 0; i < kRows; ++i) {
      float sum = 0;
      for (int r = 0; r < kWorld; ++r) sum += value(call + step, r, workspace.rank * kRows + i);
      local.wrong += out[i] != sum;
    }
  }
}

// Runs a call of several launches. It copies one chunk per peer, at fixed addresses.
void copies(Rank& local, const Workspace& workspace, int call) {
  const auto chunk = [&](int rank, int dst) {
    return reinterpret_cast<u64*>(workspace.regions[rank] + kBuffersOffset) + 16 * dst;
  };
  launch(1, [&] { call_begin(workspace, 1); });
  local.wrong += local.state[kStateFlags] != 0;
  for (int dst = 0; dst < kWorld; ++dst) {
    for (int i = 0; i < 16; ++i)
      chunk(workspace.rank, dst)[i] = 100 * call + 10 * workspace.rank + dst;
  }
  launch(1, [&] { call_publish(workspace, {-1, 1}); });
  for (int source = 0; source < kWorld; ++source) {
    if (source == workspace.rank) continue;
    launch(1, [&] { call_wait(workspace, {source, 1}); });
    for (int i = 0; i < 16; ++i) {
      const u64 expected = 100 * call + 10 * source + workspace.rank;
      local.wrong += chunk(source, workspace.rank)[i] != expected;
    }
  }
  launch(1, [&] { call_flag(workspace, 0); });
  local.wrong += local.state[kStateFlags] != kFlagSet;
  launch(1, [&] { call_end(workspace, {}); });
}

void run_rank(int rank, std::vector<Rank>& ranks, const std::vector<u64>& regions,
              const Switches& switches) {
  Rank& local = ranks[rank];
  Workspace workspace = local.workspace(rank, regions, kSignals, switches);
  for (int call = 0; call < kCalls; ++call) {
    workspace.signature = 7 + call;
    if (call % 4 == 3) {
      copies(local, workspace, call);
    } else if (call % 8 == 4) {
      reduce_scatters(local, workspace, call);
    } else {
      all_reduce(local, workspace, call);
    }
    if (call % 5 == 4) launch(1, [&] { call_barrier(workspace); });
  }
  local.wrong += local.state[kStateStatus] != 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<Rank> ranks(kWorld);
  return run_ranks(argc, argv, ranks, kCalls, run_rank);
}
