"""What a model calls by default, for the GPU suite: the ops over NCCL, with gradients, compiled,
and timed against the two calls that a user of torch would write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import tpkernels
from benchmarks.gpu.stage import (
    Result,
    Setting,
    checks,
    compared,
    integers,
    median_ms,
    nccl_worlds,
    over_ranks,
    random,
    synchronize,
)
from tpkernels import groups
from tpkernels.planning.table import Table

OPS = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_reduce_",
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
)
ALGORITHMS = ("auto", "unfused", "ring")


def _path_job(device: str, algorithm: str, calls: int) -> list[tuple[str, bool]]:
    from benchmarks.gpu.calls import Calls

    made = Calls(device, algorithm)
    return [(op, all(made.check(op, i, 60 + i) for i in range(calls))) for op in OPS]


def path_check(setting: Setting) -> Iterator[Result]:
    """Every op by `auto`, `unfused` and `ring` over NCCL, on exact integers: three dtypes, even and
    uneven shards, with and without bias and residual."""
    worlds, why = nccl_worlds(setting)
    for world in worlds:
        for algorithm in ALGORITHMS:
            given = {"by": f" by {algorithm}", "value": "6 calls", "backend": "nccl"}
            yield from checks("path_check", setting, world, _path_job, algorithm, 6, **given)
    yield Result("path_check", "numbers of ranks", why, ok=None)


def _grad_job(device: str) -> list[tuple[str, bool]]:
    """Whether the gradients of a column- and row-parallel pair are exact."""
    from benchmarks.gpu.calls import Calls

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


def grad_check(setting: Setting) -> Iterator[Result]:
    """Gradients through the ops over NCCL, on exact integers."""
    for world in nccl_worlds(setting)[0]:
        yield from checks("grad_check", setting, world, _grad_job, backend="nccl")


def _by_ops(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, name: str) -> torch.Tensor:
    h = tpkernels.all_gather_matmul(x, up, name)
    return tpkernels.matmul_reduce_scatter(h.relu(), down, name)


def _by_torch(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, name: str) -> torch.Tensor:
    h = functional.all_gather_tensor(x, 0, name) @ up
    y: torch.Tensor = functional.reduce_scatter_tensor(h.relu() @ down, "sum", 0, name)
    return y


def _compile_job(device: str) -> list[tuple[str, str, bool]]:
    """What was compiled, what the pass says, and whether the result is exact."""
    from benchmarks.gpu.calls import Calls

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


def compile_check(setting: Setting) -> Iterator[Result]:
    """A pair of ops under torch.compile, and torch's own calls with the compiler pass."""
    for world in nccl_worlds(setting)[0]:
        ranks = over_ranks(setting, world, _compile_job, backend="nccl")
        for what, report, _ in ranks[0]:
            right = all(exact for rank in ranks for each, _, exact in rank if each == what)
            yield Result("compile_check", f"{what}, {world} ranks", report, right)


def _speed_job(device: str, m: int, n: int, k: int) -> list[tuple[str, float, float]]:
    """(op, our ms, torch's ms) in bf16: all-gather of x [m / world, k] and a product with n / world
    columns; a product of k / world columns with n, then reduce-scatter or all-reduce."""
    from benchmarks.gpu.calls import Calls

    made = Calls(device, "auto")
    world, group = made.world, made.group
    shard, whole, w = (random(device, *s) for s in ((m // world, k), (m, k), (k, n // world)))
    part, v = random(device, m, k // world), random(device, k // world, n)
    y, y_own = part @ v, torch.empty(m // world, n, dtype=torch.bfloat16, device=device)

    def gather_and_multiply() -> torch.Tensor:
        dist.all_gather_into_tensor(whole, shard, group)
        return whole @ w

    def multiply_and_scatter() -> None:
        torch.mm(part, v, out=y)
        dist.reduce_scatter_tensor(y_own, y, group=group)

    def multiply_and_reduce() -> None:
        torch.mm(part, v, out=y)
        dist.all_reduce(y, group=group)

    pairs = {
        "all_gather_matmul": (
            lambda: tpkernels.all_gather_matmul(shard, w, group), gather_and_multiply,
        ),
        "matmul_reduce_scatter": (
            lambda: tpkernels.matmul_reduce_scatter(part, v, group), multiply_and_scatter,
        ),
        "matmul_all_reduce": (
            lambda: tpkernels.matmul_all_reduce(part, v, group), multiply_and_reduce,
        ),
    }  # fmt: skip
    return [(op, *(median_ms(group, device, job) for job in pair)) for op, pair in pairs.items()]


def path_speed(setting: Setting) -> Iterator[Result]:
    """`auto` compared with the two calls of torch, which it must never lose to."""
    shapes = [(1, 4096, 4096), (64, 8192, 8192), (2048, 8192, 8192), (8192, 8192, 28672)]
    for world in nccl_worlds(setting)[0]:
        for m, n, k in [(8, 16, 16)] if setting.small else shapes:
            rows = max(m, world)
            for op, ours, theirs in over_ranks(
                setting, world, _speed_job, rows, n, k, backend="nccl"
            )[0]:
                what, value = f"{op} {rows}x{n}x{k}, {world} ranks", compared(ours, "torch", theirs)
                yield Result("path_speed", what, value, ok=None)


def _autotune_job(device: str, rows: int, n: int, k: int) -> list[tuple[str, str, bool]]:
    """What `tpkernels.autotune` measured and chose, and whether the result is exact."""
    from benchmarks.gpu.calls import Calls

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


def autotune_check(setting: Setting) -> Iterator[Result]:
    """Every op within `tpkernels.autotune` and after it, on exact integers, and the times."""
    m, n, k = (24, 32, 16) if setting.small else (4096, 3584, 8192)
    for world in nccl_worlds(setting)[0]:
        ranks = over_ranks(setting, world, _autotune_job, m, n, k, backend="nccl")
        for at, (op, ms, _) in enumerate(ranks[0]):
            right = all(rank[at][2] for rank in ranks)
            yield Result("autotune_check", f"{op}, {world} ranks", ms, right)
