"""Split a dimension over ranks."""

from __future__ import annotations

from collections.abc import Sequence


def shard_sizes(total: int, world: int, unit: int = 1) -> list[int]:
    """Return the balanced split of ``total`` rows over ``world`` ranks.

    Args:
        total: number of rows, at least 0.
        world: number of ranks, at least 1.
        unit: granularity; every size is a multiple of it.

    Returns:
        The number of rows of each rank, identical on all ranks. Sizes differ by at most ``unit``,
        and larger sizes are first.

    Raises:
        ValueError: ``total`` is negative or not a multiple of ``unit``, or ``world`` or ``unit`` is
            not positive.
    """
    if total < 0 or world < 1:
        raise ValueError(
            f"cannot split {total} rows over {world} ranks; total must be at least 0 and world at "
            "least 1"
        )
    if unit < 1 or total % unit:
        raise ValueError(
            f"cannot split {total} rows at multiples of {unit}; unit must be at least 1 and divide "
            "total"
        )
    units = total // unit
    return [unit * (units // world + (rank < units % world)) for rank in range(world)]


def chunk_sizes(total: int, world: int) -> list[int]:
    """Return the split of ``torch.chunk`` and DTensor. The last ranks may have fewer or zero
    rows."""
    chunk = -(-total // world)
    return [max(0, min(chunk, total - rank * chunk)) for rank in range(world)]


def check_sizes(sizes: Sequence[int], world: int, name: str = "shard_sizes") -> tuple[int, ...]:
    """Return ``sizes`` as a tuple, after checking that it is a split over ``world`` ranks.

    Raises:
        ValueError: ``sizes`` has the wrong length or a negative entry.
    """
    if len(sizes) != world:
        raise ValueError(
            f"{name} has {len(sizes)} entries {list(sizes)} but the group has {world} ranks"
        )
    if any(size < 0 for size in sizes):
        raise ValueError(f"{name} {list(sizes)} has a negative entry")
    return tuple(int(size) for size in sizes)
