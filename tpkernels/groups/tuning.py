"""The measured times of a group, and how it tunes the problems that it meets."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from tpkernels.planning.problem import Problem
from tpkernels.planning.table import Series, Table, are_alike
from tpkernels.planning.trials import Trial

LIMIT = 5.0  # s, for one problem


@dataclass(frozen=True)
class Tuning:
    """Tune on the spot; see ``tpkernels.autotune``.

    Attributes:
        limit: seconds after which no further round of a problem starts.
        save: add the times to the file that `tpkernels tune` writes.
    """

    limit: float = LIMIT
    save: bool = False


@dataclass
class Measured:
    """What calls are planned by; the same on all ranks."""

    tables: dict[str, Table] = field(default_factory=dict)  #: by device type; see `Group.tuned`
    trials: dict[Hashable, Trial] = field(default_factory=dict)  #: see tuning/trial.py
    tuning: Tuning | None = None  #: on the spot; see tuning/autotune.py
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
