"""The torch.distributed backend "tpkernels": results, order, refusals, failures."""

from __future__ import annotations

import contextlib
import gc
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed import _functional_collectives as functional

import tpkernels
from tests.support import faults
from tests.support.ranked import check_job, on_hosts, on_ranks, separate_hosts
from tests.support.tiers import sweep
from tpkernels import groups
from tpkernels.common.cache import replace_file
from tpkernels.groups.c10d import bridge
from tpkernels.launch import Ranks
from tpkernels.symm import host

REALS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
REDUCTIONS: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    ReduceOp.SUM: lambda x: x.sum(0),
    ReduceOp.MIN: lambda x: x.amin(0),
    ReduceOp.MAX: lambda x: x.amax(0),
    ReduceOp.PRODUCT: lambda x: x.prod(0),
}
BITWISE: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
# Elements: none, one, odd, larger than a data buffer of the smallest workspace.
COUNTS = (0, 1, 37, 50_001)


@contextlib.contextmanager
def backend_group(
    timeout: float = faults.PATIENCE, workspace_bytes: int | None = faults.WORKSPACE_BYTES
) -> Iterator[dist.ProcessGroup]:
    """Create a group of all ranks with the backend."""
    group = dist.new_group(backend="tpkernels", timeout=timedelta(seconds=timeout))
    assert group is not None
    if workspace_bytes is not None:
        tpkernels.init(group, timeout=timeout, workspace_bytes=workspace_bytes)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def make_values(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return small integers [world, count], equal on all ranks."""
    generator = torch.Generator().manual_seed(count)
    values = torch.randint(0, 3, (dist.get_world_size(), count), generator=generator)
    return values.to(dtype)


def check_reductions(group: dist.ProcessGroup) -> list[str]:
    rank, failures = group.rank(), list[str]()
    for dtype, count in product((*REALS, *INTEGERS), COUNTS):
        values = make_values(count, dtype)
        reductions = dict[Any, torch.Tensor]()
        for op, reduce in REDUCTIONS.items():
            reductions[op] = reduce(values).to(dtype)
        if dtype in REALS:
            mean = values.to(torch.float64).sum(0) / group.size()
            reductions[ReduceOp.AVG] = mean.to(dtype)
        else:
            for op, combine in BITWISE.items():
                reductions[op] = values[0]
                for row in values[1:]:
                    reductions[op] = combine(reductions[op], row)
        for op, expected in reductions.items():
            x = values[rank].clone()
            dist.all_reduce(x, op, group)
            close = torch.allclose(x.double(), expected.double(), rtol=1e-6, atol=0)
            if not (close if op == ReduceOp.AVG else torch.equal(x, expected)):
                failures.append(f"all_reduce {op} of {count} {dtype}")
    return failures


def check_moves(
    group: dist.ProcessGroup, dtype: torch.dtype, count: int, *, shared: bool = True
) -> list[str]:
    """Run every collective that moves or sums elements, and compare with the values of all
    ranks."""
    rank, world, root = group.rank(), group.size(), group.size() - 1
    values, failures = make_values(count, dtype), list[str]()

    def check(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
        if not torch.equal(got, expected.view(got.shape)):
            failures.append(f"{name} of {count} {dtype} on rank {rank}: {got} not {expected}")

    def empty() -> list[torch.Tensor]:
        return [torch.full_like(values[0], 7) for _ in range(world)]

    outs = empty()
    dist.all_gather(outs, values[rank], group)
    check("all_gather", torch.stack(outs), values)
    out = torch.full_like(values, 7)
    functional_out = functional.all_gather_tensor(values[rank], 0, group)
    check("functional all_gather", functional_out + 0, values)
    group._allgather_base(out, values[rank]).wait()
    check("all_gather of a tensor", out, values)
    x = values[rank].clone()
    dist.broadcast(x, group=group, group_src=root)
    check("broadcast", x, values[root])
    gathered = empty() if rank == root else None
    dist.gather(values[rank], gathered, group=group, group_dst=root)
    if gathered is not None:
        check("gather", torch.stack(gathered), values)
    x = torch.full_like(values[0], 7)
    dist.scatter(x, list(values) if rank == root else None, group=group, group_src=root)
    check("scatter", x, values[rank])
    out = torch.full_like(values, 7)
    dist.all_to_all_single(out.view(-1), values.roll(rank, 0).reshape(-1), group=group)
    check("all_to_all", out, torch.stack([values[(rank - r) % world] for r in range(world)]))
    splits = [r * count for r in range(world)]  # rank r receives r copies of the values
    x = values[rank].repeat(sum(range(world)))
    out = torch.full_like(values, 7)[:, : count * rank if count else 0].reshape(-1)
    received = torch.empty(world * rank * count, dtype=dtype)
    dist.all_to_all_single(received, x, [rank * count] * world, splits, group)
    check("uneven all_to_all", received, values.repeat(1, max(rank, 1))[:, : rank * count])
    if shared:  # gloo refuses
        shards = [torch.full((r + 1,), r, dtype=dtype) for r in range(world)]
        outs = [torch.empty_like(shard) for shard in shards]
        dist.all_gather(outs, shards[rank], group)
        check("uneven all_gather", torch.cat(outs), torch.cat(shards))
    if dtype in REALS:
        total = values.double().sum(0).to(dtype)
        x = values[rank].clone()
        dist.reduce(x, group=group, group_dst=root)
        if shared or rank == root:  # gloo overwrites the inputs of the other ranks
            check("reduce", x, total if rank == root else values[rank])
        x = torch.full_like(values[0], 7)
        dist.reduce_scatter(x, [v + values[rank] for v in values], group=group)
        check("reduce_scatter", x, values[rank] * world + total)
        summed = functional.reduce_scatter_tensor(values.reshape(-1), "sum", 0, group)
        check("functional reduce_scatter", summed + 0, values[rank] * world)
    return failures


@pytest.mark.parametrize("world", sweep([2, 3, 1, 4]))
@on_ranks()
def test_every_collective() -> list[str]:
    with backend_group() as group:
        failures = check_reductions(group)
        for dtype in (*REALS, torch.int64, torch.uint8, torch.bool, torch.complex64):
            failures += check_moves(group, dtype, 37)
        for count in COUNTS:
            failures += check_moves(group, torch.float32, count)
            failures += check_moves(group, torch.int8, count)
    return failures


@on_ranks(2)
def test_every_collective_without_a_compiler() -> list[str]:
    error = bridge.CompileError("refused by a test")
    with mock.patch.object(bridge, "load", side_effect=error), backend_group() as group:
        with pytest.raises(NotImplementedError, match="on meta, but without a C"):
            group.allreduce([torch.ones(3, device="meta")])
        return check_reductions(group) + check_moves(group, torch.float32, 37)


@on_ranks(2)
def test_tensors_that_are_not_contiguous() -> None:
    with backend_group() as group:
        rank = group.rank()
        x = torch.arange(12.0).view(3, 4).t()
        dist.all_reduce(x, group=group)
        assert torch.equal(x, 2 * torch.arange(12.0).view(3, 4).t())
        outs = list(torch.zeros(3, 2).unbind(1))
        dist.all_gather(outs, torch.full((3,), float(rank)), group)
        assert torch.equal(torch.stack(outs), torch.tensor([[0.0] * 3, [1.0] * 3]))
        out = torch.zeros(2, 4).t()
        dist.broadcast(out if rank else torch.arange(8.0).view(4, 2), group=group, group_src=0)
        assert not rank or torch.equal(out, torch.arange(8.0).view(4, 2))


@on_ranks(3)
def test_sums_in_rank_order_are_equal_on_every_rank_and_in_every_run() -> None:
    """A negative control: the order of the ranks changes the bits of these sums."""
    values = torch.randn(3, 100_000, generator=torch.Generator().manual_seed(0))
    expected = values[0] + values[1] + values[2]
    assert not torch.equal(expected, values[2] + values[1] + values[0])
    with backend_group(workspace_bytes=None) as group:
        for _ in range(5):
            x = values[group.rank()].clone()
            dist.all_reduce(x, group=group)
            assert torch.equal(x, expected)
        out = torch.empty(50)
        shards = [v[:150].clone() for v in values]
        dist.reduce_scatter(out, list(shards[group.rank()].split(50)), group=group)
        first = 50 * group.rank()
        assert torch.equal(out, expected[first : first + 50])


# Asynchronous collectives.


@on_ranks(2)
def test_asynchronous_collectives_run_in_order() -> None:
    with backend_group(workspace_bytes=None) as group:
        x = torch.ones(1 << 20)
        works = [dist.all_reduce(x, group=group, async_op=True) for _ in range(6)]
        small = torch.ones(4)
        dist.all_reduce(small, group=group)  # after the pending ones
        assert all(work is not None and work.is_completed() for work in works)
        assert float(small[0]) == 2 and float(x[0]) == 2**6
        work = dist.all_reduce(x, group=group, async_op=True)
        total = tpkernels.all_reduce(torch.ones(4), group)  # an op of the package waits as well
        assert work is not None and work.is_completed() and float(total[0]) == 2
        future = dist.all_reduce(small, group=group, async_op=True).get_future()
        (value,) = future.then(lambda f: f.value()).wait()
        assert value is small or torch.equal(value, small)
        future = dist.broadcast(small, group=group, group_src=0, async_op=True).get_future()
        future.wait()


@on_ranks(2)
def test_collectives_in_callbacks_of_futures() -> None:
    """A callback runs on the thread of the group, while later collectives are pending."""
    with backend_group(workspace_bytes=None) as group:
        dist.barrier(group)
        x = torch.ones(1 << 20)  # slow enough that the callback is set before it has run

        def callback(future: Any) -> torch.Tensor:
            y = torch.ones(3)
            dist.all_reduce(y, group=group)
            z = dist.all_reduce(y, group=group, async_op=True).get_future().wait()[0]
            assert isinstance(z, torch.Tensor)
            return z

        first = [dist.all_reduce(x, group=group, async_op=True) for _ in range(8)]
        last = first[-1]
        assert last is not None
        future = last.get_future().then(callback)
        later = dist.all_reduce(x, group=group, async_op=True)
        assert float(future.wait()[0]) == 4
        assert later is not None
        later.wait()


@on_ranks(2)
def test_collectives_of_a_callback_and_of_another_thread_do_not_cross() -> None:
    """The callback is slow on rank 1. The calls are equal, so crossed calls would not be found."""
    with backend_group(workspace_bytes=None) as group:
        dist.barrier(group)
        y, z = torch.full((3,), 10.0), torch.full((3,), 100.0)

        def callback(future: Any) -> None:
            time.sleep(0.3 * group.rank())
            dist.all_reduce(y, group=group)

        work = dist.all_reduce(torch.ones(1 << 20), group=group, async_op=True)
        assert work is not None
        future = work.get_future().then(callback)
        work.wait()
        time.sleep(0.1 * (1 - group.rank()))
        dist.all_reduce(z, group=group)
        future.wait()
        assert (float(y[0]), float(z[0])) == (20, 200)


@on_ranks(2)
def test_a_callback_cannot_wait_for_a_later_collective() -> None:
    with backend_group(workspace_bytes=None) as group:
        dist.barrier(group)
        works: list[Any] = []
        first = dist.all_reduce(torch.ones(1 << 22), group=group, async_op=True)
        assert first is not None
        future = first.get_future().then(lambda _: works[0].wait())
        works.append(dist.all_reduce(torch.ones(3), group=group, async_op=True))
        with pytest.raises(RuntimeError, match="callback of a future waits for all_reduce"):
            future.wait()
        works[0].wait()


@on_ranks(2)
def test_finalize_waits_for_pending_collectives() -> None:
    with backend_group(workspace_bytes=None) as group:
        dist.barrier(group)
        x = torch.ones(1 << 20)
        works = [dist.all_reduce(x, group=group, async_op=True) for _ in range(5)]
        tpkernels.finalize()
        for work in works:
            assert work is not None
            work.wait()
        assert float(x[0]) == 2**5


@on_ranks(2)
def test_wait_with_a_timeout() -> None:
    with backend_group(workspace_bytes=None) as group:
        x = torch.ones(3)
        if group.rank() == 1:
            time.sleep(0.5)
        work = dist.all_reduce(x, group=group, async_op=True)
        assert work is not None
        if group.rank() == 0:
            assert not work.is_completed()
            with pytest.raises(tpkernels.CollectiveTimeoutError, match="not completed after"):
                work.wait(timedelta(seconds=0.05))
        assert work.wait()
        assert float(x[0]) == 2
        dist.barrier(group)  # the group remains usable


@on_ranks(2)
def test_an_asynchronous_failure_reaches_the_waiter_and_the_future() -> None:
    with backend_group(workspace_bytes=None) as group:
        dist.barrier(group)
        count = 3 + group.rank()
        work = dist.all_reduce(torch.ones(count), group=group, async_op=True)
        assert work is not None
        with pytest.raises(tpkernels.CollectiveMismatchError, match="all_reduce of 3 elements"):
            work.wait()
        with pytest.raises(RuntimeError, match="all_reduce of 4 elements"):
            work.get_future().wait()
        assert work.is_completed() and not work.is_success()
        with pytest.raises(tpkernels.GroupBrokenError):
            dist.barrier(group)


@on_ranks(2)
def test_threads_of_a_rank() -> None:
    """Threads may make equal calls in any order. The results show that no call is torn."""
    with backend_group(workspace_bytes=None) as group:
        dist.barrier(group)

        def reduce() -> None:
            for _ in range(50):
                x = torch.ones(64)
                dist.all_reduce(x, group=group)
                assert float(x[0]) == 2

        assert faults.run_concurrently([reduce] * 3) == [None] * 3


@on_ranks(2)
def test_a_call_that_grows_the_workspace_while_collectives_are_pending() -> None:
    """The call holds the group lock, so it must not wait for the pending collectives."""
    with backend_group(workspace_bytes=None) as group:
        dist.barrier(group)
        state, works = groups.get(group.group_name), []
        grow = host.HostWorkspace.grow

        def grow_late(*args: Any) -> Any:
            if not works:  # a thread starts a collective meanwhile
                works.append(dist.all_reduce(torch.ones(3), group=group, async_op=True))
                assert state.has_pending_calls
            return grow(*args)

        with mock.patch.object(host.HostWorkspace, "grow", grow_late):
            dist.all_reduce(torch.ones(4 << 20), group=group)
        assert works[0].wait()


@on_ranks(2)
def test_the_backend_after_finalize() -> None:
    with backend_group(workspace_bytes=None) as group:
        dist.barrier(group)
        dist.barrier()  # both ranks have returned
        tpkernels.finalize()
        x = torch.ones(3)
        dist.all_reduce(x, group=group)
        assert float(x[0]) == 2


# Refusals and mismatches.


@on_ranks(2)
def test_wrong_arguments_leave_the_group_usable() -> None:
    with backend_group(workspace_bytes=None) as group:
        x = torch.ones(4)
        refusals: list[tuple[type[Exception], str, Callable[[], object]]] = [
            (
                NotImplementedError,
                "cannot reduce torch.float32 with op band",
                lambda: dist.all_reduce(x, ReduceOp.BAND, group),
            ),
            (
                NotImplementedError,
                "cannot reduce torch.int64 with op avg",
                lambda: dist.all_reduce(x.long(), ReduceOp.AVG, group),
            ),
            (
                NotImplementedError,
                "cannot reduce torch.float8",
                lambda: dist.all_reduce(x.to(torch.float8_e5m2), group=group),
            ),
            (
                ValueError,
                "the output has 7 elements, but must have 8",
                lambda: group._allgather_base(torch.empty(7), x),
            ),
            (
                TypeError,
                "output 1 is torch.float64",
                lambda: group.allgather([[x, x.double()]], [x]),
            ),
            (
                ValueError,
                "3 rows, which 2 ranks cannot share",
                lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3), group=group),
            ),
            (
                ValueError,
                r"splits \[1, 1\] must be 2 numbers with the sum 4",
                lambda: dist.all_to_all_single(x, x, [2, 2], [1, 1], group),
            ),
        ]
        for kind, message, call in refusals:
            with pytest.raises(kind, match=message):
                call()
        dist.all_reduce(x, group=group)
        assert float(x[0]) == 2


MISMATCHES: dict[str, tuple[Callable[[Any], object], Callable[[Any], object], tuple[str, ...]]] = {
    "collectives": (
        lambda g: dist.all_reduce(torch.ones(3), group=g),
        lambda g: dist.broadcast(torch.ones(3), group=g, group_src=0),
        ("all_reduce of 3 elements of torch.float32, op sum", "broadcast of 3 elements"),
    ),
    "sizes": (
        lambda g: dist.all_reduce(torch.ones(3), group=g),
        lambda g: dist.all_reduce(torch.ones(4), group=g),
        ("all_reduce of 3 elements", "all_reduce of 4 elements"),
    ),
    "dtypes": (
        lambda g: dist.all_reduce(torch.ones(3), group=g),
        lambda g: dist.all_reduce(torch.ones(3).int(), group=g),
        ("of torch.float32, op sum", "of torch.int32, op sum"),
    ),
    "ops": (
        lambda g: dist.all_reduce(torch.ones(3), ReduceOp.MAX, g),
        lambda g: dist.all_reduce(torch.ones(3), ReduceOp.MIN, g),
        ("op max", "op min"),
    ),
    "roots": (
        lambda g: dist.broadcast(torch.ones(3), group=g, group_src=0),
        lambda g: dist.broadcast(torch.ones(3), group=g, group_src=1),
        ("root 0", "root 1"),
    ),
    "splits": (
        lambda g: dist.all_to_all_single(torch.ones(4), torch.ones(4), [2, 2], [2, 2], g),
        lambda g: dist.all_to_all_single(torch.ones(4), torch.ones(4), [1, 3], [2, 2], g),
        ("rank 0 sends 8 bytes to rank 1, which expects 4 bytes",),
    ),
    "an op of the package": (
        lambda g: dist.all_reduce(torch.ones(3), group=g),
        lambda g: tpkernels.all_gather(torch.ones(3), g),
        ("all_reduce of 3 elements", "all_gather"),
    ),
}


@on_ranks(2)
def test_mismatches_name_both_calls() -> list[str]:
    failures = []
    for name, (first, second, message) in MISMATCHES.items():
        with backend_group() as group:
            tpkernels.all_gather(torch.ones(3), group)
            start = time.monotonic()
            call = (first, second)[group.rank()]
            ending = faults.record_ending(lambda call=call, group=group: call(group))
            found = all(part in ending.message for part in message)
            if ending.error != "CollectiveMismatchError" or not found:
                failures.append(f"{name}: {ending}")
            if time.monotonic() - start > faults.PROMPT:
                failures.append(f"{name}: took {time.monotonic() - start} s")
    return failures


# Groups.


@on_ranks(3)
def test_subgroups_and_reinitialization_of_groups() -> None:
    for _ in range(3):
        pairs = [
            dist.new_group([0, 1], backend="tpkernels"),
            dist.new_group([1, 2], backend="gloo"),
        ]
        for pair in pairs:
            if isinstance(pair, dist.ProcessGroup):  # this rank is a member
                x = torch.ones(5)
                dist.all_reduce(x, group=pair)
                assert float(x[0]) == 2
                dist.all_reduce(x, group=pair, async_op=True).wait()
                assert float(x[0]) == 4
                dist.destroy_process_group(pair)


def default_group_job() -> None:
    """Use the backend for the default group, twice."""
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    for attempt in range(2):
        dist.destroy_process_group()
        prefix = dist.PrefixStore(f"attempt {attempt}", store)
        dist.init_process_group(
            ("cpu:tpkernels,cuda:gloo", "tpkernels")[attempt], store=prefix, rank=rank, world_size=2
        )
        x = torch.ones(3)
        dist.all_reduce(x)
        assert float(x[0]) == 2
        group = dist.group.WORLD
        assert group is not None
        assert group._get_backend(torch.device("cpu")).name() == "tpkernels"
        if attempt == 0:
            assert group._get_backend(torch.device("cuda")).name() == "gloo"
        total = tpkernels.all_reduce(torch.ones(3), group)
        assert float(total[0]) == 2
        total = tpkernels.all_reduce(torch.ones(3), group, algorithm="unfused")
        assert float(total[0]) == 2
        total = tpkernels.all_reduce(torch.ones(3), group, algorithm="ring")
        assert float(total[0]) == 2
        gathered: list[Any] = [None] * 2
        dist.all_gather_object(gathered, {"rank": rank})
        assert gathered == [{"rank": 0}, {"rank": 1}]
        if rank == 0:
            dist.send(torch.arange(3.0), 1, tag=5)
        else:
            received = torch.empty(3)
            assert dist.recv(received, tag=5) == 0
            assert torch.equal(received, torch.arange(3.0))


def test_default_group_and_mixed_devices() -> None:
    with Ranks(2) as ranks:
        check_job(ranks, default_group_job)


def names_job() -> None:
    """Destroyed groups do not use the groups that later have their names."""
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    gc.disable()  # only reference counting frees objects
    for attempt, backend in enumerate(("tpkernels", "gloo", "tpkernels")):
        old = dist.group.WORLD
        assert old is not None
        dist.destroy_process_group()
        prefix = dist.PrefixStore(f"attempt {attempt}", store)
        dist.init_process_group(backend, store=prefix, rank=rank, world_size=2)
        group = dist.group.WORLD
        assert group is not None and group.group_name == old.group_name
        for algorithm in ("direct", "unfused"):
            assert float(tpkernels.all_reduce(torch.ones(3), group, algorithm=algorithm)[0]) == 2
        assert (groups.get(group.group_name).backend is None) == (backend == "gloo")
        if attempt == 1:
            with pytest.raises((tpkernels.GroupBrokenError, ValueError)):
                old.allreduce([torch.ones(3)])


def test_names_of_destroyed_groups() -> None:
    with Ranks(2) as ranks:
        check_job(ranks, names_job)


@on_ranks(2)
def test_no_collective_after_a_shutdown() -> None:
    with backend_group(workspace_bytes=None) as group:
        dist.all_reduce(torch.ones(3), group=group, async_op=True).wait()
        dist.barrier()
        group.abort()
        for is_async in (False, True):
            with pytest.raises(tpkernels.GroupBrokenError, match="has been shut down"):
                dist.all_reduce(torch.ones(3), group=group, async_op=is_async)


# The compiled bridge.


def test_a_damaged_bridge_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(bridge, "_compile", lambda _, __, path: replace_file(path, b"not ELF"))
    with pytest.raises(bridge.CompileError, match="cannot be loaded, and has been removed"):
        bridge._load()
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.parametrize("compiler", ["", "false"])
def test_a_machine_without_a_compiler(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", compiler or "no-such-compiler")
    if not compiler:
        monkeypatch.setenv("PATH", str(tmp_path))
    message = "failed with exit code 1" if compiler else "no C.. compiler was found"
    with pytest.raises(bridge.CompileError, match=message):
        bridge._load()


@on_ranks(2)
def test_the_timeout_of_the_process_group_limits_waits() -> None:
    with backend_group(timeout=0.5, workspace_bytes=None) as group:
        dist.barrier(group)
        assert groups.get(group.group_name).timeout == 0.5
        group._get_backend(torch.device("cpu")).set_timeout(timedelta(seconds=0.25))
        assert groups.get(group.group_name).timeout == 0.25
        if group.rank() == 0:
            with pytest.raises(tpkernels.CollectiveTimeoutError, match="barrier"):
                dist.barrier(group)
        else:
            time.sleep(0.6)
            with pytest.raises(tpkernels.TpkernelsError):
                for _ in range(2):  # rank 0 has signalled the first barrier
                    dist.barrier(group)


@pytest.mark.parametrize("hosts", ["AB", "AAB", "AABB"])
def test_groups_that_span_hosts(hosts: str, ranks: Any) -> None:
    check_job(ranks(len(hosts)), hosts_job, hosts)


def hosts_job(hosts: str) -> list[str]:
    between = separate_hosts() if len(set(hosts)) == len(hosts) else on_hosts(hosts)
    with between, backend_group() as group:
        failures = check_moves(group, torch.float32, 37, shared=False)
        failures += check_moves(group, torch.int64, 5, shared=False)
        x = torch.full((3,), float(group.rank()))
        works = [dist.all_reduce(x, group=group, async_op=True) for _ in range(2)]
        x_max = torch.full((3,), group.rank())
        dist.all_reduce(x_max, ReduceOp.MAX, group)
        total = sum(range(group.size())) * group.size()
        if float(x[0]) != total or int(x_max[0]) != group.size() - 1:
            failures.append(f"all_reduce across hosts: {x} {x_max}")
        for work in works:
            assert work is not None
            work.wait()
    return failures


# Failures.


@pytest.mark.parametrize("is_async", [False, True])
def test_a_killed_rank_is_named_within_a_second(
    is_async: bool, fresh_ranks: Callable[[int], Ranks]
) -> None:
    ranks = fresh_ranks(3)
    ranks.submit(killed_job, is_async)
    endings = faults.values(faults.collect_without(ranks, 1), 1)
    for ending, killed_at in endings.values():
        assert ending.error == "PeerLostError" and ending.peer == 1, ending
        assert "(pid" in ending.message
        assert ending.time - killed_at < faults.PROMPT
    assert min(ending.time - at for ending, at in endings.values()) < faults.IMMEDIATE


def killed_job(is_async: bool) -> tuple[faults.Ending, float]:
    group = dist.new_group(backend="tpkernels")
    assert group is not None
    dist.barrier(group)
    if group.rank() == 1:
        faults.disturb_now(signal.SIGKILL)

    def reduce() -> None:
        work = dist.all_reduce(torch.ones(3), group=group, async_op=is_async)
        if work is not None:
            work.wait()

    return faults.record_ending(reduce), faults.get_disturbance_time()


@on_ranks(2)
def test_a_fork_cannot_use_the_group() -> None:
    with backend_group(workspace_bytes=None) as group:
        dist.all_reduce(torch.ones(3), group=group, async_op=True).wait()

        def child() -> str:
            with pytest.raises(tpkernels.GroupBrokenError, match="was forked"):
                dist.all_reduce(torch.ones(3), group=group)
            with pytest.raises(tpkernels.GroupBrokenError, match="was forked"):
                dist.all_reduce(torch.ones(3), group=group, async_op=True).wait()
            return "fine"

        assert faults.run_in_child(child) == "fine"
        dist.barrier(group)


@on_ranks(2)
def test_an_interrupt_breaks_the_group_on_all_ranks() -> None:
    with backend_group(workspace_bytes=None) as group:
        dist.barrier(group)
        if group.rank() == 0:
            faults.disturb_later(0.3, signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                dist.barrier(group)
            with pytest.raises(tpkernels.GroupBrokenError, match="KeyboardInterrupt"):
                dist.barrier(group)
        else:
            time.sleep(0.6)
            with pytest.raises(tpkernels.PeerLostError, match="KeyboardInterrupt"):
                for _ in range(2):  # rank 0 has signalled the first barrier
                    dist.barrier(group)


def pending_at_exit_job() -> None:
    """End with collectives that never run, because the other rank has no more calls."""
    group = dist.new_group(backend="tpkernels")
    dist.barrier(group)
    if dist.get_rank() == 0:
        for _ in range(3):
            dist.all_reduce(torch.ones(3), group=group, async_op=True)


def test_a_process_with_pending_collectives_can_exit(
    fresh_ranks: Callable[[int], Ranks],
) -> None:
    faults.values(faults.collect(fresh_ranks(2), pending_at_exit_job))
