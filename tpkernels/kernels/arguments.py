"""What every kernel that communicates takes, under names."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

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


def launch_arguments(space: DeviceWorkspace, signature: int) -> dict[str, Any]:
    """The arguments of every kernel that communicates."""
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
    return {
        "workspace": space.argument,
        "rank": space.rank,
        "signature": signed(signature),
        "timeout_ns": space.timeout_ns,
        "seed": space.seed,
    }
