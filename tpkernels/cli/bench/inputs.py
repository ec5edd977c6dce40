"""A case's inputs, as often as it takes for none to be in the cache when its turn comes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch

from tpkernels.cli.cases import Case, gathered

_CACHE_BYTES = 32 << 20  # where the machine does not tell
_MOST_COPIES = 1024


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


class Inputs:
    """Copies of ``case``; `sharded` and `whole` are the next one's, turn by turn.

    Every variant takes the next copy. By the time that a copy comes up again, twice the cache's
    size of others has been used, so that a call finds its weights in memory, as it does in a
    model between whose layers the same weights do not come up again. Collective.

    Args:
        cold: otherwise there is one copy.
    """

    def __init__(self, case: Case, *, cold: bool) -> None:
        self._case = case
        operands = (case.x, *case.weights)
        nbytes = max(1, sum(t.numel() * t.element_size() for t in operands))
        wanted = math.ceil(2 * last_level_cache_bytes(case.x.device.type) / nbytes) if cold else 1
        copies = min(wanted, _MOST_COPIES)
        self._sharded = [_clone(case) for _ in range(copies)]
        x = gathered(case).x
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


def _clone(case: Case) -> Case:
    """Weights keep their layout."""
    return replace(case, x=case.x.clone(), weights=tuple(w.clone() for w in case.weights))
