// All-reduces whose rows are normalised, in one launch.
//
// Problem: total = round(sum_r(x_r) + bias + residual) and, for each row of it,
// normed = round(total / sqrt(mean(total^2) + eps) * weight), on every rank.
//
// Algorithm: sums by LL in one hop or two (cuda/ll.cuh), or two-shot (cuda/all_reduce.cuh), but a
// cluster of blocks has whole rows, which it normalises at once (cuda/rms_norm.cuh). In two hops
// the owner pushes the sum of its rows, as there, and every rank normalises all rows: so no more
// bytes cross the links.
//
// Sync: that of those files. Blocks wait only for blocks of the same number on other ranks, and for
// those of their cluster, which run at the same time. A thread pushes the same elements that it
// sums, so `total` may be x.
//
// Failure: as there. A grid that starts after a failure pushes nothing, but it still meets the
// barriers of its clusters: their other blocks may have started before it.
#pragma once

#include "cuda/ll.cuh"
#include "cuda/rms_norm.cuh"

namespace tpkernels::cuda {

template <int D>
constexpr int kVectorPacks = kVector / kLanes<D>;

// What is needed after the sum, and no product behind which this kernel starts early has made.
TPK_DEVICE void prefetch_operands(const AllReduce& call, const RmsNorm& norm) {
  const Epilogue& after = call.epilogue;
  for_vectors(norm.cols, [&](u64 v) {
    const u64 i = v * kVector;
    prefetch(static_cast<const char*>(norm.weight) + i * size_of(norm.weight_dtype));
    if (after.bias == nullptr) return;
    prefetch(static_cast<const char*>(after.bias) + i * size_of(after.bias_dtype));
  });
  if (after.residual == nullptr || call.segment < call.count) return;
  const auto* residual = static_cast<const char*>(after.residual);
  const u64 size = size_of(after.residual_dtype);
  for_rows(call.count / norm.cols, [&](u64 row) {
    for_vectors(norm.cols,
                [&](u64 v) { prefetch(residual + (row * norm.cols + v * kVector) * size); });
  });
}

template <int D>
TPK_DEVICE void rows_by_ll(const Peers& peers, const AllReduce& call, const RmsNorm& norm) {
  constexpr int kPacks = kVectorPacks<D>;
  const Piece own{address_of(call.x), call.count * size_of(D)};
  const u64 cols = norm.cols, rows = call.count / cols, out = address_of(call.out);
  delay(peers, thread());
  if (peers.usable) {
    for_rows(rows, [&](u64 row) {
      for_vectors(cols, [&](u64 v) {
        push_packs<kPacks>(peers, own, (row * (cols / kVector) + v) * kPacks);
      });
    });
  }
  sync_cluster();  // its blocks run now, so their scratch is there
  delay(peers, thread() + 1);
  unsigned turn = 0;
  for_rows(rows, [&](u64 row) {
    const auto value = [&](u64 v, float (&x)[kVector]) {
      const u64 i = row * cols + v * kVector;
      add_up_arriving<D>(x, peers, own, i / kVector);
      add_epilogue(x, 0, i, call.epilogue);
      round_to<D>(x);
      store<D>(out + i * size_of(D), x);
    };
    normalise<D>(norm, row, turn++, out + row * cols * size_of(D), value);
  });
}

template <int D>
TPK_DEVICE void load_packs(Pack (&to)[kVectorPacks<D>], u64 from) {
#pragma unroll
  for (int p = 0; p < kVectorPacks<D>; ++p) {
    to[p] = load_pack(reinterpret_cast<const void*>(from + p * sizeof(Pack)));
  }
}

template <int D>
TPK_DEVICE void store_packs(u64 to, const Pack (&from)[kVectorPacks<D>]) {
#pragma unroll
  for (int p = 0; p < kVectorPacks<D>; ++p) {
    store_pack(reinterpret_cast<void*>(to + p * sizeof(Pack)), from[p]);
  }
}

// Pushes this cluster's rows of each peer's segment to that peer.
template <int D>
TPK_DEVICE void push_segments(const Peers& peers, const AllReduce& call, u64 cols) {
  constexpr int kAtOnce = 4;
  const int rank = peers.space.rank, world = peers.space.world;
  const auto from = [&](int to, u64 i) {
    return address_of(call.x) + (segment_of(call, to).first + i) * size_of(D);
  };
  for_rows(call.segment / cols, [&](u64 row) {
    for_vectors(cols, [&](u64 v) {
      const u64 i = row * cols + v * kVector;
      for (int turn = 1; turn < world; turn += kAtOnce) {
        Pack held[kAtOnce][kVectorPacks<D>];
        bool has[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          const int to = (rank + turn + k) % world;
          const Range segment = segment_of(call, to);
          has[k] = turn + k < world && segment.first + i < segment.last;
          if (has[k]) load_packs<D>(held[k], from(to, i));
        }
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          const int to = (rank + turn + k) % world;
          if (has[k]) store_packs<D>(slot_of(peers, call, to, rank) + i * size_of(D), held[k]);
        }
      }
    });
  });
}

// x = the rounded elements of the sum from `i` of this rank's `segment` on, which it has summed.
template <int D>
TPK_DEVICE void sum_vector(const Peers& peers, const AllReduce& call, Range segment, u64 i,
                           float (&x)[kVector]) {
  const int rank = peers.space.rank;
  const auto partials = [&](int r) {
    return r == rank ? address_of(call.x) + segment.first * size_of(D)
                     : slot_of(peers, call, rank, r);
  };
  add_up<D>(x, partials, peers.space.world, i);
  add_epilogue(x, 0, segment.first + i, call.epilogue);
  round_to<D>(x);
}

template <int D>
TPK_DEVICE void two_shot_rows(const Peers& peers, const AllReduce& call, const RmsNorm& norm) {
  const int rank = peers.space.rank, world = peers.space.world;
  const int word = kTiles + block(), result = word + blocks();
  const u64 cols = norm.cols;
  if (peers.usable) push_segments<D>(peers, call, cols);
  publish_to_all(peers, word);
  wait_for_all(peers, word);
  const Range own = segment_of(call, rank);
  for_rows((own.last - own.first) / cols, [&](u64 row) {
    for_vectors(cols, [&](u64 v) {
      const u64 i = row * cols + v * kVector, first = own.first + i;
      float x[kVector];
      sum_vector<D>(peers, call, own, i, x);
      store<D>(address_of(call.out) + first * size_of(D), x);
      for (int k = 1; peers.usable && k < world; ++k) {
        store<D>(result_of(peers, call, (rank + k) % world, first), x);
      }
    });
  });
  publish_to_all(peers, result);
  sync_cluster();  // its blocks run now, so their scratch is there
  unsigned turn = 0;
  for (int i = 0; i < world; ++i) {
    const int owner = (rank + i) % world;
    const Range segment = segment_of(call, owner);
    if (i > 0) wait_for(peers, owner, result);
    for_rows((segment.last - segment.first) / cols, [&](u64 row) {
      const u64 first = segment.first + row * cols;
      const u64 total = address_of(call.out) + first * size_of(D);
      const auto value = [&](u64 v, float (&x)[kVector]) {
        const u64 at = v * kVector * size_of(D);
        load<D>(x, i == 0 ? total + at : result_of(peers, call, rank, first) + at);
        if (i > 0) store<D>(total + at, x);
      };
      normalise<D>(norm, first / cols, turn++, total, value);
    });
  }
}

// In two hops: `call.segment` is whole rows, and a row has the same cluster on all ranks. A thread
// has the same vectors of a row in every step.
template <int D>
TPK_DEVICE void rows_by_ll_in_two_hops(const Peers& peers, const AllReduce& call,
                                       const RmsNorm& norm) {
  constexpr int kPacks = kVectorPacks<D>;
  const int rank = peers.space.rank;
  const u64 cols = norm.cols, rows = call.count / cols;
  const TwoHops hops = two_hops(call);
  const auto owner_of = [&](u64 row) { return static_cast<int>(row * cols / call.segment); };
  const auto vector_in = [&](u64 row, u64 v) { return row * cols % call.segment / kVector + v; };
  const auto total_of = [&](u64 row) { return address_of(call.out) + row * cols * size_of(D); };
  delay(peers, thread());
  for_rows(peers.usable ? rows : 0, [&](u64 row) {
    const int owner = owner_of(row);
    if (owner == rank) return;
    const Piece piece = hops.partial_for(owner);
    for_vectors(cols, [&](u64 v) {
      push_packs_to<kPacks>(peers, owner, piece, vector_in(row, v) * kPacks);
    });
  });
  sync_cluster();  // its blocks run now, so their scratch is there
  delay(peers, thread() + 1);
  for_rows(peers.usable ? rows : 0, [&](u64 row) {
    if (owner_of(row) != rank) return;
    for_vectors(cols, [&](u64 v) {
      float x[kVector];
      const bool arrived = add_up_arriving<D>(x, peers, hops.partial_for(rank), vector_in(row, v));
      add_epilogue(x, 0, row * cols + v * kVector, call.epilogue);
      store<D>(total_of(row) + v * kVector * size_of(D), x);
      if (arrived) push_packs<kPacks>(peers, hops.sum_of(rank), vector_in(row, v) * kPacks);
    });
  });
  delay(peers, thread() + 2);
  unsigned turn = 0;
  for_rows(rows, [&](u64 row) {
    const int owner = owner_of(row);
    const auto value = [&](u64 v, float (&x)[kVector]) {
      const u64 at = total_of(row) + v * kVector * size_of(D);
      if (owner != rank) {
        Pack found[kPacks];
        receive_from<kPacks>(peers, owner, hops.sum_of(owner), vector_in(row, v) * kPacks, found);
        store_packs<D>(at, found);
      }
      load<D>(x, at);
    };
    normalise<D>(norm, row, turn++, total_of(row), value);
  });
}

}  // namespace tpkernels::cuda
