"""The file of measured times: its content is not trusted, and all ranks use the file of rank 0."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pickle
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.planning.test_table import measured, plan, spec
from tests.support import emulated, faults
from tests.support.cases import RanksFixture
from tests.support.ranked import fresh_group, separate_hosts
from tpkernels import groups
from tpkernels.bench.cases import random_case
from tpkernels.bench.specs import Spec
from tpkernels.common.cache import locked
from tpkernels.planning import machine, store
from tpkernels.planning.choose import EMPTY_TABLE
from tpkernels.planning.machine import Machine, this_machine
from tpkernels.planning.op_spec import OPS
from tpkernels.planning.table import Table

MACHINE = this_machine("cpu", 2, 1, True, threads=1)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the table of `MACHINE`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return store.get_table_path(MACHINE)


FEW = measured(spec(9), ring=2, direct=3)
TABLE = Table((measured(spec(64), unfused=1.5, direct=1.0), FEW))


def test_a_saved_table_is_loaded(cache: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.load_or_warn(MACHINE) == EMPTY_TABLE  # no file, no warning
        assert store.update(MACHINE, *TABLE.measurements) == (cache, TABLE)
        assert store.load_or_warn(MACHINE) == TABLE
    assert [file.name for file in cache.parent.iterdir()] == [cache.name]
    newer = measured(spec(64), unfused=0.5, direct=1.0)  # newer times of a stored case
    assert store.update(MACHINE, newer)[1].measurements == (newer, FEW)
    assert store.load_or_warn(MACHINE).measurements == (newer, FEW)
    assert plan(spec(64), FEW, newer).algorithm == "unfused"


def test_each_machine_has_a_separate_file(monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[dict[str, Any]] = [
        {"device": "another"}, {"cores": 99}, {"threads": 7}, {"ranks": 3},
        {"hosts": 2}, {"shared_memory": False}, {"vector_unit": "none"}, {"kind": "cuda"},
    ]  # fmt: skip
    names = {replace(MACHINE, **change).file_name for change in [{}, *changes]}
    assert len(names) == len(changes) + 1
    monkeypatch.setattr("tpkernels.planning.machine.versions", lambda: {"torch": "1.0"})
    assert MACHINE.file_name not in names


def edited(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content | changes


def first(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    """Return a function that changes the first measurement of the content."""
    return lambda content: content | {"measurements": [content["measurements"][0] | changes]}


WRONG: dict[str, tuple[bytes | Callable[[dict[str, Any]], Any], str]] = {
    "empty": (b"", "it is not JSON"),
    "a pickle": (pickle.dumps({"format": store.FORMAT}), "it is not text"),
    "deep": (b"[" * 100_000, "recursion"),
    "a list": (b"[]", "'format' is missing"),
    "a huge number": (b'{"format": ' + b"9" * 5000 + b"}", "digits"),
    "too large": (b" " * (2 << 20), "more than 1048576 bytes"),
    "another format": (edited(format="tpkernels tuning 1"), "format is 'tpkernels tuning 1'"),
    "another torch": (edited(versions={"tpkernels": tpkernels.__version__, "torch": "1.0"}),
                      "torch is '1.0', but '"),
    "another device": (lambda c: c | {"machine": c["machine"] | {"device": "a\x1b[2J\nb"}},
                       r"device is 'a\\x1b[2J\\nb', but '".replace("\\\\", "\\")),
    "other ranks": (lambda c: c | {"machine": c["machine"] | {"ranks": 4}},
                    "ranks is 4, but 2 on this"),
    "no measurements": (edited(measurements={"a": 1}),
                        "measurements is {'a': 1}; it must be of type list"),
    "no time": (first(ms={"direct": 0.0}), "the time of 'direct' is 0.0"),
    "not a number": (first(ms={"direct": float("nan")}), "measurements[0].ms.direct is nan"),
    "no date": (first(date="yesterday\n"), r"a date is 'yesterday\n'"),
}  # fmt: skip


def test_the_largest_cache_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "Path", lambda _: tmp_path)
    assert machine.last_level_cache_bytes("cpu") == machine._CACHE_BYTES
    for index, size in enumerate(("48K", "24576K", "2048K", "unknown")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert machine.last_level_cache_bytes("cpu") == 24 << 20


def test_a_bad_file_is_ignored_with_one_warning(cache: Path) -> None:
    for case, (damage, reason) in WRONG.items():
        store.update(MACHINE, *TABLE.measurements)
        content = damage
        if not isinstance(content, bytes):
            content = json.dumps(content(json.loads(cache.read_bytes()))).encode()
        cache.write_bytes(content)
        with pytest.warns(RuntimeWarning) as raised:
            assert store.load_or_warn(MACHINE) == EMPTY_TABLE, case
        (warning,) = raised
        assert f"ignoring the tuning cache {cache}: " in str(warning.message)
        assert reason in str(warning.message), case
        assert "\x1b" not in str(warning.message)
        assert cache.read_bytes() == content  # kept for inspection
        cache.unlink()


def test_no_table_without_a_home_or_a_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.parent.mkdir()
    cache.parent.chmod(0o777)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.load_or_warn(MACHINE) == EMPTY_TABLE

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert store.load_or_warn(MACHINE) == EMPTY_TABLE


# Updates.

UPDATES = 25


def update_often(home: str) -> None:
    """Add cases one by one, concurrently with the peer."""
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": home}):
        dist.barrier()
        for i in range(UPDATES):
            store.update(MACHINE, measured(spec(2 * i + 1 + dist.get_rank()), direct=1.0))


def test_concurrent_updates_are_all_saved(ranks: RanksFixture, cache: Path) -> None:
    ranks(2).run(update_often, str(cache.parent.parent))
    saved = {m.extent for m in store.load_or_warn(MACHINE).measurements}
    assert saved == set(range(1, 2 * UPDATES + 1))


def test_a_lock_that_is_never_released_is_an_error(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_LOCK_SECONDS", 0.2)
    store.update(MACHINE, measured(spec(1), direct=1.0))
    lock = store.get_table_path(MACHINE).with_suffix(".lock")
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        begin = time.monotonic()
        with pytest.raises(
            TimeoutError, match=f"a different process has held the lock {lock} for 0.2 s"
        ):
            store.update(MACHINE, measured(spec(2), direct=1.0))
        assert 0.2 <= time.monotonic() - begin < 5
    assert len(store.update(MACHINE, measured(spec(3), direct=1.0))[1].measurements) == 2


def test_the_lock_is_exclusive(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The previous holder may remove the file after this process has opened it, and a new file may
    be created."""
    cache.parent.mkdir(0o700)
    path, flock = cache.with_name("file.lock"), fcntl.flock
    for removed, replaced in ((False, False), (True, False), (True, True)):
        first = iter([removed])

        def late(
            handle: int, operation: int, first: Any = first, replaced: bool = replaced
        ) -> None:
            if next(first, False):
                path.unlink()
                if replaced:
                    path.touch()
            flock(handle, operation)

        monkeypatch.setattr(fcntl, "flock", late)
        with locked(path, seconds=1), pytest.raises(TimeoutError), locked(path, seconds=0):
            pass
        assert not path.exists()


def test_a_write_that_fails_leaves_the_old_table_and_no_lock(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.update(MACHINE, *TABLE.measurements)
    with monkeypatch.context() as broken:
        broken.setattr(os, "replace", mock.Mock(side_effect=OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            store.update(MACHINE, measured(spec(7), direct=1.0))
    assert store.load_or_warn(MACHINE) == TABLE
    assert [file.name for file in cache.parent.iterdir()] == [cache.name]


def test_a_symbolic_link_as_lock_file_is_not_followed(cache: Path) -> None:
    cache.parent.mkdir(0o700)
    store.get_table_path(MACHINE).with_suffix(".lock").symlink_to(cache.with_name("victim"))
    with pytest.raises(OSError, match="symbolic link"):
        store.update(MACHINE, measured(spec(1), direct=1.0))
    assert not (cache.with_name("victim")).exists()
    assert store.load_or_warn(MACHINE) == EMPTY_TABLE


# On ranks.


def collect_problems(specs: list[Spec]) -> list[Any]:
    """Return the problems that the ops plan for these cases."""
    assert dist.group.WORLD is not None
    group, problems = groups.get(dist.group.WORLD.group_name), []
    for case in specs:
        group.clear_planned_calls()
        random_case(case).run()
        (call,) = group.planned_calls()
        problems.append(call.problem)
    return problems


def test_tuned_problems_equal_called_problems(ranks: RanksFixture) -> None:
    """Compare the problems of benchmark cases with the problems that the ops plan.

    If they differed, no measurement would apply.
    """
    specs = [spec(9, op=op) if "matmul" in op else Spec(op, (77,), torch.float32) for op in OPS]
    for problems in ranks(2).run(collect_problems, specs):
        assert problems == [spec.problem(2) for spec in specs]


def choose_with_cache(folders: list[str], spread: bool) -> tuple[str, str, int, Machine]:
    """Return the choice of `auto` and its reason, the number of warnings, and the machine. Each
    rank has a separate cache folder."""
    with contextlib.ExitStack() as stack:
        env = {"XDG_CACHE_HOME": folders[dist.get_rank()]}
        stack.enter_context(mock.patch.dict(os.environ, env))
        raised = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        if spread:
            stack.enter_context(separate_hosts())
        pg = stack.enter_context(fresh_group())
        group = groups.get(pg.group_name)
        x, w = torch.ones(32, 512).bfloat16(), torch.ones(512, 256).bfloat16()
        tpkernels.all_gather_matmul(x, w, pg)
        (call,) = group.planned_calls()
        machine = this_machine("cpu", 2, group.hosts, group.shared_memory)
    count = sum("tuning cache" in str(warning.message) for warning in raised)
    return call.plan.algorithm, call.plan.reason, count, machine


@pytest.mark.parametrize("spread", [False, True], ids=["one host", "no memory in common"])
def test_ranks_with_different_caches_agree(
    ranks: RanksFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spread: bool
) -> None:
    """All ranks use the table of rank 0, and only rank 0 warns."""
    folders = [str(tmp_path / name) for name in "ab"]
    results = ranks(2).run(choose_with_cache, folders, spread)
    assert [result[0] for result in results] == ["unfused" if spread else "direct"] * 2
    machine = results[0][3]
    assert (machine.shared_memory, machine.hosts) == (not spread, 1)
    for folder, slow in zip(folders, ("direct", "ring"), strict=True):
        monkeypatch.setenv("XDG_CACHE_HOME", folder)
        times = dict.fromkeys(("unfused", "ring", "direct", "pipelined"), 2.0)
        times["ring" if slow == "direct" else "unfused"] = 1.0
        store.update(machine, measured(spec(64), **times))
    for result in ranks(2).run(choose_with_cache, folders, spread):
        assert result[:3] == ("ring", "tuned: 1 ms, unfused 2 ms, 2026-11-21", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", folders[0])
    store.get_table_path(machine).write_bytes(b"{")
    results = ranks(2).run(choose_with_cache, folders, spread)
    assert [result[0] for result in results] == ["unfused" if spread else "direct"] * 2
    assert [result[2] for result in results] == [1, 0]


def warn_on_separate_hosts() -> str:
    with (
        mock.patch.object(store, "load", lambda machine: (Table(), "is ignored")),
        separate_hosts(),
    ):
        group = faults.new_group()
        warnings.simplefilter("error")
        return faults.record_ending(lambda: faults.run_op("all_gather", group)).error


def test_a_warning_without_shared_memory_follows_the_call(ranks: RanksFixture) -> None:
    assert ranks(2).run(warn_on_separate_hosts) == ["RuntimeWarning", ""]


def test_times_on_gpus_depend_on_links_and_libraries(
    cxx_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not depend on the host: `tpkernels tune` runs with a different number of threads than
    torchrun."""
    nvml = str(emulated.build(cxx_cache, "nvml.cpp", "-fPIC", "-shared"))
    monkeypatch.setattr("tpkernels.common.nvml.LIBRARY", nvml)
    monkeypatch.setattr("tpkernels.common.nvml.get_uuid", lambda number: f"GPU-{number}")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))

    def get_machine() -> Machine:
        machine._gpus.cache_clear()
        return this_machine("cuda", 4, 1, True)

    first = get_machine()
    assert first.gpus == "4 GPUs, 0 pairs without NVLink; driver 580.65.06, NCCL 2.27.3"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(99))
    assert get_machine().file_name == first.file_name
    changed = set()
    for name, value in (("EMULATED_DRIVER", "590.1"), ("EMULATED_UNLINKED", "1-3")):
        monkeypatch.setenv(name, value)
        changed.add(get_machine().file_name)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 1))
    changed.add(get_machine().file_name)
    monkeypatch.setattr("tpkernels.common.nvml.LIBRARY", "libmissing.so")
    assert get_machine().gpus == "4 GPUs, links unknown: OSError; driver unknown, NCCL 2.28.1"
    assert len(changed | {first.file_name, get_machine().file_name}) == 5
    machine._gpus.cache_clear()
