"""``hierarchical`` on groups that span hosts: exact results, bitwise identity with ``unfused``, and
skipped waits.

`on_hosts` simulates hosts on one machine. test_hosts.py covers network namespaces and
failures/test_faults.py covers faults.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.algorithms import test_ring
from tests.support.cases import DTYPES, Case, RanksFixture, expand_cases, one_of_each
from tests.support.faults import poison_buffer
from tests.support.ranked import (
    SMALLEST_WORKSPACE,
    call,
    check_cases,
    check_job,
    fresh_group,
    on_hosts,
    run_cases,
)
from tests.support.tiers import sweep
from tpkernels import groups
from tpkernels.symm.node import Node

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
# Host of each rank. A running sum visits a host after the host of the owner, and returns, if that
# host has at least three ranks (fp32) or five ranks (bf16).
TWO_AND_ONE, TWO_AND_TWO = "001", "0011"
LAYOUTS = (TWO_AND_ONE, TWO_AND_TWO, "011", "0111", "00112", "01122")


def run(ranks: RanksFixture, hosts: str, cases: list[Case]) -> None:
    cases = [replace(case, algorithm="hierarchical") for case in dict.fromkeys(cases)]
    run_cases(ranks, len(hosts), cases, SMALLEST_WORKSPACE, hosts)


@pytest.mark.parametrize("hosts", sweep(LAYOUTS))
def test_every_op_and_dtype(ranks: RanksFixture, hosts: str) -> None:
    plain = {replace(case, algorithm="auto") for case in one_of_each(len(hosts))}
    cases = expand_cases(
        *sorted(plain, key=str), dtypes=(*DTYPES, F64), algorithms=("hierarchical",)
    )
    run(ranks, hosts, cases)


@pytest.mark.parametrize("hosts", sweep(LAYOUTS))
def test_uneven_and_empty_shards(ranks: RanksFixture, hosts: str) -> None:
    run(ranks, hosts, test_ring.uneven_cases(len(hosts), "hierarchical"))


STEPPED = [
    Case(op="all_gather", shape=(60, 3000)),
    Case(op="all_gather", shape=(3, 60, 1000), dim=1),
    Case(op="reduce_scatter", shape=(60, 3000)),
    Case(op="all_reduce_", shape=(60, 3000)),
    Case(op="all_gather_matmul", shape=(120, 1000), n=(8,), return_gathered=True),
    Case(op="matmul_reduce_scatter", shape=(120, 400), k=(8,), biases=(F32,), residual=F32),
    Case(op="matmul_reduce_scatter", shape=(400, 60), dim=1, k=(8,)),
    Case(op="matmul_all_reduce", shape=(240, 400), k=(8,), biases=(F32,), out_dtype=F32),
]


@pytest.mark.parametrize("hosts", sweep(LAYOUTS))
def test_more_than_the_workspace_holds(ranks: RanksFixture, hosts: str) -> None:
    cases = [replace(c, dtype=d, integers=True) for c in STEPPED for d in (F32, BF16)]
    run(ranks, hosts, [replace(c, residual=c.residual and c.dtype) for c in cases])


BITS = [
    *test_ring.BITS,
    Case(op="matmul_reduce_scatter", shape=(60, 65), k=(133,), wire_dtype=F32),
    Case(op="reduce_scatter", shape=(60, 65), out_dtype=F32),
]


def bits_job(hosts: str, cases: list[Case]) -> None:
    """Require that `unfused` and `hierarchical` are bitwise identical, with random delays."""
    with on_hosts(hosts), fresh_group() as group:
        _node(group).workspace.set_chaos(seed=group.rank() + 1, max_delay_us=300)
        for case in cases:
            first, second = (
                call(replace(case, algorithm=algorithm), group)
                for algorithm in ("unfused", "hierarchical")
            )
            assert all(map(torch.equal, first, second)), str(case)


@pytest.mark.parametrize("hosts", sweep((*LAYOUTS, "011111")))
def test_bitwise_identical_to_unfused(ranks: RanksFixture, hosts: str) -> None:
    cases = [replace(case, dtype=dtype) for case in BITS for dtype in DTYPES]
    check_job(ranks(len(hosts)), bits_job, hosts, cases, timeout=120)


def _node(group: dist.ProcessGroup) -> Node:
    node = groups.get(group.group_name).node
    assert node is not None
    return node


def special_job(hosts: str, dtype: torch.dtype) -> list[str]:
    """Compare the results for NaN (both signs, with payloads), infinities and signed zeros."""
    rank, world = dist.get_rank(), len(hosts)
    values = torch.tensor([float("nan"), -float("nan"), float("inf"), -float("inf"), -0.0, 0.0])
    column = torch.cartesian_prod(*[values] * world)[:, rank].contiguous()
    column[::5] = torch.tensor([0x7FC12300 + rank], dtype=torch.int32).view(F32)
    x = column[: len(column) // world * world].to(dtype)
    bits = torch.int32 if dtype == F32 else torch.int16
    with on_hosts(hosts), fresh_group() as group:
        wrong = []
        for op in ("reduce_scatter", "all_reduce"):
            unfused, hierarchical = (
                getattr(tpkernels, op)(x, group, algorithm=algorithm).view(bits)
                for algorithm in ("unfused", "hierarchical")
            )
            if not torch.equal(unfused, hierarchical):
                wrong.append(
                    f"{op}: {int((unfused != hierarchical).sum())} of {unfused.numel()} differ"
                )
    return wrong


@pytest.mark.parametrize(
    ("hosts", "dtype"), sweep([("0111", F32), ("011111", BF16), (TWO_AND_TWO, BF16)])
)
def test_special_values_are_bitwise_identical(
    ranks: RanksFixture, hosts: str, dtype: torch.dtype
) -> None:
    assert not any(ranks(len(hosts)).run(special_job, hosts, dtype))


def delayed_job(hosts: str, calls: int, **broken: bool) -> list[str]:
    """Run calls with random delays. Each rank overwrites its buffers as soon as that is allowed."""
    wrong: list[str] = []
    with on_hosts(hosts), fresh_group(SMALLEST_WORKSPACE) as group:
        node = _node(group)
        node.workspace.set_chaos(seed=group.rank() + 1, max_delay_us=5000, **broken)
        cases = [replace(c, integers=True, algorithm="hierarchical") for c in STEPPED]
        for case in itertools.islice(itertools.cycle(cases), calls):
            wrong += check_cases([case], group)
            poison_buffer(node.workspace, node.channel.epoch + 1)
    return wrong


@pytest.mark.parametrize("hosts", sweep(LAYOUTS[1:]))
def test_calls_with_delays_and_poison(ranks: RanksFixture, hosts: str) -> None:
    for wrong in ranks(len(hosts)).run(delayed_job, hosts, 16, timeout=120):
        assert not wrong, wrong[:3]


@pytest.mark.thorough
def test_a_skipped_wait_is_detected(ranks: RanksFixture) -> None:
    """Negative control: the test above can fail."""
    errors = ranks(4).run(delayed_job, TWO_AND_TWO, 16, timeout=120, skip_waits=True)
    assert any(errors)
