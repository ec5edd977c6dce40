"""Ops on scaled operands on real ranks against float64: exact for small integers with powers of two
as scales, otherwise within the derived bound of ops/reference.py.

Also covers arbitrary bytes, unaligned rows and several hosts.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tpkernels
from tests.support.cases import MATMUL_ALGORITHMS, QUICK_WORLDS, Case, RanksFixture, expand_cases
from tests.support.ranked import find_unexpected_messages, fresh_group, on_ranks, run_cases
from tests.support.reference import E4M3, E8M0, SCALES, scaled_case
from tests.support.tiers import sweep
from tpkernels.common.shards import shard_sizes
from tpkernels.local.scaled import ScaledMatrix, scaled_matmul

F32, F16, BF16, E5M2 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2
GATHER, SCATTER = "all_gather_scaled_matmul", "scaled_matmul_reduce_scatter"
REDUCE = "scaled_matmul_all_reduce"
PATTERNS = (0x7F800001, 0xFFBFFFFF, 0x00000001, 0x807FFFFF)  # float32 bits of NaNs and denormals
DENORMALS = (1, 0x123456, 0x7FFFFF)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "world" in metafunc.fixturenames:
        metafunc.parametrize("world", QUICK_WORLDS)


PAIRS = ((E4M3, E4M3), (E5M2, E4M3), (E5M2, E5M2))
OPS = (GATHER, SCATTER, REDUCE)


@pytest.mark.parametrize("op", OPS)
def test_every_dtype_by_every_algorithm(ranks: RanksFixture, world: int, op: str) -> None:
    n = (5, 300) if op == GATHER else (300,)
    cases = [
        scaled_case(op, (6 * world,), n=n, scales="rows", dtype=x, w_dtype=w) for x, w in PAIRS
    ]
    cases += [replace(cases[0], out_dtype=out) for out in (F32, F16)]
    if op != GATHER:
        cases += [replace(cases[0], out_dtype=out, wire_dtype=F32) for out in (F16, None)]
    run_cases(ranks, world, expand_cases(*cases, algorithms=MATMUL_ALGORITHMS))


@pytest.mark.parametrize("op", OPS)
def test_every_kind_of_scales(ranks: RanksFixture, world: int, op: str) -> None:
    """In a reduction, each rank has separate scales and a separate K. In a gather, swizzled scales
    need full tiles of 128 rows on each rank."""
    rows, n = (128 * world, (130, 5)) if op == GATHER else (4 * world, (9,))
    cases = [
        scaled_case(op, (rows,), k, n, scales=scales, out_dtype=out)
        for scales in SCALES
        for k, out in ((96, None), (160, F32))
    ]
    cases += [scaled_case(op, (rows,), 37, n, scales=scales) for scales in ("tensor", "rows")]
    cases += [replace(cases[0], scales="rows", replicated=True)] if op == GATHER else []
    run_cases(ranks, world, expand_cases(*cases, algorithms=("direct", "pipelined")))


@pytest.mark.thorough
@pytest.mark.parametrize("op", [GATHER, SCATTER])
def test_epilogues_and_layouts(ranks: RanksFixture, world: int, op: str) -> None:
    """Includes few rows and zero rows."""
    n = (7, 260) if op == GATHER else (260,)

    def make_case(*rows: int, scales: str = "rows") -> Case:
        epilogue = {} if op == GATHER else {"residual": BF16}
        return scaled_case(op, rows, n=n, scales=scales, biases=(BF16,), **epilogue)

    case = make_case(3 * world)
    cases = [
        replace(case, residual=None),
        replace(case, out_dtype=F32, biases=(F32,), residual=None),
    ]
    if op == GATHER:
        cases += [replace(case, out_dtype=BF16, return_gathered=True)]
    else:
        cases += [case, replace(case, wire_dtype=F32, scales="blocks")]
    cases += [
        replace(case, layout=layout, weight_layout=layout, scales=scales)
        for layout in ("sliced", "transposed")
        for scales in ("tensor", "rows", "blocks")
    ]
    row_shapes = [(0,), (world,), (world, 2, 3)]
    cases += [
        make_case(*rows, scales=scales) for rows in row_shapes for scales in ("rows", "blocks")
    ]
    run_cases(ranks, world, expand_cases(*cases))


@pytest.mark.parametrize("op", OPS)
def test_uneven_shards_and_other_dims(ranks: RanksFixture, world: int, op: str) -> None:
    cases = []
    more = {"return_gathered": True} if op == GATHER else {"biases": (BF16,), "residual": BF16}
    last = (0,) * (world > 1)  # the last of several ranks has no rows
    sizes = None if op == REDUCE else (*shard_sizes(11, world - len(last)), *last)
    for scales in ("tensor", "rows", "blocks", "fp4" if op == GATHER else "swizzled"):
        options = {"scales": scales, "dim": int(op != REDUCE), **more}
        cases += [
            scaled_case(op, (11,), scales=scales, sizes=sizes),
            scaled_case(op, (2, 11, 3), sizes=sizes, **options),
            scaled_case(op, (3, 2 * world), **options),
        ]
    if op == GATHER:
        cases += [replace(case, scales="rows", replicated=True) for case in cases[3:6]]
    run_cases(ranks, world, expand_cases(*cases))


@on_ranks()
def test_all_bytes_arrive_unchanged() -> None:
    """All 256 byte values arrive unchanged, even if four of them form a float32 NaN or denormal. So
    does a denormal scale."""
    with fresh_group() as group:
        patterns = torch.tensor(PATTERNS).to(torch.int32).repeat_interleave(256).view(-1, 256)
        all_bytes = torch.arange(256, dtype=torch.uint8).repeat(4, 4)
        x = torch.cat((all_bytes, patterns.view(torch.uint8))).roll(group.rank(), 1).view(E4M3)
        w = torch.ones(1, x.shape[1]).to(E4M3).t()
        rows = x.shape[0]
        for algorithm in ("unfused", "direct", "pipelined", "ring"):
            for scale in (torch.ones([]), torch.ones(rows, 1)):
                gathered, _ = tpkernels.all_gather_scaled_matmul(
                    x, w, scale, torch.ones([]), group, return_gathered=True, algorithm=algorithm
                )
                for rank, shard in enumerate(gathered.view(torch.uint8).split(rows)):
                    expected_shard = x.view(torch.uint8).roll(rank - group.rank(), 1)
                    assert torch.equal(shard, expected_shard), (
                        f"{algorithm}, scale {list(scale.shape)}"
                    )
            one = torch.eye(1, 32).to(E4M3)
            scale = torch.tensor(DENORMALS, dtype=torch.int32).view(F32).unsqueeze(1)
            factors = (one.expand(len(DENORMALS), 32), one.t(), scale, torch.ones([]))
            y = tpkernels.all_gather_scaled_matmul(
                *factors, group, out_dtype=F32, algorithm=algorithm
            )
            # The local matmul may flush denormals to zero, so its result is the reference.
            left, right = ScaledMatrix(factors[0], scale), ScaledMatrix(factors[1], factors[3])
            local = scaled_matmul(left, right, torch.empty(len(DENORMALS), 1))
            expected = local.repeat(group.size(), 1)
            assert torch.equal(y.view(torch.int32), expected.view(torch.int32)), algorithm


@on_ranks()
def test_all_ranks_refuse_a_partial_tile() -> list[str]:
    """Only the last rank has a partial tile of scales, but all ranks raise."""
    with fresh_group() as group:
        last = group.size() - 1
        sizes = [128] * last + [4]
        x, w = torch.ones(sizes[group.rank()], 32).to(E4M3), torch.ones(32, 5).to(E4M3)
        args = (x, w, torch.ones(512).to(E8M0), torch.ones(512).to(E8M0), group)
        message = f"NotImplementedError: scale_x is swizzled, but x has 4 rows on rank {last}"
        return find_unexpected_messages(
            {message: lambda: tpkernels.all_gather_scaled_matmul(*args, shard_sizes=sizes)}
        )


@on_ranks()
def test_unaligned_rows() -> None:
    """Row strides are not multiples of a 4-byte word, or the matrix starts within a word."""
    rows = 4
    with fresh_group() as group:
        values = torch.randint(-2, 3, (rows, 66)).to(E4M3)
        buffer = torch.empty(1 + rows * 64, dtype=torch.uint8).view(E4M3)
        shifted = buffer[1:].view(rows, 64)
        shifted.copy_(values[:, :64])
        w, one = torch.eye(64).to(E4M3), torch.ones([])
        for x in (values[:1, :64], shifted, values[:, :64]):
            y = tpkernels.all_gather_scaled_matmul(x, w, one, one, group, out_dtype=F32)
            local = y.split(x.shape[0])[group.rank()]
            assert torch.equal(local, x.float()), (x.stride(), x.storage_offset())


@pytest.mark.parametrize("hosts", sweep(["012", "001", "0011"]))
def test_across_hosts(ranks: RanksFixture, hosts: str) -> None:
    """Several ranks on a host, and ranks without shared memory."""
    world = len(hosts)
    cases = [
        scaled_case(op, (12 * world,), scales=scales)
        for op in (GATHER, SCATTER, REDUCE)
        for scales in ("tensor", "rows", "blocks")
    ]
    algorithms = ("hierarchical", "auto") if len(set(hosts)) == 2 else ("unfused", "ring", "auto")
    run_cases(ranks, world, expand_cases(*cases, algorithms=algorithms), hosts=hosts)
