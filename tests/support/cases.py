"""Cases of the correctness tests. A case describes one call on all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import TypeAlias

import pytest
import torch

from tests.support.tiers import sweep
from tpkernels.launch import Ranks

RanksFixture: TypeAlias = Callable[[int], Ranks]

WORLDS = (1, 2, 3, 4)
# World sizes of sweeps. The remaining tests use WORLDS.
QUICK_WORLDS = (*sweep((3, 2, 1)), pytest.param(4, marks=pytest.mark.slow))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PACKABLE = DTYPES  # dtypes of weights that can be packed
CONCRETE_COLLECTIVE_ALGORITHMS = ("unfused", "ring", "direct")
CONCRETE_MATMUL_ALGORITHMS = ("unfused", "ring", "direct", "pipelined")
COLLECTIVE_ALGORITHMS = (*CONCRETE_COLLECTIVE_ALGORITHMS, "auto")
MATMUL_ALGORITHMS = (*CONCRETE_MATMUL_ALGORITHMS, "auto")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call on all ranks."""

    op: str
    shape: tuple[int, ...]  #: of the gathered x, or of the unreduced sum, as in `plan.Problem`
    dim: int = 0  #: dim that is gathered or scattered
    sizes: tuple[int, ...] | None = None  #: shard_sizes; None for equal shards
    dtype: torch.dtype = torch.float32
    algorithm: str = "auto"
    k: tuple[int, ...] = ()  #: in reductions, K of rank r is k[r % len(k)]
    n: tuple[int, ...] = ()  #: columns of each weight in all_gather_matmul
    n_by_rank: bool = False  #: add r columns to the weights of rank r
    biases: tuple[torch.dtype | None, ...] = ()  #: bias dtypes, cycled; a reduction has one bias
    residual: torch.dtype | None = None
    norm: torch.dtype | None = None  #: dtype of the RMSNorm weight; None for the dtype of x
    out_dtype: torch.dtype | None = None
    wire_dtype: torch.dtype | None = None
    return_gathered: bool = False
    layout: str = "plain"  #: memory layout of x, see `ranked.copy_to_layout`
    weight_layout: str = "plain"
    integers: bool = False
    scales: str = ""  #: kind of scales, one of `reference.SCALES`
    w_dtype: torch.dtype | None = None  #: dtype of scaled weights; None for the dtype of x
    replicated: bool = False  #: every rank passes the scales of the gathered x

    def __str__(self) -> str:
        """Return the op and all fields that differ from their default."""
        changed = [
            f"{field.name}={getattr(self, field.name)}"
            for field in fields(self)
            if field.name != "op" and getattr(self, field.name) != field.default
        ]
        return f"{self.op}({', '.join(changed)})"

    @property
    def out(self) -> torch.dtype:
        return self.out_dtype or (torch.bfloat16 if self.scales else self.dtype)

    @property
    def wire(self) -> torch.dtype:
        return self.wire_dtype or (self.out if self.scales else self.dtype)

    @property
    def scattered(self) -> bool:
        return "reduce_scatter" in self.op

    @property
    def normalises(self) -> bool:
        return self.op.endswith("_rms_norm")

    def shards(self, world: int) -> tuple[int, ...]:
        """Return the rows of each rank along ``dim``."""
        return self.sizes or (self.shape[self.dim] // world,) * world

    def shard(self, full: torch.Tensor, rank: int, world: int) -> torch.Tensor:
        """Return the shard of a rank of the gathered or scattered tensor."""
        shards = self.shards(world)
        return full.narrow(self.dim, sum(shards[:rank]), shards[rank])

    def values(self) -> Case:
        """Reset the fields that affect neither the inputs nor the expected results."""
        plain = {"layout": "plain", "weight_layout": "plain"}
        return replace(self, algorithm="auto", replicated=False, **plain)

    def generator(self, *seed_key: object) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(f"{self} {seed_key}".encode()))


def expand_cases(
    *cases: Case,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    algorithms: tuple[str, ...] | None = None,
    integers: tuple[bool, ...] = (True, False),
) -> list[Case]:
    """Expand cases to all dtypes, integers and random values, and algorithms.

    Scaled cases keep their dtype. ``algorithms`` defaults to all algorithms of the op except
    "auto".
    """
    return [
        replace(case, dtype=dtype, integers=integral, algorithm=algorithm)
        for case in cases
        for dtype in ((case.dtype,) if case.scales else dtypes)
        for integral in integers
        for algorithm in algorithms
        or (CONCRETE_MATMUL_ALGORITHMS if "matmul" in case.op else CONCRETE_COLLECTIVE_ALGORITHMS)
    ]


def along_each_dim(case: Case, shapes: Iterable[tuple[int, ...]], size: int) -> list[Case]:
    """Vary the case over the shapes, and over the dims of size ``size`` in each shape."""
    return [
        replace(case, shape=shape, dim=dim)
        for shape in shapes
        for dim in range(len(shape))
        if shape[dim] == size
    ]


def exact_cases(*cases: Case, dtypes: tuple[torch.dtype, ...] = DTYPES) -> list[Case]:
    """Expand with integers only, for cases that move data and do not change arithmetic."""
    return expand_cases(*cases, dtypes=dtypes, integers=(True,))


def one_of_each(world: int) -> list[Case]:
    """Create a small case per op and algorithm, with uneven shards if possible."""
    sizes = tuple(range(4, 4 + world))
    rows = sum(sizes)
    collectives = [
        Case(op="all_gather", shape=(rows, 5), sizes=sizes),
        Case(op="reduce_scatter", shape=(rows, 5), sizes=sizes),
        Case(op="all_reduce", shape=(70, 71)),
        Case(op="all_reduce_", shape=(7, 5)),
        Case(op="all_reduce_rms_norm", shape=(70, 71)),
    ]
    matmuls = [
        Case(op="all_gather_matmul", shape=(rows, 9), sizes=sizes, n=(6, 4)),
        Case(op="matmul_reduce_scatter", shape=(rows, 6), sizes=sizes, k=(9,)),
        Case(op="matmul_all_reduce", shape=(rows, 6), k=(9,)),
        Case(op="matmul_all_reduce_rms_norm", shape=(rows, 6), k=(9,)),
    ]
    return [
        *exact_cases(*collectives, dtypes=(torch.float32,)),
        *exact_cases(*matmuls, dtypes=(torch.float32,)),
    ]


def uneven_splits(total: int, world: int) -> Iterator[tuple[int, ...]]:
    """Yield splits of ``total`` rows.

    The first is balanced, in the second the rows grow with the rank. Then follow splits with empty
    ranks at the start, at the end and in the middle.
    """
    yield tuple(total // world + (rank < total % world) for rank in range(world))
    offsets = [total * rank * (rank + 1) // (world * (world + 1)) for rank in range(world + 1)]
    yield tuple(end - begin for begin, end in pairwise(offsets))
    yield (*(0,) * (world - 1), total)
    yield (total, *(0,) * (world - 1))
    if world > 2:
        yield (total - total // 2, *(0,) * (world - 2), total // 2)
