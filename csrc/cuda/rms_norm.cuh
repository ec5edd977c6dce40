// The normalisation of rows by clusters of blocks.
//
// Problem: y = round(x / sqrt(mean(x^2) + eps) * weight) for each row x, in fp32.
//
// Algorithm: a cluster has whole rows, and each of its blocks the same columns of them. A block
// adds the squares of its columns and stores the sums in all blocks of the cluster. After one
// barrier each has the whole sum, and normalises its columns.
//
// Numerics: the order of a sum follows from the number of columns alone. Vector v of a row (kVector
// elements) belongs to lane v % kRowLanes, which adds its squares in kVector chains. Then chains,
// lanes and groups of lanes are added in pairs. So clusters of any size give the same bits.
//
// Sync: of the sums of groups there are two sets. A block writes into a set again after the barrier
// of the row between, which the others reach when they have read it.
#pragma once

#include "cuda/reduce.cuh"

namespace tpkernels::cuda {

constexpr int kRowLanes = 1024;
constexpr int kGroup = 32;  // lanes whose squares one thread adds up
constexpr int kGroups = kRowLanes / kGroup;
// The sums of the lanes, a group every kGroup + 1 floats, in other banks; then those of the groups.
constexpr int kGroupSums = kGroups * (kGroup + 1);
static_assert(kGroupSums + 2 * kGroups <= kScratchFloats);

// Calls `take(v)` for this thread's vectors of a row, and `end(lane)` after each of its lanes.
template <class Take, class End>
TPK_DEVICE void for_lanes(u64 cols, const Take& take, const End& end) {
  const int count = kRowLanes / cluster_blocks(), first = block_in_cluster() * count;
  for (int lane = thread(); lane < count; lane += threads()) {
    for (u64 v = first + lane; v < cols / kVector; v += kRowLanes) take(v);
    end(lane);
  }
}

template <class Take>
TPK_DEVICE void for_vectors(u64 cols, const Take& take) {
  for_lanes(cols, take, [](int) {});
}

// Calls `take(row)` for this cluster's rows of `count`.
template <class Take>
TPK_DEVICE void for_rows(u64 count, const Take& take) {
  const u64 clusters = blocks() / cluster_blocks();
  for (u64 row = block() / cluster_blocks(); row < count; row += clusters) take(row);
}

template <int N>
TPK_DEVICE float sum_of_pairs(const float* x) {
  if constexpr (N == 1) {
    return *x;
  } else {
    return sum_of_pairs<N / 2>(x) + sum_of_pairs<N / 2>(x + N / 2);
  }
}

// The values after a rounding to D.
template <int D>
TPK_DEVICE void round_to(float (&x)[kVector]) {
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    if constexpr (D == kF16) x[k] = widen_f16(round_f16(x[k]));
    if constexpr (D == kBF16) x[k] = float_of(static_cast<unsigned>(round_bf16(x[k])) << 16);
  }
}

// Normalises the row at `total`; `value(v, x)` gives vector `v` of it, which is stored there then.
// `turn` counts the rows of the cluster.
template <int D, class Value>
TPK_DEVICE void normalise(const RmsNorm& norm, u64 row, unsigned turn, u64 total,
                          const Value& value) {
  float* lanes = scratch();
  float* groups = lanes + kGroupSums + turn % 2 * kGroups;
  float squares[kVector] = {};
  const auto add_squares = [&](u64 v) {
    float x[kVector];
    value(v, x);
#pragma unroll
    for (int k = 0; k < kVector; ++k) squares[k] = multiply_add(x[k], x[k], squares[k]);
  };
  for_lanes(norm.cols, add_squares, [&](int lane) {
    lanes[lane + lane / kGroup] = sum_of_pairs<kVector>(squares);
#pragma unroll
    for (int k = 0; k < kVector; ++k) squares[k] = 0;
  });
  sync_block();
  const int here = kGroups / cluster_blocks(), first = block_in_cluster() * here;
#pragma unroll 1
  for (int g = thread(); g < here; g += threads()) {
    const float sum = sum_of_pairs<kGroup>(lanes + g * (kGroup + 1));
#pragma unroll 1
    for (int b = 0; b < cluster_blocks(); ++b) store_in_block(groups + first + g, b, sum);
  }
  sync_cluster();
  const float mean = divide(sum_of_pairs<kGroups>(groups), static_cast<float>(norm.cols));
  const float factor = divide(1.0f, square_root(mean + norm.eps));
  const u64 to = address_of(norm.normed) + row * norm.cols * size_of(D);
  for_vectors(norm.cols, [&](u64 v) {
    const u64 i = v * kVector;
    float x[kVector], weight[kVector];
    load<D>(x, total + i * size_of(D));
    load_any(weight, address_of(norm.weight) + i * size_of(norm.weight_dtype), norm.weight_dtype);
#pragma unroll
    for (int k = 0; k < kVector; ++k) x[k] = x[k] * factor * weight[k];
    store<D>(to + i * size_of(D), x);
  });
}

// Rows that are there already.
template <int D>
TPK_DEVICE void normalise_rows(const Rows& rows, const RmsNorm& norm) {
  unsigned turn = 0;
  sync_cluster();  // its blocks run now, so their scratch is there
  for_rows(rows.count / norm.cols, [&](u64 row) {
    const u64 from = address_of(rows.x) + row * norm.cols * size_of(D);
    const auto value = [&](u64 v, float (&x)[kVector]) {
      load<D>(x, from + v * kVector * size_of(D));
    };
    normalise<D>(norm, row, turn++, from, value);
  });
}

}  // namespace tpkernels::cuda
