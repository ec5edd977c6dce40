"""`tpkernels compare`: whether a second run is slower than a first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tpkernels.bench.inputs import COLD
from tpkernels.bench.results import Report, Result
from tpkernels.bench.statistics import Array, Estimate, independent, ratio

# Facts of an environment that may differ without notice.
_VOLATILE = {"launcher"}


@dataclass(frozen=True)
class Change:
    """A case and algorithm in both files.

    Attributes:
        first, second: median milliseconds; None if the result was wrong and not timed.
        ratio: the second time over the first; None unless both were timed.
        right: whether the second result is right.
    """

    case: str
    algorithm: str
    first: float | None
    second: float | None
    ratio: Estimate | None
    right: bool

    @property
    def comparable(self) -> bool:
        """Whether a verdict is possible: both are timed, or one of them is wrong."""
        return self.ratio is not None or self.first is None or self.second is None

    def regressed(self, threshold: float) -> bool:
        """Newly wrong, or slower by more than ``threshold`` over the whole interval."""
        if not self.right:
            return self.first is not None
        low = None if self.ratio is None else self.ratio.low
        return low is not None and low > 1 + threshold


def changes(first: Report, second: Report, relative_to: str | None = None) -> list[Change]:
    """Every case and requested algorithm that both reports contain."""
    earlier = {result["case"]: result for result in first["results"]}
    names = [name for name in second["sweep"]["algorithms"] if name in first["sweep"]["algorithms"]]
    return [
        _change(earlier[result["case"]], result, name, relative_to)
        for result in second["results"]
        if result["case"] in earlier
        for name in names
    ]


def differences(first: Report, second: Report) -> Iterator[str]:
    """Sentences on what differs between the runs besides the code."""
    old, new = first["environment"], second["environment"]
    for name in sorted((old.keys() | new.keys()) - _VOLATILE):
        if old.get(name) != new.get(name):
            yield f"{name} differs: {old.get(name)} and {new.get(name)}"
    for name in ("cold", "threads"):
        a, b = first["sweep"].get(name), second["sweep"].get(name)
        if a != b:
            yield f"{name} differs: {a} and {b}"
    earlier = {result["case"]: result["inputs_over_cache"] for result in first["results"]}
    for result in second["results"]:
        before, now = earlier.get(result["case"]), result["inputs_over_cache"]
        if before is not None and (before < COLD) != (now < COLD):
            yield (
                f"the inputs of {result['case']} differ: {before:.2g}x and {now:.2g}x the "
                f"last-level cache (cold from {COLD:g}x)"
            )


def summary(compared: list[Change], first: Report, second: Report, threshold: float) -> str:
    """How many cases were compared, and how many regressed, in one sentence."""
    regressions = sum(change.regressed(threshold) for change in compared)
    undecided = sum(change.ratio is not None and change.ratio.low is None for change in compared)
    old, new = ({result["case"] for result in report["results"]} for report in (first, second))
    percent = 100 * threshold
    parts = [f"{len(compared)} compared, {regressions} slower by more than {percent:g} % or wrong"]
    if undecided:
        parts.append(f"{undecided} undecided: fewer than 6 repetitions")
    if old ^ new:
        parts.append(f"{len(old ^ new)} cases in one file only")
    return "; ".join(parts) + "."


def _change(first: Result, second: Result, name: str, relative_to: str | None) -> Change:
    old, new = first["times"].get(name), second["times"].get(name)
    names = [name] if relative_to is None else [name, relative_to]
    return Change(
        case=second["case"],
        algorithm=name,
        first=old and old["median"],
        second=new and new["median"],
        ratio=_ratio(first, second, names),
        right=second["algorithms"][name]["right"],
    )


def _ratio(first: Result, second: Result, names: list[str]) -> Estimate | None:
    """The second time over the first, each relative to its baseline if ``names`` has one."""
    if not all(name in result["times"] for result in (first, second) for name in names):
        return None
    series = [[result["times"][name]["samples"] for name in names] for result in (second, first)]
    return independent(ratio if len(names) == 1 else _ratio_to_baselines, *series)


def _ratio_to_baselines(b: Array, b_base: Array, a: Array, a_base: Array) -> Array:
    return (b / b_base) / (a / a_base)
