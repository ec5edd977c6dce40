"""``tpkernels.autotune``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tpkernels.groups.registry import GroupLike, named_or_default
from tpkernels.groups.tuning import LIMIT, Tuning


@contextlib.contextmanager
def autotune(
    group: GroupLike | None = None, *, limit: float = LIMIT, save: bool = False
) -> Iterator[None]:
    """Within the context, ``algorithm="auto"`` times every algorithm of a problem on the spot when
    it first meets it, on all ranks together, and keeps the fastest for the life of the group. All
    ranks enter and leave the context between the same calls::

        with tpkernels.autotune(group):
            model(x)  # tunes what it meets
        model(x)

    ``tpkernels.init(group, autotune=True)`` does it for all calls. Results are right while tuning:
    the algorithms run on the call's own inputs (on a copy of one that an op overwrites), and the
    call then runs with the winner. The slowest rank's time counts. The caches are overwritten
    before each run, as other layers would. A problem has its op, dtypes and the shape of
    the tensor that travels; row counts within a factor of 1.5 share their times. Works on CPU and
    CUDA tensors. Problems with uneven shards are not tuned, nor CUDA tensors that gloo moves, nor
    what is met while a graph is traced. What is met in the capture of a CUDA graph is tuned when it
    is met again.

    An algorithm that reads its peers' memory, and fails on any rank, is left out with a warning: it
    runs in a workspace of its own. An error in one that goes through the process group breaks the
    group, as in any call. While tuning, a rank needs memory for a second workspace, for up to
    256 MiB that overwrite the caches, and for the copies; if that is not there, nothing is tuned,
    with a warning.

    Args:
        group: the process group; None for the default one.
        limit: seconds after which no further round of a problem starts; inf for none. Each
            algorithm runs at least twice. Rank 0 reports on stderr when a problem takes longer than
            two seconds.
        save: also add the times to the file of `tpkernels tune`, for later processes.

    Raises:
        ValueError: ``limit`` is not positive.
    """
    if not limit > 0:
        raise ValueError(f"limit must be positive, in seconds, not {limit}")
    tuned = named_or_default(group)
    before = tuned.measured.tuning
    tuned.tune_by(Tuning(float(limit), save))
    try:
        yield
    finally:  # `init` may have turned it on within the context
        tuned.tune_by(Tuning() if before is None and tuned.autotune else before)
