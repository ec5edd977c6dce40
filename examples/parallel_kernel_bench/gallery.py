"""Framework of the gallery: problems, inputs, verification and timing.

A problem is a function from `Setup` to `Case`, registered with `problem`. It creates the local
inputs and returns two functions: ``reference`` uses torch.distributed, ``ours`` uses tpkernels.
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

SMALL = 8  # divisor of all full sizes
_SECONDS = 3.0  # timing budget of a problem
Result = torch.Tensor | tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Case:
    """The two functions of a problem, with the local inputs.

    ``depth`` is the length of the longest sum that the functions may evaluate in different orders;
    0: the results are bitwise identical.
    """

    reference: Callable[[], Result]
    ours: Callable[[], Result]
    depth: int = 0


class Setup:
    """Ranks, and random inputs that are identical in every run. ``shared`` inputs are identical on
    all ranks."""

    def __init__(self, number: int, *, full: bool = False, dtype: torch.dtype = torch.float32):
        assert dist.group.WORLD is not None
        self.group = dist.group.WORLD
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.dtype, self._full = dtype, full
        seeds = (number, number + 1000 * (self.rank + 1))
        self._shared, self._own = (torch.Generator().manual_seed(seed) for seed in seeds)

    def size(self, full: int) -> int:
        """Return ``full``, or an eighth of it for the small problem."""
        return full if self._full else max(1, full // SMALL)

    def normal(self, *shape: int, shared: bool = False) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator(shared)).to(self.dtype)

    def integers(self, *shape: int, shared: bool = False, max_value: int = 4) -> torch.Tensor:
        """Return integers in [-max_value, max_value]. Their dot products are exact."""
        return self.ids(2 * max_value + 1, *shape, shared=shared).sub_(max_value).to(self.dtype)

    def ids(self, count: int, *shape: int, shared: bool = False) -> torch.Tensor:
        return torch.randint(count, shape, generator=self._generator(shared))

    def mesh(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Return the two groups of this rank in a mesh: W x 1 for W = 2, W/2 x 2 for W >= 4."""
        inner = 2 if self.world % 2 == 0 and self.world > 2 else 1
        return _mesh(self.world // inner, inner)

    def _generator(self, shared: bool) -> torch.Generator:
        return self._shared if shared else self._own


def _mesh(*shape: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    mesh = init_device_mesh("cpu", shape)
    return mesh.get_group(0), mesh.get_group(1)


@dataclass(frozen=True)
class Problem:
    """A problem, with its number and name in ParallelKernelBench."""

    number: int
    name: str
    description: str
    build: Callable[[Setup], Case]


PROBLEMS: dict[int, Problem] = {}


def problem(number: int, description: str) -> Callable[..., Callable[[Setup], Case]]:
    """Register a function that makes the `Case` of a problem. Its name is the problem name."""

    def register(build: Callable[[Setup], Case]) -> Callable[[Setup], Case]:
        PROBLEMS[number] = Problem(number, build.__name__, description, build)
        return build

    return register


@dataclass(frozen=True)
class ProblemResult:
    """Local results of a problem. ``error`` is relative to its bound; above 1 it is wrong."""

    number: int
    error: float
    samples: dict[str, Samples]


def examine(number: int, full: bool, repeat: int) -> ProblemResult:
    """Verify a problem and time both functions ``repeat`` times, interleaved. Collective."""
    build = PROBLEMS[number].build
    with torch.no_grad():
        case = build(Setup(number, full=full))
        with tpkernels.autotune(limit=1.0) if repeat else nullcontext():
            ours = case.ours()
        exact = build(Setup(number, full=full, dtype=torch.float64)) if case.depth else case
        error = compare(ours, case.reference(), exact.reference(), case.depth)
        variants = {"reference": Variant(case.reference), "ours": Variant(case.ours)}
        samples = measure(variants, repeat=repeat, budget=_SECONDS) if repeat else {}
    return ProblemResult(number, error, samples)


def compare(ours: Result, reference: Result, exact: Result, depth: int) -> float:
    """Return the largest error relative to its bound.

    The bound is the error of the reference plus sqrt(depth) units in the last place of the largest
    element. ``exact`` is the float64 result.
    """
    tensors = [(r,) if isinstance(r, torch.Tensor) else r for r in (ours, reference, exact)]
    if len({len(results) for results in tensors}) != 1:
        return math.inf
    return max(_error(*results, depth) for results in zip(*tensors, strict=True))


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
