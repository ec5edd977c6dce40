"""Launches that ``unfused``, and ``direct`` for MoE ops, queue on a GPU.

The tensors are fake: launches are counted, and no kernel runs. A host synchronization would raise.
No GPU has confirmed the counts.
"""

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
from tpkernels.ops.problems import make_problem
from tpkernels.ops.registration import get_executor
from tpkernels.planning.choose import Capabilities, choose
from tpkernels.planning.op_spec import OPS
from tpkernels.planning.problem import ORDERED, VENDOR
from tpkernels.symm import streams
from tpkernels.symm.device import PreparedCall

WORLD, RANK = 8, 1
BF16, F32 = torch.bfloat16, torch.float32


def fake(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def record_queue(
    op: str,
    numerics: str,
    make: Callable[[], dict[str, Any]],
    algorithm: str = "unfused",
    world: int = WORLD,
) -> Queue:
    """Call an op with checked arguments and return the queue of its launches."""
    with queued(min(RANK, world - 1), world) as (queue, group):
        cls = arguments_class(OPS[op.rstrip("_")])
        args = cls(**{"group": "", "algorithm": algorithm} | make())
        problem = make_problem(op.rstrip("_"), group, args)
        if problem.spec.reduces:
            problem = replace(problem, numerics=numerics)
        plan = choose(problem, Capabilities(shared_memory=True), requested=algorithm)
        call = Call(group, problem, plan, TABLES["cuda"][problem.op, algorithm], 0)
        queue.launches.clear()
        queue.touched = 0
        get_executor(problem.spec, in_place=op.endswith("_"))(call, args)
    return queue


TENSORS = {"x", "w", "bias", "residual", "weight", "norm_weight", "routes", "topk_weights"}
TENSORS |= {"counts"}
Shape = tuple[Any, ...]  # dims, then a dtype unless it is bf16


def arguments(**shapes: Any) -> Callable[[], dict[str, Any]]:
    """Return a function that creates the arguments of a call. Shapes stand for tensors."""

    def tensor(shape: Shape) -> torch.Tensor:
        *dims, last = shape
        return fake(*dims, dtype=last) if isinstance(last, torch.dtype) else fake(*shape)

    def make_value(name: str, value: Any) -> Any:
        if name in ("weights", "biases"):
            return [tensor(shape) for shape in value]
        return tensor(value) if name in TENSORS else value

    return lambda: {name: make_value(name, value) for name, value in shapes.items()}


def matmul_args(**more: Any) -> Callable[[], dict[str, Any]]:
    return arguments(**({"x": (64, 16), "w": (16, 32)} | more))


UNEVEN = tuple(shard_sizes(60, WORLD))
RS, AR, IN_PLACE = "reduce_scatter", "all_reduce", "all_reduce_"
MRS, MAR, AGM = "matmul_reduce_scatter", "matmul_all_reduce", "all_gather_matmul"
A2A, SUM, AG = "all_to_all", "sum_partials", "all_gather"
# Default launches of a reduction with numerics "ordered".
IN_ORDER = {MRS: ["mm", A2A, SUM], MAR: ["mm", A2A, SUM, AG], RS: [A2A, SUM]}
IN_ORDER |= {op: [A2A, SUM, AG] for op in (AR, IN_PLACE)}

BATCH: dict[str, Any] = {"x": (2, 64, 16), "scatter_dim": 1}
GATHER: dict[str, Any] = {"x": (8, 16), "weights": [(16, 32)]}
A2A_SIZES = {"gather_dim": 1, "scatter_dim": 2, "gather_sizes": UNEVEN, "scatter_sizes": UNEVEN}

# (op, arguments, launches with "vendor", launches with "ordered" if they differ from IN_ORDER)
CASES: dict[str, tuple[Any, ...]] = {
    "scatter": (MRS, matmul_args(), ["mm", RS]),
    "bias": (MRS, matmul_args(bias=(32,)), ["mm", RS, SUM]),
    "fp32 bias": (MRS, matmul_args(bias=(32, F32), residual=(8, 32)), ["mm", RS, SUM]),
    "fp32 on the wire": (MRS, matmul_args(wire_dtype=F32), ["mm", RS, SUM]),
    "fp32 result": (MRS, matmul_args(out_dtype=F32), ["mm", RS, SUM]),
    "batch": (MRS, matmul_args(**BATCH), ["mm", "clone", RS], ["mm", "clone", A2A, SUM]),
    "batch of one": (MRS, matmul_args(x=(1, 64, 16), scatter_dim=1), ["mm", RS]),
    "uneven": (MRS, matmul_args(x=(60, 16), shard_sizes=UNEVEN), ["mm", f"{RS} of a list"]),
    "reduce": (MAR, matmul_args(), ["mm", AR]),
    "reduce, bias": (MAR, matmul_args(bias=(32,), residual=(64, 32)), ["mm", AR, SUM]),
    "reduce, fp32 on the wire": (MAR, matmul_args(wire_dtype=F32), ["mm", AR, SUM]),
    "reduce, odd": (MAR, matmul_args(x=(63, 16)), ["mm", AR], ["mm", A2A, SUM, f"{AG} of a list"]),
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
    assert record_queue(op, VENDOR, make).launches == vendor
    if op in IN_ORDER:
        expected = ordered[0] if ordered else IN_ORDER[op]
        assert record_queue(op, ORDERED, make).launches == expected


@pytest.mark.parametrize("op", [RS, AG])
def test_uneven_shards_move_no_padding(op: str) -> None:
    """The shard sizes are 15, 1, 1, ...; padding would send 15 rows per shard."""
    sizes = (15, *[1] * (WORLD - 1))
    rows = sum(sizes) if op == RS else 1
    received = record_queue(op, VENDOR, arguments(x=(rows, 32), shard_sizes=sizes)).received
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
def test_no_copy_follows_a_matmul(
    out: torch.dtype, bias_dtype: torch.dtype | None, launches: list[str]
) -> None:
    with queued(RANK, WORLD) as (queue, _):
        bias = None if bias_dtype is None else fake(32, dtype=bias_dtype)
        result = fake(64, 32, dtype=out)
        queue.launches.clear()
        local_matmul(fake(64, 16), fake(16, 32), result, bias)
    assert [name for name in queue.launches if name != "empty"] == launches


@pytest.mark.parametrize("op", [MRS, MAR])
def test_a_large_reduction(op: str) -> None:
    """M = N = 8192, K = 1024 per rank, bf16, 8 ranks: the lines of
    benchmarks/results/gpu-counted-unfused.md.

    After the matmul, "vendor" reads and writes no bytes. "ordered" reads the partial sums of one
    shard and writes the result.
    """
    make = matmul_args(x=(8192, 1024), w=(1024, 8192))
    operand, partial = 2 * 8192 * 1024, 2 * 8192 * 8192
    for numerics, extra_bytes in ((VENDOR, 0), (ORDERED, partial + partial // WORLD)):
        queue = record_queue(op, numerics, make)
        assert queue.touched == 2 * operand + partial + extra_bytes
        assert queue.received == partial * (WORLD - 1) / WORLD * (1 if op == MRS else 2)
        print(f"{op} {numerics}: {queue.launches}, {extra_bytes / 1e6:.0f} MB behind the product")


# Reductions followed by RMSNorm.


def by_torch(launches: list[str]) -> bool:
    """Return True if torch normalises. The kernels and their number depend on the torch version."""
    return bool(launches) and not {A2A, AG, AR, SUM, "rms_norm"} & set(launches)


@pytest.mark.parametrize(
    ("op", "make", "vendor"),
    [
        (AR, arguments(x=(64, 32), weight=(32,)), ["copy_", AR]),
        (AR, arguments(x=(64, 32), weight=(32,), residual=(64, 32)), ["copy_", AR, SUM]),
        (MAR, matmul_args(norm_weight=(32,), residual=(64, 32)), ["mm", AR, SUM]),
    ],
)
def test_a_normalisation_follows_the_sum(
    op: str, make: Callable[[], dict[str, Any]], vendor: list[str]
) -> None:
    """Torch normalises "vendor" sums. The package normalises "ordered" sums, which are bitwise
    reproducible."""
    launches = record_queue(f"{op}_rms_norm", VENDOR, make).launches
    assert launches[: len(vendor)] == vendor and by_torch(launches[len(vendor) :])
    assert record_queue(f"{op}_rms_norm", ORDERED, make).launches == [*IN_ORDER[op], "rms_norm"]


def test_torch_normalises_rows_of_partial_vectors() -> None:
    make = arguments(x=(64, 33), weight=(33,))
    launches = record_queue(f"{AR}_rms_norm", ORDERED, make).launches
    assert launches[:3] == [A2A, SUM, AG] and by_torch(launches[3:])


# Launches that compute the permutation, the rank offsets and the expert offsets.
PERMUTATION = ["sort", "arange", "clamp", "add", "searchsorted", "arange", "searchsorted"]
INVERSE = ["arange", "scatter_"]
# Number of launches and first launches, by op, algorithm and world size.
ROUTED: dict[tuple[str, str, int], tuple[int, list[str]]] = {
    ("moe_dispatch", "direct", WORLD): (9, [*PERMUTATION, "routed", "sub"]),
    ("moe_combine", "direct", WORLD): (10, [*PERMUTATION, *INVERSE, "routed"]),
    ("moe_dispatch", "unfused", 1): (17, []),
    ("moe_combine", "unfused", 1): (30, []),
}


@pytest.mark.parametrize(("op", "algorithm", "world"), ROUTED)
def test_no_host_sync_with_max_rows(
    monkeypatch: pytest.MonkeyPatch, op: str, algorithm: str, world: int
) -> None:
    prepared_calls: list[PreparedCall] = []

    def queue_launch(call: Call, on: Any, key: Any, prepare: Callable[..., Any], *_: Any) -> None:
        prepared_calls.append(prepare())
        call.group.pg.queue.launches.append("routed")

    monkeypatch.setattr(cuda, "queue", queue_launch)
    rows, sizes = 200, UNEVEN if world > 1 else (60,)
    tokens = sizes[min(RANK, world - 1)]
    shapes = {
        "x": (rows if op == "moe_combine" else tokens, 512),
        **({"topk_weights": (tokens, 3, F32)} if op == "moe_combine" else {}),
        "routes": (60, 3, torch.int64),
        "num_experts": 12,
        "shard_sizes": sizes,
    }
    queue = record_queue(op, ORDERED, arguments(**shapes, max_rows=rows), algorithm, world)
    count, names = ROUTED[op, algorithm, world]
    assert len(queue.launches) == count and queue.launches[: len(names)] == names
    for prepared in prepared_calls:  # one block per 8 KiB of routes; buffers of tokens, or of rows
        needed = max(UNEVEN) * 512 * 2 * (3 if op == "moe_combine" else 1)
        assert (prepared.signals, prepared.buffer_bytes) == (1 + 3, needed)
    for captured, error in ((False, DataDependentOutputException), (True, CaptureError)):
        monkeypatch.setattr(streams, "is_captured", lambda _, captured=captured: captured)
        with pytest.raises(error):
            record_queue(op, ORDERED, arguments(**shapes, max_rows=None), algorithm, world)


def test_no_host_sync_for_experts_with_replicated_tokens() -> None:
    with queued(RANK, WORLD):
        ids, expert_range = fake(60, 3, dtype=torch.int64), (12, 2, 3)
        order, counts = _routes_of_experts(ids, *expert_range, static=True)
        assert order.shape == (180,) and counts.shape == (3,)
        rows = fake(60, 64).index_select(0, order // 3)
        grouped_matmul(rows, fake(3, 64, 32), counts, fake(3, 32))
        with pytest.raises(DataDependentOutputException):
            _routes_of_experts(ids, *expert_range, static=False)
