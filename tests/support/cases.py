"""What the correctness tests run: one call as all ranks see it, and lists of them."""

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
# For sweeps; other tests take all of WORLDS.
QUICK_WORLDS = (*sweep((3, 2, 1)), pytest.param(4, marks=pytest.mark.slow))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PACKABLE = DTYPES  # the dtypes of weights that can be packed
COLLECTIVE_WAYS = ("unfused", "ring", "direct")
MATMUL_WAYS = ("unfused", "ring", "direct", "pipelined")
COLLECTIVE_ALGORITHMS = (*COLLECTIVE_WAYS, "auto")
MATMUL_ALGORITHMS = (*MATMUL_WAYS, "auto")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call, as all ranks see it."""

    op: str
    shape: tuple[int, ...]  #: the gathered x, or the unreduced sum: that of `plan.Problem`
    dim: int = 0  #: gathered or scattered
    sizes: tuple[int, ...] | None = None  #: passed as shard_sizes, None for equal shards
    dtype: torch.dtype = torch.float32
    algorithm: str = "auto"
    k: tuple[int, ...] = ()  #: of a reduction: K of rank r is k[r % len(k)]
    n: tuple[int, ...] = ()  #: of all_gather_matmul: columns of each weight
    n_by_rank: bool = False  #: rank r's weights have r columns more
    biases: tuple[torch.dtype | None, ...] = ()  #: their dtypes, in turn; a reduction has one
    residual: torch.dtype | None = None
    norm: torch.dtype | None = None  #: of the weight of a normalisation, None for that of x
    out_dtype: torch.dtype | None = None
    wire_dtype: torch.dtype | None = None
    return_gathered: bool = False
    layout: str = "plain"  #: of x in memory, see `ranked.place`
    weight_layout: str = "plain"
    integers: bool = False
    scales: str = ""  #: of an op on scaled operands: one of `reference.SCALES`
    w_dtype: torch.dtype | None = None  #: of the scaled weights, None for that of x
    replicated: bool = False  #: every rank passes the scales of the gathered x

    def __str__(self) -> str:
        """The op, and what is not at its default."""
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
        """Rows of each rank along ``dim``."""
        return self.sizes or (self.shape[self.dim] // world,) * world

    def shard(self, whole: torch.Tensor, rank: int, world: int) -> torch.Tensor:
        """Rank's part of the gathered or scattered tensor."""
        shards = self.shards(world)
        return whole.narrow(self.dim, sum(shards[:rank]), shards[rank])

    def values(self) -> Case:
        """The case without the fields that change no value."""
        plain = {"layout": "plain", "weight_layout": "plain"}
        return replace(self, algorithm="auto", replicated=False, **plain)

    def generator(self, *what: object) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(f"{self} {what}".encode()))


def each(
    *cases: Case,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    algorithms: tuple[str, ...] | None = None,
    integers: tuple[bool, ...] = (True, False),
) -> list[Case]:
    """The cases in every dtype (scaled ones in theirs), with integers and with random numbers, by
    every algorithm of the op or by ``algorithms`` ("auto" chooses one of them)."""
    return [
        replace(case, dtype=dtype, integers=exact, algorithm=algorithm)
        for case in cases
        for dtype in ((case.dtype,) if case.scales else dtypes)
        for exact in integers
        for algorithm in algorithms or (MATMUL_WAYS if "matmul" in case.op else COLLECTIVE_WAYS)
    ]


def along_each_dim(case: Case, shapes: Iterable[tuple[int, ...]], size: int) -> list[Case]:
    """The case with each of the shapes, along each dim of that size."""
    return [
        replace(case, shape=shape, dim=dim)
        for shape in shapes
        for dim in range(len(shape))
        if shape[dim] == size
    ]


def exact(*cases: Case, dtypes: tuple[torch.dtype, ...] = DTYPES) -> list[Case]:
    """``each`` with integers only: for cases that move data and change no arithmetic."""
    return each(*cases, dtypes=dtypes, integers=(True,))


def one_of_each(world: int) -> list[Case]:
    """A small case of every op by every algorithm, with uneven shards where possible."""
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
        *exact(*collectives, dtypes=(torch.float32,)),
        *exact(*matmuls, dtypes=(torch.float32,)),
    ]


def uneven_splits(total: int, world: int) -> Iterator[tuple[int, ...]]:
    """Splits of ``total`` rows: balanced, growing with the rank, and with empty ranks before,
    between and behind others."""
    yield tuple(total // world + (rank < total % world) for rank in range(world))
    edges = [total * rank * (rank + 1) // (world * (world + 1)) for rank in range(world + 1)]
    yield tuple(after - before for before, after in pairwise(edges))
    yield (*(0,) * (world - 1), total)
    yield (total, *(0,) * (world - 1))
    if world > 2:
        yield (total - total // 2, *(0,) * (world - 2), total // 2)
