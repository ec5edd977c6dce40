"""How a group tunes the problems that it meets; see ``tpkernels.autotune``."""

from __future__ import annotations

from dataclasses import dataclass

LIMIT = 5.0  # s, for one problem


@dataclass(frozen=True)
class Tuning:
    """Tune on the spot.

    Attributes:
        limit: seconds after which no further round of a problem starts.
        save: add the times to the file that `tpkernels tune` writes.
    """

    limit: float = LIMIT
    save: bool = False
