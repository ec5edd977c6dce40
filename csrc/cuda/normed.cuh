// All-reduces fused with RMSNorm, in one launch.
//
// Problem: total = round(sum_r(x_r) + bias + residual) and, for each row of it,
// normed = round(total / sqrt(mean(total^2) + eps) * weight), on every rank.
//
// Algorithm: the sum is LL one-shot or two-shot (cuda/ll.cuh), or two-shot (cuda/all_reduce.cuh).
// In all cases a cluster of blocks processes full rows and normalises them directly
// (cuda/rms_norm.cuh). In two-shot, the owner pushes the sum of its rows and every rank normalises
// all rows, so the links carry no additional bytes.
//
// Sync: as in those files. Blocks wait only for blocks with their number on peers, and for the
// blocks of their cluster, which run concurrently. A thread pushes the elements that it sums, so
// `total` may be x.
//
// Failure: as in those files. A block that starts after a failure pushes nothing, but it still
// reaches its cluster barriers, because other blocks of its cluster may have started before the
// failure.
#pragma once

#include "cuda/ll.cuh"
#include "cuda/rms_norm.cuh"

namespace tpkernels::cuda {

template <int D>
constexpr int kVectorPacks = kVector / kLanes<D>;

// Prefetches the operands of the epilogue and the norm. The preceding matmul does not write them,
// so an early launch may prefetch them.
TPK_DEVICE void prefetch_operands(const AllReduce& call, const RmsNorm& norm) {
  const Epilogue& epilogue = call.epilogue;
  for_vectors(norm.cols, [&](u64 v) {
    const u64 i = v * kVector;
    prefetch(static_cast<const char*>(norm.weight) + i * dtype_size(norm.weight_dtype));
    if (epilogue.bias == nullptr) return;
    prefetch(static_cast<const char*>(epilogue.bias) + i * dtype_size(epilogue.bias_dtype));
  });
  if (epilogue.residual == nullptr || call.segment < call.count) return;
  const auto* residual = static_cast<const char*>(epilogue.residual);
  const u64 size = dtype_size(epilogue.residual_dtype);
  for_rows(call.count / norm.cols, [&](u64 row) {
    for_vectors(norm.cols,
                [&](u64 v) { prefetch(residual + (row * norm.cols + v * kVector) * size); });
  });
}

template <int D>
TPK_DEVICE void ll_reduce_rows(const Peers& peers, const AllReduce& call, const RmsNorm& norm) {
  constexpr int kPacks = kVectorPacks<D>;
  const Chunk local_chunk{to_address(call.x), call.count * dtype_size(D)};
  const u64 cols = norm.cols, rows = call.count / cols, out = to_address(call.out);
  delay(peers, thread());
  if (peers.usable) {
    for_rows(rows, [&](u64 row) {
      for_vectors(cols, [&](u64 v) {
        push_packs<kPacks>(peers, local_chunk, (row * (cols / kVector) + v) * kPacks);
      });
    });
  }
  sync_cluster();  // all blocks of the cluster run now, so their scratch is valid
  delay(peers, thread() + 1);
  unsigned iteration = 0;
  for_rows(rows, [&](u64 row) {
    const auto value = [&](u64 v, float (&x)[kVector]) {
      const u64 i = row * cols + v * kVector;
      accumulate_arriving<D>(x, peers, local_chunk, i / kVector);
      add_epilogue(x, 0, i, call.epilogue);
      round_to<D>(x);
      store<D>(out + i * dtype_size(D), x);
    };
    normalise<D>(norm, row, iteration++, out + row * cols * dtype_size(D), value);
  });
}

template <int D>
TPK_DEVICE void load_packs(Pack (&dst)[kVectorPacks<D>], u64 src) {
#pragma unroll
  for (int p = 0; p < kVectorPacks<D>; ++p) {
    dst[p] = load_pack(reinterpret_cast<const void*>(src + p * sizeof(Pack)));
  }
}

template <int D>
TPK_DEVICE void store_packs(u64 dst, const Pack (&src)[kVectorPacks<D>]) {
#pragma unroll
  for (int p = 0; p < kVectorPacks<D>; ++p) {
    store_pack(reinterpret_cast<void*>(dst + p * sizeof(Pack)), src[p]);
  }
}

// Pushes partials to their owners: of each peer segment, the rows that this cluster processes.
template <int D>
TPK_DEVICE void push_segments(const Peers& peers, const AllReduce& call, u64 cols) {
  constexpr int kBatch = 4;
  const int rank = peers.workspace.rank, world = peers.workspace.world;
  const auto source_address = [&](int peer, u64 i) {
    return to_address(call.x) + (segment_range(call, peer).first + i) * dtype_size(D);
  };
  for_rows(call.segment / cols, [&](u64 row) {
    for_vectors(cols, [&](u64 v) {
      const u64 i = row * cols + v * kVector;
      for (int distance = 1; distance < world; distance += kBatch) {
        Pack packs[kBatch][kVectorPacks<D>];
        bool has_pack[kBatch];
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          const int peer = (rank + distance + k) % world;
          const Range segment = segment_range(call, peer);
          has_pack[k] = distance + k < world && segment.first + i < segment.last;
          if (has_pack[k]) load_packs<D>(packs[k], source_address(peer, i));
        }
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          const int peer = (rank + distance + k) % world;
          if (has_pack[k])
            store_packs<D>(slot_address(peers, call, peer, rank) + i * dtype_size(D), packs[k]);
        }
      }
    });
  });
}

// Computes x = the rounded sum of the vector at element `i` of the local `segment`.
template <int D>
TPK_DEVICE void sum_vector(const Peers& peers, const AllReduce& call, Range segment, u64 i,
                           float (&x)[kVector]) {
  const int rank = peers.workspace.rank;
  const auto partials = [&](int r) {
    return r == rank ? to_address(call.x) + segment.first * dtype_size(D)
                     : slot_address(peers, call, rank, r);
  };
  accumulate<D>(x, partials, peers.workspace.world, i);
  add_epilogue(x, 0, segment.first + i, call.epilogue);
  round_to<D>(x);
}

template <int D>
TPK_DEVICE void two_shot_reduce_rows(const Peers& peers, const AllReduce& call,
                                     const RmsNorm& norm) {
  const int rank = peers.workspace.rank, world = peers.workspace.world;
  const int partials_signal = kTiles + block(), results_signal = partials_signal + blocks();
  const u64 cols = norm.cols;
  if (peers.usable) push_segments<D>(peers, call, cols);
  publish_to_all(peers, partials_signal);
  wait_for_all(peers, partials_signal);
  const Range local_segment = segment_range(call, rank);
  for_rows((local_segment.last - local_segment.first) / cols, [&](u64 row) {
    for_vectors(cols, [&](u64 v) {
      const u64 i = row * cols + v * kVector, first = local_segment.first + i;
      float x[kVector];
      sum_vector<D>(peers, call, local_segment, i, x);
      store<D>(to_address(call.out) + first * dtype_size(D), x);
      for (int k = 1; peers.usable && k < world; ++k) {
        store<D>(result_address(peers, call, (rank + k) % world, first), x);
      }
    });
  });
  publish_to_all(peers, results_signal);
  sync_cluster();  // all blocks of the cluster run now, so their scratch is valid
  unsigned iteration = 0;
  for (int i = 0; i < world; ++i) {
    const int owner = (rank + i) % world;
    const Range segment = segment_range(call, owner);
    if (i > 0) wait_for(peers, owner, results_signal);
    for_rows((segment.last - segment.first) / cols, [&](u64 row) {
      const u64 first = segment.first + row * cols;
      const u64 total = to_address(call.out) + first * dtype_size(D);
      const auto value = [&](u64 v, float (&x)[kVector]) {
        const u64 offset = v * kVector * dtype_size(D);
        load<D>(x, i == 0 ? total + offset : result_address(peers, call, rank, first) + offset);
        if (i > 0) store<D>(total + offset, x);
      };
      normalise<D>(norm, first / cols, iteration++, total, value);
    });
  }
}

// LL two-shot. `call.segment` consists of full rows. A row has the same cluster on all ranks, and a
// thread has the same vectors of a row in every step.
template <int D>
TPK_DEVICE void ll_two_shot_reduce_rows(const Peers& peers, const AllReduce& call,
                                        const RmsNorm& norm) {
  constexpr int kPacks = kVectorPacks<D>;
  const int rank = peers.workspace.rank;
  const u64 cols = norm.cols, rows = call.count / cols;
  const TwoShotPlan plan = plan_two_shot(call);
  const auto row_owner = [&](u64 row) { return static_cast<int>(row * cols / call.segment); };
  const auto vector_index = [&](u64 row, u64 v) { return row * cols % call.segment / kVector + v; };
  const auto total_address = [&](u64 row) {
    return to_address(call.out) + row * cols * dtype_size(D);
  };
  delay(peers, thread());
  for_rows(peers.usable ? rows : 0, [&](u64 row) {
    const int owner = row_owner(row);
    if (owner == rank) return;
    const Chunk chunk = plan.partial_chunk(owner);
    for_vectors(cols, [&](u64 v) {
      push_packs_to<kPacks>(peers, owner, chunk, vector_index(row, v) * kPacks);
    });
  });
  sync_cluster();  // all blocks of the cluster run now, so their scratch is valid
  delay(peers, thread() + 1);
  for_rows(peers.usable ? rows : 0, [&](u64 row) {
    if (row_owner(row) != rank) return;
    for_vectors(cols, [&](u64 v) {
      float x[kVector];
      const bool arrived =
          accumulate_arriving<D>(x, peers, plan.partial_chunk(rank), vector_index(row, v));
      add_epilogue(x, 0, row * cols + v * kVector, call.epilogue);
      store<D>(total_address(row) + v * kVector * dtype_size(D), x);
      if (arrived) push_packs<kPacks>(peers, plan.sum_chunk(rank), vector_index(row, v) * kPacks);
    });
  });
  delay(peers, thread() + 2);
  unsigned iteration = 0;
  for_rows(rows, [&](u64 row) {
    const int owner = row_owner(row);
    const auto value = [&](u64 v, float (&x)[kVector]) {
      const u64 address = total_address(row) + v * kVector * dtype_size(D);
      if (owner != rank) {
        Pack packs[kPacks];
        receive_from<kPacks>(peers, owner, plan.sum_chunk(owner), vector_index(row, v) * kPacks,
                             packs);
        store_packs<D>(address, packs);
      }
      load<D>(x, address);
    };
    normalise<D>(norm, row, iteration++, total_address(row), value);
  });
}

}  // namespace tpkernels::cuda
