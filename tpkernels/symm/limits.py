"""How much memory this process may still take, as far as the kernel tells."""

from __future__ import annotations

import contextlib
from pathlib import Path


def available_bytes() -> int:
    """Free memory of the host, or of the control group where that has less. A commit of more would
    have the kernel kill a process instead of returning an error."""
    room = _host_available()
    for limit, usage in _cgroup_files():
        with contextlib.suppress(OSError, ValueError):  # "max", or no such controller
            room = min(room, int(limit.read_text()) - int(usage.read_text()))
    return max(room, 0)


def _host_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62


def _cgroup_files() -> list[tuple[Path, Path]]:
    root = Path("/sys/fs/cgroup")
    folders = [root]
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                own = root / line[3:].lstrip("/")
                folders += [own, *(p for p in own.parents if root in p.parents)]
    files = [(folder / "memory.max", folder / "memory.current") for folder in folders]
    v1 = root / "memory"
    return [*files, (v1 / "memory.limit_in_bytes", v1 / "memory.usage_in_bytes")]
