"""The extension's side of an arena, and how long its waits poll."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from tpkernels import _C
from tpkernels.symm.exchange import Participant
from tpkernels.symm.rendezvous import MappedArena

# How long a waiter polls at most before it sleeps (csrc/host/patience.h). If ranks outnumber cores,
# it yields its core between polls; else not, because whoever gets it keeps it for long: vLLM's
# workers share their cores with its engine, which is always busy. With the plugin it decodes a
# batch of 8 at 0.77 of its own speed where waiters yield after 5 us, and at 1.14 where they do not
# (benchmarks/results/cpu-2core-vllm.md).
_SPIN_US, _CROWDED_SPIN_US = 2000.0, 200.0


def is_crowded(pids: Sequence[int]) -> bool:
    """Return whether the ranks are more than the cores they may use together. An engine may have
    bound each to a core of its own."""
    cores = os.sched_getaffinity(0)
    for pid in pids:
        with contextlib.suppress(OSError):  # it ended, or is in another pid namespace
            cores |= os.sched_getaffinity(pid)
    return len(pids) > len(cores)


def make_channel(link: MappedArena, participant: Participant, capacity: int) -> _C.host.Channel:
    crowded = is_crowded(link.pids)
    return _C.host.Channel(
        link.arena,
        participant.rank,
        link.pidfds,
        link.pids,
        timeout=participant.timeout,
        spin_us=_CROWDED_SPIN_US if crowded else _SPIN_US,
        yield_us=0.0 if crowded else _SPIN_US,
        capacity=capacity,
        names=participant.names,
    )
