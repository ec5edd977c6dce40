// Runs routed_dispatch and routed_combine with ranks as threads, call after call, with random
// delays. All results are checked.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "../../../csrc/cuda/kernels.cu"
#include "ranks.h"

namespace {
constexpr int kWorld = 3, kK = 3, kExperts = 5, kCalls = 24, kBlocks = 3;
constexpr int kTokenOffsets[] = {0, 3, 3, 7}, kExpertOffsets[] = {0, 2, 4, 5};
constexpr u64 kBufferBytes = 1 << 14, kBuffersOffset = 1024;
constexpr int kSignals = 16;
using Rank = Memory<kBuffersOffset, kBufferBytes>;
float value(int call, int token, u64 i) {
  return static_cast<float>((call + 5 * token + i) % 11) / 3;
}
void run_rank(int rank, std::vector<Rank>& ranks, const std::vector<u64>& regions,
              const Switches& switches) {
  Rank& local = ranks[rank];
  Workspace workspace = local.workspace(rank, regions, kSignals, switches);
  const int n = kTokenOffsets[kWorld] * kK;
  for (int call = 0; call < kCalls; ++call) {
    const u64 row = call % 3 == 0 ? 200 : call % 3 == 1 ? 203 : 5, max_rows = call % 4 == 3 ? 4 : n;
    std::vector<int> expert(n);
    std::vector<i64> permutation(n), inverse_permutation(n), rank_offsets(kWorld + 1);
    for (int i = 0; i < n; ++i)
      expert[i] = (i * i + call + i / 4) % (kExperts + (call % 5 == 2)) - (call % 7 == 1 && i == 4);
    for (int i = 0; i < n; ++i) permutation[i] = i;
    std::stable_sort(permutation.begin(), permutation.end(),
                     [&](i64 a, i64 b) { return expert[a] < expert[b]; });
    for (int i = 0; i < n; ++i) inverse_permutation[permutation[i]] = i;
    for (int r = 0; r <= kWorld; ++r)
      rank_offsets[r] =
          std::count_if(expert.begin(), expert.end(), [&](int e) { return e < kExpertOffsets[r]; });
    const int first_token = kTokenOffsets[rank],
              num_local_tokens = kTokenOffsets[rank + 1] - first_token;
    const u64 local_rows = std::min<u64>(rank_offsets[rank + 1] - rank_offsets[rank], max_rows);
    struct alignas(16) Block {
      float v[4];
    };
    std::vector<Block> a(num_local_tokens * row / 4 + 1), b(max_rows * row / 4 + 1),
        c(num_local_tokens * row / 4 + 1);
    auto *x = &a[0].v[0], *out = &b[0].v[0], *y = &c[0].v[0];
    for (int t = 0; t < num_local_tokens; ++t)
      for (u64 i = 0; i < row; ++i) x[t * row + i] = value(call, first_token + t, i);
    std::fill(out, out + max_rows * row, 77.0f);
    std::vector<float> weights(num_local_tokens * kK);
    for (u64 i = 0; i < weights.size(); ++i) weights[i] = 0.3f + (first_token * kK + i) % 5;
    workspace.signature = 7 + 2 * call;
    Routed args{x,
                out,
                permutation.data(),
                inverse_permutation.data(),
                weights.data(),
                rank_offsets.data(),
                kTokenOffsets,
                kK,
                max_rows,
                row,
                kF32};
    emulated::run({kBlocks, 2}, 2, [&] { routed_dispatch(workspace, args); });
    for (u64 r = 0; r < max_rows; ++r)
      for (u64 i = 0; i < row; ++i)
        local.wrong +=
            out[r * row + i] !=
            (r < local_rows ? value(call, permutation[rank_offsets[rank] + r] / kK, i) : 0);
    for (u64 r = 0; r < local_rows; ++r)
      for (u64 i = 0; i < row; ++i)
        out[r * row + i] *= expert[permutation[rank_offsets[rank] + r]] + 2;
    ++workspace.signature;
    args.x = out;
    args.out = y;
    emulated::run({kBlocks, 2}, 2, [&] { routed_combine(workspace, args); });
    for (int t = 0; t < num_local_tokens; ++t)
      for (u64 i = 0; i < row; ++i) {
        float sum = 0;
        for (int j = 0; j < kK; ++j) {
          const int assignment = (first_token + t) * kK + j, e = expert[assignment];
          int owner = 0;
          while (owner < kWorld - 1 && e >= kExpertOffsets[owner + 1]) ++owner;
          const bool has_row =
              e >= 0 && e < kExperts &&
              inverse_permutation[assignment] - rank_offsets[owner] < static_cast<i64>(max_rows);
          volatile float term =
              has_row ? weights[t * kK + j] * (value(call, first_token + t, i) * (e + 2)) : NAN;
          sum += term;
        }
        local.wrong += std::isnan(sum) ? !std::isnan(y[t * row + i]) : y[t * row + i] != sum;
      }
  }
  local.wrong += local.state[kStateStatus] != 0;
}
}  // namespace
int main(int argc, char** argv) {
  std::vector<Rank> ranks(kWorld);
  return run_ranks(argc, argv, ranks, kCalls, run_rank);
}
