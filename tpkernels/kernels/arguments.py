"""What every kernel that communicates takes, under names."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import triton.language as tl

from tpkernels.kernels.matmul import Segments
from tpkernels.symm.device import DeviceWorkspace, signed


class Workspace(NamedTuple):
    """A ``DeviceWorkspace`` as one launch argument, which kernels read by name."""

    regions: Any  # the ranks' regions: a table of addresses
    state: Any
    control: Any
    words: Any  # from one source
    buffers_at: Any  # bytes from the start of a region
    buffer_stride: Any  # bytes from one buffer to the other
    world: Any  # known at compile time
    chaos: Any  # known at compile time; see `delay`


# Launch arguments that differ between ranks or calls. They are not fields of `Workspace`: Triton
# 3.6 and 3.7 specialise the values in a tuple even if the argument is listed in
# do_not_specialize, and would compile a kernel for rank 1 and another for multiples of 16.
SCALARS = ["rank", "signature", "timeout_ns", "seed"]


def launch_arguments(space: DeviceWorkspace, signature: int) -> tuple[Any, ...]:
    """Return the arguments of every kernel that communicates: `workspace`, and those in SCALARS."""
    if space.argument is None:
        space.argument = Workspace(
            space.regions,
            space.state,
            space.control,
            space.words,
            space.buffers_at,
            space.buffer_stride,
            tl.constexpr(space.world),
            tl.constexpr(space.chaos),
        )
    return space.argument, space.rank, signed(signature), space.timeout_ns, space.seed


@functools.lru_cache(maxsize=4096)
def table_of(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes whose table of `starts` a kernel reads: none if all are equal."""
    return () if sizes.count(sizes[0]) == len(sizes) else sizes


def segments_of(space: DeviceWorkspace, sizes: tuple[int, ...]) -> Segments:
    """Return the launch argument for segments of ``sizes`` rows."""
    found = space.segments.get(sizes)
    if found is None:
        starts = space.starts(sizes) if table_of(sizes) else None
        found = Segments(starts, sizes[0], sum(sizes), tl.constexpr(len(sizes)))
        space.segments[sizes] = found
    return found
