// Ranks as threads: routed_dispatch and routed_combine, call after call, with delays.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "../../../csrc/cuda/kernels.cu"
#include "ranks.h"

namespace {
constexpr int kWorld = 3, kK = 3, kExperts = 5, kCalls = 24, kBlocks = 3;
constexpr int kTokens[] = {0, 3, 3, 7}, kFirst[] = {0, 2, 4, 5};
constexpr u64 kBufferBytes = 1 << 14, kBuffersAt = 1024;
constexpr int kWords = 16;
using Rank = Memory<kBuffersAt, kBufferBytes>;
float value(int call, int token, u64 i) {
  return static_cast<float>((call + 5 * token + i) % 11) / 3;
}
void run_rank(int rank, std::vector<Rank>& ranks, const std::vector<u64>& regions,
              const Switches& switches) {
  Rank& own = ranks[rank];
  Space space = own.space(rank, regions, kWords, switches);
  const int n = kTokens[kWorld] * kK;
  for (int call = 0; call < kCalls; ++call) {
    const u64 row = call % 3 == 0 ? 200 : call % 3 == 1 ? 203 : 5, most = call % 4 == 3 ? 4 : n;
    std::vector<int> expert(n);
    std::vector<i64> order(n), places(n), rows(kWorld + 1);
    for (int i = 0; i < n; ++i)
      expert[i] = (i * i + call + i / 4) % (kExperts + (call % 5 == 2)) - (call % 7 == 1 && i == 4);
    for (int i = 0; i < n; ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(),
                     [&](i64 a, i64 b) { return expert[a] < expert[b]; });
    for (int i = 0; i < n; ++i) places[order[i]] = i;
    for (int r = 0; r <= kWorld; ++r)
      rows[r] = std::count_if(expert.begin(), expert.end(), [&](int e) { return e < kFirst[r]; });
    const int first = kTokens[rank], tokens = kTokens[rank + 1] - first;
    const u64 mine = std::min<u64>(rows[rank + 1] - rows[rank], most);
    struct alignas(16) Block {
      float v[4];
    };
    std::vector<Block> a(tokens * row / 4 + 1), b(most * row / 4 + 1), c(tokens * row / 4 + 1);
    auto *x = &a[0].v[0], *out = &b[0].v[0], *y = &c[0].v[0];
    for (int t = 0; t < tokens; ++t)
      for (u64 i = 0; i < row; ++i) x[t * row + i] = value(call, first + t, i);
    std::fill(out, out + most * row, 77.0f);
    std::vector<float> weights(tokens * kK);
    for (u64 i = 0; i < weights.size(); ++i) weights[i] = 0.3f + (first * kK + i) % 5;
    space.signature = 7 + 2 * call;
    Routed given{x,  out,  order.data(), places.data(), weights.data(), rows.data(), kTokens,
                 kK, most, row,          kF32};
    emulated::run({kBlocks, 2}, 2, [&] { routed_dispatch(space, given); });
    for (u64 r = 0; r < most; ++r)
      for (u64 i = 0; i < row; ++i)
        own.wrong +=
            out[r * row + i] != (r < mine ? value(call, order[rows[rank] + r] / kK, i) : 0);
    for (u64 r = 0; r < mine; ++r)
      for (u64 i = 0; i < row; ++i) out[r * row + i] *= expert[order[rows[rank] + r]] + 2;
    ++space.signature;
    given.x = out;
    given.out = y;
    emulated::run({kBlocks, 2}, 2, [&] { routed_combine(space, given); });
    for (int t = 0; t < tokens; ++t)
      for (u64 i = 0; i < row; ++i) {
        float sum = 0;
        for (int j = 0; j < kK; ++j) {
          const int route = (first + t) * kK + j, e = expert[route];
          int h = 0;
          while (h < kWorld - 1 && e >= kFirst[h + 1]) ++h;
          const bool there =
              e >= 0 && e < kExperts && places[route] - rows[h] < static_cast<i64>(most);
          volatile float product =
              there ? weights[t * kK + j] * (value(call, first + t, i) * (e + 2)) : NAN;
          sum += product;
        }
        own.wrong += std::isnan(sum) ? !std::isnan(y[t * row + i]) : y[t * row + i] != sum;
      }
  }
  own.wrong += own.state[kStateStatus] != 0;
}
}  // namespace
int main(int argc, char** argv) {
  std::vector<Rank> ranks(kWorld);
  return run_ranks(argc, argv, ranks, kCalls, run_rank);
}
