"""Enough copies of a case's inputs that a call finds none of them in the cache."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.distributed as dist

from tpkernels.bench.cases import Case, gathered
from tpkernels.planning.machine import last_level_cache_bytes
from tpkernels.symm.limits import available_bytes
from tpkernels.timing import slowest

# Inputs are cold if all copies exceed the last-level cache by this factor: a copy is then evicted
# before its next use.
COLD = 2.0
_MOST_COPIES = 1 << 14  # creating them takes 0.2 s; with 4 KiB inputs they exceed 32 MiB


def memory_budget(device: str) -> int:
    """Return the bytes that each rank may use for copies: an equal part of half the memory
    available now. The same on all ranks. Collective."""
    available = torch.cuda.mem_get_info()[0] if device == "cuda" else available_bytes()
    (most,) = slowest([-float(available)])  # no rank allocates before all have measured
    return int(-most) // (2 * dist.get_world_size())


def copies(nbytes: int, *, footprint: int, cache: int, room: int) -> int:
    """Return how many copies of the inputs make them cold (`COLD`), as far as memory allows.

    Args:
        nbytes: bytes of a copy that one call reads.
        footprint: bytes of memory that a copy occupies.
        cache: bytes of the last-level cache.
        room: bytes of memory that all copies may occupy.
    """
    wanted = math.ceil(COLD * cache / max(1, nbytes))
    return max(1, min(wanted, _MOST_COPIES, room // max(1, footprint)))


class Inputs:
    """Copies of ``case``, used in rotation by `sharded` and `whole`.

    Every variant uses the next copy. Before a copy is used again, copies of ``over_cache`` times
    the cache's size have been read. From `COLD` on, a call reads its weights from memory, as it
    does in a model, whose other layers evict them. Collective.

    Args:
        cold: make as many copies as that needs, memory permitting; otherwise make one.
    """

    over_cache: float  #: bytes of all copies over the last-level cache; inf if a rank has no input

    def __init__(self, case: Case, *, cold: bool) -> None:
        self._case = case
        device = case.x.device.type
        local = gathered(case)
        nbytes = sum(t.numel() * t.element_size() for t in (case.x, *case.weights))
        footprint = nbytes + (local.x.nbytes if case.weights else 0)
        cache, count = last_level_cache_bytes(device), 1
        if cold:
            room = memory_budget(device)
            count = copies(nbytes, footprint=footprint, cache=cache, room=room)
        self.over_cache = count * nbytes / cache if nbytes else math.inf
        self._sharded = [
            replace(case, x=case.x.clone(), weights=tuple(w.clone() for w in case.weights))
            for _ in range(count)
        ]
        self._whole: list[Case] = []
        if case.weights:
            self._whole = [
                replace(each, x=local.x.clone(), scales=local.scales) for each in self._sharded
            ]
        self._next = 0
        self._used: set[int] = set()

    def sharded(self) -> Case:
        """Return the next copy, as an op takes it."""
        return self._sharded[self._turn()]

    def whole(self) -> Case:
        """Return the next copy, as the local matmul takes it: see `gathered`."""
        return self._whole[self._turn()]

    def restore(self) -> None:
        """Restore the copies that in-place calls have overwritten since the last time."""
        for turn in self._used:
            self._sharded[turn].x.copy_(self._case.x)
        self._used.clear()

    def _turn(self) -> int:
        turn, self._next = self._next, (self._next + 1) % len(self._sharded)
        self._used.add(turn)
        return turn
