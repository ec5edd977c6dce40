// RMSNorm of rows by clusters of blocks.
//
// Problem: y = round(x / sqrt(mean(x^2) + eps) * weight) for each row x, in fp32.
//
// Algorithm: a cluster processes full rows, and each of its blocks always has the same columns. A
// block sums the squares of its columns and stores the sums in all blocks of the cluster. After one
// barrier each block has the sum of the full row and normalises its columns.
//
// Numerics: the order of summation depends only on the number of columns. Vector v of a row
// (kVector elements) belongs to lane v % kRowLanes, which sums its squares in kVector chains.
// Chains, lanes and groups of lanes are then added pairwise. The result is therefore bitwise
// identical for all cluster sizes.
//
// Sync: the group sums are double-buffered. A block reuses a buffer after the barrier of the
// intermediate row. The peer blocks reach that barrier only after they have read the buffer.
#pragma once

#include "cuda/reduce.cuh"

namespace tpkernels::cuda {

constexpr int kRowLanes = 1024;
constexpr int kGroup = 32;  // lanes summed by one thread
constexpr int kGroups = kRowLanes / kGroup;
// Scratch layout: the lane sums, padded to kGroup + 1 floats per group to avoid bank conflicts;
// then the group sums.
constexpr int kGroupSums = kGroups * (kGroup + 1);
static_assert(kGroupSums + 2 * kGroups <= kScratchFloats);

// Calls `visit(v)` for the vectors of this thread in a row, and `end(lane)` after each of its
// lanes.
template <class Visit, class End>
TPK_DEVICE void for_lanes(u64 cols, const Visit& visit, const End& end) {
  const int count = kRowLanes / cluster_blocks(), first = block_in_cluster() * count;
  for (int lane = thread(); lane < count; lane += threads()) {
    for (u64 v = first + lane; v < cols / kVector; v += kRowLanes) visit(v);
    end(lane);
  }
}

template <class Visit>
TPK_DEVICE void for_vectors(u64 cols, const Visit& visit) {
  for_lanes(cols, visit, [](int) {});
}

// Calls `visit(row)` for the rows of this cluster, out of `count` rows.
template <class Visit>
TPK_DEVICE void for_rows(u64 count, const Visit& visit) {
  const u64 clusters = blocks() / cluster_blocks();
  for (u64 row = block() / cluster_blocks(); row < count; row += clusters) visit(row);
}

template <int N>
TPK_DEVICE float sum_pairwise(const float* x) {
  if constexpr (N == 1) {
    return *x;
  } else {
    return sum_pairwise<N / 2>(x) + sum_pairwise<N / 2>(x + N / 2);
  }
}

// Rounds the values to dtype D.
template <int D>
TPK_DEVICE void round_to(float (&x)[kVector]) {
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    if constexpr (D == kF16) x[k] = widen_f16(round_f16(x[k]));
    if constexpr (D == kBF16) x[k] = bits_to_float(static_cast<unsigned>(round_bf16(x[k])) << 16);
  }
}

// Normalises the row at address `total`. `value(v, x)` returns vector `v` of the row in x; by then
// the vector is stored at `total`. `iteration` counts the rows of the cluster.
template <int D, class Value>
TPK_DEVICE void normalise(const RmsNorm& norm, u64 row, unsigned iteration, u64 total,
                          const Value& value) {
  float* lanes = scratch();
  float* groups = lanes + kGroupSums + iteration % 2 * kGroups;
  float squares[kVector] = {};
  const auto add_squares = [&](u64 v) {
    float x[kVector];
    value(v, x);
#pragma unroll
    for (int k = 0; k < kVector; ++k) squares[k] = multiply_add(x[k], x[k], squares[k]);
  };
  for_lanes(norm.cols, add_squares, [&](int lane) {
    lanes[lane + lane / kGroup] = sum_pairwise<kVector>(squares);
#pragma unroll
    for (int k = 0; k < kVector; ++k) squares[k] = 0;
  });
  sync_block();
  const int num_groups = kGroups / cluster_blocks(), first = block_in_cluster() * num_groups;
#pragma unroll 1
  for (int g = thread(); g < num_groups; g += threads()) {
    const float sum = sum_pairwise<kGroup>(lanes + g * (kGroup + 1));
#pragma unroll 1
    for (int b = 0; b < cluster_blocks(); ++b) store_in_block(groups + first + g, b, sum);
  }
  sync_cluster();
  const float mean = divide(sum_pairwise<kGroups>(groups), static_cast<float>(norm.cols));
  const float factor = divide(1.0f, square_root(mean + norm.eps));
  const u64 dst = to_address(norm.normed) + row * norm.cols * dtype_size(D);
  for_vectors(norm.cols, [&](u64 v) {
    const u64 i = v * kVector;
    float x[kVector], weight[kVector];
    load<D>(x, total + i * dtype_size(D));
    load_any(weight, to_address(norm.weight) + i * dtype_size(norm.weight_dtype),
             norm.weight_dtype);
#pragma unroll
    for (int k = 0; k < kVector; ++k) x[k] = x[k] * factor * weight[k];
    store<D>(dst + i * dtype_size(D), x);
  });
}

// Normalises existing rows.
template <int D>
TPK_DEVICE void normalise_rows(const Rows& rows, const RmsNorm& norm) {
  unsigned iteration = 0;
  sync_cluster();  // all blocks of the cluster run now, so their scratch is valid
  for_rows(rows.count / norm.cols, [&](u64 row) {
    const u64 src = to_address(rows.x) + row * norm.cols * dtype_size(D);
    const auto value = [&](u64 v, float (&x)[kVector]) {
      load<D>(x, src + v * kVector * dtype_size(D));
    };
    normalise<D>(norm, row, iteration++, src, value);
  });
}

}  // namespace tpkernels::cuda
