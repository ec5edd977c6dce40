"""Concurrent `tpkernels tune` runs: no measurement is lost, and none waits forever."""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests.planning.test_tuning import measured, spec
from tests.planning.test_tuning_store import MACHINE
from tests.support.cases import RanksFixture
from tpkernels import cache
from tpkernels.planning import store
from tpkernels.planning.choose import NOTHING_TUNED

UPDATES = 25


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tpkernels"


def update_often(home: str) -> None:
    """Each rank adds its own cases one by one, concurrently with the others."""
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": home}):
        dist.barrier()
        for i in range(UPDATES):
            store.update(MACHINE, measured(spec(1 + i, n=512 * (1 + dist.get_rank())), direct=1.0))


def test_updates_of_two_processes_are_all_kept(ranks: RanksFixture, folder: Path) -> None:
    ranks(2).run(update_often, str(folder.parent))
    kept = {(one.extent, one.other) for one in store.load_or_warn(MACHINE).measurements}
    assert kept == {(1 + i, 512 * n) for i in range(UPDATES) for n in (1, 2)}


def test_an_update_replaces_the_same_case() -> None:
    one, other = measured(spec(1), direct=1.0), measured(spec(2), direct=1.0)
    path, table = store.update(MACHINE, one, other)
    assert path == store.path_for(MACHINE)
    assert table.measurements == (one, other)
    newer = replace(one, ms={"direct": 2.0})
    assert store.update(MACHINE, newer)[1].measurements == (other, newer)
    assert store.load_or_warn(MACHINE).measurements == (other, newer)


def test_a_lock_that_is_never_given_back_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_LOCK_SECONDS", 0.2)
    store.update(MACHINE, measured(spec(1), direct=1.0))
    lock = store.path_for(MACHINE).with_suffix(".lock")
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        begin = time.monotonic()
        with pytest.raises(TimeoutError, match=f"another process has held {lock} for 0.2 s"):
            store.update(MACHINE, measured(spec(2), direct=1.0))
        assert 0.2 <= time.monotonic() - begin < 5
    assert len(store.update(MACHINE, measured(spec(3), direct=1.0))[1].measurements) == 2


def test_one_at_a_time_has_the_lock(folder: Path) -> None:
    folder.mkdir(0o700)
    path = folder / "file.lock"
    with cache.locked(path, seconds=0), pytest.raises(TimeoutError), cache.locked(path, seconds=0):
        pass
    assert not path.exists()
    with cache.locked(path, seconds=0):
        assert path.exists()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_lock_that_was_removed_in_between_is_not_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    """The last holder removes the file after this process has opened it; a new one is created."""
    folder.mkdir(0o700)
    path, flock, first = folder / "file.lock", fcntl.flock, iter([True])

    def late(handle: int, how: int) -> None:
        if next(first, False):
            path.unlink()
            if replaced:
                path.touch()
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with cache.locked(path, seconds=1), pytest.raises(TimeoutError), cache.locked(path, seconds=0):
        pass


def test_what_fails_under_the_lock_gives_it_back(folder: Path) -> None:
    """The table stays as it was."""
    store.update(MACHINE, measured(spec(1), direct=1.0))
    full = mock.patch.object(store, "replace_file", side_effect=OSError("disk full"))
    with full, pytest.raises(OSError, match="disk full"):
        store.update(MACHINE, measured(spec(2), direct=1.0))
    assert len(store.update(MACHINE, measured(spec(3), direct=1.0))[1].measurements) == 2


def test_a_link_in_the_place_of_the_lock_is_not_followed(folder: Path) -> None:
    folder.mkdir(0o700)
    store.path_for(MACHINE).with_suffix(".lock").symlink_to(folder / "victim")
    with pytest.raises(OSError, match="symbolic link"):
        store.update(MACHINE, measured(spec(1), direct=1.0))
    assert not (folder / "victim").exists()
    assert store.load_or_warn(MACHINE) == NOTHING_TUNED
