"""What the ranks of a stage run: calls of one variant. Each rank computes the expected results by
itself, compares, and reports the first wrong call.
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
from tpkernels.common.text import of_error, short
from tpkernels.errors import PeerLostError, TpkernelsError, WorkspaceMemoryError
from tpkernels.launch.session import rank_device, synchronizer
from tpkernels.ops.reference import Expected, rms_norm
from tpkernels.ops.tuner import graph_of
from tpkernels.planning.op_spec import OPS
from tpkernels.planning.qualification import COPY_ENGINES, SHARDS, SUMS, Failure, Qualification
from tpkernels.qualification.op_case import NORM_EPS, OpCase, Operands, Outputs

TIMEOUT_S = 10.0  # of a wait
_DTYPES = (torch.bfloat16, torch.float32, torch.float16)
_FIRST, _TEXT = 16, 2000  # wrong elements, and characters of an error, that are kept
DELAY_US = 200
# Rows, columns and sums of products: few, then more than a tile, none a multiple of another. LL in
# one hop takes 0.4 GB for the largest of 8 ranks, in float32.
_SMALL = ((2, 24, 40), (61, 72, 136))
_LARGE = ((2, 4096, 128), (1021, 1032, 2056), (2048, 1536, 4096))
_REPLAYS = 10
TOP_K = 3  # experts of a token
_WIRE_ROUNDINGS = 2  # of a partial, and of the sum by a switch


@dataclass(frozen=True)
class CheckedCall:
    """A call of an op on x [m, k], or [m, n] of a collective, and w [k, n] of each rank, with a
    residual if the op takes one."""

    op: str
    shape: tuple[int, int, int]
    dtype: torch.dtype
    exact: bool  #: integers
    delayed: bool
    seed: int
    replayed: bool = False

    def __str__(self) -> str:
        data = "integers" if self.exact else "random data"
        how = ", delayed" if self.delayed else ", replayed" if self.replayed else ""
        shape = "x".join(map(str, self.shape))
        return f"{self.op} {shape} {dtypes.name(self.dtype)}, {data}{how}"

    def operands(self, rank: int, world: int, device: torch.device) -> Operands:
        """Make what a rank passes to the op."""
        (m, n, k), spec = self.shape, OPS[self.op]
        whole = (m, n * world, k) if spec.gathers else (m, n, k * world)
        case = OpCase(
            op=self.op,
            extents=whole if spec.has_matmul else (m, n),
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


def ops_of(variant: str) -> list[str]:
    """Return the ops by which a variant is checked."""
    algorithm, _, name = variant.partition("/")
    if name == "routed":
        return ["moe_dispatch", "moe_combine"]
    if algorithm == "direct":
        sums = ["all_reduce", "matmul_all_reduce", "all_reduce_rms_norm"]
        return sums * (name in SUMS) + (["all_gather", "reduce_scatter"] if name in SHARDS else [])
    if algorithm == "multimem":
        plain = [name] if name != "all_reduce" else [name, "all_reduce_rms_norm"]
        return [*plain, "all_gather_matmul" if name == "all_gather" else f"matmul_{name}"]
    kinds = {
        "all_gather": "all_gather_matmul",
        COPY_ENGINES: "all_gather_matmul",
        "reduce_scatter": "matmul_reduce_scatter",
        "all_reduce": "matmul_all_reduce",
        "all_to_all": "all_to_all",
    }
    collectives = [name] if algorithm == "ring" and name in OPS and name != "all_to_all" else []
    return [kinds[name], *collectives]


def shapes_on(device: str) -> tuple[tuple[int, int, int], ...]:
    """Return the rows, columns and sums of the calls; on CPUs, a rehearsal, few."""
    return _SMALL if device == "cpu" else _LARGE


def calls_of(variant: str, device: str, repeats: int) -> Iterator[CheckedCall]:
    """Return the calls by which a variant is checked: on integers, then random data, without delays
    and with them, then replays of graphs."""
    shapes, kinds = shapes_on(device), _DTYPES[:2] if device == "cpu" else _DTYPES
    if variant.startswith("multimem/"):
        kinds = kinds[:2]  # torch has no kernel that sums float16
    seed = itertools.count(1)
    for _ in range(repeats):
        for delayed, exact in ((False, True), (True, True), (False, False)):
            for shape, dtype, op in itertools.product(shapes, kinds, ops_of(variant)):
                yield CheckedCall(op, shape, dtype, exact, delayed, next(seed))
    for op in ops_of(variant) if device == "cuda" else ():
        yield CheckedCall(op, shapes[1], torch.bfloat16, True, False, next(seed), replayed=True)


@dataclass
class StageReport:
    """What a rank reports of a stage."""

    checks: int = 0  #: calls, or packs of a litmus test, that were right
    failure: Failure | None = None  #: the first one
    call: str = "setup"  #: under way


class Failed(Exception):
    """Ends a stage on this rank."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure


@contextlib.contextmanager
def reporting(rank: int = 0) -> Iterator[StageReport]:
    """Give a report, which takes what is raised within: whatever it is, it fails the stage."""
    report = StageReport()
    try:
        yield report
    except Failed as error:
        report.failure = error.failure
    except Exception as error:
        report.failure = failure_of(error, report.call, rank)


def check_variant(variant: str, device: str, repeats: int = 1) -> StageReport:
    """Check a variant on this rank."""
    where, previous = rank_device(device), list[torch.Tensor]()
    with reporting(dist.get_rank()) as report, _one_variant(variant, where) as group:
        own = groups.get(group.group_name)
        for call in calls_of(variant, device, repeats):
            report.call = str(call)
            if own.workspace is not None:
                delay = DELAY_US if call.delayed else 0
                own.workspace.set_chaos(seed=group.rank(), max_delay_us=delay)
            operands = call.operands(group.rank(), group.size(), where)
            run = functools.partial(operands.run, variant.partition("/")[0], group)
            if call.replayed:
                _replay(operands, run, previous)
            else:
                results = run()
                if (wait := synchronizer(device)) is not None:
                    wait()
                tpkernels.check(group)  # a failed wait says more than the NaN that it leaves
                require(operands, results, previous)
            report.checks += 1
        tpkernels.check(group)
        # Nobody leaves before all have looked.
        own.exchange_in_turn("end of the stage", report.checks, "cpu")
    return report


def failure_of(error: BaseException, call: str, rank: int) -> Failure:
    """Return the failure of a call that raised ``error`` on ``rank``."""
    kind, peer = "error", error.peer if isinstance(error, TpkernelsError) else None
    if isinstance(error, MemoryError | torch.OutOfMemoryError | WorkspaceMemoryError):
        kind = "memory"
    elif isinstance(error, PeerLostError):
        kind = "lost"
    elif isinstance(error, NotImplementedError):
        kind = "unsupported"
    return Failure(kind, call, rank, peer, short(of_error(error), _TEXT))


def accumulate_in_float32() -> None:
    """Have torch's products on GPUs round as the bound says."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


@contextlib.contextmanager
def copying(variant: str) -> Iterator[None]:
    """Gather shards of every size by copy engines, if ``variant`` is the one that uses them."""
    least = fused.COPY_ENGINE_BYTES
    if variant == f"fused/{COPY_ENGINES}":
        fused.COPY_ENGINE_BYTES = 0
    try:
        yield
    finally:
        fused.COPY_ENGINE_BYTES = least


@contextlib.contextmanager
def _one_variant(variant: str, device: torch.device) -> Iterator[dist.ProcessGroup]:
    """Create a group whose calls use only this variant of its algorithm."""
    accumulate_in_float32()
    group = dist.new_group()
    assert group is not None  # all ranks are in it
    tpkernels.init(group, timeout=TIMEOUT_S, autotune=False)
    own, (algorithm, _, name) = groups.get(group.group_name), variant.partition("/")
    own.use_qualification(Qualification(frozenset({variant})))
    if name == COPY_ENGINES and (why := cuda.unsupported(device)) is not None:
        raise NotImplementedError(f"{variant} {why}")  # it would go without them
    try:
        with copying(variant):
            yield group
        spaces = own.workspace.on_gpus.values() if own.workspace is not None else ()
        for space in spaces if algorithm in ("direct", "fused") else ():
            if space.current.variants != {name}:
                raise RuntimeError(
                    f"{variant} was selected, but the calls ran {sorted(space.current.variants)}"
                )
    finally:
        dist.destroy_process_group(group)


def _replay(operands: Operands, run: Callable[[], Outputs], previous: list[torch.Tensor]) -> None:
    """Capture a call in a graph, and replay it with new values each time."""
    made: list[list[torch.Tensor]] = []
    replay = graph_of(lambda: made.append(run()), calls=1)
    for i in range(_REPLAYS):
        renewed = operands.refill(operands.of.seed + 1000 * (i + 1))
        replay()
        torch.cuda.synchronize()
        require(renewed, made[-1], previous)


def require(operands: Operands, results: list[torch.Tensor], previous: list[torch.Tensor]) -> None:
    """Raise `Failed` if the results of a call are wrong; ``previous`` is that of `compared`."""
    if (failure := compared(operands, results, previous)) is not None:
        raise Failed(failure)


def compared(
    operands: Operands, results: list[torch.Tensor], previous: list[torch.Tensor]
) -> Failure | None:
    """Return what is wrong with the results of a call; None: nothing. ``previous`` holds the values
    that were expected of the last one. Rows are normalised after the sum was rounded, whose values
    are checked before."""
    expected = operands.expected(wire_roundings=_WIRE_ROUNDINGS)
    wanted = list(expected)
    if operands.norm_weight is not None:
        wanted.append(rms_norm(results[0], operands.norm_weight, NORM_EPS))
    for got, want in zip(results, wanted, strict=True):
        failure = _difference(got, want, previous, operands.of.name, operands.rank)
        if failure is not None:
            return failure
    previous[:] = [want.exact for want in expected]
    return None


def _difference(
    got: torch.Tensor, want: Expected, previous: list[torch.Tensor], call: str, rank: int
) -> Failure | None:
    """Return what is wrong with a result; None: nothing."""
    wrong = want.wrong(got)
    if not wrong.any():
        return None
    at = wrong.flatten().nonzero().flatten()
    values, wanted = got.flatten()[at].double().cpu(), want.exact.flatten()[at].cpu()
    looks = ""
    if values.isnan().all():
        looks = "NaN"
    elif (values == 0).all():
        looks = "zero"
    elif previous and previous[0].shape == want.exact.shape:
        stale = previous[0].flatten()[at].cpu()
        looks = "the previous call's" if torch.equal(stale, values) else ""
    triples = zip(at.tolist(), values.tolist(), wanted.tolist(), strict=True)
    first = tuple((i, f"{a:.6g}", f"{b:.6g}") for i, a, b in itertools.islice(triples, _FIRST))
    counts = want.exact.numel(), len(at)
    return Failure("wrong", call, rank, None, "", *counts, first, looks)
