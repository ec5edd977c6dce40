"""Warm calls of `direct` and `fused` on the code path of CUDA tensors: which launches a planned
call keeps, and what makes it bind them again. Launches of `fused` do nothing, or run under Triton's
interpreter."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import emulated, faults
from tests.support.cuda_rehearsal import FUSED_OPS, pretending, space_of
from tests.support.faults import Ending
from tests.support.ranked import fresh_group, functions_called, on_ranks
from tests.support.tiers import sweep
from tpkernels import _C, groups
from tpkernels.algorithms import backends
from tpkernels.groups.call import Call
from tpkernels.ops import planned_calls

# Functions of Python in a warm call, those of Triton's launcher included.
MOST_FUNCTIONS = {"all_gather_matmul": 58, "matmul_reduce_scatter": 47, "matmul_all_reduce": 42}
MOST_OF_DIRECT = 45


@contextlib.contextmanager
def rehearsed() -> Iterator[tuple[Any, list[Any]]]:
    """A group's calls on the way of CUDA tensors; the launches, which do nothing."""
    from tests.support.fake_triton import launching
    from tpkernels.kernels import configs

    launches: list[Any] = []
    with pretending() as patch, launching(launches), configs.assuming(90, 132):
        patch.setattr(configs, "INTERPRETED", False)
        yield patch, launches


def call_of(op: str, group: dist.ProcessGroup, rows: int = 32) -> Callable[[], Any]:
    x = torch.ones(rows, 64, dtype=torch.bfloat16)
    w = torch.ones(48, 64, dtype=torch.bfloat16).t()
    return functools.partial(getattr(tpkernels, op), x, w, group, algorithm="fused")


@pytest.mark.parametrize("op", sweep(FUSED_OPS))
@on_ranks(2)
def test_a_warm_call_only_launches(op: str) -> None:
    """Nothing of what a cold one does, and few functions of Python."""
    with rehearsed() as (patch, launches):
        call = call_of(op, faults.new_group())
        call()
        ran: list[str] = []
        run = backends.run
        patch.setattr(backends, "run", lambda *given: ran.append("run") or run(*given))
        patch.setattr(f"tpkernels.kernels.{op}.prepare", lambda *_: ran.append("prepare"))
        before = len(launches)
        call()
        with functions_called() as called:
            call()
        count = len(called) - 2  # without the two that end the block
        assert len(launches) > before and not ran, ran
        assert count <= MOST_FUNCTIONS[op], count


@emulated.on_ranks(2)
def test_a_warm_call_of_direct_only_launches() -> None:
    """Nothing is checked or laid out again, and the results are those of a cold call."""
    x, w, norm = torch.ones(4, 8), torch.ones(8, 16), torch.ones(16)
    with pretending() as patch, fresh_group() as group:
        calls = [
            functools.partial(op, *given, group, algorithm="direct")
            for op, given in (
                (tpkernels.all_gather, [x]),
                (tpkernels.reduce_scatter, [x]),
                (tpkernels.all_reduce, [x]),
                (tpkernels.matmul_all_reduce, [x, w]),
                (tpkernels.matmul_all_reduce_rms_norm, [x, w, norm]),
            )
        ]
        cold = [call() for call in calls]
        for name in ("all_gather", "reduce_scatter", "all_reduce", "normed_all_reduce"):
            patch.delattr(f"tpkernels.cuda.prepare_{name}")
        for call, before in zip(calls, cold, strict=True):
            with functions_called() as called:
                after = call()
            torch.testing.assert_close(after, before, rtol=0, atol=0)
            assert len(called) - 2 <= MOST_OF_DIRECT, called


def test_an_alarm_reads_the_words_that_it_watches() -> None:
    """And no others: their memory may be gone."""
    alarm, words = _C.calls.Alarm(), torch.zeros(2, dtype=torch.int64)
    first, second = (word.data_ptr() for word in words)
    alarm.watch(first)
    alarm.watch(second)
    assert not alarm.rings()
    words.fill_(1)
    assert alarm.rings()
    alarm.unwatch(first)
    assert alarm.rings()
    alarm.unwatch(second)
    assert not alarm.rings()
    alarm.raised = True
    assert alarm.rings()


@on_ranks(2)
def test_calls_are_bound_anew_when_the_workspace_changes() -> None:
    """Launches have the workspace and the timeout that hold when they are made."""
    with rehearsed() as (_, launches):
        group = faults.new_group()
        workspace = faults.workspace_of(group)
        small, large = (call_of("matmul_reduce_scatter", group, rows) for rows in (32, 4096))
        small()
        memory = space_of(group)
        first = memory.current
        for change in (
            lambda: None,
            large,
            lambda: workspace.set_timeouts(9.0, 7.0),
            lambda: workspace.set_chaos(seed=3, max_delay_us=5),
        ):
            change()
            small()
            *_, space, _, _, timeout_ns, seed, _, _ = launches[-1][2]
            now = memory.current
            assert space is now.argument and (timeout_ns, seed) == (now.timeout_ns, now.seed)
        assert memory.current is not first and memory.current.seed == 3


def killed_job() -> list[Ending]:
    """No kernel runs that could notice: the thread that watches does."""
    with rehearsed():
        group = faults.new_group()
        call = call_of("matmul_reduce_scatter", group)
        call()
        dist.barrier()
        if group.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        until = time.monotonic() + faults.PROMPT
        while not (first := faults.ending_of(call)).error and time.monotonic() < until:
            time.sleep(0.05)
        return [first, faults.ending_of(call)]


def test_a_warm_call_finds_that_a_peer_is_lost() -> None:
    with faults.watched_ranks(2) as ranks:
        told = faults.values(faults.collect(ranks, killed_job), 1)[0]
        assert [each.error for each in told] == ["PeerLostError", "GroupBrokenError"], told


@on_ranks(2)
def test_torchs_flag_makes_a_warm_call_be_planned_anew() -> None:
    """The call that finds the change plans for itself, and the next one for all that follow: the
    numerics of what was planned in each of the calls, as torch's flag changes."""
    with rehearsed() as (patch, _):
        group = faults.new_group()
        patch.setattr("tpkernels.groups.group.Group.uses_gloo", lambda *_: False)
        patch.setattr("tpkernels.groups.group.Group.has_times", lambda *_: False)
        call, found = call_of("matmul_all_reduce", group), [""] * 6
        plan, run, ran = planned_calls._plan_call, backends.run, set[int]()
        for at, flag in enumerate((False, False, True, True, True, False)):

            def note(*given: Any, at: int = at, **named: Any) -> Call:
                made = plan(*given, **named)
                found[at] = made.problem.numerics
                return made

            patch.setattr(planned_calls, "_plan_call", note)
            patch.setattr(backends, "run", lambda *given, at=at: ran.add(at) or run(*given))
            torch.use_deterministic_algorithms(flag)
            call()
    assert found == ["vendor", "", "ordered", "ordered", "", "vendor"], found
    assert not ran & {1, 4}, ran


@pytest.mark.parametrize("op", sweep(FUSED_OPS))
@on_ranks(2, fixture="interpreting")
def test_operands_of_any_layout(op: str) -> None:
    """Calls with one key whose operands lie otherwise each time."""
    with pretending():
        group = faults.new_group()
        call = functools.partial(getattr(tpkernels, op), group=group, algorithm="fused")
        for turn in range(2):
            x, w = torch.arange(20.0).view(4, 5), torch.arange(35.0).view(5, 7)
            xs = x, x.t().contiguous().t(), torch.cat([x, x], 1)[:, :5]
            ws = w, w.t().contiguous().t(), torch.cat([w, w], 1)[:, :7]
            for i, (own, factor) in enumerate(zip(xs, ws, strict=True)):
                got = call(own + turn, factor) if i < 2 else call(own, factor)
                want = (x + turn if i < 2 else x) @ w
                whole = torch.cat([want] * 2) if "gather" in op else 2 * want
                if "scatter" in op:
                    whole = whole[2 * group.rank() :][:2]
                assert torch.equal(got, whole), (turn, i)
        (planned,) = groups.get(group.group_name).planned_calls()
        assert len(planned.kept) >= 2, "bound for one layout only"
