"""Process groups as the ops see them: by name, with what their ranks share and have agreed on."""

from tpkernels.groups.registry import (
    GroupLike,
    check,
    empty,
    finalize,
    get,
    init,
    known_times,
    name_of,
    told_of_errors,
)

__all__ = [
    "GroupLike",
    "check",
    "empty",
    "finalize",
    "get",
    "init",
    "known_times",
    "name_of",
    "told_of_errors",
]
