"""Checks of one variant, run on every rank of a stage. Each rank computes the expected results
without communication, compares, and reports the first wrong call.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

import tpkernels
from tpkernels import cuda, groups
from tpkernels.algorithms import fused
from tpkernels.common import dtypes
from tpkernels.common.text import describe_error, shorten
from tpkernels.errors import PeerLostError, TpkernelsError, WorkspaceMemoryError
from tpkernels.launch.session import rank_device, synchronizer
from tpkernels.ops.reference import Expected, rms_norm
from tpkernels.ops.tuner import capture_graph
from tpkernels.planning.op_spec import OPS
from tpkernels.planning.qualification import COPY_ENGINES, SHARDS, SUMS, Failure, Qualification
from tpkernels.qualification.op_case import NORM_EPS, OpCase, Operands, Outputs

TIMEOUT_S = 10.0  # timeout of a wait
_DTYPES = (torch.bfloat16, torch.float32, torch.float16)
_MAX_MISMATCHES, _MAX_ERROR_CHARS = 16, 2000  # limits of a failure report
DELAY_US = 200
# (M, N, K): few rows; then more than a tile, with sizes that do not divide each other; then a
# larger shape. One-shot LL uses 0.4 GB for the largest shape on 8 ranks in float32.
_SMALL = ((2, 24, 40), (61, 72, 136))
_LARGE = ((2, 4096, 128), (1021, 1032, 2056), (2048, 1536, 4096))
_REPLAYS = 10
TOP_K = 3  # experts per token
_WIRE_ROUNDINGS = 2  # roundings of a partial sum, and of the sum in a switch


@dataclass(frozen=True)
class CheckedCall:
    """A call of an op: x [m, k] and w [k, n] per rank or, for a collective, x [m, n]. With a
    residual if the op supports it."""

    op: str
    shape: tuple[int, int, int]
    dtype: torch.dtype
    exact: bool  #: integer data, with exact results
    delayed: bool
    seed: int
    replayed: bool = False

    def __str__(self) -> str:
        data = "integers" if self.exact else "random data"
        suffix = ", delayed" if self.delayed else ", replayed" if self.replayed else ""
        shape = "x".join(map(str, self.shape))
        return f"{self.op} {shape} {dtypes.name(self.dtype)}, {data}{suffix}"

    def operands(self, rank: int, world: int, device: torch.device) -> Operands:
        """Create the operands of a rank."""
        (m, n, k), spec = self.shape, OPS[self.op]
        extents = (m, n * world, k) if spec.gathers else (m, n, k * world)
        case = OpCase(
            op=self.op,
            extents=extents if spec.has_matmul else (m, n),
            dtype=self.dtype,
            world=world,
            device=device,
            seed=self.seed,
            integers=self.exact,
            linear=False,
            residual=spec.reduces and (spec.has_matmul or spec.normed),
            experts=2 * world + 1,
            idle=1,
            top_k=TOP_K,
            static=spec.routed and self.exact,
            name=str(self),
        )
        return case.operands(rank)


def get_checked_ops(variant: str) -> list[str]:
    """Return the ops that check a variant."""
    algorithm, _, name = variant.partition("/")
    if name == "routed":
        return ["moe_dispatch", "moe_combine"]
    if algorithm == "direct":
        sums = ["all_reduce", "matmul_all_reduce", "all_reduce_rms_norm"]
        return sums * (name in SUMS) + (["all_gather", "reduce_scatter"] if name in SHARDS else [])
    if algorithm == "multimem":
        plain = [name] if name != "all_reduce" else [name, "all_reduce_rms_norm"]
        return [*plain, "all_gather_matmul" if name == "all_gather" else f"matmul_{name}"]
    ops = {
        "all_gather": "all_gather_matmul",
        COPY_ENGINES: "all_gather_matmul",
        "reduce_scatter": "matmul_reduce_scatter",
        "all_reduce": "matmul_all_reduce",
        "all_to_all": "all_to_all",
    }
    collectives = [name] if algorithm == "ring" and name in OPS and name != "all_to_all" else []
    return [ops[name], *collectives]


def get_shapes(device: str) -> tuple[tuple[int, int, int], ...]:
    """Return M, N, K of the calls. The CPU dry run uses small shapes."""
    return _SMALL if device == "cpu" else _LARGE


def make_calls(variant: str, device: str, repeats: int) -> Iterator[CheckedCall]:
    """Yield the calls that check a variant: integers, integers with delays, random data, then
    replays of a CUDA graph."""
    shapes, all_dtypes = get_shapes(device), _DTYPES[:2] if device == "cpu" else _DTYPES
    if variant.startswith("multimem/"):
        all_dtypes = all_dtypes[:2]  # the torch multimem ops cannot reduce float16
    seed = itertools.count(1)
    for _ in range(repeats):
        for delayed, exact in ((False, True), (True, True), (False, False)):
            for shape, dtype, op in itertools.product(shapes, all_dtypes, get_checked_ops(variant)):
                yield CheckedCall(op, shape, dtype, exact, delayed, next(seed))
    for op in get_checked_ops(variant) if device == "cuda" else ():
        yield CheckedCall(op, shapes[1], torch.bfloat16, True, False, next(seed), replayed=True)


@dataclass
class StageReport:
    """Report of a rank on a stage."""

    checks: int = 0  #: number of correct calls, or of correct values in a litmus test
    failure: Failure | None = None  #: first failure
    call: str = "setup"  #: current call


class StageFailed(Exception):
    """Ends a stage on this rank with a failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure


@contextlib.contextmanager
def collect_report(rank: int = 0) -> Iterator[StageReport]:
    """Yield a report. An exception in the block becomes the failure of the report."""
    report = StageReport()
    try:
        yield report
    except StageFailed as error:
        report.failure = error.failure
    except Exception as error:
        report.failure = make_failure(error, report.call, rank)


def check_variant(variant: str, device: str, repeats: int = 1) -> StageReport:
    """Check a variant on this rank."""
    torch_device, previous = rank_device(device), list[torch.Tensor]()
    with (
        collect_report(dist.get_rank()) as report,
        _create_variant_group(variant, torch_device) as group,
    ):
        tp_group = groups.get(group.group_name)
        for call in make_calls(variant, device, repeats):
            report.call = str(call)
            if tp_group.workspace is not None:
                delay = DELAY_US if call.delayed else 0
                tp_group.workspace.set_chaos(seed=group.rank(), max_delay_us=delay)
            operands = call.operands(group.rank(), group.size(), torch_device)
            run = functools.partial(operands.run, variant.partition("/")[0], group)
            if call.replayed:
                _replay(operands, run, previous)
            else:
                results = run()
                if (wait := synchronizer(device)) is not None:
                    wait()
                tpkernels.check(group)  # before the comparison, which would only report NaN
                require_correct(operands, results, previous)
            report.checks += 1
        tpkernels.check(group)
        # Keep the group alive until all ranks have checked their results.
        tp_group.lock_and_exchange("end of the stage", report.checks, "cpu")
    return report


def make_failure(error: BaseException, call: str, rank: int) -> Failure:
    """Return the failure of a call that raised ``error`` on ``rank``."""
    kind, peer = "error", error.peer if isinstance(error, TpkernelsError) else None
    if isinstance(error, MemoryError | torch.OutOfMemoryError | WorkspaceMemoryError):
        kind = "memory"
    elif isinstance(error, PeerLostError):
        kind = "lost"
    elif isinstance(error, NotImplementedError):
        kind = "unsupported"
    return Failure(kind, call, rank, peer, shorten(describe_error(error), _MAX_ERROR_CHARS))


def accumulate_in_float32() -> None:
    """Make torch matmuls on GPUs round as the error bound assumes."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


@contextlib.contextmanager
def force_copy_engines(variant: str) -> Iterator[None]:
    """Gather shards of every size with copy engines if ``variant`` uses them."""
    min_bytes = fused.COPY_ENGINE_BYTES
    if variant == f"fused/{COPY_ENGINES}":
        fused.COPY_ENGINE_BYTES = 0
    try:
        yield
    finally:
        fused.COPY_ENGINE_BYTES = min_bytes


@contextlib.contextmanager
def _create_variant_group(variant: str, device: torch.device) -> Iterator[dist.ProcessGroup]:
    """Create a group whose calls use only this variant of its algorithm."""
    accumulate_in_float32()
    group = dist.new_group()
    assert group is not None  # the group contains all ranks
    tpkernels.init(group, timeout=TIMEOUT_S, autotune=False)
    tp_group, (algorithm, _, name) = groups.get(group.group_name), variant.partition("/")
    tp_group.use_qualification(Qualification(frozenset({variant})))
    if name == COPY_ENGINES and (reason := cuda.unsupported(device)) is not None:
        # Without this error, the calls would run without copy engines.
        raise NotImplementedError(f"{variant} {reason}")
    try:
        with force_copy_engines(variant):
            yield group
        workspaces = (
            tp_group.workspace.cuda_workspaces.values() if tp_group.workspace is not None else ()
        )
        for workspace in workspaces if algorithm in ("direct", "fused") else ():
            if workspace.current.variants != {name}:
                raise RuntimeError(
                    f"{variant} was selected, but the calls ran "
                    f"{sorted(workspace.current.variants)}"
                )
    finally:
        dist.destroy_process_group(group)


def _replay(operands: Operands, run: Callable[[], Outputs], previous: list[torch.Tensor]) -> None:
    """Capture a call in a CUDA graph and replay it, with new operand values in each replay."""
    outputs: list[list[torch.Tensor]] = []
    replay = capture_graph(lambda: outputs.append(run()), calls=1)
    for i in range(_REPLAYS):
        refilled = operands.refill(operands.case.seed + 1000 * (i + 1))
        replay()
        torch.cuda.synchronize()
        require_correct(refilled, outputs[-1], previous)


def require_correct(
    operands: Operands, results: list[torch.Tensor], previous: list[torch.Tensor]
) -> None:
    """Raise `StageFailed` if the results of a call are wrong. ``previous``: see
    `compare_results`."""
    if (failure := compare_results(operands, results, previous)) is not None:
        raise StageFailed(failure)


def compare_results(
    operands: Operands, results: list[torch.Tensor], previous: list[torch.Tensor]
) -> Failure | None:
    """Compare the results of a call with the expected values. Return the failure, or None.

    ``previous`` holds the expected values of the previous call and is updated. Normalised rows are
    compared with the norm of the returned sum, which is checked first.
    """
    expected = operands.expected(wire_roundings=_WIRE_ROUNDINGS)
    references = list(expected)
    if operands.norm_weight is not None:
        references.append(rms_norm(results[0], operands.norm_weight, NORM_EPS))
    for result, reference in zip(results, references, strict=True):
        failure = _compare(result, reference, previous, operands.case.name, operands.rank)
        if failure is not None:
            return failure
    previous[:] = [reference.exact for reference in expected]
    return None


def _compare(
    result: torch.Tensor, reference: Expected, previous: list[torch.Tensor], call: str, rank: int
) -> Failure | None:
    """Return the failure of a result, or None if it is correct."""
    wrong = reference.wrong(result)
    if not wrong.any():
        return None
    indices = wrong.flatten().nonzero().flatten()
    values, exact = (
        result.flatten()[indices].double().cpu(),
        reference.exact.flatten()[indices].cpu(),
    )
    looks = ""
    if values.isnan().all():
        looks = "NaN"
    elif (values == 0).all():
        looks = "zero"
    elif previous and previous[0].shape == reference.exact.shape:
        stale = previous[0].flatten()[indices].cpu()
        looks = "the previous call's" if torch.equal(stale, values) else ""
    triples = zip(indices.tolist(), values.tolist(), exact.tolist(), strict=True)
    first = tuple(
        (i, f"{a:.6g}", f"{b:.6g}") for i, a, b in itertools.islice(triples, _MAX_MISMATCHES)
    )
    counts = reference.exact.numel(), len(indices)
    return Failure("wrong", call, rank, None, "", *counts, first, looks)
