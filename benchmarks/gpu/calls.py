"""Calls of the ops for the GPU suite, on the ranks of a group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import tpkernels
from benchmarks.gpu.stage import integers, random, synchronize, times_ms
from tpkernels import groups
from tpkernels.kernels import matmul_all_reduce as reduce
from tpkernels.kernels.matmul import matmul
from tpkernels.shards import shard_sizes

TIMEOUT = 20.0


def _rounded(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x @ w as it travels: in x's dtype."""
    return (x.double() @ w.double()).to(x.dtype)


class Calls:
    """The ops with one algorithm, on a group of their own. Every rank can generate the inputs of
    all ranks.

    Args:
        device: "cuda" or "cpu".
        algorithm: of the ops.
    """

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

    def _own(self, sizes: tuple[int, ...]) -> slice:
        """This rank's rows."""
        begin = sum(sizes[: self.rank])
        return slice(begin, begin + sizes[self.rank])

    def run(
        self,
        op: str,
        x: torch.Tensor,
        w: torch.Tensor | None,
        sizes: tuple[int, ...],
        **options: Any,
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

    def compare_with_plain(self, m: int, n: int, k: int) -> list[tuple[str, float, float]]:
        """(op, ms, ms of the plain kernel) at world size 1, bf16."""
        x, w = random(self.device, m, k), random(self.device, n, k).t()
        results = []
        for op in ("all_gather_matmul", "matmul_reduce_scatter", "one_shot"):
            jobs = [lambda op=op: self.run(op, x, w, (m,)), lambda: matmul(x, w)]
            results.append((op, *times_ms(self.device, jobs)))
        return results

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

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles
            block()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            y = block()
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
