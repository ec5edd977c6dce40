"""Warm calls of `direct` and `fused` on the code path of CUDA tensors.

Covers the launches that a planned call caches, and the reasons to bind them again. Launches of
`fused` are empty, or run under the Triton interpreter.
"""

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
from tests.support.cuda_rehearsal import FUSED_OPS, cuda_code_path, get_cuda_workspace
from tests.support.faults import Ending
from tests.support.ranked import fresh_group, functions_called, on_ranks
from tests.support.tiers import sweep
from tpkernels import _C, groups
from tpkernels.algorithms import backends
from tpkernels.groups.call import Call
from tpkernels.ops import planned_calls

# Max Python function calls per warm call, including those of the Triton launcher.
MAX_FUNCTIONS = {"all_gather_matmul": 58, "matmul_reduce_scatter": 47, "matmul_all_reduce": 42}
MAX_DIRECT_FUNCTIONS = 45


@contextlib.contextmanager
def dry_run() -> Iterator[tuple[Any, list[Any]]]:
    """Run calls on the code path of CUDA tensors. Yield their launches, which run no kernel."""
    from tests.support.fake_triton import launching
    from tpkernels.kernels import configs

    launches: list[Any] = []
    with cuda_code_path() as patch, launching(launches), configs.assume_device(90, 132):
        patch.setattr(configs, "INTERPRETED", False)
        yield patch, launches


def make_call(op: str, group: dist.ProcessGroup, rows: int = 32) -> Callable[[], Any]:
    x = torch.ones(rows, 64, dtype=torch.bfloat16)
    w = torch.ones(48, 64, dtype=torch.bfloat16).t()
    return functools.partial(getattr(tpkernels, op), x, w, group, algorithm="fused")


@pytest.mark.parametrize("op", sweep(FUSED_OPS))
@on_ranks(2)
def test_a_warm_call_only_launches(op: str) -> None:
    """A warm call skips planning and preparation, and calls few Python functions."""
    with dry_run() as (patch, launches):
        call = make_call(op, faults.new_group())
        call()
        ran: list[str] = []
        run = backends.run
        patch.setattr(backends, "run", lambda *args: ran.append("run") or run(*args))
        patch.setattr(f"tpkernels.kernels.{op}.prepare", lambda *_: ran.append("prepare"))
        before = len(launches)
        call()
        with functions_called() as called:
            call()
        count = len(called) - 2  # without the 2 calls that end the block
        assert len(launches) > before and not ran, ran
        assert count <= MAX_FUNCTIONS[op], count


@emulated.on_ranks(2)
def test_a_warm_call_of_direct_only_launches() -> None:
    """Compare warm and cold calls.

    Warm calls skip checks and preparation, and return equal results.
    """
    x, w, norm = torch.ones(4, 8), torch.ones(8, 16), torch.ones(16)
    with cuda_code_path() as patch, fresh_group() as group:
        calls = [
            functools.partial(op, *args, group, algorithm="direct")
            for op, args in (
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
            assert len(called) - 2 <= MAX_DIRECT_FUNCTIONS, called


def test_an_alarm_reads_only_watched_flags() -> None:
    """Set two watched flags, then unwatch both.

    The alarm must not read unwatched flags, because their memory may be unmapped.
    """
    alarm, flags = _C.calls.Alarm(), torch.zeros(2, dtype=torch.int64)
    first, second = (flag.data_ptr() for flag in flags)
    alarm.watch(first)
    alarm.watch(second)
    assert not alarm.is_set()
    flags.fill_(1)
    assert alarm.is_set()
    alarm.unwatch(first)
    assert alarm.is_set()
    alarm.unwatch(second)
    assert not alarm.is_set()
    alarm.raised = True
    assert alarm.is_set()


@on_ranks(2)
def test_workspace_changes_rebind_calls() -> None:
    """Change the workspace, its timeouts and its delays between warm calls.

    Each launch uses the current workspace and timeout of the group.
    """
    with dry_run() as (_, launches):
        group = faults.new_group()
        workspace = faults.get_workspace(group)
        small, large = (make_call("matmul_reduce_scatter", group, rows) for rows in (32, 4096))
        small()
        memory = get_cuda_workspace(group)
        first = memory.current
        for change in (
            lambda: None,
            large,
            lambda: workspace.set_timeouts(9.0, 7.0),
            lambda: workspace.set_chaos(seed=3, max_delay_us=5),
        ):
            change()
            small()
            *_, launched, _, _, timeout_ns, seed, _, _ = launches[-1][2]
            now = memory.current
            assert launched is now.argument and (timeout_ns, seed) == (now.timeout_ns, now.seed)
        assert memory.current is not first and memory.current.seed == 3


def killed_job() -> list[Ending]:
    """Kill rank 1. Repeat a call on rank 0 until it reports the loss.

    Kernels do not run, so only the watcher thread can detect it.
    """
    with dry_run():
        group = faults.new_group()
        call = make_call("matmul_reduce_scatter", group)
        call()
        dist.barrier()
        if group.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        until = time.monotonic() + faults.PROMPT
        while not (first := faults.record_ending(call)).error and time.monotonic() < until:
            time.sleep(0.05)
        return [first, faults.record_ending(call)]


def test_a_warm_call_detects_a_lost_peer() -> None:
    with faults.watched_ranks(2) as ranks:
        endings = faults.values(faults.collect(ranks, killed_job), 1)[0]
        assert [ending.error for ending in endings] == ["PeerLostError", "GroupBrokenError"], (
            endings
        )


@on_ranks(2)
def test_the_torch_flag_replans_warm_calls() -> None:
    """Change the deterministic flag between calls and record the planned numerics.

    The first call after a change plans only for itself. The next call plans for all later calls.
    """
    with dry_run() as (patch, _):
        group = faults.new_group()
        patch.setattr("tpkernels.groups.group.Group.uses_gloo", lambda *_: False)
        patch.setattr("tpkernels.groups.group.Group.has_times", lambda *_: False)
        call, numerics_by_call = make_call("matmul_all_reduce", group), [""] * 6
        plan, run, ran = planned_calls._plan_call, backends.run, set[int]()
        for index, flag in enumerate((False, False, True, True, True, False)):

            def record_plan(*args: Any, index: int = index, **kwargs: Any) -> Call:
                planned = plan(*args, **kwargs)
                numerics_by_call[index] = planned.problem.numerics
                return planned

            patch.setattr(planned_calls, "_plan_call", record_plan)
            patch.setattr(backends, "run", lambda *args, index=index: ran.add(index) or run(*args))
            torch.use_deterministic_algorithms(flag)
            call()
    assert numerics_by_call == ["vendor", "", "ordered", "ordered", "", "vendor"], numerics_by_call
    assert not ran & {1, 4}, ran


@pytest.mark.parametrize("op", sweep(FUSED_OPS))
@on_ranks(2, fixture="interpreter_ranks")
def test_operands_of_any_layout(op: str) -> None:
    """Repeat calls with equal cache keys and different memory layouts."""
    with cuda_code_path():
        group = faults.new_group()
        call = functools.partial(getattr(tpkernels, op), group=group, algorithm="fused")
        for iteration in range(2):
            x, w = torch.arange(20.0).view(4, 5), torch.arange(35.0).view(5, 7)
            xs = x, x.t().contiguous().t(), torch.cat([x, x], 1)[:, :5]
            ws = w, w.t().contiguous().t(), torch.cat([w, w], 1)[:, :7]
            for i, (x_layout, w_layout) in enumerate(zip(xs, ws, strict=True)):
                got = call(x_layout + iteration, w_layout) if i < 2 else call(x_layout, w_layout)
                want = (x + iteration if i < 2 else x) @ w
                expected = torch.cat([want] * 2) if "gather" in op else 2 * want
                if "scatter" in op:
                    expected = expected[2 * group.rank() :][:2]
                assert torch.equal(got, expected), (iteration, i)
        (planned,) = groups.get(group.group_name).planned_calls()
        assert len(planned.cache) >= 2, "bound for one layout only"
