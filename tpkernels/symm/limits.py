"""The memory limits of this process, as reported by the kernel."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_UNKNOWN = 1 << 62
_MEMINFO = Path("/proc/meminfo")
_PROCESS_CGROUPS = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
# Control group files for cgroup v2 and v1: limit and usage in bytes, and the lines of memory.stat
# that count page cache. Usage includes page cache, but the kernel reclaims most of it before it
# refuses memory or kills a process.
_VERSION_2 = "memory.max", "memory.current", ("active_file", "inactive_file")
_VERSION_1 = (
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)


def available_bytes() -> int:
    """Return the bytes that this process may still allocate: the minimum of the free memory of the
    host and the headroom of the control groups. If more is committed, the kernel kills a process
    instead of returning an error."""
    limits = [_UNKNOWN]
    with contextlib.suppress(OSError):  # /proc is not mounted
        limits += [kib << 10 for kib in _read_values(_MEMINFO, ("MemAvailable:",))]
    for folder, (limit_file, usage_file, reclaimable) in _process_cgroups():
        with contextlib.suppress(OSError, ValueError):  # "max", or no such controller
            limit = int((folder / limit_file).read_text())
            used = int((folder / usage_file).read_text())
            with contextlib.suppress(OSError):
                used -= sum(_read_values(folder / "memory.stat", reclaimable))
            limits.append(limit - max(used, 0))
    return max(0, min(limits))


def find_memory_shortage(nbytes: int, world: int) -> str | None:
    """Return the reason why ``world`` ranks cannot commit ``nbytes`` each, or None if they can."""
    free = available_bytes()
    if nbytes * world <= free:
        return None
    return (
        f"the ranks' shared memory needs {world} x {nbytes >> 20} MiB, but only {free >> 20} MiB "
        "are free"
    )


def _read_values(path: Path, names: tuple[str, ...]) -> Iterator[int]:
    """Yield the values of the lines that begin with one of ``names``."""
    for line in path.read_text().splitlines():
        name, _, value = line.partition(" ")
        if name in names:
            yield int(value.split()[0])


def _process_cgroups() -> Iterator[tuple[Path, tuple[str, str, tuple[str, ...]]]]:
    """Yield (folder, file names) of each control group that limits this process, including its
    ancestors. In a container, the group of the process may be mounted as the root."""
    lines = ["0::/", "-:memory:/"]
    with contextlib.suppress(OSError):
        lines += _PROCESS_CGROUPS.read_text().splitlines()
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
