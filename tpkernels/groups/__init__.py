"""Process groups as the ops see them: by name, with what their ranks share and have agreed on."""

from tpkernels.groups.registry import (
    GroupLike,
    break_if_left,
    check,
    empty,
    finalize,
    get,
    init,
    known_times,
    name_of,
    positions,
    told_of_errors,
    tuned_on_the_spot,
)

__all__ = [
    "GroupLike",
    "break_if_left",
    "check",
    "empty",
    "finalize",
    "get",
    "init",
    "known_times",
    "name_of",
    "positions",
    "told_of_errors",
    "tuned_on_the_spot",
]
