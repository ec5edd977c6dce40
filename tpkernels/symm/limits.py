"""How much more memory this process may allocate, by the kernel's accounts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_UNKNOWN = 1 << 62
_MEMINFO = Path("/proc/meminfo")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
# The files of each version of control groups; values are in bytes. Usage includes page cache, most
# of which the kernel reclaims before it refuses memory or kills a process: the lines of memory.stat
# that count it follow.
_VERSION_2 = "memory.max", "memory.current", ("active_file", "inactive_file")
_VERSION_1 = (
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)


def available_bytes() -> int:
    """Return the bytes that this process may still allocate: what the host has free, or what its
    control groups leave if that is less. If more were committed, the kernel would kill a process
    instead of returning an error."""
    rooms = [_UNKNOWN]
    with contextlib.suppress(OSError):  # /proc is not mounted
        rooms += [kib << 10 for kib in _numbers(_MEMINFO, ("MemAvailable:",))]
    for folder, (limit_file, usage_file, reclaimable) in _own_cgroups():
        with contextlib.suppress(OSError, ValueError):  # "max", or no such controller
            limit = int((folder / limit_file).read_text())
            used = int((folder / usage_file).read_text())
            with contextlib.suppress(OSError):
                used -= sum(_numbers(folder / "memory.stat", reclaimable))
            rooms.append(limit - max(used, 0))
    return max(0, min(rooms))


def short_of_memory(nbytes: int, world: int) -> str | None:
    """Return why ``world`` ranks cannot commit ``nbytes`` each; None: they can."""
    free = available_bytes()
    if nbytes * world <= free:
        return None
    return (
        f"the ranks' shared memory needs {world} x {nbytes >> 20} MiB, but only {free >> 20} MiB "
        "are free"
    )


def _numbers(path: Path, names: tuple[str, ...]) -> Iterator[int]:
    """Yield the values of the lines that begin with one of ``names``."""
    for line in path.read_text().splitlines():
        name, _, value = line.partition(" ")
        if name in names:
            yield int(value.split()[0])


def _own_cgroups() -> Iterator[tuple[Path, tuple[str, str, tuple[str, ...]]]]:
    """Yield the control groups that limit this process: its own and its ancestors. In a container,
    the process's own group may be mounted as the root."""
    lines = ["0::/", "-:memory:/"]
    with contextlib.suppress(OSError):
        lines += _OWN_CGROUPS.read_text().splitlines()
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, files = _CGROUPS, _VERSION_2
        elif "memory" in controllers.split(","):
            root, files = _CGROUPS / "memory", _VERSION_1
        else:
            continue
        folder = root / path.lstrip("/")
        yield from ((group, files) for group in (folder, *folder.parents) if root in group.parents)
        yield root, files
