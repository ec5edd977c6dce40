"""The measured times of a group, and how it tunes the problems that it meets."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from typing import Any

from tpkernels.planning.problem import Problem
from tpkernels.planning.table import Series, Table, are_alike

LIMIT = 5.0  # s, for one problem


@dataclass(frozen=True)
class Tuning:
    """Tune on the spot; see ``tpkernels.autotune``.

    Attributes:
        limit: seconds after which no further round of a problem starts.
        save: add the times to the file that `tpkernels tune` writes.
        rounds: the most rounds of a problem.
        among: the algorithms that may be taken; None: all that can run and may be faster.
        anew: also tune problems that have been measured.
    """

    limit: float = LIMIT
    save: bool = False
    rounds: int = 40
    among: Collection[str] | None = None
    anew: bool = False


@dataclass
class Measured:
    """What calls are planned by; the same on all ranks."""

    tables: dict[str, Table] = field(default_factory=dict)  #: by device type; see `Group.tuned`
    trials: dict[Hashable, Any] = field(default_factory=dict)  #: see `tried` in tuning/tuner.py
    tuning: Tuning | None = None  #: on the spot
    #: The algorithms that failed when a problem was tuned, and why; empty if none did.
    left_out: dict[tuple[Series, int], dict[str, str]] = field(default_factory=dict)

    def left_out_of(self, problem: Problem) -> dict[str, str] | None:
        """Return the algorithms that failed when the problem, or one of nearly the same extent, was
        tuned on the spot, and why; None: none was."""
        key = problem.tuning_key if self.left_out else None
        if key is None:
            return None
        found = [
            names
            for (series, extent), names in self.left_out.items()
            if series == key[0] and are_alike(extent, key[1])
        ]
        return {name: why for names in found for name, why in names.items()} if found else None
