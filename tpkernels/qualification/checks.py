"""What the ranks of a stage run: calls of one way. Each rank computes the expected results by
itself, compares, and reports the first wrong call.

Small integers have exact sums and products, whatever the order, where bfloat16 holds each: operands
of a product are the sparser the more they add up. Random data may differ from float64 by the
contract's bound: a rounding of each partial to its dtype on the wire and of the sum, and those of
float32 within the products. All ranks can make the inputs of all, where these are needed: a host
would take seconds for those of a large call.
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
from tpkernels import cuda, dtypes, groups
from tpkernels.algorithms import fused
from tpkernels.errors import PeerLostError, TpkernelsError, WorkspaceMemoryError
from tpkernels.launch.session import rank_device, synchronizer
from tpkernels.op_spec import OPS
from tpkernels.planning.trust import COPY_ENGINES, NORMED_SUMS, SHARDS, SUMS, Failure, Trust
from tpkernels.shards import shard_sizes
from tpkernels.text import of_error, short
from tpkernels.tuning.tuner import graph_of

Run = Callable[[], list[torch.Tensor]]
TIMEOUT_S = 10.0  # of a wait
_DTYPES = (torch.bfloat16, torch.float32, torch.float16)
_FLOAT32_EPS = torch.finfo(torch.float32).eps
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
class Call:
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


def calls_of(way: str, device: str, repeats: int) -> Iterator[Call]:
    """Return the calls by which a way is checked: on integers, then random data, without delays
    and with them, then replays of graphs."""
    shapes, kinds = shapes_on(device), _DTYPES[:2] if device == "cpu" else _DTYPES
    if way.startswith("multimem/"):
        kinds = kinds[:2]  # torch has no kernel that sums float16
    seed = itertools.count(1)
    for _ in range(repeats):
        for delayed, exact in ((False, True), (True, True), (False, False)):
            for shape, dtype, op in itertools.product(shapes, kinds, ops_of(way)):
                yield Call(op, shape, dtype, exact, delayed, next(seed))
    for op in ops_of(way) if device == "cuda" else ():
        yield Call(op, shapes[1], torch.bfloat16, True, False, next(seed), replayed=True)


def check_way(way: str, device: str, repeats: int = 1) -> dict[str, Any]:
    """Check a way on this rank; return how many calls were right, and the first `Failure`, or
    None."""
    where, checks = rank_device(device), 0
    call: Call | str = "the set-up"
    try:
        with _one_way(way, where) as group:
            previous: list[torch.Tensor] = []
            for call in calls_of(way, device, repeats):
                workspace = groups.get(group.group_name).workspace
                if workspace is not None:
                    delay = DELAY_US if call.delayed else 0
                    workspace.set_chaos(seed=group.rank(), max_delay_us=delay)
                operands = Operands(call, group.rank(), group.size(), where)
                run = functools.partial(operands.run, way.partition("/")[0], group)
                if call.replayed:
                    failure = _replay(operands, run, previous)
                else:
                    results = run()
                    if (wait := synchronizer(device)) is not None:
                        wait()
                    tpkernels.check(group)  # a failed wait says more than the NaN that it leaves
                    failure = compared(operands, results, previous)
                if failure is not None:
                    return {"checks": checks, "failure": failure}
                checks += 1
            tpkernels.check(group)
            # Nobody leaves before all have looked.
            groups.get(group.group_name).exchange_in_turn("the end", checks, "cpu")
    except Exception as error:  # whatever it is, it disqualifies the way
        return {"checks": checks, "failure": failure_of(error, str(call), dist.get_rank())}
    return {"checks": checks, "failure": None}


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


class Operands:
    """The inputs of all ranks, and what is expected of this one. ``factors``: what the op is called
    with."""

    def __init__(self, call: Call, rank: int, world: int, device: torch.device) -> None:
        (m, n, k), spec, generator = call.shape, OPS[call.op], torch.Generator(device)
        generator.manual_seed(call.seed)
        # A factor is -1 or 1 with probability 2 / (2 * most + 1), else 0.
        added = max(world, TOP_K) * k
        most = math.ceil((2 * math.sqrt(added) / _LARGEST_DEVIATION - 1) / 2)
        most = max(1, most) if spec.has_matmul else 1

        def make(*shape: int) -> torch.Tensor:
            if not call.exact:
                return torch.randn(shape, generator=generator, device=device).to(call.dtype)
            options: dict[str, Any] = {"generator": generator, "device": device}
            drawn = torch.randint(-most, most + 1, shape, dtype=torch.int16, **options)
            return (drawn * (drawn.abs() <= 1)).to(call.dtype)

        self.call, self.spec, self.options = call, spec, dict[str, Any]()
        self.rank, self.world, self.device = rank, world, device
        sizes = tuple(shard_sizes(m, world))
        own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        if spec.exchanges:  # rows of x to all ranks, columns from all: sizes of a rank are alike
            m, n = (world * math.ceil(size / world) for size in (m, n))
            x = make(world, m, n)
            self.factors = [x[rank].contiguous()]
            whole = torch.cat([part[rank * m // world : (rank + 1) * m // world] for part in x], 1)
            self.wanted, self.bound = [whole.double()], [torch.zeros(())]
            self.options = {"gather_dim": 1, "scatter_dim": 0}
            return
        if spec.routed:
            self._route(make, generator, rank, sizes, own)
            return
        width = k if spec.has_matmul else n
        if spec.gathers:
            x, w = make(m, width), make(k, n) if spec.has_matmul else None
            self.factors = [x[own].contiguous(), *([] if w is None else [w])]
            exact, magnitude = _product(x, w, call.exact)
            partials = torch.zeros_like(exact)
            self.options["shard_sizes"] = sizes
        else:
            exact, magnitude, partials = (
                torch.zeros(m, n, dtype=torch.float64, device=device) for _ in range(3)
            )
            for source in range(world):
                x, w = make(m, width), make(k, n) if spec.has_matmul else None
                if source == rank:
                    self.factors = [part for part in (x, w) if part is not None]
                partial, size = _product(x, w, call.exact)
                exact += partial
                magnitude += size
                partials += _rounding(partial, call.dtype)
            if spec.has_matmul or spec.normed:
                residual = make(m, n)
                exact = exact + residual.double()
                partials += _rounding(residual.double(), call.dtype)
                self.options["residual"] = residual
        if spec.scatters:
            exact, magnitude, partials = exact[own], magnitude[own], partials[own]
            self.options["shard_sizes"] = sizes
            if "residual" in self.options:
                self.options["residual"] = self.options["residual"][own].contiguous()
        bound = partials + _rounding(exact, call.dtype) + math.sqrt(k) * _FLOAT32_EPS * magnitude
        self.wanted, self.bound = [exact], [torch.zeros(()) if call.exact else bound]
        if spec.normed:
            self.factors.append(make(n))
            self.options["eps"] = _EPS

    def _route(self, make: Any, generator: Any, rank: int, sizes: Any, own: slice) -> None:
        """Make rows of tokens or, of a combine, of routes; as many as there may be, or of random
        data as there are. The last expert gets none."""
        (m, n, _), held = self.call.shape, shard_sizes(2 * len(sizes) + 1, len(sizes))
        each = 1 if self.spec.combines else TOP_K  # routes with the same row
        of_routes = make(m * TOP_K // each, n).repeat_interleave(each, 0)
        shape, device = (m, TOP_K), of_routes.device
        routes = torch.randint(sum(held) - 1, shape, generator=generator, device=device)
        counts = routes.flatten().bincount(minlength=sum(held)).split(held)
        order = routes.flatten().argsort(stable=True).split([int(part.sum()) for part in counts])
        rows = of_routes[order[rank]]
        self.options = {"shard_sizes": sizes, "num_experts": sum(held)}
        if self.call.exact:
            self.options["max_rows"] = m * TOP_K
            rows = torch.cat([rows, rows.new_zeros(m * TOP_K - len(rows), n)])
        zero = torch.zeros(())
        if self.spec.dispatches:
            self.factors = [of_routes[::TOP_K][own].contiguous(), routes]
            self.wanted, self.bound = [counts[rank].double(), rows.double()], [zero, zero]
            return
        weights = make(*shape).float()
        self.factors = [rows, weights[own], routes]
        terms = (weights[..., None].double() * of_routes.double().view(*shape, n))[own]
        exact, magnitude = terms.sum(1), terms.abs().sum(1)
        bound = _rounding(exact, self.call.dtype) + TOP_K * _FLOAT32_EPS * magnitude
        self.wanted, self.bound = [exact], [zero if self.call.exact else bound]

    def run(self, algorithm: str, group: dist.ProcessGroup) -> list[torch.Tensor]:
        """Make the call; return its results, the sum first."""
        function = getattr(torch.ops.tpkernels if self.spec.routed else tpkernels, self.call.op)
        options = {"group": group.group_name, "algorithm": algorithm, **self.options}
        results = function(*self.factors, **options)
        if isinstance(results, torch.Tensor):
            return [results]
        return [results[1], results[0]]

    def expected(self, results: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return what each result is to be, and how far it may be from it. Rows are normalised
        after the sum was rounded, whose bits are checked before."""
        pairs = list(zip(self.wanted, self.bound, strict=True))
        if self.spec.normed:
            total, weight = results[0].double(), self.factors[-1].double()
            normed = torch.nn.functional.rms_norm(total, weight.shape, weight, _EPS)
            pairs.append((normed, 2 * torch.finfo(self.call.dtype).eps * normed.abs() + 1e-6))
        return pairs

    def refill(self, seed: int) -> Operands:
        """Put other values where the operands are, as a replay reads them there."""
        call = replace(self.call, seed=seed)
        made = Operands(call, self.rank, self.world, self.device)
        for old, new in zip(self.factors, made.factors, strict=True):
            old.copy_(new)
        if "residual" in self.options:
            self.options["residual"].copy_(made.options["residual"])
        return made


def _rounding(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return how far from ``values`` a rounding to a dtype may be, twice over: subnormal numbers
    are as far apart as the smallest normal ones."""
    found = torch.finfo(dtype)
    return found.eps * values.abs().clamp_min(found.tiny)


def _product(
    x: torch.Tensor, w: torch.Tensor | None, integers: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x @ w in float64, as if nothing were rounded, and |x| @ |w|. Float32 has all sums of
    products of these integers, and some GPUs take 60 times as long for float64."""
    if w is None:
        return x.double(), torch.zeros_like(x, dtype=torch.float64)
    magnitude = (x.float().abs() @ w.float().abs()).double()
    exact = (x.float() @ w.float()).double() if integers else x.double() @ w.double()
    return exact, magnitude


def _replay(operands: Operands, run: Run, previous: list[torch.Tensor]) -> Failure | None:
    """Capture a call in a graph, and replay it with new values each time."""
    made: list[list[torch.Tensor]] = []
    replay = graph_of(lambda: made.append(run()), calls=1)
    for i in range(_REPLAYS):
        renewed = operands.refill(operands.call.seed + 1000 * (i + 1))
        replay()
        torch.cuda.synchronize()
        failure = compared(renewed, made[-1], previous)
        if failure is not None:
            return failure
    return None


def compared(
    operands: Operands, results: list[torch.Tensor], previous: list[torch.Tensor]
) -> Failure | None:
    """Return what is wrong with the results of a call; None: nothing. ``previous`` holds those that
    were expected of the last one."""
    where = str(operands.call), operands.rank
    for got, (want, bound) in zip(results, operands.expected(results), strict=True):
        failure = difference(got, want, bound, previous, *where)
        if failure is not None:
            return failure
    previous[:] = operands.wanted
    return None


def difference(
    got: torch.Tensor,
    want: torch.Tensor,
    bound: torch.Tensor,
    previous: list[torch.Tensor],
    call: str,
    rank: int,
) -> Failure | None:
    """Return what is wrong with a result; None: nothing. NaN always is."""
    distance = (got.double() - want).abs()
    wrong = ~(distance <= bound.to(distance.device))
    if not wrong.any():
        return None
    at = wrong.flatten().nonzero().flatten()
    values, wanted = got.flatten()[at].double().cpu(), want.flatten()[at].cpu()
    looks = ""
    if values.isnan().all():
        looks = "NaN"
    elif (values == 0).all():
        looks = "zero"
    elif previous and previous[0].shape == want.shape:
        stale = previous[0].flatten()[at].cpu()
        looks = "the previous call's" if torch.equal(stale, values) else ""
    triples = zip(at.tolist(), values.tolist(), wanted.tolist(), strict=True)
    first = tuple((i, f"{a:.6g}", f"{b:.6g}") for i, a, b in itertools.islice(triples, _FIRST))
    counts = want.numel(), len(at)
    return Failure("wrong", call, rank, None, "", *counts, first, looks)
