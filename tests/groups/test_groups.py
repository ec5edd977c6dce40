"""Ops on every kind of group: subgroups, mesh dims, group names, several groups and threads."""

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
from tests.support.ranked import check_cases, check_job, fresh_group, on_ranks, separate_hosts
from tests.support.tiers import sweep
from tpkernels import groups
from tpkernels.groups import GroupLike
from tpkernels.launch import Ranks
from tpkernels.planning import store
from tpkernels.planning.table import Table
from tpkernels.symm import colocation, host


def reinitialization_job() -> list[str]:
    """Groups and meshes of an earlier initialization are refused, even if their names are in
    use."""
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
    for old in (first, mesh, (mesh, "tp")):
        if rank == 2 and old is first:
            continue  # rank 2 was never a member
        with pytest.raises(ValueError, match="was destroyed"):
            tpkernels.all_reduce(torch.full((3,), 10.0**rank), old)
    return failures + check_cases(one_of_each(3)[:4], second)


def test_groups_of_an_earlier_initialization_are_refused() -> None:
    with Ranks(3) as ranks:
        check_job(ranks, reinitialization_job)


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
    group_likes: list[tuple[GroupLike, dist.ProcessGroup]] = [
        ((mesh, 0), dp),
        (mesh["dp"], dp),
        ((mesh, "tp"), tp),
        ((mesh, 1), tp),
    ]
    failures = []
    for group_like, group in group_likes:
        failures += check_cases(one_of_each(group.size()), group, group_like)
    with pytest.raises(ValueError, match="2 dims"):
        tpkernels.all_reduce(torch.ones(3), mesh)
    return failures


@pytest.mark.parametrize("members", sweep([[(0, 3), (0, 1, 2), (2,)], [(0, 2), (1, 3)]]))
@on_ranks(4)
def test_sub_groups(members: Sequence[Sequence[int]]) -> list[str]:
    """Every rank runs on the subgroups in ``members`` that contain it."""
    subgroups = [dist.new_group(list(ranks)) for ranks in members]
    failures = []
    for group, ranks in zip(subgroups, members, strict=True):
        if dist.get_rank() in ranks:
            assert isinstance(group, dist.ProcessGroup)
            failures += check_cases(one_of_each(len(ranks)), group)
    return failures


class Worker:
    """A thread that runs calls on request, one at a time."""

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
    pair = Worker(group), Worker(group)
    try:
        yield pair
    finally:
        for worker in pair:
            worker._todo.put(0.0)


@on_ranks(2)
def test_threads_whose_calls_cross_are_a_mismatch() -> None:
    """Two threads per rank make equal calls, but on rank 1 they swap the last call."""
    group, rank = faults.new_group(), dist.get_rank()
    with workers(group) as (first, second):
        assert [first(1.0), second(10.0), first(1.0)] == [2.0, 20.0, 2.0]
        got = (second, first)[rank]((10.0, 1.0)[rank])
        assert isinstance(got, tpkernels.CollectiveMismatchError), got
        assert "makes this call on a different thread" in str(got) and got.peer == 1 - rank, got
        assert isinstance(second(1.0), tpkernels.GroupBrokenError)


@on_ranks(2)
def test_threads_that_share_a_group() -> None:
    """Named threads call in the same order on all ranks. Calls of the main thread, of pool workers
    and of threads that Python did not start come in between."""
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
        for _ in pool.map(lambda _: start.wait(), range(2)):  # starts both workers of the pool
            pass
        for call in ((total, foreign), (foreign, total))[rank]:
            in_pool = pool.submit(total, 3.0).result
            assert in_pool() == 6.0 and call(3.0) == 6.0


@pytest.mark.parametrize("autotune", sweep([True, None]))
@on_ranks(2)
def test_threads_make_first_calls(autotune: bool | None) -> list[str]:
    """Two threads on each of two new groups make the same first call simultaneously. Rank 0 reads
    its timing table slowly."""
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
            new_groups = [faults.require_group(dist.new_group()) for _ in range(2)]
            for group in new_groups:
                if autotune is not None:
                    tpkernels.init(group, autotune=autotune)
            start = threading.Barrier(4)
            results = faults.run_concurrently(
                functools.partial(work, g, start) for g in [*new_groups, *new_groups]
            )
            failures += [repr(result) for result in results if result != [2.0] * 40]
            for group in new_groups:
                dist.destroy_process_group(group)
    return failures


@on_ranks(2)
def test_only_the_creating_process_notifies_its_kernels_of_the_end() -> None:
    """A fork does not notify, nor does a group without shared memory."""
    with separate_hosts():
        unshared = faults.new_group()
    shared = faults.new_group()
    with mock.patch.object(host.HostWorkspace, "leave") as leave:
        for group in (unshared, shared):
            groups.get(group.group_name).leave()
        assert leave.call_count == 1

        def child() -> str:
            groups.get(shared.group_name).leave()
            return "told" * (leave.call_count - 1)

        assert faults.run_in_child(child) == "fine"


# With ``-W error`` rank 0 raises the warning only after its peers have stopped waiting for it.


WORLD = 2
LARGE = 1 << 20  # number of elements that requires a larger workspace


@pytest.mark.parametrize("what", ["init", "first op", "growth", "tuning"])
@on_ranks(WORLD)
def test_a_warning_that_is_an_error_leaves_the_group_usable(what: str) -> None:
    """Turn the warning of a call into an error. Only rank 0 raises it, and the next call
    succeeds."""
    group = faults.require_group(dist.new_group())
    calls = {
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
            calls["init"]()
        if what == "growth":
            stack.enter_context(
                mock.patch.object(host, "find_memory_shortage", lambda *_: "simulated")
            )
        if what == "tuning":
            ignored = Table(), "the tuning cache is ignored"
            stack.enter_context(mock.patch.object(store, "load", lambda machine: ignored))
        warnings.simplefilter("error")
        endings = [faults.record_ending(calls[first])]
        endings += [faults.record_ending(calls["op"])]
        result = tpkernels.all_reduce(torch.ones(3), group)
    assert all(ending.seconds < faults.PATIENCE / 2 for ending in endings), endings
    warned = "RuntimeWarning" if dist.get_rank() == 0 else ""
    assert [ending.error for ending in endings] == [warned, ""] and result.sum() == 3.0 * WORLD, (
        endings
    )
