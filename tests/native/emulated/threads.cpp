// Runs the CUDA kernels with ranks as threads of one process, for ThreadSanitizer and
// AddressSanitizer: call after call, with random delays on each rank. The sums are checked.
#include <cstring>

#include "../../../csrc/cuda/kernels.cu"
#include "ranks.h"

namespace {

constexpr int kWorld = 3, kCalls = 24, kBlocks = 3, kThreads = 2, kAtOnce = 2;
constexpr int kRows = 128, kAll = kWorld * kRows;  // of a reduce-scatter
constexpr u64 kCount = 3 * 64 * 2 + 5, kBufferBytes = 8192;
constexpr int kWords = (kFirstData + 4 * ((kCount * 4 + 15) / 16) + 15) / 16 * 16;
constexpr u64 kBuffersAt = (2 * kWorld * kWords * 8 + 255) / 256 * 256;

struct Rank : Memory<kBuffersAt, kBufferBytes> {};

void launch(int blocks, const std::function<void()>& kernel) {
  emulated::run({blocks, kThreads}, kAtOnce, kernel);
}

// x[i] of a rank in a call; small enough to be exact in any dtype.
float value(int call, int rank, u64 i) { return static_cast<float>((call + 2 * rank + i) % 7); }

void all_reduce(Rank& own, const Space& space, int call) {
  const int way = (call - call / 4) % 3;
  const u64 segment = way == 1 ? kCount : (kCount / kWorld + 64) / 64 * 64;
  const u64 slot = (segment * 4 + 255) / 256 * 256;
  alignas(16) float x[kCount], out[kCount];
  for (u64 i = 0; i < kCount; ++i) x[i] = value(call, space.rank, i);
  const AllReduce given{x,       out,  kCount,       kF32, {nullptr, 1, nullptr, kF32, kF32},
                        segment, slot, kWorld * slot};
  launch(kBlocks, [&] {
    if (way == 0) return two_shot_all_reduce(space, given);
    if (way == 1) return ll_all_reduce(space, given);
    ll_two_shot_all_reduce(space, given);
  });
  for (u64 i = 0; i < kCount; ++i) {
    float sum = 0;
    for (int r = 0; r < kWorld; ++r) sum += value(call, r, i);
    own.wrong += out[i] != sum;
  }
}

// Two calls whose words do not tell that buffers have been read, one after the other.
void reduce_scatters(Rank& own, const Space& space, int call) {
  const int starts[] = {0, kRows, 2 * kRows, kAll};
  alignas(16) float x[kAll], out[kRows];
  for (int turn = 0; turn < 2; ++turn) {
    for (int i = 0; i < kAll; ++i) x[i] = value(call + turn, space.rank, i);
    const Shards shards{x, out, starts, 1, kF32, 4 * kRows, {nullptr, 1, nullptr, kF32, kF32}};
    launch(kBlocks, [&] { one_shot_reduce_scatter(space, shards); });
    for (int i = 0; i < kRows; ++i) {
      float sum = 0;
      for (int r = 0; r < kWorld; ++r) sum += value(call + turn, r, space.rank * kRows + i);
      own.wrong += out[i] != sum;
    }
  }
}

// A call of several launches: a chunk for every peer, at fixed addresses.
void copies(Rank& own, const Space& space, int call) {
  const auto chunk = [&](int rank, int to) {
    return reinterpret_cast<u64*>(space.regions[rank] + kBuffersAt) + 16 * to;
  };
  launch(1, [&] { call_begin(space, 1); });
  own.wrong += own.state[kStateFlags] != 0;
  for (int to = 0; to < kWorld; ++to) {
    for (int i = 0; i < 16; ++i) chunk(space.rank, to)[i] = 100 * call + 10 * space.rank + to;
  }
  launch(1, [&] { call_publish(space, {-1, 1}); });
  for (int source = 0; source < kWorld; ++source) {
    if (source == space.rank) continue;
    launch(1, [&] { call_wait(space, {source, 1}); });
    for (int i = 0; i < 16; ++i) {
      const u64 want = 100 * call + 10 * source + space.rank;
      own.wrong += chunk(source, space.rank)[i] != want;
    }
  }
  launch(1, [&] { call_flag(space, 0); });
  own.wrong += own.state[kStateFlags] != kRaised;
  launch(1, [&] { call_end(space, {}); });
}

void run_rank(int rank, std::vector<Rank>& ranks, const std::vector<u64>& regions,
              const Switches& switches) {
  Rank& own = ranks[rank];
  Space space = own.space(rank, regions, kWords, switches);
  for (int call = 0; call < kCalls; ++call) {
    space.signature = 7 + call;
    if (call % 4 == 3) {
      copies(own, space, call);
    } else if (call % 8 == 4) {
      reduce_scatters(own, space, call);
    } else {
      all_reduce(own, space, call);
    }
    if (call % 5 == 4) launch(1, [&] { call_barrier(space); });
  }
  own.wrong += own.state[kStateStatus] != 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<Rank> ranks(kWorld);
  return run_ranks(argc, argv, ranks, kCalls, run_rank);
}
