"""Measured times of the algorithms, and the choices they justify. Pure.

A problem that was measured gets its fastest algorithm, unless the algorithm that the rules give
(choose.py) is as fast: between equals, a single measurement would decide by chance.

Between two measured sizes, an algorithm that is as fast as any at both ends is chosen: if times are
affine in the size, ``t_a <= c * t_b`` at both ends holds in between. If there is none, the choice
at the nearer end counts up to a ratio of sizes of `_NEAR`. Below the first and above the last size
it counts up to a ratio of `_ALIKE`. Everywhere else the table decides nothing.

The other dimension of the matmul (N of a column-parallel weight, K of a row-parallel weight) may
differ by rank, so it is not part of a problem. The measurement that was taken last counts.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tpkernels.planning.op_spec import OPS, OpSpec

# Times within this ratio of the fastest count as equally fast. Medians of 40 interleaved
# repetitions of the same algorithm in two runs differ by 1 to 4 %. AMD EPYC Zen 3, 2 ranks,
# 2026-11-21: `pytest -m slow -s tests/cli/test_tune.py`.
AS_FAST = 1.02
# An algorithm beyond this ratio to `unfused` is slower than not fusing.
NOT_SLOWER = 1 / 0.97
# A choice applies to sizes up to this ratio away, at most.
_NEAR = 2.0
# Sizes up to this ratio apart need not be measured both.
_ALIKE = 1.5


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
    """Milliseconds of each algorithm on one problem: the shortest of interleaved runs of all ranks.

    ``extent`` counts the rows of a matmul op, or the elements of a collective without a matmul,
    over all ranks, split evenly. ``date`` is an ISO date.
    """

    series: Series
    extent: int
    ms: Mapping[str, float]
    date: str

    def ratio(self, algorithm: str, among: Collection[str]) -> float:
        """Return its time over the time of the fastest in ``among``."""
        return self.ms[algorithm] / min(self.ms[name] for name in among)


@dataclass(frozen=True)
class Table:
    """Measurements of one machine; empty if nothing has been tuned."""

    measurements: tuple[Measurement, ...] = ()
    _by_series: dict[Series, dict[int, Measurement]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        for one in self.measurements:
            self._by_series.setdefault(one.series, {})[one.extent] = one

    def at(self, series: Series, extent: int) -> Measurement | None:
        """Return the measurement of exactly this problem."""
        return self._by_series.get(series, {}).get(extent)

    def near(self, series: Series, extent: int) -> bool:
        """Return whether this extent, or one that is nearly the same, was measured."""
        return any(are_alike(known, extent) for known in self._by_series.get(series, ()))

    def extents(self, series: Series) -> list[int]:
        """Return the measured extents."""
        return sorted(self._by_series.get(series, {}))

    def choice(
        self, series: Series, extent: int, possible: Collection[str], default: str
    ) -> tuple[str, str] | None:
        """Return the algorithm to use, out of ``possible``, and the reason; ``default`` is kept if
        it is as fast. None: the table does not decide."""
        measured, known = self._by_series.get(series, {}), self.extents(series)
        if not known:
            return None
        unit = "rows" if series.spec.has_matmul else "elements"
        if extent in measured:
            best = _minimax([measured[extent]], possible, default)
            return best and (best[0], _reason(best[0], measured[extent], possible))
        above = bisect.bisect(known, extent)
        ends = known[max(above - 1, 0) : above + 1]
        if len(ends) == 2:
            best = _minimax([measured[end] for end in ends], possible, default)
            if best is not None and best[1] <= AS_FAST:
                reason = f"tuned: as fast as any at {ends[0]} and at {ends[1]} {unit}"
                return best[0], reason
        nearest = min(ends, key=lambda end: _ratio(end, extent))
        if _ratio(nearest, extent) > (_NEAR if len(ends) == 2 else _ALIKE):
            return None
        best = _minimax([measured[nearest]], possible, default)
        return best and (best[0], f"tuned: from the times at {nearest} {unit}")

    def extended(self, new: Iterable[Measurement]) -> Table:
        """Return the table with ``new`` replacing any measurements of the same problems."""
        merged = {(one.series, one.extent): one for one in (*self.measurements, *new)}
        return Table(tuple(merged.values()))


def are_alike(left: int, right: int) -> bool:
    """Return whether two extents are so close that they need not be measured both."""
    return _ratio(left, right) <= _ALIKE


def _ratio(left: int, right: int) -> float:
    """Return by how much two extents differ; they may be 0."""
    return max(left, right, 1) / max(min(left, right), 1)


def _minimax(
    measurements: Sequence[Measurement], possible: Collection[str], default: str
) -> tuple[str, float] | None:
    """Return the algorithm with the smallest worst-case ratio to the fastest, and that ratio, among
    those never slower than `unfused`. None: there is nothing to compare."""
    names = [name for name in possible if all(name in one.ms for one in measurements)]
    if len(names) < 2:
        return None
    if "unfused" in names:
        names = [
            name
            for name in names
            if all(one.ms[name] <= NOT_SLOWER * one.ms["unfused"] for one in measurements)
        ]
    worst = {name: max(one.ratio(name, names) for one in measurements) for name in names}
    if default in worst and worst[default] <= AS_FAST:
        return default, worst[default]
    best = min(names, key=worst.__getitem__)
    return best, worst[best]


def _reason(algorithm: str, measured: Measurement, possible: Collection[str]) -> str:
    others = [name for name in possible if name in measured.ms and name != algorithm]
    other = "unfused" if "unfused" in others else min(others, key=measured.ms.__getitem__)
    times = f"{measured.ms[algorithm]:.3g} ms, {other} {measured.ms[other]:.3g} ms"
    return f"tuned: {times}, {measured.date}"
