"""Checks of the ops for the GPU suite, on exact integers: by all algorithms, over NCCL too, with
gradients, compiled, tuned, in CUDA graphs and on several streams."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import tpkernels
from benchmarks.gpu.stage import (
    Result,
    Setting,
    captured,
    checks,
    delayed,
    integers,
    nccl_worlds,
    over_ranks,
    stage,
    synchronize,
)
from tpkernels import cuda, groups
from tpkernels.algorithms import fused
from tpkernels.kernels import matmul_all_reduce as reduce
from tpkernels.planning.table import Table
from tpkernels.shards import shard_sizes

OPS = (
    *("all_gather", "reduce_scatter", "all_reduce", "all_reduce_"),
    *("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"),
)
FUSED_OPS = ("all_gather_matmul", "matmul_reduce_scatter", "one_shot", "two_shot")
# (M, N, K) of exact calls with many tiles and k-iterations for each program; one of odd sizes.
DEEP = [(4096, 3584, 8192), (1021, 1031, 2053)]
TIMEOUT = 20.0


def _rounded(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x @ w as it travels: in x's dtype."""
    return (x.double() @ w.double()).to(x.dtype)


class Calls:
    """The ops with one algorithm, on a group of their own. Every rank can generate the inputs of
    all ranks."""

    def __init__(self, device: str, algorithm: str) -> None:
        self.device, self.algorithm = device, algorithm
        self.group = dist.new_group()
        assert self.group is not None
        self.rank, self.world = self.group.rank(), self.group.size()
        if device == "cuda":
            torch.cuda.set_device(self.rank % torch.cuda.device_count())
        tpkernels.init(self.group, timeout=TIMEOUT)

    def set_chaos(self, seed: int, max_delay_us: int) -> None:
        """Adds random delays to every later publish and wait."""
        workspace = groups.get(self.group.group_name).workspace
        assert workspace is not None
        workspace.set_chaos(seed=seed, max_delay_us=max_delay_us)

    def _own(self, sizes: Sequence[int]) -> slice:
        """This rank's rows."""
        begin = sum(sizes[: self.rank])
        return slice(begin, begin + sizes[self.rank])

    def run(
        self, op: str, x: torch.Tensor, w: torch.Tensor | None, sizes: Sequence[int], **options: Any
    ) -> torch.Tensor:
        """One call; the all-gathers take this rank's rows of x, the others all rows. "one_shot" and
        "two_shot" are ways of `matmul_all_reduce`."""
        if "shot" in op:
            reduce.ONE_SHOT_BYTES = 0 if op == "two_shot" else 1 << 40
            op = "matmul_all_reduce"
        if "all_reduce" not in op:
            options["shard_sizes"] = sizes
        operands = (x,) if w is None else (x, w)
        function = getattr(tpkernels, op)
        result: torch.Tensor = function(*operands, self.group, algorithm=self.algorithm, **options)
        return result

    def check(self, op: str, seed: int, rows: int, n: int = 72, k: int = 40) -> bool:
        """Whether one call on integers is exact: x [rows, k], w [k, n]; in the matmul reductions
        also with a bias and a residual, if ``seed`` is odd."""
        sizes = tuple(shard_sizes(rows, self.world))
        dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
        xs = [integers(seed * 9 + r, self.device, dtype, rows, k) for r in range(self.world)]
        ws = [integers(seed * 9 + 5 + r, self.device, dtype, k, n) for r in range(self.world)]
        own, w = self._own(sizes), ws[self.rank] if "matmul" in op or "shot" in op else None
        if "all_gather" in op:
            got = self.run(op, xs[0][own].contiguous(), w, sizes)
            exact = xs[0].double() if w is None else xs[0].double() @ w.double()
        else:
            partials = [x if w is None else _rounded(x, v) for x, v in zip(xs, ws, strict=True)]
            exact = torch.stack([partial.double() for partial in partials]).sum(0)
            rows_out = own if "reduce_scatter" in op else slice(None)
            exact, options = exact[rows_out], {}
            if w is not None and seed % 2:
                bias = integers(seed + 1, self.device, dtype, n)
                residual = integers(seed + 2, self.device, dtype, rows, n)[rows_out].contiguous()
                options = {"bias": bias, "residual": residual}
                exact = exact + bias.double() + residual.double()
            x = xs[self.rank].clone() if op.endswith("_") else xs[self.rank]
            got = self.run(op, x, w, sizes, **options)
        synchronize(self.device)
        return torch.equal(got, exact.to(dtype))

    def replay(self, replays: int, rows: int = 256, n: int = 128, k: int = 64) -> int:
        """Captures an all-gather and a reduce-scatter and replays them, each time with new input;
        returns the number of wrong replays."""
        sizes = tuple(shard_sizes(rows, self.world))
        own = self._own(sizes)
        w = integers(1, self.device, torch.bfloat16, k, n)
        v = integers(2, self.device, torch.bfloat16, n, k)
        x = integers(3, self.device, torch.bfloat16, rows, k)[own].contiguous()

        def block() -> torch.Tensor:
            h = self.run("all_gather_matmul", x, w, sizes)
            return self.run("matmul_reduce_scatter", h.clamp(-1, 1), v, sizes)

        recorded, y = captured(block)
        wrong = 0
        for i in range(replays):
            everything = integers(100 + i, self.device, torch.bfloat16, rows, k)
            x.copy_(everything[own])
            recorded.replay()
            torch.cuda.synchronize()
            h = (everything.double() @ w.double()).clamp(-1, 1)
            exact = self.world * (h @ v.double())[own]
            wrong += not torch.equal(y.double(), exact.to(torch.bfloat16).double())
        return wrong


# Over NCCL.


def _path_job(device: str, algorithm: str, calls: int) -> list[tuple[str, bool]]:
    made = Calls(device, algorithm)
    return [(op, all(made.check(op, i, 60 + i) for i in range(calls))) for op in OPS]


@stage()
def path_check(setting: Setting) -> Iterator[Result]:
    """Every op by `auto`, `unfused` and `ring` over NCCL, on exact integers: three dtypes, even and
    uneven shards, with and without bias and residual."""
    worlds, why = nccl_worlds(setting)
    for world in worlds:
        for algorithm in ("auto", "unfused", "ring"):
            given = {"by": f" by {algorithm}", "value": "6 calls", "backend": "nccl"}
            yield from checks(setting, world, _path_job, algorithm, 6, **given)
    yield Result("numbers of ranks", why, ok=None)


def _grad_job(device: str) -> list[tuple[str, bool]]:
    """Whether the gradients of a column- and row-parallel pair are exact."""
    made = Calls(device, "auto")
    rank, world, rows = made.rank, made.world, 6 * made.world
    own = slice(6 * rank, 6 * rank + 6)
    # The same on all ranks, so that each can compute everything.
    xs = integers(1, device, torch.float32, rows, 12)
    ups = [integers(2 + r, device, torch.float32, 12, 5) for r in range(world)]
    downs = [integers(20 + r, device, torch.float32, 5, 12) for r in range(world)]
    dy = integers(40, device, torch.float32, rows, 12)
    exact = [each.double().requires_grad_() for each in (xs, *ups, *downs)]
    x64, up64, down64 = exact[0], exact[1 : world + 1], exact[world + 1 :]
    pairs = zip(up64, down64, strict=True)
    y64 = torch.stack([x64 @ up @ down for up, down in pairs]).sum(0)
    y64.backward(dy.double())

    x, up, down = (each.clone().requires_grad_() for each in (xs[own], ups[rank], downs[rank]))
    results = []
    h = tpkernels.all_gather_matmul(x, up, made.group)
    y = tpkernels.matmul_reduce_scatter(h, down, made.group)
    y.backward(dy[own])
    synchronize(device)
    wanted = (x64.grad[own], up64[rank].grad, down64[rank].grad)  # type: ignore[index]
    got = (x.grad, up.grad, down.grad)
    right = torch.equal(y.double(), y64[own]) and all(
        torch.equal(mine.double(), one)
        for mine, one in zip(got, wanted, strict=True)  # type: ignore[union-attr, arg-type]
    )
    results.append(("gradients of all_gather_matmul, matmul_reduce_scatter", right))
    up, down = (each.clone().requires_grad_() for each in (ups[rank], downs[rank]))
    y = tpkernels.matmul_all_reduce(xs @ up, down, made.group)
    y.backward(dy)
    synchronize(device)
    right = torch.equal(y.double(), y64) and all(
        torch.equal(mine.grad.double(), one.grad)  # type: ignore[union-attr, arg-type]
        for mine, one in ((up, up64[rank]), (down, down64[rank]))
    )
    return [*results, ("gradients of matmul_all_reduce", right)]


@stage()
def grad_check(setting: Setting) -> Iterator[Result]:
    """Gradients through the ops over NCCL, on exact integers."""
    for world in nccl_worlds(setting)[0]:
        yield from checks(setting, world, _grad_job, backend="nccl")


def _by_ops(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, name: str) -> torch.Tensor:
    h = tpkernels.all_gather_matmul(x, up, name)
    return tpkernels.matmul_reduce_scatter(h.relu(), down, name)


def _by_torch(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, name: str) -> torch.Tensor:
    h = functional.all_gather_tensor(x, 0, name) @ up
    y: torch.Tensor = functional.reduce_scatter_tensor(h.relu() @ down, "sum", 0, name)
    return y


def _compile_job(device: str) -> list[tuple[str, str, bool]]:
    """What was compiled, what the pass says, and whether the result is exact."""
    made = Calls(device, "auto")
    rank, world = made.rank, made.world
    rows = 6
    everyone = integers(1, device, torch.float32, rows * world, 12)
    x = everyone[rows * rank : rows * (rank + 1)].contiguous()
    up, down = integers(2 + rank, device, torch.float32, 12, 5), integers(9, device, x.dtype, 5, 12)
    name = made.group.group_name
    want = _by_torch(x, up, down, name)
    results = []
    for what, function in (("the ops", _by_ops), ("the pass over torch's calls", _by_torch)):
        options: dict[str, Any] = {}
        report = ""
        if function is _by_torch:
            fusion = tpkernels.compile.fuse_collectives(made.group)
            options = {"options": fusion.options}
        compiled = torch.compile(function, fullgraph=True, **options)
        for _ in range(2):
            got = compiled(x, up, down, name)
        if function is _by_torch:
            report = " ".join(str(fusion.report).split())[:200]
        synchronize(device)
        results.append((what, report, torch.equal(got, want)))
    return results


@stage()
def compile_check(setting: Setting) -> Iterator[Result]:
    """A pair of ops under torch.compile, and torch's own calls with the compiler pass."""
    for world in nccl_worlds(setting)[0]:
        ranks = over_ranks(setting, world, _compile_job, backend="nccl")
        for what, report, _ in ranks[0]:
            right = all(exact for rank in ranks for each, _, exact in rank if each == what)
            yield Result(f"{what}, {world} ranks", report, right)


def _autotune_job(device: str, rows: int, n: int, k: int) -> list[tuple[str, str, bool]]:
    """What `tpkernels.autotune` measured and chose, and whether the result is exact."""
    made = Calls(device, "auto")
    own = groups.get(made.group.group_name)
    found = []
    for op in OPS:
        seed = 1 + rows  # one dtype for all
        before = own.measured.tables.get(device, Table()).measurements
        with tpkernels.autotune(made.group):
            right = made.check(op, seed, rows, n, k)
        right = made.check(op, seed, rows, n, k) and right
        new = own.measured.tables.get(device, Table()).measurements[len(before) :]
        times = [f"{name} {ms:.4f} ms" for one in new for name, ms in one.ms.items()]
        known = made.world == 1 or op == "all_reduce_"  # as `all_reduce`
        found.append((op, ", ".join(times) or "not tuned", right and (bool(new) or known)))
    return found


@stage()
def autotune_check(setting: Setting) -> Iterator[Result]:
    """Every op within `tpkernels.autotune` and after it, on exact integers, and the times."""
    m, n, k = (24, 32, 16) if setting.small else (4096, 3584, 8192)
    for world in nccl_worlds(setting)[0]:
        ranks = over_ranks(setting, world, _autotune_job, m, n, k, backend="nccl")
        for at, (op, ms, _) in enumerate(ranks[0]):
            right = all(rank[at][2] for rank in ranks)
            yield Result(f"{op}, {world} ranks", ms, right)


# In memory that the ranks share.


def _queued_job(device: str, algorithm: str, calls: int, delay_us: int) -> list[tuple[str, bool]]:
    """Runs the ops on one rank, on exact integers and uneven shards; `copied` is `fused` with copy
    engines even for small shards. On a GPU also replays of a graph."""
    if algorithm == "copied":
        fused.COPY_ENGINE_BYTES = 0
    made = Calls(device, "fused" if algorithm == "copied" else algorithm)
    made.set_chaos(seed=dist.get_rank(), max_delay_us=delay_us)
    results = []
    for op in FUSED_OPS[:3]:
        results.append((op, all(made.check(op, i, 300 + i % 3) for i in range(calls))))
    if device == "cuda":
        index = torch.cuda.current_device()
        by = "streams" if cuda.image.kernels(index).streams_write(captured=True) else "kernels"
        what = f"graph replays, flags by {by}" if algorithm == "copied" else "graph replays"
        results.append((what, made.replay(10 * calls) == 0))
    return results


@stage(gpus=1)
def queued_check(setting: Setting) -> Iterator[Result]:
    """The ops by `direct`, by `pipelined`, and by `fused` with copy engines."""
    for algorithm in ("direct", "pipelined", "copied"):
        for world, delay_us in ((1, 0), (2, 0), (4, 0), (2, 200), (4, 200)):
            args, by = (algorithm, 5, delay_us), f" by {algorithm}{delayed(delay_us)}"
            yield from checks(setting, world, _queued_job, *args, by=by, value="5 calls")


def _fused_job(
    device: str, calls: int, delay_us: int, m: int, n: int, k: int
) -> list[tuple[str, bool]]:
    """Runs the fused ops on one rank, on exact integers and uneven shards, call after call."""
    made = Calls(device, "fused")
    made.set_chaos(seed=dist.get_rank(), max_delay_us=delay_us)
    exact = dict.fromkeys(FUSED_OPS, True)
    for i in range(calls):
        for op in FUSED_OPS:
            exact[op] = exact[op] and made.check(op, i, m + i % 3, n, k)
    return list(exact.items())


@stage()
def fused_check(setting: Setting) -> Iterator[Result]:
    """The fused kernels on ranks that may share a GPU: small calls with and without delays, then
    calls of many tiles and k-iterations."""
    jobs = [(world, 20, delay_us, 300, 72, 40) for world in (1, 2, 4) for delay_us in (0, 200)]
    jobs += [(world, 3, 0, *shape) for world in (2, 4, 8) for shape in DEEP]
    if setting.small:
        jobs = [(world, 1, delay_us, 40, 72, 40) for world in (1, 2) for delay_us in (0, 200)]
        jobs += [(2, 1, 0, 150, 70, 200)]
    for world, calls, delay_us, *shape in jobs:
        by, args = f" {'x'.join(map(str, shape))}{delayed(delay_us)}", (calls, delay_us, *shape)
        yield from checks(setting, world, _fused_job, *args, by=by, value=f"{calls} calls")


def _graph_job(device: str, replays: int) -> int:
    return Calls(device, "fused").replay(replays)


@stage(gpus=1)
def graph(setting: Setting) -> Iterator[Result]:
    """A captured CUDA graph of the fused all-gather and reduce-scatter, replayed with new input."""
    for world in (1, 2):
        for rank, wrong in enumerate(over_ranks(setting, world, _graph_job, 100)):
            yield Result(f"100 replays, rank {rank} of {world}", f"{wrong} wrong", wrong == 0)


def _streams_job(device: str, algorithm: str, rounds: int) -> list[tuple[str, bool]]:
    """Calls of two groups, all issued before the host waits: on one stream each, then both on new
    streams in turn. All ranks issue them in one order, but the GPUs may start them in any."""
    two = [Calls(device, algorithm) for _ in range(2)]
    world, rank = two[0].world, two[0].rank
    sizes = tuple(shard_sizes(40 * world, world))
    x = torch.full((40, 64), float(rank + 1), device=device)
    w = torch.ones(64, 48, device=device)
    want = torch.cat([torch.full((40, 48), 64.0 * (r + 1)) for r in range(world)])
    results = []
    for what, count in (
        ("two groups, a stream for each", 2),
        ("two groups, a new stream for each call", 0),
    ):
        made = [torch.cuda.Stream() for _ in range(count)] if device == "cuda" else []
        outs = []
        for i in range(rounds):
            for g, calls in enumerate(two):
                stream = contextlib.nullcontext()
                if device == "cuda":
                    chosen = made[g] if made else torch.cuda.Stream()
                    chosen.wait_stream(torch.cuda.current_stream())
                    stream = torch.cuda.stream(chosen)
                with stream:
                    op = "all_gather_matmul" if i % 2 else "one_shot"
                    outs.append((op, calls.run(op, x, w, sizes)))
        synchronize(device)
        total = torch.full((40, 48), 64.0 * sum(range(1, world + 1)))
        right = all(
            torch.equal(out.cpu(), want if op == "all_gather_matmul" else total) for op, out in outs
        )
        results.append((what, right))
    return results


@stage()
def streams_check(setting: Setting) -> Iterator[Result]:
    """Two groups with the same ranks on two streams, by each algorithm with kernels of ours, and by
    `auto`."""
    rounds = 2 if setting.small else 50
    for algorithm in ("auto", "direct", "pipelined", "fused"):
        if setting.rehearsal and algorithm == "fused":
            continue  # `fused_check` runs the interpreter
        for world in (2, 4):
            given = {"by": f" by {algorithm}", "value": f"{rounds} calls of each"}
            yield from checks(setting, world, _streams_job, algorithm, rounds, **given)
