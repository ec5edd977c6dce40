"""Rows that other ranks own: embeddings, features of nodes, neighbours.

tpkernels has no all-to-all in which each pair of ranks trades a size of its own. `sent` gathers the
rows of all ranks instead, W times the bytes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import tpkernels
from examples.parallel_kernel_bench import plain
from examples.parallel_kernel_bench.gallery import Case, Setup, problem


def sent(x: torch.Tensor, counts: torch.Tensor, at: Setup) -> torch.Tensor:
    """Send ``counts[r]`` rows of ``x`` to rank r; return the rows received."""
    table = tpkernels.all_gather(counts[None], at.group)  # [from, to]
    whole = tpkernels.all_gather(x, at.group, shard_sizes=table.sum(1).tolist())
    return torch.cat(whole.split(table.flatten().tolist())[at.rank :: at.world])


def fetched_by_torch(table: torch.Tensor, ids: torch.Tensor, at: Setup) -> torch.Tensor:
    """Send the ids to their owners, who send the rows."""
    owner = ids // len(table)
    order, counts = owner.argsort(stable=True), owner.bincount(minlength=at.world)
    asked, received = plain.sent(ids[order], counts)
    rows = plain.sent_known(table[asked % len(table)], received, counts.tolist())
    return torch.empty_like(rows).index_copy_(0, order, rows)


def fetched(table: torch.Tensor, ids: torch.Tensor, at: Setup) -> torch.Tensor:
    """Gather the ids; each rank looks up its rows of all, zeros elsewhere, which are summed."""
    local = tpkernels.all_gather(ids, at.group) - at.rank * len(table)
    here = (local >= 0) & (local < len(table))
    rows = F.embedding(local.where(here, 0), table).mul_(here[:, None])
    return tpkernels.reduce_scatter(rows, at.group)


@problem(10, "ids of each rank in a table with sharded rows")
def embedding_lookup(at: Setup) -> Case:
    table, ids = at.normal(at.size(32768), 256), at.ids(at.world * at.size(32768), at.size(8192))
    return Case(lambda: fetched_by_torch(table, ids, at), lambda: fetched(table, ids, at))


@problem(68, "features of nodes that other ranks own, projected")
def gnn_sparse_feature_fetch_projection(at: Setup) -> Case:
    table, ids = at.integers(at.size(32768), 256), at.ids(at.world * at.size(32768), at.size(8192))
    w = at.integers(256, 64, shared=True)
    return Case(lambda: fetched_by_torch(table, ids, at) @ w, lambda: fetched(table, ids, at) @ w)


@problem(79, "nearest neighbours of queries among sharded features")
def dinov2_distributed_knn(at: Setup) -> Case:
    queries, features = at.normal(at.size(512), 256), at.normal(at.size(8192), 256)
    labels = at.ids(1000, len(features))

    def nearest(similarity, labels):
        values, indices = similarity.topk(20, dim=1)
        return values, labels.expand(len(similarity), -1).gather(1, indices)

    def reference():
        found = []
        for owner in range(at.world):
            candidates = nearest(plain.broadcast(queries, owner) @ features.t(), labels)
            found.append([plain.gathered(x, 1) for x in candidates])
        return nearest(*found[at.rank])

    def ours():
        similarity = tpkernels.all_gather_matmul(queries, features.t(), at.group)
        candidates = nearest(similarity, labels)
        return nearest(*(tpkernels.all_to_all(x, at.group, 1, 0) for x in candidates))

    return Case(reference, ours, depth=256)
