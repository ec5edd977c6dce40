"""The order in which variants are timed against each other."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator


def interleaved(names: Iterable[str], rounds: int, seed: int = 0) -> Iterator[str]:
    """Yield each name once in every round, in a new random order each time, the same on all ranks:
    a variant is affected by the caches and the busy threads that its predecessor leaves behind."""
    candidates, chance = list(names), random.Random(seed)
    for _ in range(rounds):
        yield from chance.sample(candidates, len(candidates))
