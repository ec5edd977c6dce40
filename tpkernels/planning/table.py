"""Measured times of the algorithms, and what follows from them for a problem. Pure.

Which of the times apply. A measurement has the problem as all ranks know it, and beyond that the
other extent of the matmul (N of a column-parallel weight, K of a row-parallel one), which may
differ by rank and so can decide nothing. All measurements of one problem count alike: the choice is
the algorithm whose worst ratio to the fastest, over all of them, is the smallest, among those that
are nowhere slower than `unfused`. Where that of the thresholds (plan.py) is as fast, it stays:
between equals a single run decides by chance. So `auto` is the best on each problem measured once;
with several measurements that disagree it is a compromise, and not below `unfused` on any.

Between two extents (rows, or elements of a collective alone) that were measured, the same is asked
of the measurements at both ends, and taken only if the algorithm is as fast as any at both. Where
times are affine in the extent, ``t_a <= c * t_b`` at both ends holds between them too. Outside of
what was measured nothing follows.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

# Of the time of the fastest: what is within it is as fast. Medians of 40 repetitions by turns, of
# the same algorithms in two runs, differ by 1 to 4 %. AMD EPYC Zen 3, 2 ranks, 2026-11-21:
# `pytest -m slow -s tests/cli/test_tune.py`.
AS_FAST = 1.02
# Of the time of `unfused`: more is slower than not to fuse.
NOT_SLOWER = 1 / 0.97


Config: TypeAlias = tuple[tuple[str, int], ...]  # fields of kernels.configs.MatmulConfig


@dataclass(frozen=True)
class Series:
    """Problems that differ in their extent only.

    ``width`` is the last dim of what travels in a matmul op, 1 for a collective alone; ``dtype`` is
    what travels; ``options`` is the rest that decides about times.
    """

    op: str
    device: str
    world: int
    width: int
    dtype: str
    options: tuple[str, ...]


@dataclass(frozen=True)
class Measurement:
    """Milliseconds of each algorithm on one problem: the slowest rank's median, by turns.

    ``extent`` counts rows of a matmul op over all ranks, or elements of a collective alone, split
    evenly over the ranks where they are split. ``other`` is the extent of the matmul that is no
    part of the problem, over all ranks; 0 for a collective alone. ``date`` is an ISO date.
    """

    series: Series
    extent: int
    other: int
    ms: Mapping[str, float]
    date: str
    config: Config = ()  #: of the kernels of `fused` in these times; (): that of their table

    def ratio(self, algorithm: str, among: Collection[str]) -> float:
        """Its time over that of the fastest of ``among``."""
        return self.ms[algorithm] / min(self.ms[name] for name in among)


@dataclass(frozen=True)
class Table:
    """Measurements of one machine; empty where nothing has been tuned."""

    measurements: tuple[Measurement, ...] = ()
    _by_series: dict[Series, dict[int, list[Measurement]]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        for one in self.measurements:
            self._by_series.setdefault(one.series, {}).setdefault(one.extent, []).append(one)

    def at(self, series: Series, extent: int) -> list[Measurement]:
        """What was measured of exactly this problem."""
        return self._by_series.get(series, {}).get(extent, [])

    def config(self, series: Series, extent: int) -> Config:
        """The block sizes for the kernels of `fused`: those of the largest case measured of this
        problem; between two extents, what is the same at both."""
        extents = self._by_series.get(series, {})
        known = sorted(extents)
        if extent not in extents:
            above = bisect.bisect(known, extent)
            if above in (0, len(known)):
                return ()
            low, high = (self.config(series, known[at]) for at in (above - 1, above))
            return low if low == high else ()
        return max(extents[extent], key=lambda one: one.other).config

    def choice(
        self, series: Series, extent: int, possible: Collection[str], unless: str
    ) -> tuple[str, str] | None:
        """The algorithm to take, of those ``possible``, and why; ``unless`` is taken where it is as
        fast. None: the times do not tell."""
        extents = self._by_series.get(series)
        if not extents:
            return None
        if extent in extents:
            found = _steadiest(extents[extent], possible, unless)
            return found and (found[0], _reason(found[0], extents[extent], possible))
        known = sorted(extents)
        above = bisect.bisect(known, extent)
        if above in (0, len(known)):
            return None
        ends = known[above - 1], known[above]
        found = _steadiest([*extents[ends[0]], *extents[ends[1]]], possible, unless)
        if found is None or found[1] > AS_FAST:
            return None
        return found[0], f"tuned: as fast as any at {ends[0]} and at {ends[1]} {_unit(series)}"

    def with_measurement(self, new: Measurement) -> Table:
        """The table with ``new`` in place of what it had of the same case."""
        key = (new.series, new.extent, new.other)
        kept = (one for one in self.measurements if (one.series, one.extent, one.other) != key)
        return Table((*kept, new))


def _common(measurements: Sequence[Measurement], possible: Collection[str]) -> list[str]:
    """The algorithms that all of them have, in the order of ``possible``."""
    return [name for name in possible if all(name in one.ms for one in measurements)]


def _steadiest(
    measurements: Sequence[Measurement], possible: Collection[str], unless: str
) -> tuple[str, float] | None:
    """The algorithm whose worst ratio to the fastest is the smallest, and that ratio, of those that
    are not slower than `unfused` in any."""
    names = _common(measurements, possible)
    if len(names) < 2:  # nothing to compare
        return None
    if "unfused" in names:
        names = [name for name in names if _keeps_up(name, measurements)]
    worst = {name: max(one.ratio(name, names) for one in measurements) for name in names}
    if unless in worst and worst[unless] <= AS_FAST:
        return unless, worst[unless]
    best = min(names, key=worst.__getitem__)
    return best, worst[best]


def _keeps_up(algorithm: str, measurements: Sequence[Measurement]) -> bool:
    return all(one.ms[algorithm] <= NOT_SLOWER * one.ms["unfused"] for one in measurements)


def _reason(algorithm: str, measurements: Sequence[Measurement], possible: Collection[str]) -> str:
    last = max(one.date for one in measurements)
    if len(measurements) > 1:
        names = _common(measurements, possible)
        worst = max(one.ratio(algorithm, names) for one in measurements)
        return f"tuned: within {worst:.2f}x of the fastest in {len(measurements)} cases, {last}"
    (one,) = measurements
    others = [name for name in _common(measurements, possible) if name != algorithm]
    beside = "unfused" if "unfused" in others else min(others, key=one.ms.__getitem__)
    return f"tuned: {one.ms[algorithm]:.3g} ms, {beside} {one.ms[beside]:.3g} ms, {last}"


def _unit(series: Series) -> str:
    return "rows" if "matmul" in series.op else "elements"
