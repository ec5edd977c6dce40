"""What `unfused`, and for routed rows `direct`, queue on a GPU, launch by launch. The
tensors are fake: this counts, and no GPU has confirmed it. Whatever made a host wait would
raise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from tests.support.launches import Queue, queued
from tpkernels import shard_sizes
from tpkernels.algorithms.backends import TABLES
from tpkernels.algorithms.direct import cuda
from tpkernels.errors import CaptureError
from tpkernels.groups.call import Call
from tpkernels.local.matmul import local_matmul
from tpkernels.ops.arguments import arguments_class
from tpkernels.ops.experts import _routes_of_experts
from tpkernels.ops.grouped_matmul import grouped_matmul
from tpkernels.ops.problems import problem_of
from tpkernels.ops.registration import execution_of
from tpkernels.planning.choose import Means, choose
from tpkernels.planning.op_spec import OPS
from tpkernels.planning.problem import ORDERED, VENDOR
from tpkernels.symm import streams
from tpkernels.symm.device import Prepared

WORLD, RANK = 8, 1
BF16, F32 = torch.bfloat16, torch.float32


def fake(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def queue_of(
    op: str,
    numerics: str,
    make: Callable[[], dict[str, Any]],
    algorithm: str = "unfused",
    world: int = WORLD,
) -> Queue:
    """What a call of an op queues, from its checked arguments on."""
    with queued(min(RANK, world - 1), world) as (queue, group):
        cls = arguments_class(OPS[op.rstrip("_")])
        given = cls(**{"group": "", "algorithm": algorithm} | make())
        problem = problem_of(op.rstrip("_"), group, given)
        if problem.spec.reduces:
            problem = replace(problem, numerics=numerics)
        plan = choose(problem, Means(shared_memory=True), requested=algorithm)
        call = Call(group, problem, plan, TABLES["cuda"][problem.op, algorithm], 0)
        queue.launches.clear()
        queue.touched = 0
        execution_of(problem.spec, in_place=op.endswith("_"))(call, given)
    return queue


TENSORS = {"x", "w", "bias", "residual", "weight", "norm_weight", "routes", "topk_weights"}
TENSORS |= {"counts"}
Shape = tuple[Any, ...]  # a dtype last, if it is not bf16


def arguments(**given: Any) -> Callable[[], dict[str, Any]]:
    """Makes the arguments of a call: tensors of the shapes that are given for them."""

    def tensor(shape: Shape) -> torch.Tensor:
        *dims, last = shape
        return fake(*dims, dtype=last) if isinstance(last, torch.dtype) else fake(*shape)

    def made(name: str, value: Any) -> Any:
        if name in ("weights", "biases"):
            return [tensor(shape) for shape in value]
        return tensor(value) if name in TENSORS else value

    return lambda: {name: made(name, value) for name, value in given.items()}


def factors(**more: Any) -> Callable[[], dict[str, Any]]:
    return arguments(**({"x": (64, 16), "w": (16, 32)} | more))


UNEVEN = tuple(shard_sizes(60, WORLD))
RS, AR, IN_PLACE = "reduce_scatter", "all_reduce", "all_reduce_"
MRS, MAR, AGM = "matmul_reduce_scatter", "matmul_all_reduce", "all_gather_matmul"
A2A, SUM, AG = "all_to_all", "sum_partials", "all_gather"
# What a sum queues with the numerics "ordered", if nothing else is said.
IN_ORDER = {MRS: ["mm", A2A, SUM], MAR: ["mm", A2A, SUM, AG], RS: [A2A, SUM]}
IN_ORDER |= {op: [A2A, SUM, AG] for op in (AR, IN_PLACE)}

BATCH: dict[str, Any] = {"x": (2, 64, 16), "scatter_dim": 1}
GATHER: dict[str, Any] = {"x": (8, 16), "weights": [(16, 32)]}
A2A_SIZES = {"gather_dim": 1, "scatter_dim": 2, "gather_sizes": UNEVEN, "scatter_sizes": UNEVEN}

# (op, arguments, what is queued with "vendor", and with "ordered" if it differs from IN_ORDER)
CASES: dict[str, tuple[Any, ...]] = {
    "scatter": (MRS, factors(), ["mm", RS]),
    "bias": (MRS, factors(bias=(32,)), ["mm", RS, SUM]),
    "fp32 bias": (MRS, factors(bias=(32, F32), residual=(8, 32)), ["mm", RS, SUM]),
    "fp32 on the wire": (MRS, factors(wire_dtype=F32), ["mm", RS, SUM]),
    "fp32 result": (MRS, factors(out_dtype=F32), ["mm", RS, SUM]),
    "batch": (MRS, factors(**BATCH), ["mm", "clone", RS], ["mm", "clone", A2A, SUM]),
    "batch of one": (MRS, factors(x=(1, 64, 16), scatter_dim=1), ["mm", RS]),
    "uneven": (MRS, factors(x=(60, 16), shard_sizes=UNEVEN), ["mm", f"{RS} of a list"]),
    "reduce": (MAR, factors(), ["mm", AR]),
    "reduce, bias": (MAR, factors(bias=(32,), residual=(64, 32)), ["mm", AR, SUM]),
    "reduce, fp32 on the wire": (MAR, factors(wire_dtype=F32), ["mm", AR, SUM]),
    "reduce, odd": (MAR, factors(x=(63, 16)), ["mm", AR], ["mm", A2A, SUM, f"{AG} of a list"]),
    "reduce_scatter": (RS, arguments(x=(64, 32)), [RS]),
    "all_reduce": (AR, arguments(x=(64, 32)), ["copy_", AR]),
    "all_reduce_": (IN_PLACE, arguments(x=(64, 32)), [AR]),
    "all_reduce, fp32": (AR, arguments(x=(64, 32), out_dtype=F32), ["copy_", AR, SUM]),
    "all_gather": (AG, arguments(x=(8, 16)), [AG]),
    "all_gather of columns": (AG, arguments(x=(8, 16), gather_dim=1), [AG, "cat"]),
    "all_gather, uneven": (
        AG,
        arguments(x=(UNEVEN[RANK], 16), shard_sizes=UNEVEN),
        [f"{AG} of a list"],
    ),
    "all_to_all": (A2A, arguments(x=(8, 64), scatter_dim=1), ["clone", A2A, "cat"]),
    "all_to_all, uneven": (
        A2A,
        arguments(x=(5, UNEVEN[RANK], 60), **A2A_SIZES),
        [*["copy_"] * WORLD, A2A, "cat"],
    ),
    "gather": (AGM, arguments(**GATHER), [AG, "mm"]),
    "gather, kept": (
        AGM,
        arguments(x=(8, 16), weights=[(16, 32)] * 2, return_gathered=True),
        [AG, "mm", "mm"],
    ),
    "gather, biased": (AGM, arguments(**GATHER, biases=[(32,)]), [AG, "addmm"]),
    "gather, fp32 result": (AGM, arguments(**GATHER, out_dtype=F32), [AG, "mm"]),
    "gather of a batch": (
        AGM,
        arguments(x=(2, 8, 16), weights=[(16, 32)], gather_dim=1),
        [AG, "cat", "mm"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_launches(name: str) -> None:
    op, make, vendor, *ordered = CASES[name]
    assert queue_of(op, VENDOR, make).launches == vendor
    if op in IN_ORDER:
        wanted = ordered[0] if ordered else IN_ORDER[op]
        assert queue_of(op, ORDERED, make).launches == wanted


@pytest.mark.parametrize("op", [RS, AG])
def test_uneven_shards_move_no_padding(op: str) -> None:
    """Sizes 15, 1, 1, ... of which padding would make 15 each."""
    sizes = (15, *[1] * (WORLD - 1))
    rows = sum(sizes) if op == RS else 1
    received = queue_of(op, VENDOR, arguments(x=(rows, 32), shard_sizes=sizes)).received
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
    make = factors(x=(8192, 1024), w=(1024, 8192))
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
    ("op", "make", "vendor"),
    [
        (AR, arguments(x=(64, 32), weight=(32,)), ["copy_", AR]),
        (AR, arguments(x=(64, 32), weight=(32,), residual=(64, 32)), ["copy_", AR, SUM]),
        (MAR, factors(norm_weight=(32,), residual=(64, 32)), ["mm", AR, SUM]),
    ],
)
def test_a_normalisation_follows_the_sum(
    op: str, make: Callable[[], dict[str, Any]], vendor: list[str]
) -> None:
    """Torch's for the vendor's sum; ours where bits are promised."""
    found = queue_of(f"{op}_rms_norm", VENDOR, make).launches
    assert found[: len(vendor)] == vendor and by_torch(found[len(vendor) :])
    assert queue_of(f"{op}_rms_norm", ORDERED, make).launches == [*IN_ORDER[op], "rms_norm"]


def test_torch_normalises_rows_that_are_no_whole_vectors() -> None:
    made = arguments(x=(64, 33), weight=(33,))
    found = queue_of(f"{AR}_rms_norm", ORDERED, made).launches
    assert found[:3] == [A2A, SUM, AG] and by_torch(found[3:])


# Of the routes: their order, the edges of the ranks' rows, and the counts of experts.
PLACES = ["sort", "arange", "clamp", "add", "searchsorted", "arange", "searchsorted"]
INVERSE = ["arange", "scatter_"]
# Launches, by op, algorithm and ranks.
ROUTED: dict[tuple[str, str, int], tuple[int, list[str]]] = {
    ("moe_dispatch", "direct", WORLD): (9, [*PLACES, "routed", "sub"]),
    ("moe_combine", "direct", WORLD): (10, [*PLACES, *INVERSE, "routed"]),
    ("moe_dispatch", "unfused", 1): (17, []),
    ("moe_combine", "unfused", 1): (30, []),
}


@pytest.mark.parametrize(("op", "algorithm", "world"), ROUTED)
def test_no_host_waits_for_routed_rows_of_a_static_number(
    monkeypatch: pytest.MonkeyPatch, op: str, algorithm: str, world: int
) -> None:
    made: list[Prepared] = []

    def queue_launch(call: Call, on: Any, key: Any, prepare: Callable[..., Any], *_: Any) -> None:
        made.append(prepare())
        call.group.pg.queue.launches.append("routed")

    monkeypatch.setattr(cuda, "queue", queue_launch)
    rows, sizes = 200, UNEVEN if world > 1 else (60,)
    tokens = sizes[min(RANK, world - 1)]
    given = {
        "x": (rows if op == "moe_combine" else tokens, 512),
        **({"topk_weights": (tokens, 3, F32)} if op == "moe_combine" else {}),
        "routes": (60, 3, torch.int64),
        "num_experts": 12,
        "shard_sizes": sizes,
    }
    queue = queue_of(op, ORDERED, arguments(**given, max_rows=rows), algorithm, world)
    count, names = ROUTED[op, algorithm, world]
    assert len(queue.launches) == count and queue.launches[: len(names)] == names
    for prepared in made:  # a block for each 8 KiB of routes; tokens, or rows of routes
        needed = max(UNEVEN) * 512 * 2 * (3 if op == "moe_combine" else 1)
        assert (prepared.words, prepared.buffer_bytes) == (1 + 3, needed)
    for captured, error in ((False, DataDependentOutputException), (True, CaptureError)):
        monkeypatch.setattr(streams, "is_captured", lambda _, captured=captured: captured)
        with pytest.raises(error):
            queue_of(op, ORDERED, arguments(**given, max_rows=None), algorithm, world)


def test_no_host_waits_for_experts_if_all_ranks_have_all_tokens() -> None:
    with queued(RANK, WORLD):
        ids, own = fake(60, 3, dtype=torch.int64), (12, 2, 3)
        order, counts = _routes_of_experts(ids, *own, static=True)
        assert order.shape == (180,) and counts.shape == (3,)
        rows = fake(60, 64).index_select(0, order // 3)
        grouped_matmul(rows, fake(3, 64, 32), counts, fake(3, 32))
        with pytest.raises(DataDependentOutputException):
            _routes_of_experts(ids, *own, static=False)
