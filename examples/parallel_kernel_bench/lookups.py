"""Lookups of remote rows: embeddings, node features, nearest neighbours.

tpkernels has no all-to-all with arbitrary sizes per pair of ranks. `send_rows` gathers the rows of
all ranks instead and receives W times the bytes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import tpkernels
from examples.parallel_kernel_bench import plain
from examples.parallel_kernel_bench.gallery import Case, Setup, problem


def send_rows(x: torch.Tensor, counts: torch.Tensor, setup: Setup) -> torch.Tensor:
    """Send ``counts[r]`` rows of ``x`` to rank r. Returns the received rows."""
    table = tpkernels.all_gather(counts[None], setup.group)  # [source rank, destination rank]
    rows = tpkernels.all_gather(x, setup.group, shard_sizes=table.sum(1).tolist())
    return torch.cat(rows.split(table.flatten().tolist())[setup.rank :: setup.world])


def fetch_with_torch(table: torch.Tensor, ids: torch.Tensor, setup: Setup) -> torch.Tensor:
    """Send the ids to the ranks that own them, and receive the rows."""
    owner = ids // len(table)
    order, counts = owner.argsort(stable=True), owner.bincount(minlength=setup.world)
    requested, received = plain.send_rows(ids[order], counts)
    rows = plain.send_rows_with_counts(table[requested % len(table)], received, counts.tolist())
    return torch.empty_like(rows).index_copy_(0, order, rows)


def fetch(table: torch.Tensor, ids: torch.Tensor, setup: Setup) -> torch.Tensor:
    """Gather all ids, look up the local rows (zeros for remote ids), and reduce-scatter."""
    local = tpkernels.all_gather(ids, setup.group) - setup.rank * len(table)
    is_local = (local >= 0) & (local < len(table))
    rows = F.embedding(local.where(is_local, 0), table).mul_(is_local[:, None])
    return tpkernels.reduce_scatter(rows, setup.group)


@problem(10, "ids of each rank in a table with sharded rows")
def embedding_lookup(setup: Setup) -> Case:
    table, ids = (
        setup.normal(setup.size(32768), 256),
        setup.ids(setup.world * setup.size(32768), setup.size(8192)),
    )
    return Case(lambda: fetch_with_torch(table, ids, setup), lambda: fetch(table, ids, setup))


@problem(68, "features of nodes that other ranks own, projected")
def gnn_sparse_feature_fetch_projection(setup: Setup) -> Case:
    table, ids = (
        setup.integers(setup.size(32768), 256),
        setup.ids(setup.world * setup.size(32768), setup.size(8192)),
    )
    w = setup.integers(256, 64, shared=True)
    return Case(
        lambda: fetch_with_torch(table, ids, setup) @ w, lambda: fetch(table, ids, setup) @ w
    )


@problem(79, "nearest neighbours of queries among sharded features")
def dinov2_distributed_knn(setup: Setup) -> Case:
    queries, features = setup.normal(setup.size(512), 256), setup.normal(setup.size(8192), 256)
    labels = setup.ids(1000, len(features))

    def find_nearest(similarity, labels):
        values, indices = similarity.topk(20, dim=1)
        return values, labels.expand(len(similarity), -1).gather(1, indices)

    def reference():
        results = []
        for owner in range(setup.world):
            candidates = find_nearest(plain.broadcast(queries, owner) @ features.t(), labels)
            results.append([plain.all_gather(x, 1) for x in candidates])
        return find_nearest(*results[setup.rank])

    def ours():
        similarity = tpkernels.all_gather_matmul(queries, features.t(), setup.group)
        candidates = find_nearest(similarity, labels)
        return find_nearest(*(tpkernels.all_to_all(x, setup.group, 1, 0) for x in candidates))

    return Case(reference, ours, depth=256)
