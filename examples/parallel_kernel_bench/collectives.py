"""Collectives: the first eight problems, fp8 blocks, and the all-to-alls of Ulysses attention.

A rooted collective is a collective with uneven shards in which the root holds all rows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

import tpkernels
from examples.parallel_kernel_bench import plain
from examples.parallel_kernel_bench.gallery import Case, Setup, problem
from examples.parallel_kernel_bench.plain import (
    all_gather,
    all_gather_stacked,
    all_reduce,
    all_to_all,
    reduce_scatter,
)

ROOT, FP8, BLOCK = 0, torch.float8_e4m3fn, 128


def root_sizes(rows: int, setup: Setup) -> list[int]:
    return [rows if rank == ROOT else 0 for rank in range(setup.world)]


@problem(1, "the sum of the tensors of all ranks")
def allreduce(setup: Setup) -> Case:
    x = setup.integers(setup.size(1 << 22))
    return Case(lambda: all_reduce(x), lambda: tpkernels.all_reduce(x, setup.group))


@problem(2, "the tensors of all ranks, stacked")
def allgather(setup: Setup) -> Case:
    x = setup.normal(setup.size(1 << 22))
    return Case(lambda: all_gather_stacked(x), lambda: tpkernels.all_gather(x[None], setup.group))


@problem(3, "the tensor of one rank on all ranks")
def broadcast(setup: Setup) -> Case:
    x, rows = setup.normal(setup.size(1 << 22)), root_sizes(setup.size(1 << 22), setup)
    return Case(
        lambda: plain.broadcast(x, ROOT),
        lambda: tpkernels.all_gather(x[: rows[setup.rank]], setup.group, shard_sizes=rows),
    )


@problem(4, "the sum of the tensors of all ranks, on one rank")
def reduce(setup: Setup) -> Case:
    x, rows = setup.integers(setup.size(1 << 22)), root_sizes(setup.size(1 << 22), setup)

    def reference():
        total = x.clone()
        dist.reduce(total, ROOT)
        return total[: rows[setup.rank]]

    return Case(reference, lambda: tpkernels.reduce_scatter(x, setup.group, shard_sizes=rows))


@problem(5, "a row of one rank's tensor on each rank")
def scatter(setup: Setup) -> Case:
    x, rows = setup.normal(1, setup.world, setup.size(1 << 21)), root_sizes(1, setup)

    def reference():
        row = torch.empty_like(x[:, 0])
        dist.scatter(row, list(x.unbind(1)) if setup.rank == ROOT else None, src=ROOT)
        return row[:, None]

    def ours():
        return tpkernels.all_to_all(x[: rows[setup.rank]], setup.group, gather_sizes=rows)

    return Case(reference, ours)


@problem(6, "the tensors of all ranks, stacked on one rank")
def gather(setup: Setup) -> Case:
    x, rows = setup.normal(setup.size(1 << 22)), root_sizes(setup.size(1 << 22), setup)

    def reference():
        out = x.new_empty(setup.world, rows[setup.rank])
        dist.gather(x, list(out) if setup.rank == ROOT else None, dst=ROOT)
        return out

    return Case(reference, lambda: tpkernels.all_to_all(x[None], setup.group, scatter_sizes=rows))


@problem(7, "the local rows of the sum of the tensors of all ranks")
def reducescatter(setup: Setup) -> Case:
    x = setup.integers(setup.world, setup.size(1 << 21))
    return Case(lambda: reduce_scatter(x), lambda: tpkernels.reduce_scatter(x, setup.group))


@problem(8, "row r of each rank's tensor on rank r")
def alltoall(setup: Setup) -> Case:
    x = setup.normal(setup.world, setup.size(1 << 21))
    return Case(
        lambda: plain.all_to_all_single(x),
        lambda: tpkernels.all_to_all(x[None], setup.group).squeeze(1),
    )


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize blocks of 128 elements to fp8. Returns the elements and one scale per block."""
    blocks = x.unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(-1) / torch.finfo(FP8).max
    return (blocks / scale[..., None]).to(FP8).view(x.shape), scale


def dequantize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x.float().view(*scale.shape, BLOCK) * scale[..., None]).view(x.shape)


@problem(19, "quantize blocks to fp8, gather them and their scales")
def blocked_fp8_quantize(setup: Setup) -> Case:
    x = setup.normal(setup.size(1024), 2048)

    def reference():
        elements, scale = quantize(x)
        return all_gather(elements.view(torch.uint8)), all_gather(scale)

    def ours():
        elements, scale = quantize(x)
        out = tpkernels.all_gather(elements.view(torch.int32), setup.group)
        return out.view(torch.uint8), tpkernels.all_gather(scale, setup.group)

    return Case(reference, ours)


@problem(20, "dequantize blocks of fp8 and exchange them")
def blocked_fp8_dequantize(setup: Setup) -> Case:
    elements, scale = quantize(setup.normal(setup.world, setup.size(512), 2048))

    def ours():  # sends fp8, a quarter of the bytes, then dequantizes
        moved, scales = (
            tpkernels.all_to_all(x[None], setup.group).squeeze(1)
            for x in (elements.view(torch.int32), scale)
        )
        return dequantize(moved.view(FP8), scales)

    return Case(lambda: plain.all_to_all_single(dequantize(elements, scale)), ours)


@problem(33, "shards of one dim for shards of another")
def ulysses_all_to_all_tensor_primitive(setup: Setup) -> Case:
    x = setup.normal(setup.size(1024), 32, 32 * setup.world)
    return Case(lambda: all_to_all(x, 0, 2), lambda: tpkernels.all_to_all(x, setup.group, 0, 2))


@problem(34, "the rows of all ranks")
def ulysses_all_gather_into_tensor_primitive(setup: Setup) -> Case:
    x = setup.normal(setup.size(2048), 1024)
    return Case(
        lambda: all_gather_stacked(x).flatten(0, 1), lambda: tpkernels.all_gather(x, setup.group)
    )


@problem(35, "the rows of all ranks, whose counts are unknown")
def ulysses_all_gather_variable_primitive(setup: Setup) -> Case:
    x = setup.normal(setup.size(2048) - 3 * setup.rank, 1024)

    def ours():
        rows = tpkernels.all_gather(torch.tensor([len(x)]), setup.group).tolist()
        return tpkernels.all_gather(x, setup.group, shard_sizes=rows)

    return Case(lambda: plain.all_gather_uneven(x), ours)


@problem(36, "the full, padded sequence of the local heads")
def ulysses_gather_seq_scatter_heads(setup: Setup) -> Case:
    x, tokens = (
        setup.normal(2, setup.size(1024), 16 * setup.world, 32),
        setup.size(1024) * setup.world - 1,
    )
    return Case(
        lambda: all_to_all(x, 1, 2)[:, :tokens],
        lambda: tpkernels.all_to_all(x, setup.group, 1, 2)[:, :tokens],
    )


@problem(37, "all heads of a sequence shard, which is padded")
def ulysses_gather_heads_scatter_seq(setup: Setup) -> Case:
    x, padding = setup.normal(2, setup.size(1024) * setup.world - 1, 16, 32), (0, 0, 0, 0, 0, 1)
    return Case(
        lambda: all_to_all(F.pad(x, padding), 2, 1),
        lambda: tpkernels.all_to_all(F.pad(x, padding), setup.group, 2, 1),
    )


@problem(38, "the full sequence of the local heads of Q, K and V in one tensor")
def ulysses_gather_seq_scatter_heads_qkv(setup: Setup) -> Case:
    qkv = setup.normal(2, setup.size(1024), 3, 512 * setup.world)
    return Case(
        lambda: all_to_all(qkv, 1, 3).flatten(2),
        lambda: tpkernels.all_to_all(qkv, setup.group, 1, 3).flatten(2),
    )
