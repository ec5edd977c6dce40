"""What the soak tests run in the ranks: sequences of random calls whose results are exact
integers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

import tpkernels
from tpkernels import groups
from tpkernels.symm.host import HostWorkspace

# Sums stay below 256, which bfloat16 still holds exactly: K <= 20 products of -1, 0 and 1 on each
# of at most 5 ranks, a bias and a residual of at most 8.
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST_K = 20
WORKSPACE_BYTES = 1 << 16  # the smallest: many calls take several chunks


@dataclass(frozen=True)
class Outcome:
    """What one rank saw."""

    epoch: int
    wrong: list[str]  #: calls with a wrong result, the first few
    failed: str  #: the error that ended the sequence early


@dataclass(frozen=True, kw_only=True)
class Task:
    """A sequence of calls, the same on all ranks."""

    seed: int
    calls: int
    max_delay_us: int = 0
    single_buffer: bool = False
    skip_waits: bool = False
    #: Which of the rank's own buffers to fill with NaN after each call: "next", or "last" (wrong).
    poison: str = ""
    slow_rank: int = -1  #: sleeps between calls
    slow_seconds: float = 0.0


def workspace_of(group: dist.ProcessGroup) -> HostWorkspace:
    workspace = groups.get(group.group_name).workspace
    assert workspace is not None
    return workspace


class Calls:
    """Random calls on one group. Every rank draws the same numbers, and so knows all inputs."""

    def __init__(self, group: dist.ProcessGroup, seed: int) -> None:
        self.group, self.rank, self.world = group, group.rank(), group.size()
        self.draw = random.Random(seed)
        self.own = random.Random(f"{seed} {self.rank}")  # for choices that ranks need not share
        self.numbers = torch.Generator().manual_seed(seed)
        self.kinds: list[Callable[[], str | None]] = [
            self.all_gather,
            self.reduce_scatter,
            self.all_reduce,
            self.all_gather_matmul,
            self.matmul_reduce_scatter,
            self.matmul_all_reduce,
        ]
        self.symmetric = {
            dtype: tpkernels.empty(20000, dtype=dtype, group=group) for dtype in DTYPES
        }

    def one(self) -> str | None:
        """Runs a call; what is wrong with its result."""
        self.dtype = self.draw.choice(DTYPES)
        return self.draw.choice(self.kinds)()

    def _integers(self, *shape: int, top: int = 1) -> torch.Tensor:
        return torch.randint(-top, top + 1, shape, generator=self.numbers).double()

    def _inputs(self, *shape: int, top: int = 1) -> list[torch.Tensor]:
        return [self._integers(*shape, top=top) for _ in range(self.world)]

    def _placed(self, x: torch.Tensor) -> torch.Tensor:
        """x in the call's dtype; on some ranks, in some calls, in symmetric memory."""
        ranks = self.draw.choice([0, 0, self.draw.randrange(1 << self.world)])
        x = x.to(self.dtype)
        if ranks >> self.rank & 1 and 0 < x.numel() <= 20000:
            return self.symmetric[self.dtype][: x.numel()].view(x.shape).copy_(x)
        return x

    def _algorithm(self, *names: str) -> str:
        return self.draw.choice([*names, "direct", "direct", "auto", "unfused"])

    def _sizes(self, most: int) -> list[int]:
        if self.draw.random() < 0.5:
            return [self.draw.randint(1, most)] * self.world
        return [self.draw.choice([0, self.draw.randint(1, most)]) for _ in range(self.world)]

    def _share(self, whole: torch.Tensor, sizes: list[int], dim: int = 0) -> torch.Tensor:
        return whole.split(sizes, dim)[self.rank]

    def _compare(self, what: str, got: torch.Tensor, exact: torch.Tensor) -> str | None:
        if got.shape == exact.shape and torch.equal(got.double(), exact):
            return None
        where = (got.double() != exact).nonzero()[:3].tolist() if got.shape == exact.shape else []
        return f"rank {self.rank}, call #{workspace_of(self.group).epoch}: {what} at {where}"

    def all_gather(self) -> str | None:
        sizes, width = self._sizes(40), self.draw.choice([1, 7, 33, 300])
        whole = self._integers(sum(sizes), width, top=100)
        x = self._placed(self._share(whole, sizes))
        algorithm = self._algorithm()
        got = tpkernels.all_gather(x, self.group, shard_sizes=sizes, algorithm=algorithm)
        return self._compare(f"all_gather {sizes} {width} {algorithm}", got, whole)

    def reduce_scatter(self) -> str | None:
        sizes, width = self._sizes(20), self.draw.choice([1, 7, 33, 300])
        inputs = self._inputs(sum(sizes), width, top=8)
        exact = self._share(torch.stack(inputs).sum(0), sizes)
        x = self._placed(inputs[self.rank])
        algorithm = self._algorithm()
        got = tpkernels.reduce_scatter(x, self.group, shard_sizes=sizes, algorithm=algorithm)
        return self._compare(f"reduce_scatter {sizes} {width} {algorithm}", got, exact)

    def all_reduce(self) -> str | None:
        count = self.draw.choice([1, 63, 1000, 5000, 20000])
        inputs = self._inputs(count, top=8)
        exact = torch.stack(inputs).sum(0)
        x, algorithm = self._placed(inputs[self.rank]), self._algorithm()
        if self.draw.random() < 0.5:
            got = tpkernels.all_reduce_(x, self.group, algorithm=algorithm)
        else:
            got = tpkernels.all_reduce(x, self.group, algorithm=algorithm)
        return self._compare(f"all_reduce {count} {algorithm}", got, exact)

    def all_gather_matmul(self) -> str | None:
        sizes, k = self._sizes(30), self.draw.randint(1, MOST_K)
        whole = self._integers(sum(sizes), k)
        columns = self.draw.choice([1, 5, 40])
        weights = [self._integers(k, n) for n in (columns, 3)]
        x, algorithm = self._placed(self._share(whole, sizes)), self._algorithm("pipelined")
        gathered, outs = tpkernels.all_gather_matmul(
            x,
            [w.to(self.dtype) for w in weights],
            self.group,
            return_gathered=True,
            shard_sizes=sizes,
            algorithm=algorithm,
        )
        what = f"all_gather_matmul {sizes} {k} {columns} {algorithm}"
        results = [(gathered, whole), *zip(outs, (whole @ w for w in weights), strict=True)]
        return next(filter(None, (self._compare(what, *pair) for pair in results)), None)

    def _factors(self, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """This rank's x and w, and the sum of all ranks' products."""
        k = self.draw.randint(1, MOST_K)
        xs, ws = self._inputs(rows, k), self._inputs(k, columns)
        exact = torch.stack([x @ w for x, w in zip(xs, ws, strict=True)]).sum(0)
        return xs[self.rank].to(self.dtype), ws[self.rank].to(self.dtype), exact

    def matmul_reduce_scatter(self) -> str | None:
        by_columns = self.draw.random() < 0.3
        sizes, other = self._sizes(30), self.draw.choice([1, 5, 40])
        shape = (other, sum(sizes)) if by_columns else (sum(sizes), other)
        if shape[1] == 0:
            shape, by_columns = (0, other), False
        x, w, exact = self._factors(*shape)
        bias, residual = self._integers(shape[1], top=8), self._integers(*shape, top=8)
        dim = int(by_columns)
        exact = self._share(exact + bias + residual, sizes, dim)
        algorithm = self._algorithm("pipelined")
        got = tpkernels.matmul_reduce_scatter(
            x,
            w,
            self.group,
            dim,
            bias=bias.to(self.dtype),
            residual=self._share(residual, sizes, dim).to(self.dtype),
            shard_sizes=sizes,
            algorithm=algorithm,
        )
        return self._compare(f"matmul_reduce_scatter {sizes} {dim} {algorithm}", got, exact)

    def matmul_all_reduce(self) -> str | None:
        rows, columns = self.draw.randint(1, 90), self.draw.choice([1, 5, 40])
        x, w, exact = self._factors(rows, columns)
        bias = self._integers(columns, top=8)
        algorithm = self._algorithm("pipelined")
        got = tpkernels.matmul_all_reduce(
            x, w, self.group, bias=bias.to(self.dtype), algorithm=algorithm
        )
        return self._compare(f"matmul_all_reduce {rows} {columns} {algorithm}", got, exact + bias)
