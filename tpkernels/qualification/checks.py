"""What the ranks of a stage run: calls of one way. Each rank computes the expected results by
itself, compares, and reports the first wrong call.

Small integers have exact sums and products, whatever the order, where bfloat16 holds each: operands
of a matmul are the sparser the more they add up. Random data may differ from float64 by the bound
of `tpkernels.ops.reference`, without an error of the unfused program. All ranks can make the inputs
of all, where these are needed: a host would take seconds for those of a large call.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

import tpkernels
from tpkernels import cuda, groups
from tpkernels.algorithms import fused
from tpkernels.common import dtypes
from tpkernels.common.shards import shard_sizes
from tpkernels.common.text import of_error, short
from tpkernels.errors import PeerLostError, TpkernelsError, WorkspaceMemoryError
from tpkernels.launch.session import rank_device, synchronizer
from tpkernels.ops.reference import (
    Expected,
    Term,
    assignments,
    moe_combine,
    moved,
    rms_norm,
    summed,
)
from tpkernels.ops.tuner import graph_of
from tpkernels.planning.op_spec import OPS
from tpkernels.planning.trust import COPY_ENGINES, NORMED_SUMS, SHARDS, SUMS, Failure, Trust

Run = Callable[[], list[torch.Tensor]]
TIMEOUT_S = 10.0  # of a wait
_DTYPES = (torch.bfloat16, torch.float32, torch.float16)
_EPS = 1e-5  # of the norm
_FIRST, _TEXT = 16, 2000  # wrong elements, and characters of an error, that are kept
DELAY_US = 200
# Rows, columns and sums of products: few, then more than a tile, none a multiple of another. LL in
# one hop takes 0.4 GB for the largest of 8 ranks, in float32.
_SMALL = ((2, 24, 40), (61, 72, 136))
_LARGE = ((2, 4096, 128), (1021, 1032, 2056), (2048, 1536, 4096))
_LARGEST_DEVIATION = 32  # of sums of integers: 8 of it is 256, from where on bfloat16 has gaps
_REPLAYS = 10
TOP_K = 3  # experts of a token


@dataclass(frozen=True)
class CheckedCall:
    """A call of an op on x [m, k], or [m, n] of a collective, and w [k, n] of each rank."""

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


def ops_of(way: str) -> list[str]:
    """Return the ops by which a way is checked."""
    algorithm, _, name = way.partition("/")
    if name == "routed":
        return ["moe_dispatch", "moe_combine"]
    if algorithm == "direct":
        found = ["all_reduce", "matmul_all_reduce"] if name in SUMS else []
        found += ["all_reduce_rms_norm"] if name in NORMED_SUMS else []
        return found + (["all_gather", "reduce_scatter"] if name in SHARDS else [])
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


def calls_of(way: str, device: str, repeats: int) -> Iterator[CheckedCall]:
    """Return the calls by which a way is checked: on integers, then random data, without delays
    and with them, then replays of graphs."""
    shapes, kinds = shapes_on(device), _DTYPES[:2] if device == "cpu" else _DTYPES
    if way.startswith("multimem/"):
        kinds = kinds[:2]  # torch has no kernel that sums float16
    seed = itertools.count(1)
    for _ in range(repeats):
        for delayed, exact in ((False, True), (True, True), (False, False)):
            for shape, dtype, op in itertools.product(shapes, kinds, ops_of(way)):
                yield CheckedCall(op, shape, dtype, exact, delayed, next(seed))
    for op in ops_of(way) if device == "cuda" else ():
        yield CheckedCall(op, shapes[1], torch.bfloat16, True, False, next(seed), replayed=True)


@dataclass
class StageReport:
    """What a rank reports of a stage."""

    checks: int = 0  #: calls, or packs of a litmus test, that were right
    failure: Failure | None = None  #: the first one
    call: str = "the set-up"  #: under way


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


def check_way(way: str, device: str, repeats: int = 1) -> StageReport:
    """Check a way on this rank."""
    where, previous = rank_device(device), list[torch.Tensor]()
    with reporting(dist.get_rank()) as report, _one_way(way, where) as group:
        own = groups.get(group.group_name)
        for call in calls_of(way, device, repeats):
            report.call = str(call)
            if own.workspace is not None:
                delay = DELAY_US if call.delayed else 0
                own.workspace.set_chaos(seed=group.rank(), max_delay_us=delay)
            operands = CheckedOperands(call, group.rank(), group.size(), where)
            run = functools.partial(operands.run, way.partition("/")[0], group)
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
        own.exchange_in_turn("the end", report.checks, "cpu")
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
def copying(way: str) -> Iterator[None]:
    """Have copy engines bring shards of every size, if ``way`` is the variant that uses them."""
    least = fused.COPY_ENGINE_BYTES
    if way == f"fused/{COPY_ENGINES}":
        fused.COPY_ENGINE_BYTES = 0
    try:
        yield
    finally:
        fused.COPY_ENGINE_BYTES = least


@contextlib.contextmanager
def _one_way(way: str, device: torch.device) -> Iterator[dist.ProcessGroup]:
    """Make a group whose calls go this way, of all that its algorithm has."""
    accumulate_in_float32()
    group = dist.new_group()
    assert group is not None  # all ranks are in it
    tpkernels.init(group, timeout=TIMEOUT_S, autotune=False)
    own, (algorithm, _, name) = groups.get(group.group_name), way.partition("/")
    own.use_trust(Trust(frozenset({way})))
    if name == COPY_ENGINES and (why := cuda.unsupported(device)) is not None:
        raise NotImplementedError(f"{way} {why}")  # it would go without them
    try:
        with copying(way):
            yield group
        spaces = own.workspace.on_gpus.values() if own.workspace is not None else ()
        for space in spaces if algorithm in ("direct", "fused") else ():
            if space.current.ways != {name}:
                raise RuntimeError(f"{way} was not taken, but {sorted(space.current.ways)}")
    finally:
        dist.destroy_process_group(group)


class CheckedOperands:
    """The inputs of this rank, and what it must return.

    Attributes:
        factors: what the op is called with.
        options: its options besides group and algorithm.
        expected: the op's results; of normalised rows, only the sum before.
    """

    def __init__(self, call: CheckedCall, rank: int, world: int, device: torch.device) -> None:
        self.call, self.spec = call, OPS[call.op]
        self.rank, self.world, self.device = rank, world, device
        self.factors, self.options = list[torch.Tensor](), dict[str, Any]()
        self._generator = torch.Generator(device).manual_seed(call.seed)
        m, n, _ = call.shape
        self._sizes = tuple(shard_sizes(m, world))
        self._own = slice(sum(self._sizes[:rank]), sum(self._sizes[: rank + 1]))
        if self.spec.routed:
            self.expected = self._route()
        elif self.spec.exchanges:  # rows of x to all ranks, columns from all
            m, n = (world * math.ceil(size / world) for size in (m, n))  # sizes of a rank are alike
            x = self._make(world, m, n)
            self.factors = [x[rank].contiguous()]
            self.options = {"gather_dim": 1, "scatter_dim": 0}
            shards = [part[rank * m // world : (rank + 1) * m // world] for part in x]
            self.expected = [moved(torch.cat(shards, 1))]
        else:
            self.expected = [self._sum()]

    def _make(self, *shape: int) -> torch.Tensor:
        """Return random data or integers. A factor is -1 or 1 with probability 2 / (2 * most + 1),
        else 0."""
        call = self.call
        options: dict[str, Any] = {"generator": self._generator, "device": self.device}
        if not call.exact:
            return torch.randn(shape, **options).to(call.dtype)
        added = max(self.world, TOP_K) * call.shape[2]
        most = math.ceil((2 * math.sqrt(added) / _LARGEST_DEVIATION - 1) / 2)
        most = max(1, most) if self.spec.has_matmul else 1
        drawn = torch.randint(-most, most + 1, shape, dtype=torch.int16, **options)
        return (drawn * (drawn.abs() <= 1)).to(call.dtype)

    def _sum(self) -> Expected:
        """Make a gathered tensor, or partials and a residual, and weights."""
        (m, n, k), spec, dtype = self.call.shape, self.spec, self.call.dtype
        residual = None
        if spec.reduces and (spec.has_matmul or spec.normed):
            residual = self.options["residual"] = self._make(m, n)

        def term(source: int) -> Term:
            x = self._make(m, k if spec.has_matmul else n)
            w = self._make(k, n) if spec.has_matmul else None
            if source == self.rank:
                self.factors = [factor for factor in (x, w) if factor is not None]
            return x, w

        if spec.gathers:
            x, w = term(self.rank)
            self.factors[0] = x[self._own].contiguous()
            result = moved(x)
            if w is not None:
                result = summed([(x, w)], dtype=dtype, integers=self.call.exact, unfused=False)
        else:
            result = summed(
                map(term, range(self.world)),
                [residual],
                dtype=dtype,
                wire=dtype,
                integers=self.call.exact,
                unfused=False,
                sum_roundings=1,  # by a switch
            )
        if spec.scatters:
            result = Expected(result.exact[self._own], result.bound[self._own], dtype)
            if residual is not None:
                self.options["residual"] = residual[self._own].contiguous()
        if spec.gathers or spec.scatters:
            self.options["shard_sizes"] = self._sizes
        if spec.normed:
            self.factors.append(self._make(n))
            self.options["eps"] = _EPS
        return result

    def _route(self) -> list[Expected]:
        """Make rows of tokens or, of a combine, of assignments: as many as there may be, or of
        random data as there are. The last expert gets none."""
        (m, n, _), exact, experts = self.call.shape, self.call.exact, 2 * self.world + 1
        each = 1 if self.spec.combines else TOP_K  # assignments with the same row
        made = self._make(m * TOP_K // each, n).repeat_interleave(each, 0)
        options: dict[str, Any] = {"generator": self._generator, "device": self.device}
        topk_ids = torch.randint(experts - 1, (m, TOP_K), **options)
        order, counts = assignments(topk_ids, experts, self.world)
        rows = made[order[self.rank]]
        self.options = {"shard_sizes": self._sizes, "num_experts": experts}
        if exact:
            self.options["max_rows"] = m * TOP_K
            rows = torch.cat([rows, rows.new_zeros(m * TOP_K - len(rows), n)])
        if self.spec.dispatches:
            self.factors = [made[::TOP_K][self._own].contiguous(), topk_ids]
            return [moved(counts[self.rank]), moved(rows)]
        weights = self._make(m, TOP_K).float()
        self.factors = [rows, weights[self._own], topk_ids]
        combined = made.view(m, TOP_K, n)[self._own], weights[self._own]
        return [moe_combine(*combined, dtype=self.call.dtype, integers=exact)]

    def run(self, algorithm: str, group: dist.ProcessGroup) -> list[torch.Tensor]:
        """Make the call; return its results, the sum first."""
        function = getattr(torch.ops.tpkernels if self.spec.routed else tpkernels, self.call.op)
        options = {"group": group.group_name, "algorithm": algorithm, **self.options}
        results = function(*self.factors, **options)
        if isinstance(results, torch.Tensor):
            return [results]
        return [results[1], results[0]]

    def refill(self, seed: int) -> CheckedOperands:
        """Put other values where the operands are, as a replay reads them there."""
        call = replace(self.call, seed=seed)
        made = CheckedOperands(call, self.rank, self.world, self.device)
        for old, new in zip(self.factors, made.factors, strict=True):
            old.copy_(new)
        if "residual" in self.options:
            self.options["residual"].copy_(made.options["residual"])
        return made


def _replay(operands: CheckedOperands, run: Run, previous: list[torch.Tensor]) -> None:
    """Capture a call in a graph, and replay it with new values each time."""
    made: list[list[torch.Tensor]] = []
    replay = graph_of(lambda: made.append(run()), calls=1)
    for i in range(_REPLAYS):
        renewed = operands.refill(operands.call.seed + 1000 * (i + 1))
        replay()
        torch.cuda.synchronize()
        require(renewed, made[-1], previous)


def require(
    operands: CheckedOperands, results: list[torch.Tensor], previous: list[torch.Tensor]
) -> None:
    """Raise `Failed` if the results of a call are wrong; ``previous`` is that of `compared`."""
    if (failure := compared(operands, results, previous)) is not None:
        raise Failed(failure)


def compared(
    operands: CheckedOperands, results: list[torch.Tensor], previous: list[torch.Tensor]
) -> Failure | None:
    """Return what is wrong with the results of a call; None: nothing. ``previous`` holds the values
    that were expected of the last one. Rows are normalised after the sum was rounded, whose values
    are checked before."""
    expected = operands.expected
    if operands.spec.normed:
        expected = [*expected, rms_norm(results[0], operands.factors[-1], _EPS)]
    for got, want in zip(results, expected, strict=True):
        failure = _difference(got, want, previous, str(operands.call), operands.rank)
        if failure is not None:
            return failure
    previous[:] = [want.exact for want in operands.expected]
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
