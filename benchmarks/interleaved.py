"""Calls of several variants in turn, for benchmarks of single calls."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist

import tpkernels


def interleaved(
    variants: Mapping[str, Callable[[], object]],
    rounds: Iterable[object],
    group: dist.ProcessGroup,
) -> dict[str, list[float]]:
    """Seconds of each call on this rank, by variant. A round is one call of each, in a random order
    that is the same on all ranks; before each call the ranks meet in a small all-reduce."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    meeting, draw, order = torch.zeros(1), random.Random(0), list(variants)
    with torch.inference_mode():
        for _ in rounds:
            draw.shuffle(order)
            for name in order:
                tpkernels.all_reduce_(meeting, group)
                begin = time.perf_counter()
                variants[name]()
                times[name].append(time.perf_counter() - begin)
    return times
