"""Sums by a tree: ``k_sizes`` and ``k_unit`` of `matmul_all_reduce` and
`matmul_all_reduce_rms_norm`. Results are exact for integers, within the derived bound of
ops/reference.py, and bitwise identical for every split of K. tests/parallel/test_invariant.py tests
the refusals."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support.cases import DTYPES, RanksFixture
from tests.support.faults import get_workspace
from tests.support.ranked import SMALLEST_WORKSPACE, copy_to_layout, fresh_group, on_ranks
from tests.support.tiers import sweep
from tpkernels import _C
from tpkernels.ops import reference

F32, BF16, INT8 = torch.float32, torch.bfloat16, torch.int8
EPS = 1e-5
EPILOGUES: list[set[str]] = [set(), {"bias"}, {"residual"}, {"bias", "residual"}]


@dataclass(frozen=True)
class Shape:
    """[2, rows, k] @ [k, columns]. The last unit of K may be incomplete."""

    rows: int
    k: int
    columns: int
    unit: int = 64

    def splits(self, world: int) -> Iterator[list[int]]:
        """Yield K of each rank: balanced, all on one rank, and without one of the ranks."""
        units = -(-self.k // self.unit)
        for empty in [None, 0, world // 2, world - 1]:
            ranks = [rank for rank in range(world) if rank != empty]
            counts = dict(zip(ranks, tpkernels.shard_sizes(units, len(ranks)), strict=True))
            yield self.sizes([counts.get(rank, 0) for rank in range(world)])
        yield self.sizes([units if rank == 1 else 0 for rank in range(world)])

    def sizes(self, counts: list[int]) -> list[int]:
        ends = [min(self.k, self.unit * end) for end in itertools.accumulate(counts)]
        return [end - begin for begin, end in itertools.pairwise([0, *ends])]


# The results of the last two exceed the 16 KiB of a one-shot reduction.
SHAPES = [
    Shape(1, 1536, 130),
    Shape(3, 240, 33, unit=80),
    Shape(2, 1000, 70),
    Shape(5, 66, 7, unit=6),
    Shape(70, 576, 96),
    Shape(40, 1000, 130),
]
INT8_SHAPES = [Shape(1, 768, 70, unit=128), Shape(70, 896, 96, unit=128)]


@dataclass(frozen=True)
class Operands:
    """Operands of an op, equal on all ranks and not split."""

    x: torch.Tensor
    w: torch.Tensor
    bias: torch.Tensor
    residual: torch.Tensor
    norm: torch.Tensor
    int8: bool

    @classmethod
    def draw(cls, shape: Shape, dtype: torch.dtype, integers: bool, int8: bool = False) -> Operands:
        generator = torch.Generator().manual_seed(shape.k + shape.rows)

        def draw(*size: int) -> torch.Tensor:
            if integers:
                return torch.randint(-2, 3, size, generator=generator).to(dtype)
            return torch.randn(size, generator=generator).to(dtype)

        x, w = draw(2, shape.rows, shape.k), draw(shape.k, shape.columns)
        residual = draw(2, shape.rows, shape.columns)
        return cls(x, w, draw(shape.columns), residual, draw(shape.columns), int8)

    def pack(self, w: torch.Tensor) -> torch.Tensor:
        return tpkernels.pack(w, INT8) if self.int8 else tpkernels.pack(w)

    def local(self, sizes: list[int], rank: int, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the slices of ``x`` and the packed weight. A rank without K passes one zero."""
        if not sizes[rank]:
            return self.x.new_zeros(*self.x.shape[:-1], 1), self.w.new_zeros(1, self.w.shape[1])
        columns = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        return copy_to_layout(self.x[..., columns], layout), self.pack(self.w[columns])

    def added(self, names: set[str]) -> dict[str, torch.Tensor]:
        return {name: getattr(self, name) for name in ("bias", "residual") if name in names}

    def sum_on_one_rank(self, shape: Shape, names: set[str]) -> torch.Tensor:
        """Return the sum without communication: one matmul, epilogue in fp32, one rounding."""
        tree = _C.calls.SumTree([shape.k], shape.unit, 0)
        total = _C.calls.multiply_nodes(self.x, self.pack(self.w), tree)[0]
        assert total.dtype == F32
        for tensor in self.added(names).values():
            total = total + tensor.float()
        return total.to(self.x.dtype)

    def expected(self, names: set[str], integers: bool) -> reference.Expected:
        """Return the float64 result. int8 GEMMs round the weight and each row of x to 8 bits."""
        x, w = self.x, self.w
        if self.int8:
            rows = x.flatten(0, 1).t()
            x, w = (
                tpkernels.unpack(self.pack(rows)).t().view(x.shape),
                tpkernels.unpack(self.pack(w)),
            )
        return reference.expect_sum(
            [(x, w)],
            [*self.added(names).values()],
            dtype=F32 if self.int8 else x.dtype,
            out=self.x.dtype,
            integers=integers,
            unfused=False,
            roundings=2 + len(w) // 128 if self.int8 else 0,  # products with scales
        )


def find_failures(
    group: dist.ProcessGroup,
    own_group: dist.ProcessGroup,
    shape: Shape,
    operands: Operands,
    integers: bool = False,
) -> list[str]:
    """Compare both ops, for all splits, with one rank and with float64. ``own_group`` consists of
    this rank."""
    failures = []
    rank, world = group.rank(), group.size()
    for i, sizes in enumerate(shape.splits(world)):
        names = EPILOGUES[i % len(EPILOGUES)]
        layout = ("plain", "transposed", "sliced")[i % 3]
        x, w = operands.local(sizes, rank, layout)
        options: dict[str, Any] = operands.added(names) | {"k_sizes": sizes, "k_unit": shape.unit}
        want = operands.sum_on_one_rank(shape, names)
        expected = operands.expected(names, integers)
        expected_norm = reference.rms_norm(want, operands.norm, EPS)
        want_norm, own_sum = tpkernels.matmul_all_reduce_rms_norm(
            operands.x,
            operands.pack(operands.w),
            operands.norm,
            own_group,
            eps=EPS,
            **options | {"k_sizes": [shape.k]},
        )
        assert torch.equal(own_sum, want)
        for repetition in range(2):  # the second call runs in the extension
            got = tpkernels.matmul_all_reduce(x, w, group, **options)
            normed, total = tpkernels.matmul_all_reduce_rms_norm(
                x, w, operands.norm, group, eps=EPS, **options
            )
            checks = {
                "matmul_all_reduce differs from one rank": torch.equal(got, want),
                "the sum of the norm differs from one rank": torch.equal(total, want),
                "the norm differs from one rank": torch.equal(normed, want_norm),
                "the sum is out of bounds": expected.worst(got) <= 1,
                "the norm is out of bounds": expected_norm.worst(normed) <= 1,
            }
            failures += [
                f"rank {rank}: {shape} {got.dtype} {sizes} {layout} {names} {repetition=}: {text}"
                for text, is_right in checks.items()
                if not is_right
            ]
    return failures


@pytest.mark.parametrize("world", sweep([3, 2, 5], num_thorough=2))
@on_ranks()
def test_sums_do_not_depend_on_the_split() -> list[str]:
    failures = []
    with torch.no_grad(), fresh_group() as group:
        own_group, _ = dist.new_subgroups(1)
        for shape, dtype in itertools.product(SHAPES, DTYPES):
            failures += find_failures(
                group, own_group, shape, Operands.draw(shape, dtype, integers=False)
            )
        for shape, dtype in itertools.product(INT8_SHAPES, DTYPES):
            operands = Operands.draw(shape, dtype, integers=False, int8=True)
            failures += find_failures(group, own_group, shape, operands)
    return failures


@pytest.mark.parametrize("world", sweep([3, 2, 5], num_thorough=2))
@on_ranks()
def test_integers_and_several_chunks() -> list[str]:
    """Sums of small integers are exact. With the smallest workspace the results need several
    chunks."""
    failures = []
    with torch.no_grad(), fresh_group(SMALLEST_WORKSPACE) as group:
        own_group, _ = dist.new_subgroups(1)
        for shape in (Shape(3, 140, 33), Shape(150, 200, 301)):
            for dtype in (F32, BF16):
                operands = Operands.draw(shape, dtype, integers=True)
                failures += find_failures(group, own_group, shape, operands, integers=dtype == F32)
    return failures


def delayed_job(rows: int, **broken: bool) -> int:
    """Return the number of calls with wrong results, with delays before signals and waits."""
    shape, wrong = Shape(rows, 1000, 130), 0
    sizes = shape.sizes([3, 8, 5])  # the ranks send different numbers of nodes
    with torch.no_grad(), fresh_group() as group:
        operands = Operands.draw(shape, F32, integers=False)
        x, w = operands.local(sizes, group.rank(), "plain")
        want = operands.sum_on_one_rank(shape, set())
        for call in range(21):
            # Powers of 2 scale the sums exactly.
            got = tpkernels.matmul_all_reduce(x * 2**call, w, group, k_sizes=sizes)
            wrong += not torch.equal(got, want * 2**call)
            if call == 0:  # the first call has set up the group
                get_workspace(group).set_chaos(seed=group.rank() + 1, max_delay_us=1000, **broken)
        dist.barrier()  # a rank that skips waits may be ahead, and must not end the group yet
    return wrong


@pytest.mark.parametrize(
    ("rows", "broken"), [(1, {}), (40, {}), (1, {"single_buffer": True})], ids=str
)
def test_delays_and_a_negative_control(
    ranks: RanksFixture, rows: int, broken: dict[str, bool]
) -> None:
    """One-shot and two-shot. A single buffer fails in one-shot; in two-shot, the signal of the
    results protects it."""
    tries = range(10 if broken else 1)  # failures depend on timing
    wrong = (sum(ranks(3).run(delayed_job, rows, timeout=60, **broken)) for _ in tries)
    assert any(wrong) == bool(broken)


@on_ranks(3)
def test_other_orders_give_other_sums() -> None:
    """Negative controls: without a tree, and with a different unit, some sums differ from the sum
    on one rank."""
    shape = Shape(40, 1000, 130)
    sizes = shape.sizes([3, 8, 5])
    with torch.no_grad(), fresh_group() as group:
        operands = Operands.draw(shape, F32, integers=False)
        x, w = operands.local(sizes, group.rank(), "plain")
        want = operands.sum_on_one_rank(shape, set())
        call = partial(tpkernels.matmul_all_reduce, x, w, group)
        assert torch.equal(call(k_sizes=sizes), want)
        assert not torch.equal(call(), want)
        assert not torch.equal(call(k_sizes=sizes, k_unit=8), want)
