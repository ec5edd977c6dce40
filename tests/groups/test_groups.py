"""Ops on every kind of group: subgroups, mesh dims, names, several groups at once, threads."""

from __future__ import annotations

import _thread
import contextlib
import functools
import queue
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

import tpkernels
from tests.support import faults
from tests.support.cases import one_of_each
from tests.support.ranked import apart, check_cases, check_job, fresh_group, on_ranks
from tests.support.tiers import sweep
from tpkernels import groups
from tpkernels.groups import GroupLike
from tpkernels.launch import Ranks
from tpkernels.planning import store
from tpkernels.planning.table import Table
from tpkernels.symm import colocation, host


def after_initialising_again() -> list[str]:
    """Groups and meshes from before are refused, although new groups have their names."""
    store, rank = distributed_c10d._get_default_store(), dist.get_rank()
    first, mesh = dist.new_group([0, 1]), init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    name = mesh.get_group().group_name
    if rank < 2:
        tpkernels.all_reduce(torch.ones(3), first)
    dist.destroy_process_group()
    again = dist.PrefixStore("again", store)
    dist.init_process_group("gloo", store=again, rank=rank, world_size=3)
    second, failures = dist.new_group(), []
    if mesh.get_group().group_name != name or (rank < 2 and first.group_name != second.group_name):
        failures.append("torch gives other names now, and this test shows nothing")
    for group in (second, dist.group.WORLD):
        tpkernels.init(group, timeout=5.0)
    for kept in (first, mesh, (mesh, "tp")):
        if rank == 2 and kept is first:
            continue  # this rank never was in it
        with pytest.raises(ValueError, match="was destroyed"):
            tpkernels.all_reduce(torch.full((3,), 10.0**rank), kept)
    return failures + check_cases(one_of_each(3)[:4], second)


def test_what_was_kept_from_before_another_initialisation() -> None:
    with Ranks(3) as ranks:
        check_job(ranks, after_initialising_again)


@pytest.mark.parametrize("world", sweep([2, 1]))
@on_ranks()
def test_a_group_of_all_ranks() -> list[str]:
    with fresh_group() as group:
        failures = check_cases(one_of_each(group.size()), group, group.group_name)
    world = dist.group.WORLD
    assert world is not None
    return failures + check_cases(one_of_each(world.size()), world)


@on_ranks(4)
def test_dims_of_a_mesh() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
    ways: list[tuple[GroupLike, dist.ProcessGroup]] = [
        ((mesh, 0), dp),
        (mesh["dp"], dp),
        ((mesh, "tp"), tp),
        ((mesh, 1), tp),
    ]
    failures = []
    for way, group in ways:
        failures += check_cases(one_of_each(group.size()), group, way)
    with pytest.raises(ValueError, match="2 dims"):
        tpkernels.all_reduce(torch.ones(3), mesh)
    return failures


@pytest.mark.parametrize("members", sweep([[(0, 3), (0, 1, 2), (2,)], [(0, 2), (1, 3)]]))
@on_ranks(4)
def test_sub_groups(members: Sequence[Sequence[int]]) -> list[str]:
    """Every rank runs on the subgroups in ``members`` that contain it."""
    made = [dist.new_group(list(ranks)) for ranks in members]
    failures = []
    for group, ranks in zip(made, members, strict=True):
        if dist.get_rank() in ranks:
            assert isinstance(group, dist.ProcessGroup)
            failures += check_cases(one_of_each(len(ranks)), group)
    return failures


class Worker:
    """A thread that makes the calls it is told to, one by one."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._todo: queue.SimpleQueue[float] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[float | BaseException] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while value := self._todo.get():
            try:
                total = tpkernels.all_reduce(torch.tensor([value]), self._group)
                self._done.put(total.item())
            except BaseException as error:
                self._done.put(error)

    def __call__(self, value: float) -> float | BaseException:
        self._todo.put(value)
        return self._done.get()


@contextlib.contextmanager
def workers(group: dist.ProcessGroup) -> Iterator[tuple[Worker, Worker]]:
    made = Worker(group), Worker(group)
    try:
        yield made
    finally:
        for worker in made:
            worker._todo.put(0.0)


@on_ranks(2)
def test_threads_whose_calls_cross_are_a_mismatch() -> None:
    """The ranks' threads make equal calls, but the last in another order on rank 1."""
    group, rank = faults.new_group(), dist.get_rank()
    with workers(group) as (first, second):
        assert [first(1.0), second(10.0), first(1.0)] == [2.0, 20.0, 2.0]
        got = (second, first)[rank]((10.0, 1.0)[rank])
        assert isinstance(got, tpkernels.CollectiveMismatchError), got
        assert "makes this call on a different thread" in str(got) and got.peer == 1 - rank, got
        assert isinstance(second(1.0), tpkernels.GroupBrokenError)


@on_ranks(2)
def test_threads_that_share_a_group() -> None:
    """Named threads call in one order on all ranks. Between their calls come those of the main
    thread, of a pool's workers, and of threads that Python did not start."""
    group, rank = faults.new_group(), dist.get_rank()

    def total(value: float) -> float:
        return tpkernels.all_reduce(torch.tensor([value]), group).item()

    def foreign(value: float) -> float:
        done: queue.SimpleQueue[float] = queue.SimpleQueue()
        _thread.start_new_thread(lambda: done.put(total(value)), ())
        return done.get()

    with workers(group) as (first, second), ThreadPoolExecutor(2) as pool:
        for call in (first, second, second, first, total, first):
            assert call(3.0) == 6.0
        for call in (first if rank else total, second, foreign if rank else second):
            assert call(3.0) == 6.0
        start = threading.Barrier(2)
        for _ in pool.map(lambda _: start.wait(), range(2)):  # both workers of the pool
            pass
        for call in ((total, foreign), (foreign, total))[rank]:
            in_pool = pool.submit(total, 3.0).result
            assert in_pool() == 6.0 and call(3.0) == 6.0


@pytest.mark.parametrize("autotune", sweep([True, None]))
@on_ranks(2)
def test_threads_make_first_calls(autotune: bool | None) -> list[str]:
    """Two threads on each of two new groups make the same first call at once. Rank 0 takes a while
    to read the measured times of the machine."""
    load, failures = store.load, list[str]()

    def load_slowly(machine: Any) -> Any:
        time.sleep(0.02)
        return load(machine)

    def work(group: dist.ProcessGroup, start: threading.Barrier) -> list[float]:
        x = torch.ones(40)
        start.wait()
        return tpkernels.all_reduce(x, group).tolist()

    with mock.patch.object(store, "load", load_slowly):
        for _ in range(2):
            made = [faults.group_of(dist.new_group()) for _ in range(2)]
            for group in made:
                if autotune is not None:
                    tpkernels.init(group, autotune=autotune)
            start = threading.Barrier(4)
            results = faults.together(functools.partial(work, g, start) for g in [*made, *made])
            failures += [repr(result) for result in results if result != [2.0] * 40]
            for group in made:
                dist.destroy_process_group(group)
    return failures


@on_ranks(2)
def test_the_process_that_made_a_group_tells_its_kernels_that_it_ends() -> None:
    """And no fork of it; without memory there are none."""
    with apart():
        away = faults.new_group()
    here = faults.new_group()
    with mock.patch.object(host.HostWorkspace, "leave") as told:
        for group in (away, here):
            groups.get(group.group_name).leave()
        assert told.call_count == 1

        def child() -> str:
            groups.get(here.group_name).leave()
            return "told" * (told.call_count - 1)

        assert faults.in_child(child) == "fine"


# Under ``-W error``, rank 0 raises a warning only when its peers no longer wait for it.


WORLD = 2
LARGE = 1 << 20  # elements, for which a workspace must grow


@pytest.mark.parametrize("what", ["init", "first op", "growth", "tuning"])
@on_ranks(WORLD)
def test_a_warning_that_is_an_error_breaks_nothing(what: str) -> None:
    """A call that warns, and the next one."""
    group = faults.group_of(dist.new_group())
    doings = {
        "init": lambda: tpkernels.init(group, faults.PATIENCE, 8 << 20),
        "op": lambda: tpkernels.all_reduce(torch.ones(LARGE), group),
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        first = "init" if what == "init" else "op"
        if what in ("init", "first op"):
            stack.enter_context(
                mock.patch.object(colocation, "unsupported", lambda: "pretends to lack memfds")
            )
        else:
            doings["init"]()
        if what == "growth":
            stack.enter_context(mock.patch.object(host, "short_of_memory", lambda *_: "simulated"))
        if what == "tuning":
            ignored = Table(), "the tuning cache is ignored"
            stack.enter_context(mock.patch.object(store, "load", lambda machine: ignored))
        warnings.simplefilter("error")
        errors = [faults.ending_of(doings[first])]
        errors += [faults.ending_of(doings["op"])]
        result = tpkernels.all_reduce(torch.ones(3), group)
    assert all(one.seconds < faults.PATIENCE / 2 for one in errors), errors
    warned = "RuntimeWarning" if dist.get_rank() == 0 else ""
    assert [one.error for one in errors] == [warned, ""] and result.sum() == 3.0 * WORLD, errors
