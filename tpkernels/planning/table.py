"""Measured times of the algorithms, and the choices they justify. Pure.

A measurement records the problem as all ranks know it, and the other extent of the matmul (N of a
column-parallel weight, K of a row-parallel one). That extent may differ by rank, so it must not
affect the choice: all measurements of a problem count equally.

The choice is the algorithm with the smallest worst-case ratio to the fastest, among the algorithms
that are never slower than `unfused`. If the algorithm picked by the thresholds (choose.py) is as
fast, it stays: between equals, a single run would decide by chance. So `auto` is the fastest on a
problem measured once; if several measurements disagree it is a compromise that is never slower than
`unfused`.

Between two measured extents (rows, or elements of a collective alone), an algorithm is chosen that
is as fast as any at both ends: if times are affine in the extent, ``t_a <= c * t_b`` at both ends
holds in between. If there is none, the choice at the nearer end is taken, by the ratio of the
extents, where that is at most `_NEAR`. Below the first and above the last it is taken where the
ratio is at most `_ALIKE`. Everywhere else the table says nothing.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from tpkernels.op_spec import OPS, OpSpec

# Times within this ratio of the fastest count as equally fast. Medians of 40 interleaved
# repetitions of the same algorithm in two runs differ by 1 to 4 %. AMD EPYC Zen 3, 2 ranks,
# 2026-11-21: `pytest -m slow -s tests/cli/test_tune.py`.
AS_FAST = 1.02
# An algorithm beyond this ratio to `unfused` is slower than not fusing.
NOT_SLOWER = 1 / 0.97
# A choice applies to extents up to this ratio away, at most.
_NEAR = 2.0
# Extents up to this ratio apart need not be measured both.
_ALIKE = 1.5


Config: TypeAlias = tuple[tuple[str, int], ...]  # fields of kernels.configs.MatmulConfig


@dataclass(frozen=True)
class Series:
    """Problems that differ only in their extent.

    ``width`` is the last dim of the tensor that travels in a matmul op, 1 for a collective alone;
    ``dtype`` is that tensor's; ``options`` are the other options that affect times.
    """

    op: str
    device: str
    world: int
    width: int
    dtype: str
    options: tuple[str, ...]

    @property
    def spec(self) -> OpSpec:
        """Return what the op does."""
        return OPS[self.op]

    @property
    def captured(self) -> Series:
        """Return the series of the same calls in CUDA graphs, where launches cost the host
        nothing."""
        return replace(self, options=(*self.options, "captured"))


@dataclass(frozen=True)
class Measurement:
    """Milliseconds of each algorithm on one problem: of all ranks together, interleaved, as
    `Contest.times` says.

    ``extent`` counts the rows of a matmul op, or the elements of a collective alone, over all
    ranks; if they are split, they are split evenly. ``other`` is the extent of the matmul that is
    not part of the problem, over all ranks; 0 for a collective alone. ``date`` is an ISO date.
    """

    series: Series
    extent: int
    other: int
    ms: Mapping[str, float]
    date: str
    config: Config = ()  #: of the `fused` kernels when measured; (): what `configs.choose` takes
    tried: bool = False  #: in calls of ``auto`` (tuning/contest.py), not by `tpkernels tune`

    def ratio(self, algorithm: str, among: Collection[str]) -> float:
        """Return its time over the time of the fastest in ``among``."""
        return self.ms[algorithm] / min(self.ms[name] for name in among)


@dataclass(frozen=True)
class Table:
    """Measurements of one machine; empty if nothing has been tuned."""

    measurements: tuple[Measurement, ...] = ()
    _by_series: dict[Series, dict[int, list[Measurement]]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        for one in self.measurements:
            self._by_series.setdefault(one.series, {}).setdefault(one.extent, []).append(one)

    def at(self, series: Series, extent: int) -> list[Measurement]:
        """Return the measurements of exactly this problem."""
        return self._by_series.get(series, {}).get(extent, [])

    def near(self, series: Series, extent: int) -> bool:
        """Return whether this extent, or one that is nearly the same, was measured."""
        return any(are_alike(known, extent) for known in self._by_series.get(series, ()))

    def config(self, series: Series, extent: int) -> Config:
        """Return the block sizes for the `fused` kernels: those of the largest measured case of
        this problem. Between two extents, those of both ends if they agree."""
        extents = self._by_series.get(series, {})
        known = sorted(extents)
        if extent not in extents:
            above = bisect.bisect(known, extent)
            if above in (0, len(known)):
                return ()
            low, high = (self.config(series, known[at]) for at in (above - 1, above))
            return low if low == high else ()
        return max(extents[extent], key=lambda one: one.other).config

    def extents(self, series: Series) -> list[int]:
        """Return the measured extents."""
        return sorted(self._by_series.get(series, {}))

    def choice(
        self, series: Series, extent: int, possible: Collection[str], default: str
    ) -> tuple[str, str] | None:
        """Return the algorithm to use, out of ``possible``, and the reason; ``default`` is kept if
        it is as fast. None: the table does not decide."""
        extents = self._by_series.get(series)
        if not extents:
            return None
        if extent in extents:
            best = _minimax(extents[extent], possible, default)
            return best and (best[0], _reason(best[0], extents[extent], possible))
        known = sorted(extents)
        above = bisect.bisect(known, extent)
        ends = known[max(above - 1, 0) : above + 1]
        if len(ends) == 2:
            best = _minimax([one for end in ends for one in extents[end]], possible, default)
            if best is not None and best[1] <= AS_FAST:
                reason = f"tuned: as fast as any at {ends[0]} and at {ends[1]} {_unit(series)}"
                return best[0], reason
        nearest = min(ends, key=lambda end: _ratio(end, extent))
        if _ratio(nearest, extent) > (_NEAR if len(ends) == 2 else _ALIKE):
            return None
        best = _minimax(extents[nearest], possible, default)
        return best and (best[0], f"tuned: as at {nearest} {_unit(series)}")

    def extended(self, new: Iterable[Measurement]) -> Table:
        """Return the table with ``new`` replacing any measurements of the same cases."""
        added = {(one.series, one.extent, one.other): one for one in new}
        kept = (
            one for one in self.measurements if (one.series, one.extent, one.other) not in added
        )
        return Table((*kept, *added.values()))


def are_alike(left: int, right: int) -> bool:
    """Return whether two extents are so close that they need not be measured both."""
    return _ratio(left, right) <= _ALIKE


def _ratio(left: int, right: int) -> float:
    """Return by how much two extents differ; they may be 0."""
    return max(left, right, 1) / max(min(left, right), 1)


def _common(measurements: Sequence[Measurement], possible: Collection[str]) -> list[str]:
    """Return the algorithms that all measurements include, in the order of ``possible``."""
    return [name for name in possible if all(name in one.ms for one in measurements)]


def _minimax(
    measurements: Sequence[Measurement], possible: Collection[str], default: str
) -> tuple[str, float] | None:
    """Return the algorithm with the smallest worst-case ratio to the fastest, and that ratio, among
    those never slower than `unfused`."""
    names = _common(measurements, possible)
    if len(names) < 2:  # nothing to compare
        return None
    if "unfused" in names:
        names = [name for name in names if _keeps_up(name, measurements)]
    worst = {name: max(one.ratio(name, names) for one in measurements) for name in names}
    if default in worst and worst[default] <= AS_FAST:
        return default, worst[default]
    best = min(names, key=worst.__getitem__)
    return best, worst[best]


def _keeps_up(algorithm: str, measurements: Sequence[Measurement]) -> bool:
    return all(one.ms[algorithm] <= NOT_SLOWER * one.ms["unfused"] for one in measurements)


def _reason(algorithm: str, measurements: Sequence[Measurement], possible: Collection[str]) -> str:
    last = max(one.date for one in measurements)
    how = "tried" if all(one.tried for one in measurements) else "tuned"
    if len(measurements) > 1:
        names = _common(measurements, possible)
        worst = max(one.ratio(algorithm, names) for one in measurements)
        return f"{how}: within {worst:.2f}x of the fastest in {len(measurements)} cases, {last}"
    (one,) = measurements
    others = [name for name in _common(measurements, possible) if name != algorithm]
    other = "unfused" if "unfused" in others else min(others, key=one.ms.__getitem__)
    return f"{how}: {one.ms[algorithm]:.3g} ms, {other} {one.ms[other]:.3g} ms, {last}"


def _unit(series: Series) -> str:
    return "rows" if series.spec.has_matmul else "elements"
