"""A case's inputs, as often as it takes for none to be in the cache when its turn comes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from tpkernels.bench.benchmark import slowest
from tpkernels.bench.cases import Case, gathered
from tpkernels.symm.limits import available_bytes

COLD = 2.0  # times the last-level cache: what is larger leaves nothing in it until it is used again
_CACHE_BYTES = 32 << 20  # where the machine does not tell
_MOST_COPIES = 1 << 14  # takes 0.2 s; 4 KiB inputs exceed 32 MiB with it


def last_level_cache_bytes(device: str) -> int:
    """The largest cache of a CPU, or of the current GPU for "cuda"."""
    if device == "cuda":
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        if text.endswith("K") and text[:-1].isdecimal():
            sizes.append(int(text[:-1]) << 10)
    return max(sizes, default=_CACHE_BYTES)


def memory_budget(device: str) -> int:
    """Bytes that each rank may take without need: of half of what is available now, an equal part.
    The same on all ranks. Collective."""
    available = torch.cuda.mem_get_info()[0] if device == "cuda" else available_bytes()
    (most,) = slowest([-float(available)])  # none takes memory before all have looked
    return int(-most) // (2 * dist.get_world_size())


def copies(nbytes: int, *, footprint: int, cache: int, room: int) -> int:
    """How many copies of inputs to make: as many as exceed the cache twice, if memory allows.

    Args:
        nbytes: that a call reads of one.
        footprint: bytes of memory that one takes.
        cache: bytes of the last-level cache.
        room: bytes of memory that all may take.
    """
    wanted = math.ceil(COLD * cache / max(1, nbytes))
    return max(1, min(wanted, _MOST_COPIES, room // max(1, footprint)))


class Inputs:
    """Copies of ``case``; `sharded` and `whole` are the next one's, turn by turn.

    Every variant takes the next copy. By the time that a copy comes up again, others of
    ``over_cache`` times the cache's size have been used. From `COLD` on a call finds its weights in
    memory, as it does in a model between whose layers the same weights do not come up again.
    Collective.

    Args:
        cold: as many copies as that takes, if memory allows; otherwise there is one.
    """

    over_cache: float  #: bytes of all copies over the last-level cache; inf for a rank without any

    def __init__(self, case: Case, *, cold: bool) -> None:
        self._case = case
        device = case.x.device.type
        x = gathered(case).x
        nbytes = sum(t.numel() * t.element_size() for t in (case.x, *case.weights))
        footprint = nbytes + (x.numel() * x.element_size() if case.weights else 0)
        cache, count = last_level_cache_bytes(device), 1
        if cold:
            room = memory_budget(device)
            count = copies(nbytes, footprint=footprint, cache=cache, room=room)
        self.over_cache = count * nbytes / cache if nbytes else math.inf
        self._sharded = [_clone(case) for _ in range(count)]
        self._whole = [replace(each, x=x.clone()) for each in self._sharded] if case.weights else []
        self._next = 0
        self._used: set[int] = set()

    def sharded(self) -> Case:
        """What an op takes."""
        return self._sharded[self._turn()]

    def whole(self) -> Case:
        """What the local matmul takes: see `gathered`."""
        return self._whole[self._turn()]

    def restore(self) -> None:
        """Undoes what calls in place have done since the last time."""
        for turn in self._used:
            self._sharded[turn].x.copy_(self._case.x)
        self._used.clear()

    def _turn(self) -> int:
        turn, self._next = self._next, (self._next + 1) % len(self._sharded)
        self._used.add(turn)
        return turn


def warm_cases(over_cache: Mapping[str, float]) -> str:
    """A sentence about the cases whose inputs did not exceed the cache enough; "" for none.

    Args:
        over_cache: by case.
    """
    warm = [f"{case} ({over:.2g}x)" for case, over in over_cache.items() if over < COLD]
    if not warm:
        return ""
    return (
        "Inputs that may be in the cache in part or whole, with the size of all copies over that "
        f"of the cache (cold from {COLD:g}x on): {'; '.join(warm)}."
    )


def _clone(case: Case) -> Case:
    """Weights keep their layout."""
    return replace(case, x=case.x.clone(), weights=tuple(w.clone() for w in case.weights))
