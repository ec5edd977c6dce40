"""Collectives alone: the first eight problems, blocks in fp8, and Ulysses' exchanges.

A rooted collective is an uneven one, in which all rows are one rank's.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

import tpkernels
from examples.parallel_kernel_bench import plain
from examples.parallel_kernel_bench.gallery import Case, Setup, problem
from examples.parallel_kernel_bench.plain import exchanged, gathered, scattered_sum, stacked, summed

ROOT, FP8, BLOCK = 0, torch.float8_e4m3fn, 128


def at_root(rows: int, at: Setup) -> list[int]:
    return [rows if rank == ROOT else 0 for rank in range(at.world)]


@problem(1, "the sum of the tensors of all ranks")
def allreduce(at: Setup) -> Case:
    x = at.integers(at.size(1 << 22))
    return Case(lambda: summed(x), lambda: tpkernels.all_reduce(x, at.group))


@problem(2, "the tensors of all ranks, stacked")
def allgather(at: Setup) -> Case:
    x = at.normal(at.size(1 << 22))
    return Case(lambda: stacked(x), lambda: tpkernels.all_gather(x[None], at.group))


@problem(3, "the tensor of one rank on all ranks")
def broadcast(at: Setup) -> Case:
    x, rows = at.normal(at.size(1 << 22)), at_root(at.size(1 << 22), at)
    return Case(
        lambda: plain.broadcast(x, ROOT),
        lambda: tpkernels.all_gather(x[: rows[at.rank]], at.group, shard_sizes=rows),
    )


@problem(4, "the sum of the tensors of all ranks, on one rank")
def reduce(at: Setup) -> Case:
    x, rows = at.integers(at.size(1 << 22)), at_root(at.size(1 << 22), at)

    def reference():
        total = x.clone()
        dist.reduce(total, ROOT)
        return total[: rows[at.rank]]

    return Case(reference, lambda: tpkernels.reduce_scatter(x, at.group, shard_sizes=rows))


@problem(5, "a row of one rank's tensor on each rank")
def scatter(at: Setup) -> Case:
    x, rows = at.normal(1, at.world, at.size(1 << 21)), at_root(1, at)

    def reference():
        part = torch.empty_like(x[:, 0])
        dist.scatter(part, list(x.unbind(1)) if at.rank == ROOT else None, src=ROOT)
        return part[:, None]

    def ours():
        return tpkernels.all_to_all(x[: rows[at.rank]], at.group, gather_sizes=rows)

    return Case(reference, ours)


@problem(6, "the tensors of all ranks, stacked on one rank")
def gather(at: Setup) -> Case:
    x, rows = at.normal(at.size(1 << 22)), at_root(at.size(1 << 22), at)

    def reference():
        whole = x.new_empty(at.world, rows[at.rank])
        dist.gather(x, list(whole) if at.rank == ROOT else None, dst=ROOT)
        return whole

    return Case(reference, lambda: tpkernels.all_to_all(x[None], at.group, scatter_sizes=rows))


@problem(7, "the local rows of the sum of the tensors of all ranks")
def reducescatter(at: Setup) -> Case:
    x = at.integers(at.world, at.size(1 << 21))
    return Case(lambda: scattered_sum(x), lambda: tpkernels.reduce_scatter(x, at.group))


@problem(8, "row r of each rank's tensor on rank r")
def alltoall(at: Setup) -> Case:
    x = at.normal(at.world, at.size(1 << 21))
    return Case(
        lambda: plain.alltoall(x), lambda: tpkernels.all_to_all(x[None], at.group).squeeze(1)
    )


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return blocks of 128 elements in fp8, and a scale for each."""
    blocks = x.unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(-1) / torch.finfo(FP8).max
    return (blocks / scale[..., None]).to(FP8).view(x.shape), scale


def dequantized(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x.float().view(*scale.shape, BLOCK) * scale[..., None]).view(x.shape)


@problem(19, "quantize blocks to fp8, gather them and their scales")
def blocked_fp8_quantize(at: Setup) -> Case:
    x = at.normal(at.size(1024), 2048)

    def reference():
        elements, scale = quantized(x)
        return gathered(elements.view(torch.uint8)), gathered(scale)

    def ours():
        elements, scale = quantized(x)
        whole = tpkernels.all_gather(elements.view(torch.int32), at.group)
        return whole.view(torch.uint8), tpkernels.all_gather(scale, at.group)

    return Case(reference, ours)


@problem(20, "dequantize blocks of fp8 and exchange them")
def blocked_fp8_dequantize(at: Setup) -> Case:
    elements, scale = quantized(at.normal(at.world, at.size(512), 2048))

    def ours():  # exchanges the bytes, a quarter as many, before it dequantizes
        moved, scales = (
            tpkernels.all_to_all(x[None], at.group).squeeze(1)
            for x in (elements.view(torch.int32), scale)
        )
        return dequantized(moved.view(FP8), scales)

    return Case(lambda: plain.alltoall(dequantized(elements, scale)), ours)


@problem(33, "shards of one dim for shards of another")
def ulysses_all_to_all_tensor_primitive(at: Setup) -> Case:
    x = at.normal(at.size(1024), 32, 32 * at.world)
    return Case(lambda: exchanged(x, 0, 2), lambda: tpkernels.all_to_all(x, at.group, 0, 2))


@problem(34, "the rows of all ranks")
def ulysses_all_gather_into_tensor_primitive(at: Setup) -> Case:
    x = at.normal(at.size(2048), 1024)
    return Case(lambda: stacked(x).flatten(0, 1), lambda: tpkernels.all_gather(x, at.group))


@problem(35, "the rows of all ranks, whose counts are unknown")
def ulysses_all_gather_variable_primitive(at: Setup) -> Case:
    x = at.normal(at.size(2048) - 3 * at.rank, 1024)

    def ours():
        rows = tpkernels.all_gather(torch.tensor([len(x)]), at.group).tolist()
        return tpkernels.all_gather(x, at.group, shard_sizes=rows)

    return Case(lambda: plain.gathered_uneven(x), ours)


@problem(36, "the full, padded sequence of the local heads")
def ulysses_gather_seq_scatter_heads(at: Setup) -> Case:
    x, tokens = at.normal(2, at.size(1024), 16 * at.world, 32), at.size(1024) * at.world - 1
    return Case(
        lambda: exchanged(x, 1, 2)[:, :tokens],
        lambda: tpkernels.all_to_all(x, at.group, 1, 2)[:, :tokens],
    )


@problem(37, "all heads of a sequence shard, which is padded")
def ulysses_gather_heads_scatter_seq(at: Setup) -> Case:
    x, padding = at.normal(2, at.size(1024) * at.world - 1, 16, 32), (0, 0, 0, 0, 0, 1)
    return Case(
        lambda: exchanged(F.pad(x, padding), 2, 1),
        lambda: tpkernels.all_to_all(F.pad(x, padding), at.group, 2, 1),
    )


@problem(38, "the full sequence of the local heads of Q, K and V in one tensor")
def ulysses_gather_seq_scatter_heads_qkv(at: Setup) -> Case:
    qkv = at.normal(2, at.size(1024), 3, 512 * at.world)
    return Case(
        lambda: exchanged(qkv, 1, 3).flatten(2),
        lambda: tpkernels.all_to_all(qkv, at.group, 1, 3).flatten(2),
    )
