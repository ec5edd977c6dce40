"""The free memory as the kernel reports it, read from files in the format of Linux."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpkernels.symm import limits

MIB = 1 << 20


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the files of a host with 8000 MiB free and no control group."""
    (tmp_path / "cgroup").mkdir()
    (tmp_path / "meminfo").write_text(
        f"MemTotal:       16000000 kB\nMemAvailable:   {8000 * 1024} kB\nBuffers: 7 kB\n"
    )
    (tmp_path / "self").write_text("0::/\n")
    monkeypatch.setattr(limits, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(limits, "_PROCESS_CGROUPS", tmp_path / "self")
    monkeypatch.setattr(limits, "_CGROUPS", tmp_path / "cgroup")
    return tmp_path


def unified(folder: Path, limit: object, used: int, cache: int = 0) -> None:
    """Write a control group of version 2; sizes in MiB."""
    folder.mkdir(parents=True, exist_ok=True)
    limit_bytes = str(limit) if limit == "max" else str(int(str(limit)) * MIB)
    (folder / "memory.max").write_text(f"{limit_bytes}\n")
    (folder / "memory.current").write_text(f"{used * MIB}\n")
    (folder / "memory.stat").write_text(
        f"anon {(used - cache) * MIB}\nfile {(cache + 50) * MIB}\nshmem {50 * MIB}\n"
        f"inactive_file {cache // 2 * MIB}\nactive_file {(cache - cache // 2) * MIB}\n"
    )


def legacy(folder: Path, limit: int, used: int, cache: int = 0) -> None:
    """Write a control group of version 1; sizes in MiB."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit * MIB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used * MIB}\n")
    (folder / "memory.stat").write_text(
        f"cache {cache * MIB}\ninactive_file 1\nactive_file 1\n"
        f"total_inactive_file {cache * MIB - MIB}\ntotal_active_file {MIB}\n"
    )


def test_without_a_limit_the_host_memory_counts(system: Path) -> None:
    assert limits.available_bytes() == 8000 * MIB
    unified(system / "cgroup", "max", 9000)
    assert limits.available_bytes() == 8000 * MIB


def test_page_cache_counts_as_free(system: Path) -> None:
    """A container that has read 7 GB of checkpoints is not short of memory."""
    unified(system / "cgroup", 8192, 8172, cache=7600)
    assert limits.available_bytes() == (20 + 7600) * MIB
    unified(system / "cgroup", 1000, 1100)
    assert limits.available_bytes() == 0


def test_the_tightest_of_nested_groups_counts(system: Path) -> None:
    (system / "self").write_text("0::/slice/pod/container\n")
    unified(system / "cgroup", "max", 9000)
    unified(system / "cgroup" / "slice", 2000, 1000)
    unified(system / "cgroup" / "slice" / "pod", 700, 600, cache=300)
    unified(system / "cgroup" / "slice" / "pod" / "container", "max", 100)
    assert limits.available_bytes() == 400 * MIB


def test_the_cgroup_of_the_process_in_version_1(system: Path) -> None:
    """The hierarchy is mounted at the root, not at the control group of the container."""
    (system / "self").write_text("12:cpu,cpuacct:/docker/x\n9:memory:/docker/x\n1:name=systemd:/\n")
    legacy(system / "cgroup" / "memory", 1 << 40, 4000)
    legacy(system / "cgroup" / "memory" / "docker" / "x", 512, 500, cache=88)
    assert limits.available_bytes() == 100 * MIB


def test_unreadable_files_are_ignored(system: Path) -> None:
    (system / "self").unlink()
    (system / "meminfo").unlink()
    assert limits.available_bytes() > 1 << 60
    unified(system / "cgroup", 1000, 900, cache=40)
    (system / "cgroup" / "memory.stat").unlink()
    assert limits.available_bytes() == 100 * MIB
    (system / "cgroup" / "memory.current").write_text("?\n")
    assert limits.available_bytes() > 1 << 60


def test_the_message_gives_the_numbers(system: Path) -> None:
    assert limits.find_memory_shortage(1000 * MIB, 8) is None
    assert limits.find_memory_shortage(1001 * MIB, 8) == (
        "the ranks' shared memory needs 8 x 1001 MiB, but only 8000 MiB are free"
    )
