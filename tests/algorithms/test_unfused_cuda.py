"""What `unfused` queues on a GPU, launch by launch. The tensors are fake: this counts, and no GPU
has confirmed it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.launches import Queue, queued
from tpkernels import shard_sizes
from tpkernels.backends import TABLES
from tpkernels.call import Call
from tpkernels.local.matmul import local_matmul
from tpkernels.ops.problems import problem_of
from tpkernels.ops.registration import execution_of
from tpkernels.planning.choose import Means, choose
from tpkernels.planning.problem import ORDERED, VENDOR

WORLD, RANK = 8, 1
BF16, F32 = torch.bfloat16, torch.float32
DEFAULTS = {
    "bias": None,
    "biases": None,
    "residual": None,
    "out_dtype": None,
    "wire_dtype": None,
    "shard_sizes": None,
    "gather_sizes": None,
    "scatter_sizes": None,
    "return_gathered": False,
    "algorithm": "unfused",
    "gather_dim": 0,
    "scatter_dim": 0,
    "eps": 1e-6,
}


def fake(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def queue_of(op: str, numerics: str, make: Callable[[], dict[str, Any]]) -> Queue:
    """What a call of an op queues, from its checked arguments on."""
    with queued(RANK, WORLD) as (queue, group):
        given = SimpleNamespace(**DEFAULTS | make())
        problem = problem_of(op.rstrip("_"), group, given)
        if problem.spec.reduces:
            problem = replace(problem, numerics=numerics)
        plan = choose(problem, Means(shared_memory=True), requested="unfused")
        call = Call(group, problem, plan, TABLES["cuda"][problem.op, "unfused"], 0)
        queue.launches.clear()
        queue.touched = 0
        execution_of(problem.spec, in_place=op.endswith("_"))(call, given)
    return queue


@dataclass(frozen=True)
class Case:
    """A call, and what it queues."""

    op: str
    make: Callable[[], dict[str, Any]]
    vendor: list[str]
    ordered: list[str] = field(default_factory=list)  #: empty: the op does not sum


def factors(**more: Callable[[], torch.Tensor] | Any) -> Callable[[], dict[str, Any]]:
    made = {"x": lambda: fake(64, 16), "w": lambda: fake(16, 32)} | more
    return lambda: {name: make() if callable(make) else make for name, make in made.items()}


def bias(dtype: torch.dtype = BF16) -> Callable[[], torch.Tensor]:
    return lambda: fake(32, dtype=dtype)


def residual(rows: int) -> Callable[[], torch.Tensor]:
    return lambda: fake(rows, 32)


UNEVEN = tuple(shard_sizes(60, WORLD))
RS, AR = "reduce_scatter", "all_reduce"
MRS, MAR, AGM = "matmul_reduce_scatter", "matmul_all_reduce", "all_gather_matmul"
A2A, SUM, AG = "all_to_all", "sum_partials", "all_gather"
BATCH = {"x": lambda: fake(2, 64, 16), "scatter_dim": 1}

CASES = {
    "scatter": Case(MRS, factors(), ["mm", RS], ["mm", A2A, SUM]),
    "scatter, bias": Case(MRS, factors(bias=bias()), ["mm", RS, SUM], ["mm", A2A, SUM]),
    "scatter, fp32 bias and residual": Case(
        MRS,
        factors(bias=bias(F32), residual=residual(8)),
        ["mm", RS, SUM],
        ["mm", A2A, SUM],
    ),
    "scatter, fp32 on the wire": Case(
        MRS, factors(wire_dtype=F32), ["mm", RS, SUM], ["mm", A2A, SUM]
    ),
    "scatter, fp32 result": Case(MRS, factors(out_dtype=F32), ["mm", RS, SUM], ["mm", A2A, SUM]),
    "scatter of a batch": Case(
        MRS, factors(**BATCH), ["mm", "clone", RS], ["mm", "clone", A2A, SUM]
    ),
    "scatter of a batch of one": Case(
        MRS, factors(x=lambda: fake(1, 64, 16), scatter_dim=1), ["mm", RS], ["mm", A2A, SUM]
    ),
    "scatter, uneven": Case(
        MRS,
        factors(x=lambda: fake(60, 16), shard_sizes=UNEVEN),
        ["mm", f"{RS} of a list"],
        ["mm", A2A, SUM],
    ),
    "reduce": Case(MAR, factors(), ["mm", AR], ["mm", A2A, SUM, AG]),
    "reduce, bias and residual": Case(
        MAR,
        factors(bias=bias(), residual=residual(64)),
        ["mm", AR, SUM],
        ["mm", A2A, SUM, AG],
    ),
    "reduce, fp32 on the wire": Case(
        MAR, factors(wire_dtype=F32), ["mm", AR, SUM], ["mm", A2A, SUM, AG]
    ),
    "reduce, odd size": Case(
        MAR, factors(x=lambda: fake(63, 16)), ["mm", AR], ["mm", A2A, SUM, f"{AG} of a list"]
    ),
    "reduce_scatter": Case(RS, lambda: {"x": fake(64, 32)}, [RS], [A2A, SUM]),
    "all_reduce": Case(AR, lambda: {"x": fake(64, 32)}, ["copy_", AR], [A2A, SUM, AG]),
    "all_reduce_": Case(
        "all_reduce_",
        lambda: {"x": fake(64, 32)},
        [AR],
        [A2A, SUM, AG],
    ),
    "all_reduce, fp32 result": Case(
        AR,
        lambda: {"x": fake(64, 32), "out_dtype": F32},
        ["copy_", AR, SUM],
        [A2A, SUM, AG],
    ),
    "all_gather": Case(AG, lambda: {"x": fake(8, 16)}, [AG]),
    "all_gather of columns": Case(AG, lambda: {"x": fake(8, 16), "gather_dim": 1}, [AG, "cat"]),
    "all_gather, uneven": Case(
        AG,
        lambda: {"x": fake(UNEVEN[RANK], 16), "shard_sizes": UNEVEN},
        [f"{AG} of a list"],
    ),
    "all_to_all": Case(A2A, lambda: {"x": fake(8, 64), "scatter_dim": 1}, ["clone", A2A, "cat"]),
    "all_to_all, uneven": Case(
        A2A,
        lambda: (
            {"x": fake(5, UNEVEN[RANK], 60), "gather_dim": 1, "scatter_dim": 2}
            | {"gather_sizes": UNEVEN, "scatter_sizes": UNEVEN}
        ),
        [*["copy_"] * WORLD, A2A, "cat"],
    ),
    "gather": Case(AGM, lambda: {"x": fake(8, 16), "weights": [fake(16, 32)]}, [AG, "mm"]),
    "gather, kept": Case(
        AGM,
        lambda: {"x": fake(8, 16), "weights": [fake(16, 32)] * 2, "return_gathered": True},
        [AG, "mm", "mm"],
    ),
    "gather, biased": Case(
        AGM,
        lambda: {"x": fake(8, 16), "weights": [fake(16, 32)], "biases": [fake(32)]},
        [AG, "addmm"],
    ),
    "gather, fp32 result": Case(
        AGM,
        lambda: {"x": fake(8, 16), "weights": [fake(16, 32)], "out_dtype": F32},
        [AG, "mm"],
    ),
    "gather of a batch": Case(
        AGM,
        lambda: {"x": fake(2, 8, 16), "weights": [fake(16, 32)], "gather_dim": 1},
        [AG, "cat", "mm"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_launches(name: str) -> None:
    case = CASES[name]
    vendor = queue_of(case.op, VENDOR, case.make)
    assert vendor.launches == case.vendor
    if case.ordered:
        assert queue_of(case.op, ORDERED, case.make).launches == case.ordered


@pytest.mark.parametrize("op", [RS, AG])
def test_uneven_shards_move_no_padding(op: str) -> None:
    """Sizes 15, 1, 1, ... of which padding would make 15 each."""
    sizes = (15, *[1] * (WORLD - 1))
    make: dict[str, Callable[[], dict[str, Any]]] = {
        RS: lambda: {"x": fake(sum(sizes), 32), "shard_sizes": sizes},
        AG: lambda: {"x": fake(1, 32), "shard_sizes": sizes},
    }
    received = queue_of(op, VENDOR, make[op]).received
    assert received <= 2 * 32 * sum(sizes)
    assert received < 2 * 32 * 15 * (WORLD - 1)


@pytest.mark.parametrize(
    ("out", "bias_dtype", "launches"),
    [
        (BF16, None, ["mm"]),
        (BF16, BF16, ["addmm"]),
        (BF16, F32, ["mm", "add"]),
        (F32, None, ["mm"]),
        (F32, F32, ["mm", "add_"]),
    ],
)
def test_a_product_has_no_copy_behind_it(
    out: torch.dtype, bias_dtype: torch.dtype | None, launches: list[str]
) -> None:
    with queued(RANK, WORLD) as (queue, _):
        more = None if bias_dtype is None else fake(32, dtype=bias_dtype)
        result = fake(64, 32, dtype=out)
        queue.launches.clear()
        local_matmul(fake(64, 16), fake(16, 32), result, more)
    assert [name for name in queue.launches if name != "empty"] == launches


@pytest.mark.parametrize("op", [MRS, MAR])
def test_a_large_reduction(op: str) -> None:
    """M = N = 8192, K = 1024 a rank, bf16, 8 ranks: the lines of
    benchmarks/results/gpu-counted-unfused.md. Behind the product, "vendor" reads and writes
    nothing; "ordered" reads the partials of one shard and writes it."""
    make = factors(x=lambda: fake(8192, 1024), w=lambda: fake(1024, 8192))
    operand, partial = 2 * 8192 * 1024, 2 * 8192 * 8192
    for numerics, behind in ((VENDOR, 0), (ORDERED, partial + partial // WORLD)):
        queue = queue_of(op, numerics, make)
        assert queue.touched == 2 * operand + partial + behind
        assert queue.received == partial * (WORLD - 1) / WORLD * (1 if op == MRS else 2)
        print(f"{op} {numerics}: {queue.launches}, {behind / 1e6:.0f} MB behind the product")


# Normalised sums.


def by_torch(launches: list[str]) -> bool:
    """Whether torch normalises: by what, and in how many launches, differs by its version."""
    return bool(launches) and not {A2A, AG, AR, SUM, "rms_norm"} & set(launches)


@pytest.mark.parametrize(
    ("op", "make", "vendor", "ordered"),
    [
        (AR, lambda: {"x": fake(64, 32), "weight": fake(32)}, ["copy_", AR], [A2A, SUM, AG]),
        (
            AR,
            lambda: {"x": fake(64, 32), "weight": fake(32), "residual": fake(64, 32)},
            ["copy_", AR, SUM],
            [A2A, SUM, AG],
        ),
        (
            MAR,
            factors(norm_weight=bias(), residual=residual(64)),
            ["mm", AR, SUM],
            ["mm", A2A, SUM, AG],
        ),
    ],
)
def test_a_normalisation_follows_the_sum(
    op: str, make: Callable[[], dict[str, Any]], vendor: list[str], ordered: list[str]
) -> None:
    """Torch's for the vendor's sum; ours where bits are promised."""
    found = queue_of(f"{op}_rms_norm", VENDOR, make).launches
    assert found[: len(vendor)] == vendor and by_torch(found[len(vendor) :])
    assert queue_of(f"{op}_rms_norm", ORDERED, make).launches == [*ordered, "rms_norm"]


def test_torch_normalises_rows_that_are_no_whole_vectors() -> None:
    def make() -> dict[str, Any]:
        return {"x": fake(64, 33), "weight": fake(33)}

    found = queue_of(f"{AR}_rms_norm", ORDERED, make).launches
    assert found[:3] == [A2A, SUM, AG] and by_torch(found[3:])
