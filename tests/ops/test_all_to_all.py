"""``all_to_all`` on real ranks: bitwise exact results between any two dims."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support.cases import DTYPES, QUICK_WORLDS, RanksFixture, uneven_splits
from tests.support.ranked import (
    SMALLEST_WORKSPACE,
    collect_messages,
    fresh_group,
    on_ranks,
    report_cases,
)
from tests.support.tiers import thorough
from tpkernels import shard_sizes

ALGORITHMS = ("auto", "unfused", "ring", "direct")


@dataclass(frozen=True, kw_only=True)
class Case:
    """An all-to-all of a full tensor of this shape. Sizes that are None are even."""

    shape: tuple[int, ...]
    dims: tuple[int, int] = (0, 1)  # gathered, scattered
    sizes: tuple[Sequence[int] | None, Sequence[int] | None] = (None, None)
    dtype: torch.dtype = torch.float32
    algorithm: str = "auto"
    strided: bool = False


def failure(case: Case, group: dist.ProcessGroup) -> str | None:
    """Describe a wrong result or gradient, or return None. The loss is a sum over the ranks."""
    rank, world, (gather, scatter) = group.rank(), group.size(), case.dims
    generator = torch.Generator().manual_seed(sum(case.shape))
    full, grad = (torch.randn(case.shape, generator=generator).to(case.dtype) for _ in range(2))

    def shard(tensor: torch.Tensor, index: int) -> torch.Tensor:
        dim, sizes = case.dims[index], case.sizes[index]
        return tensor.split(list(sizes or shard_sizes(tensor.shape[dim], world)), dim)[rank]

    x = shard(full, 0)
    x = x.transpose(0, -1).contiguous().transpose(0, -1) if case.strided else x.contiguous()

    options = {"gather_sizes": case.sizes[0], "scatter_sizes": case.sizes[1]}

    def exchange(x: torch.Tensor) -> torch.Tensor:
        op = tpkernels.all_to_all
        return op(x, group, gather, scatter, **options, algorithm=case.algorithm)

    y = exchange(x.requires_grad_())
    (grad_x,) = torch.autograd.grad(y, x, shard(grad, 1))
    if not torch.equal(exchange(x.detach()), y):  # cached plan
        return f"{case} on rank {rank}: another result the second time"
    if not (torch.equal(y, shard(full, 1)) and y.is_contiguous()):
        return f"{case} on rank {rank}: has {y.tolist()}, not {shard(full, 1).tolist()}"
    return None if torch.equal(grad_x, shard(grad, 0)) else f"{case} on rank {rank}: gradient"


def test_every_dtype_by_every_algorithm(ranks: RanksFixture, world: int) -> None:
    pairs = itertools.product((*DTYPES, torch.float64), ALGORITHMS)
    cases = [Case(shape=(12, 24), dtype=dtype, algorithm=name) for dtype, name in pairs]
    report_cases(ranks(world), failure, cases)


@on_ranks(3)
def test_integers_of_any_bits() -> None:
    """all_gather and all_to_all move integers exactly, even if their bits are NaNs as floats."""
    with fresh_group() as group:
        for dtype, size, algorithm in itertools.product(
            (torch.int64, torch.int32), (12, 13), ALGORITHMS
        ):
            sizes, bits = shard_sizes(size, 3), torch.iinfo(dtype)
            generator = torch.Generator().manual_seed(size)
            limits = bits.min, bits.max
            full = torch.randint(*limits, (size, size), dtype=dtype, generator=generator)
            x = full.split(sizes)[group.rank()]
            both = {"gather_sizes": sizes, "scatter_sizes": sizes}
            for _ in range(2):  # the second call has a cached plan
                gathered = tpkernels.all_gather(x, group, shard_sizes=sizes, algorithm=algorithm)
                assert torch.equal(gathered, full), (dtype, size, algorithm)
                columns = tpkernels.all_to_all(x, group, **both, algorithm=algorithm)
                assert torch.equal(columns, full.split(sizes, 1)[group.rank()]), (
                    dtype,
                    size,
                    algorithm,
                )


def any_dims_cases() -> Iterator[Case]:
    for shape in [(12, 24), (12, 3, 24), (12, 24, 5), (2, 12, 24), (2, 12, 3, 24, 5), (12, 24, 1)]:
        dims = [dim for dim, size in enumerate(shape) if size % 12 == 0]
        yield from (Case(shape=shape, dims=(a, b)) for a, b in itertools.permutations(dims, 2))


@pytest.mark.parametrize("algorithm", ["direct", *map(thorough, ["ring", "unfused"])])
def test_any_two_dims(ranks: RanksFixture, world: int, algorithm: str) -> None:
    pairs = itertools.product(any_dims_cases(), (False, True))
    cases = [replace(case, algorithm=algorithm, strided=strided) for case, strided in pairs]
    report_cases(ranks(world), failure, cases)


def test_uneven_shards(ranks: RanksFixture, world: int) -> None:
    cases = [
        Case(shape=shape, dims=dims, sizes=sizes, algorithm=algorithm)
        for algorithm in ALGORITHMS[1:]
        for sizes in itertools.product(uneven_splits(7, world), uneven_splits(7, world))
        for shape, dims in [((7, 7), (0, 1)), ((2, 7, 3, 7), (3, 1))]
    ]
    report_cases(ranks(world), failure, cases)


def test_empty_shards(ranks: RanksFixture, world: int) -> None:
    shapes = [(0, world), (world, 0), (world, 0, world), (0, 0)]
    combinations = itertools.product(shapes, ALGORITHMS)
    cases = [
        Case(shape=s, dims=(0, len(s) - 1), algorithm=algorithm) for s, algorithm in combinations
    ]
    report_cases(ranks(world), failure, cases)


@pytest.mark.thorough
def test_chunks_through_a_small_workspace(ranks: RanksFixture, world: int) -> None:
    """Exchange shards of several chunks (csrc/host/collectives.cpp), then stream a large result."""
    for rows, columns in itertools.product(uneven_splits(301, world), uneven_splits(700, world)):
        forward = Case(shape=(301, 700), sizes=(rows, columns))
        backward = replace(forward, dims=(1, 0), sizes=(columns, rows))
        report_cases(ranks(world), failure, [forward, backward], workspace_bytes=SMALLEST_WORKSPACE)
    report_cases(ranks(world), failure, [Case(shape=(1200, 3600))])


@pytest.mark.thorough
def test_without_shared_memory(ranks: RanksFixture, world: int) -> None:
    uneven = [list(uneven_splits(size, world))[-1] for size in (24, 36)]
    sizes = [(None, None), (shard_sizes(24, world), uneven[1]), (uneven[0], None)]
    cases = [
        Case(shape=(24, 5, 36), dims=(0, 2), sizes=pair, algorithm=name)
        for pair in sizes
        for name in ("auto", "unfused", "ring")
    ]
    report_cases(ranks(world), failure, cases, hosts=True)


REFUSED = [
    "ValueError: gather_dim and scatter_dim are both 1; they must differ",
    "ValueError: scatter_dim is 2; a tensor of 2 dims allows 0 to 1",
    "ValueError: gather_dim is -1",
    r"ValueError: the scattered dim has 5 rows, which is not divisible by world_size=2; pass "
    r"scatter_sizes=tpkernels.shard_sizes\(5, 2",
    r"ValueError: x has 2 rows in the gathered dim, but gather_sizes \[1, 1\] specifies 1 for rank",
    r"ValueError: scatter_sizes \[2, 2\] add up to 4, but the scattered dim has 6 rows",
    "NotImplementedError: x has dtype bool; supported: .*, float64, int64, int32",
    "NotImplementedError: algorithm 'pipelined' of all_to_all overlaps communication with a matmul",
    "NotImplementedError: algorithm 'hierarchical' of all_to_all does not support all_to_all on",
    r"CollectiveMismatchError: .*scatter dim 1: \[.*, but rank \d .*scatter dim 1: \[",
]


@on_ranks(2)
def test_refusals_and_ranks_that_differ() -> None:
    op, x = tpkernels.all_to_all, torch.ones(2, 6)
    with fresh_group() as group:
        refused = collect_messages(
            [
                lambda: op(x, group, 1, 1),
                lambda: op(x, group, 0, 2),
                lambda: op(x, group, -1, 0),
                lambda: op(torch.ones(2, 5), group),
                lambda: op(x, group, gather_sizes=[1, 1]),
                lambda: op(x, group, scatter_sizes=[2, 2]),
                lambda: op(x.bool(), group),
                lambda: op(x, group, algorithm="pipelined"),
                lambda: op(x, group, algorithm="hierarchical"),
            ]
        )
        sizes = [(2, 4), (4, 2)][dist.get_rank()]
        messages = [*refused, *collect_messages([lambda: op(x, group, scatter_sizes=sizes)])]
        for message, pattern in zip(messages, REFUSED, strict=True):
            assert re.match(pattern, message), message


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "world" in metafunc.fixturenames:
        metafunc.parametrize("world", QUICK_WORLDS)
