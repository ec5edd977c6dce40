"""What the gallery is made of: problems, their inputs, and how a result is verified and timed.

A problem is a function from `Setup` to `Case`, registered by `problem`. It makes this rank's inputs
and returns two functions of them: ``reference`` uses torch.distributed, ``ours`` tpkernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tpkernels
from tpkernels.timing import Samples, Variant, measure

SMALL = 8  # divides the sizes of the full problems
_SECONDS = 3.0  # spent on timing a problem
Result = torch.Tensor | tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A problem on this rank. ``depth`` is the length of the longest sum whose terms the two
    functions may add in another order; 0: their results are equal to the bit."""

    reference: Callable[[], Result]
    ours: Callable[[], Result]
    depth: int = 0


class Setup:
    """The ranks, and random inputs that are the same in each run. ``shared`` ones are the same on
    all ranks."""

    def __init__(self, number: int, *, full: bool = False, dtype: torch.dtype = torch.float32):
        assert dist.group.WORLD is not None
        self.group = dist.group.WORLD
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.dtype, self._full = dtype, full
        seeds = (number, number + 1000 * (self.rank + 1))
        self._shared, self._own = (torch.Generator().manual_seed(seed) for seed in seeds)

    def size(self, full: int) -> int:
        """Return a size of the full problem, or an eighth of it for a small one."""
        return full if self._full else max(1, full // SMALL)

    def normal(self, *shape: int, shared: bool = False) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator(shared)).to(self.dtype)

    def integers(self, *shape: int, shared: bool = False, most: int = 4) -> torch.Tensor:
        """Return integers of at most ``most``, whose sums of products are exact."""
        return self.ids(2 * most + 1, *shape, shared=shared).sub_(most).to(self.dtype)

    def ids(self, count: int, *shape: int, shared: bool = False) -> torch.Tensor:
        return torch.randint(count, shape, generator=self._generator(shared))

    def mesh(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Return this rank's groups along two dims: W x 1 ranks, or W/2 x 2 of four or more."""
        inner = 2 if self.world % 2 == 0 and self.world > 2 else 1
        return _mesh(self.world // inner, inner)

    def _generator(self, shared: bool) -> torch.Generator:
        return self._shared if shared else self._own


def _mesh(*shape: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    mesh = init_device_mesh("cpu", shape)
    return mesh.get_group(0), mesh.get_group(1)


@dataclass(frozen=True)
class Problem:
    """A problem of ParallelKernelBench, by its number and name there."""

    number: int
    name: str
    what: str
    build: Callable[[Setup], Case]


PROBLEMS: dict[int, Problem] = {}


def problem(number: int, what: str) -> Callable[..., Callable[[Setup], Case]]:
    """Register the function that makes the problem's case, and has its name."""

    def register(build: Callable[[Setup], Case]) -> Callable[[Setup], Case]:
        PROBLEMS[number] = Problem(number, build.__name__, what, build)
        return build

    return register


@dataclass(frozen=True)
class Examined:
    """A problem on this rank. ``error`` is a share of what is allowed: above 1 it is wrong."""

    number: int
    error: float
    samples: dict[str, Samples]


def examine(number: int, full: bool, repeat: int) -> Examined:
    """Verify a problem, and time both its functions ``repeat`` times, interleaved. Collective."""
    build = PROBLEMS[number].build
    with torch.no_grad():
        case = build(Setup(number, full=full))
        with tpkernels.autotune(limit=1.0) if repeat else nullcontext():
            ours = case.ours()
        exact = build(Setup(number, full=full, dtype=torch.float64)) if case.depth else case
        error = compare(ours, case.reference(), exact.reference(), case.depth)
        variants = {"reference": Variant(case.reference), "ours": Variant(case.ours)}
        samples = measure(variants, repeat=repeat, budget=_SECONDS) if repeat else {}
    return Examined(number, error, samples)


def compare(ours: Result, reference: Result, exact: Result, depth: int) -> float:
    """Return the largest error as a share of what is allowed: the reference's own error, and
    sqrt(depth) units in the last place of the largest element. ``exact`` is in float64."""
    tensors = [(r,) if isinstance(r, torch.Tensor) else r for r in (ours, reference, exact)]
    if len({len(each) for each in tensors}) != 1:
        return math.inf
    return max(_error(*each, depth) for each in zip(*tensors, strict=True))


def _error(ours: torch.Tensor, reference: torch.Tensor, exact: torch.Tensor, depth: int) -> float:
    if ours.shape != reference.shape or ours.dtype != reference.dtype:
        return math.inf
    if torch.equal(ours, reference):
        return 0.0
    if not depth or not ours.is_floating_point():
        return math.inf
    unit = torch.finfo(ours.dtype).eps * exact.abs().max()
    allowed = (reference - exact).abs().max() + math.sqrt(depth) * unit
    error = float((ours - exact).abs().max() / allowed)
    return math.inf if math.isnan(error) else error
