"""How much more memory this process may allocate, by the kernel's accounts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNKNOWN = 1 << 62
_MEMINFO = Path("/proc/meminfo")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class _Controller:
    """The files of one version of control groups; values are in bytes. Usage includes page cache,
    most of which the kernel reclaims before it refuses memory or kills a process: ``reclaimable``
    names the lines of memory.stat that count it."""

    root: Path
    limit: str
    usage: str
    reclaimable: tuple[str, ...]

    def room(self, folder: Path) -> int | None:
        """Return the bytes that the processes of a group may still allocate; None: it has no
        limit."""
        with contextlib.suppress(OSError, ValueError):  # "max", or no such controller
            limit = int((folder / self.limit).read_text())
            used = int((folder / self.usage).read_text())
            with contextlib.suppress(OSError):
                used -= sum(_numbers(folder / "memory.stat", self.reclaimable))
            return limit - max(used, 0)
        return None


def available_bytes() -> int:
    """Memory that this process may still allocate: what the host has free, or what its control
    groups leave if that is less. If more were committed, the kernel would kill a process instead of
    returning an error."""
    rooms = [_host_available(), *(group.room(folder) for group, folder in _own_cgroups())]
    return max(0, min(room for room in rooms if room is not None))


def short_of_memory(nbytes: int, world: int) -> str | None:
    """Return why ``world`` ranks cannot commit ``nbytes`` each; None: they can."""
    free = available_bytes()
    if nbytes * world <= free:
        return None
    return (
        f"the ranks' shared memory needs {world} x {nbytes >> 20} MiB, but only {free >> 20} MiB "
        "are free"
    )


def _host_available() -> int:
    with contextlib.suppress(OSError):  # /proc is not mounted: unknown
        return next(_numbers(_MEMINFO, ("MemAvailable:",)), _UNKNOWN >> 10) << 10
    return _UNKNOWN


def _numbers(path: Path, names: tuple[str, ...]) -> Iterator[int]:
    """The values of the lines that begin with one of ``names``."""
    for line in path.read_text().splitlines():
        name, _, value = line.partition(" ")
        if name in names:
            yield int(value.split()[0])


def _own_cgroups() -> Iterator[tuple[_Controller, Path]]:
    """The control groups that limit this process's memory: its own and its ancestors. In a
    container, the process's own group may be mounted as the root."""
    unified = _Controller(
        _CGROUPS, "memory.max", "memory.current", ("active_file", "inactive_file")
    )
    legacy = _Controller(
        _CGROUPS / "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    )
    yield unified, unified.root
    yield legacy, legacy.root
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = _OWN_CGROUPS.read_text().splitlines()
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number != "0" and "memory" not in controllers.split(","):
            continue
        controller = unified if number == "0" else legacy
        own = controller.root / path.lstrip("/")
        yield controller, own
        yield from ((controller, each) for each in own.parents if controller.root in each.parents)
