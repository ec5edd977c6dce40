"""Which algorithm a call runs: Problem -> Plan. Pure: no device, no communication.

A problem holds only what all ranks share, so that all choose alike; what may differ by rank (the
columns of a column-parallel weight, the K of a row-parallel one) is not part of it.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import TypeAlias

import torch

from tpkernels import dtypes

NoKernels: TypeAlias = Mapping[str, str]
_ALL_KERNELS: NoKernels = MappingProxyType({})

ALGORITHMS = ("unfused", "ring", "direct", "pipelined", "fused")


@dataclass(frozen=True)
class Problem:
    """One call as all ranks see it.

    ``shape`` is the global shape of what travels: the gathered ``x`` of an all-gather, the
    unreduced sum of a reduction. ``dim`` is gathered or scattered (None for an all-reduce), rank
    ``r`` holding ``sizes[r]`` rows of it. ``dtype`` is what travels; ``options`` is the rest that
    ranks must share.
    """

    op: str
    device: str
    world: int
    shape: tuple[int, ...]
    dim: int | None
    sizes: tuple[int, ...]
    dtype: torch.dtype
    options: tuple[str, ...] = ()

    @property
    def outer(self) -> int:
        """Elements before ``dim``: how many blocks one rank's share consists of."""
        return prod(self.shape[: self.dim]) if self.dim is not None else 1

    @property
    def inner(self) -> int:
        """Elements after ``dim``."""
        return prod(self.shape[self.dim + 1 :]) if self.dim is not None else 1

    @property
    def rows(self) -> int:
        """Rows of the matrix product: all dims but the last."""
        return prod(self.shape[:-1])

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor that travels."""
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        parts = [f"{list(self.shape)} {dtypes.name(self.dtype)}"]
        if self.dim is not None:
            even = len(set(self.sizes)) == 1
            split = f"{self.sizes[0]} a rank" if even else str(list(self.sizes))
            parts.append(f"dim {self.dim} by {split}")
        return f"{self.op}({', '.join([*parts, *self.options])})"


@dataclass(frozen=True)
class Plan:
    """The choice, its reason in words, and how the call is named to peers."""

    algorithm: str
    reason: str
    text: str = field(repr=False)
    signature: int = field(repr=False)


# Rows that one rank contributes to an all-gather, or receives from a reduction, from which on the
# matmul is split into one part per rank. Below, a GEMM of few rows streams the weights from memory
# and splitting it streams them once per part. AMD EPYC Zen 3, 2 ranks x 1 thread, 2026-11-21:
# `tpkernels bench` (benchmarks/results).
PIPELINE_MIN_ROWS = 256

# Bytes of the tensor that travels from which on `ring` is faster than `unfused` where ranks share
# no memory; smaller ones take the messages as long as the bytes, and `ring` sends more of them. AMD
# EPYC Zen 3, 2 cores, 2 to 4 network namespaces, gloo, 2026-11-21: `python -m benchmarks.hosts`
# (benchmarks/results/cpu-2core-zen3-hosts.md).
RING_MIN_BYTES = 8 << 20


def choose(
    problem: Problem,
    *,
    shared_memory: bool,
    no_kernels: NoKernels = _ALL_KERNELS,
    requested: str = "auto",
) -> Plan:
    """The plan for ``problem``.

    Args:
        shared_memory: whether all ranks of the group can map each other's memory.
        no_kernels: the algorithms whose kernels cannot run, and why.
        requested: an algorithm's name, or "auto".

    Raises:
        ValueError: ``requested`` is no algorithm.
        NotImplementedError: the algorithm asked for cannot run this problem; the message says
            what it needs.
    """
    if requested != "auto":
        check_algorithm(requested)
        obstacle = _obstacle(problem, requested, shared_memory, no_kernels)
        if obstacle is not None:
            raise NotImplementedError(f"algorithm '{requested}' of {problem.op} {obstacle}")
        return _plan(problem, requested, "asked for")
    if problem.world == 1:
        return _plan(problem, "unfused", "one rank: nothing to communicate")
    if not shared_memory:
        return _across_hosts(problem)
    if problem.device == "cuda":
        return _plan(problem, "unfused", "on this GPU nothing is known to be faster")
    rows = _rows_per_part(problem)
    if (
        _obstacle(problem, "pipelined", shared_memory, no_kernels) is None
        and rows >= PIPELINE_MIN_ROWS
    ):
        return _plan(problem, "pipelined", f"{rows} rows a rank >= {PIPELINE_MIN_ROWS}")
    reason = (
        "no matmul to overlap with"
        if not _has_matmul(problem)
        else (f"{rows} rows a rank < {PIPELINE_MIN_ROWS}: one matmul, not split")
    )
    return _plan(problem, "direct", reason)


def _across_hosts(problem: Problem) -> Plan:
    reason, rows = "the ranks share no memory", _rows_per_part(problem)
    if problem.device == "cuda":
        return _plan(
            problem, "unfused", f"{reason}; nothing else is known to be faster on this GPU"
        )
    if problem.nbytes < RING_MIN_BYTES:
        return _plan(problem, "unfused", f"{reason}; {problem.nbytes} bytes < {RING_MIN_BYTES}")
    if _has_matmul(problem) and rows < PIPELINE_MIN_ROWS:
        return _plan(problem, "unfused", f"{reason}; {rows} rows a rank < {PIPELINE_MIN_ROWS}")
    if problem.op == "matmul_reduce_scatter":  # 0.88x to 1.13x as fast, with no trend
        return _plan(problem, "unfused", f"{reason}; ring has measured no faster")
    if _obstacle(problem, "ring", False, _ALL_KERNELS) is not None:
        return _plan(problem, "unfused", f"{reason}; a gather of K is not split")
    return _plan(problem, "ring", f"{reason}; {problem.nbytes} bytes >= {RING_MIN_BYTES}")


def check_algorithm(name: str) -> None:
    """``ValueError`` for a name that is no algorithm of this package."""
    if name not in ALGORITHMS:
        raise ValueError(f"unknown algorithm '{name}'; there are auto, {', '.join(ALGORITHMS)}")


def obstacles(
    problem: Problem, *, shared_memory: bool, no_kernels: NoKernels = _ALL_KERNELS
) -> dict[str, str | None]:
    """For each algorithm, why it cannot run ``problem`` (None: it can)."""
    return {name: _obstacle(problem, name, shared_memory, no_kernels) for name in ALGORITHMS}


def _has_matmul(problem: Problem) -> bool:
    return "matmul" in problem.op


def _rows_per_part(problem: Problem) -> int:
    """Rows of the smallest matmul that a split per rank makes (ranks without rows aside)."""
    if problem.dim is None:
        return problem.rows // problem.world
    if problem.dim == len(problem.shape) - 1:
        return problem.rows
    return min((size for size in problem.sizes if size), default=0) * prod(
        problem.shape[problem.dim + 1 : -1]
    )


def _obstacle(
    problem: Problem, algorithm: str, shared_memory: bool, no_kernels: NoKernels
) -> str | None:
    last = problem.dim == len(problem.shape) - 1
    if algorithm in ("ring", "pipelined") and problem.op == "all_gather_matmul" and last:
        return "cannot gather the dim that the matmul sums over (it would round each part)"
    if algorithm in ("unfused", "ring"):
        return None
    if not shared_memory:
        return "needs memory shared by all ranks, and this group's ranks are on several hosts"
    if algorithm in ("pipelined", "fused") and not _has_matmul(problem):
        return "overlaps a matmul, and this op has none"
    if algorithm == "fused" or problem.device == "cuda":
        vector = problem.dim == 0 and not _has_matmul(problem)
        if problem.dim is not None and (problem.outer != 1 or (last and not vector)):
            return f"moves whole rows: of {list(problem.shape)} it can split dim 0 only"
        if problem.dtype == torch.float64:
            return "accumulates in float32 and takes no float64"
    return no_kernels.get(algorithm)


@functools.lru_cache(maxsize=4096)
def _plan(problem: Problem, algorithm: str, reason: str) -> Plan:
    text = f"{problem} [{algorithm}]"
    return Plan(algorithm, reason, text, zlib.crc32(text.encode()) or 1)
