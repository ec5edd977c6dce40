"""Measured times of the algorithms, and the selection of an algorithm from them. Pure.

Measured size: the fastest algorithm. The default of the rules (choose.py) is kept if it is as fast;
otherwise noise in a single measurement would decide.

Between two measured sizes: an algorithm that is as fast as any at both. If times are affine in the
size, ``t_a <= c * t_b`` at both sizes implies it in between. Without such an algorithm: the best
algorithm at the nearer size, if the ratio of the sizes is at most `_MAX_RATIO`.

Below the smallest and above the largest measured size: the best algorithm at that size, if the
ratio is at most `_CLOSE_RATIO`. In all further cases the table does not decide.

N of a column-parallel weight and K of a row-parallel weight may differ by rank, so a problem does
not contain them. The latest measurement counts.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tpkernels.planning.op_spec import OPS, OpSpec

# Times within this ratio of the fastest time count as equal. Medians of 40 interleaved repetitions
# of the same algorithm differ by 1 to 4 % between two runs. AMD EPYC Zen 3, 2 ranks, 2026-11-21:
# `pytest -m slow -s tests/cli/test_tune.py`.
SAME_SPEED_RATIO = 1.02
# An algorithm whose time / time of `unfused` exceeds this ratio is slower than `unfused`.
MAX_UNFUSED_RATIO = 1 / 0.97
# Maximum ratio between a size and the measured size that decides for it.
_MAX_RATIO = 2.0
# Sizes within this ratio share one measurement.
_CLOSE_RATIO = 1.5


@dataclass(frozen=True)
class Series:
    """Problems that differ only in their extent.

    ``width`` is the last dim of the communicated tensor, or 1 for a collective without a matmul.
    ``dtype`` is the dtype of that tensor. ``options`` are further options that affect the time.
    """

    op: str
    device: str
    world: int
    width: int
    dtype: str
    options: tuple[str, ...]

    @property
    def spec(self) -> OpSpec:
        """Return the properties of the op."""
        return OPS[self.op]

    @property
    def captured(self) -> Series:
        """Return the series of the same calls in CUDA graphs. Replays have no launch overhead on
        the host."""
        return replace(self, options=(*self.options, "captured"))


@dataclass(frozen=True)
class Measurement:
    """Milliseconds of each algorithm on one problem: the shortest time of interleaved runs on all
    ranks.

    ``extent`` is the number of rows of a matmul op, or of elements of a collective without a
    matmul. It counts all ranks, and the split is even. ``date`` is an ISO date.
    """

    series: Series
    extent: int
    ms: Mapping[str, float]
    date: str

    def ratio(self, algorithm: str, among: Collection[str]) -> float:
        """Return the time of ``algorithm`` over the fastest time in ``among``."""
        return self.ms[algorithm] / min(self.ms[name] for name in among)


@dataclass(frozen=True)
class Table:
    """Measurements of one machine; empty if nothing has been tuned."""

    measurements: tuple[Measurement, ...] = ()
    _by_series: dict[Series, dict[int, Measurement]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        for measurement in self.measurements:
            self._by_series.setdefault(measurement.series, {})[measurement.extent] = measurement

    def get(self, series: Series, extent: int) -> Measurement | None:
        """Return the measurement of exactly this problem, or None."""
        return self._by_series.get(series, {}).get(extent)

    def has_close_extent(self, series: Series, extent: int) -> bool:
        """Return whether this extent or a close extent was measured."""
        return any(are_close(measured, extent) for measured in self._by_series.get(series, ()))

    def extents(self, series: Series) -> list[int]:
        """Return the measured extents."""
        return sorted(self._by_series.get(series, {}))

    def select(
        self, series: Series, extent: int, candidates: Collection[str], default: str
    ) -> tuple[str, str] | None:
        """Return the best algorithm in ``candidates`` and the reason, or None if the table does not
        decide. ``default`` is kept if it is as fast."""
        measured, extents = self._by_series.get(series, {}), self.extents(series)
        if not extents:
            return None
        unit = "rows" if series.spec.has_matmul else "elements"
        if extent in measured:
            best = _minimax([measured[extent]], candidates, default)
            return best and (best[0], _format_reason(best[0], measured[extent], candidates))
        above = bisect.bisect(extents, extent)
        neighbors = extents[max(above - 1, 0) : above + 1]
        if len(neighbors) == 2:
            best = _minimax([measured[size] for size in neighbors], candidates, default)
            if best is not None and best[1] <= SAME_SPEED_RATIO:
                reason = f"tuned: as fast as any at {neighbors[0]} and at {neighbors[1]} {unit}"
                return best[0], reason
        nearest = min(neighbors, key=lambda size: _ratio(size, extent))
        if _ratio(nearest, extent) > (_MAX_RATIO if len(neighbors) == 2 else _CLOSE_RATIO):
            return None
        best = _minimax([measured[nearest]], candidates, default)
        return best and (best[0], f"tuned: from the times at {nearest} {unit}")

    def extended(self, new: Iterable[Measurement]) -> Table:
        """Return a table that includes ``new``, in place of old measurements of the same
        problems."""
        merged = {(item.series, item.extent): item for item in (*self.measurements, *new)}
        return Table(tuple(merged.values()))


def are_close(left: int, right: int) -> bool:
    """Return whether two extents are close enough to share one measurement."""
    return _ratio(left, right) <= _CLOSE_RATIO


def _ratio(left: int, right: int) -> float:
    """Return the ratio of two extents, at least 1. Extents may be 0."""
    return max(left, right, 1) / max(min(left, right), 1)


def _minimax(
    measurements: Sequence[Measurement], candidates: Collection[str], default: str
) -> tuple[str, float] | None:
    """Return the algorithm with the smallest worst-case ratio to the fastest, and that ratio.

    Algorithms that are slower than `unfused` in a measurement are skipped. None if fewer than two
    candidates have times in all ``measurements``.
    """
    names = [name for name in candidates if all(name in item.ms for item in measurements)]
    if len(names) < 2:
        return None
    if "unfused" in names:
        names = [
            name
            for name in names
            if all(item.ms[name] <= MAX_UNFUSED_RATIO * item.ms["unfused"] for item in measurements)
        ]
    worst = {name: max(item.ratio(name, names) for item in measurements) for name in names}
    if default in worst and worst[default] <= SAME_SPEED_RATIO:
        return default, worst[default]
    best = min(names, key=worst.__getitem__)
    return best, worst[best]


def _format_reason(algorithm: str, measured: Measurement, candidates: Collection[str]) -> str:
    rest = [name for name in candidates if name in measured.ms and name != algorithm]
    baseline = "unfused" if "unfused" in rest else min(rest, key=measured.ms.__getitem__)
    times = f"{measured.ms[algorithm]:.3g} ms, {baseline} {measured.ms[baseline]:.3g} ms"
    return f"tuned: {times}, {measured.date}"
