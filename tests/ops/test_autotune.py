"""``tpkernels.autotune``: problems are autotuned at their first call, on all ranks together."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import itertools
import math
import os
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import emulated, faults
from tests.support.cases import RanksFixture
from tests.support.cuda_rehearsal import ALL_QUALIFIED, SharedMemory, cuda_code_path
from tests.support.ranked import fresh_group, on_ranks, separate_hosts
from tests.support.tiers import covering
from tests.support.tuned import (
    CANDIDATES,
    ROWS,
    WORLD,
    call,
    get_group,
    last_plan,
    watch_algorithms,
)
from tpkernels.algorithms.backends import TABLES
from tpkernels.errors import CollectiveTimeoutError, WorkspaceMemoryError
from tpkernels.groups.group import Group
from tpkernels.ops import planned_calls, tuner
from tpkernels.planning.op_spec import OPS
from tpkernels.planning.table import Table
from tpkernels.symm import streams
from tpkernels.symm.cuda import CudaWorkspace

OP = "matmul_all_reduce"


PLAIN_OPS = [op for op, spec in OPS.items() if spec.gathers or spec.reduces if not spec.scaled]
CASES = [
    (op, fast, fast == "ring")
    for op, fast in itertools.product(PLAIN_OPS, CANDIDATES)
    if fast != "pipelined" or "matmul" in op
]


@pytest.mark.parametrize(("op", "fast", "always"), covering(CASES))
@on_ranks(WORLD)
def test_the_fastest_is_selected_after_one_call(op: str, fast: str, always: bool) -> None:
    slow = {name: 0.01 if name == fast else 0.02 for name in CANDIDATES}
    with fresh_group(autotune=always or None) as group, watch_algorithms(slow) as runs:
        expected = call(op, group, algorithm="unfused")
        runs.clear()
        with contextlib.nullcontext() if always else tpkernels.autotune(group):
            results = [call(op, group)]
        results.append(call(op, group))
        trials = Counter(runs)
        runs.clear()
        results.append(call(op, group))
        plan = last_plan(group)
    assert all(torch.equal(result, expected) for result in results), "other bits"
    needed = {"unfused", "direct", "ring"} | ({"pipelined"} if "matmul" in op else set())
    assert set(trials) == needed and min(trials.values()) >= 4, f"tried {trials}"
    assert plan.algorithm == fast and plan.reason.startswith("tuned: "), (
        f"{plan.algorithm}: {plan.reason}"
    )
    # `direct` may run in the extension, which bypasses the table.
    assert runs in ({}, {fast: 1}), f"afterwards {runs}"


@on_ranks(WORLD)
def test_the_slowest_rank_decides() -> None:
    """`direct` is slow on rank 1 and fast on its peers."""
    seconds = dict.fromkeys(CANDIDATES, 0.02) | {"direct": 0.06 if dist.get_rank() == 1 else 0.01}
    with fresh_group() as group, watch_algorithms(seconds), tpkernels.autotune(group):
        call(OP, group)
        (measured,) = get_group(group).planner_inputs.tables["cpu"].measurements
        outcome = [last_plan(group).algorithm, *sorted(measured.ms.items())]
        outcomes: list[Any] = [None] * WORLD
        dist.all_gather_object(outcomes, outcome)
    agreed = outcomes == [outcome] * WORLD and measured.ms["direct"] > measured.ms["unfused"]
    assert agreed and outcome[0] != "direct", outcomes


@on_ranks(WORLD)
def test_kinds_of_ops() -> list[str]:
    """Scaled matmuls cannot be split, but are tuned. An even all-to-all is tuned, an uneven
    all-to-all is not. An op in place overwrites its input once."""
    failures, rank, one = [], dist.get_rank(), torch.ones([])
    with fresh_group() as group, watch_algorithms() as runs, tpkernels.autotune(group):

        def expect(label: str, right: bool, *names: str) -> None:
            if not right or set(runs) != {*names}:
                failures.append(f"{label}: {right}, {runs}")
            runs.clear()

        x, w = torch.ones(48, 32).to(torch.float8_e4m3fn), torch.ones(40, 32)
        w = w.to(torch.float8_e4m3fn).t()
        out = tpkernels.scaled_matmul_all_reduce(x, w, one, one, group)
        right = torch.equal(out, torch.full_like(out, 32 * WORLD))
        expect("scaled", right, "unfused", "direct")
        columns = [2 + peer for peer in range(WORLD)]
        x = torch.full((4, sum(columns)), float(rank))
        tpkernels.all_to_all(x, group, scatter_sizes=columns)
        expect("uneven", set(runs.values()) == {1}, *runs)
        out = tpkernels.all_to_all(torch.full((4, 2 * WORLD), float(rank)), group)
        right = torch.equal(out[:, 0], torch.arange(float(WORLD)).repeat_interleave(4))
        expect("exchange", right, "unfused", "ring", "direct")
        x = torch.arange(6.0) + rank
        tpkernels.all_reduce_(x, group)
        right = x.tolist() == [3.0 + 3 * i for i in range(6)]
        expect("overwritten", right, "unfused", "ring", "direct")
    return failures


@on_ranks(WORLD)
def test_calls_that_are_not_tuned() -> None:
    """Run calls that must not be tuned: their problem is already tuned, uneven or traced, they name
    an algorithm, or they are outside of the context."""
    with fresh_group(autotune=False) as group, watch_algorithms() as runs:

        def expect(label: str, run: Callable[[], object], max_runs: int) -> None:
            runs.clear()
            run()
            assert sum(runs.values()) <= max_runs, f"{label}: {runs}"

        tuned = functools.partial(tpkernels.autotune, group)
        with tuned():
            call(OP, group)
        with tuned():
            expect("known", lambda: call(OP, group), 1)
            expect("near", lambda: call(OP, group, ROWS + 3), 1)
            expect("asked", lambda: call("all_gather", group, algorithm="unfused"), 1)
            x = torch.ones(2 + dist.get_rank(), 4)
            sizes = [2 + rank for rank in range(WORLD)]
            expect("uneven", lambda: tpkernels.all_gather(x, group, shard_sizes=sizes), 1)
            with torch._subclasses.FakeTensorMode():
                expect("faked", lambda: tpkernels.all_reduce(torch.ones(8), group), 0)
        expect("outside", lambda: call("reduce_scatter", group), 1)

        def backend(graph: Any, example: Any) -> Any:
            assert not sum(runs.values()), f"traced: {runs}"
            return graph.forward

        run = torch.compile(lambda x: tpkernels.all_reduce(x + 1, group) * 2, backend=backend)
        expect("outside, compiled", lambda: run(torch.ones(64)), 1)
        runs.clear()
        with tuned():
            result = run(torch.ones(64))
        assert sum(runs.values()) >= 6 and torch.equal(result, torch.full((64,), 4.0 * WORLD)), runs


@on_ranks(WORLD)
def test_time_limits() -> None:
    """Rounds last at least 0.2 s and the limit is 0.8 s. All ranks follow the clock of rank 0. Rank
    0 reports long tuning."""
    clock = mock.Mock(perf_counter=lambda: (1 + dist.get_rank()) * time.perf_counter())
    with (
        fresh_group() as group,
        watch_algorithms(dict.fromkeys(CANDIDATES, 0.05), sleep=True) as runs,
        mock.patch.object(tuner, "time", clock),
        mock.patch.object(tuner, "_REPORT_SECONDS", 0.1),
        contextlib.redirect_stderr(io.StringIO()) as stderr,
    ):
        began = time.monotonic()
        with tpkernels.autotune(group, limit=0.8):
            call(OP, group)
        seconds, limited = time.monotonic() - began, Counter(runs)
        delays = {"unfused": 0.01, "direct": 0.02, "ring": 0.02}
        with watch_algorithms(delays) as endless, tpkernels.autotune(group, limit=math.inf):
            call("all_gather", group, rows=WORLD)
    assert seconds < 4 and min(limited.values()) >= 2 and sum(limited.values()) <= 4 * 5
    assert endless["unfused"] > 3
    lines, rank = stderr.getvalue().splitlines(), dist.get_rank()
    pattern = r"tpkernels.autotune: matmul_all_reduce\(\[48, 40\].*\): \d s"
    assert bool(lines) == (rank == 0)
    assert rank or re.match(pattern, lines[0]), lines
    for limit in (0.0, -1.0, math.nan):
        message = f"limit is {limit}; it must be a positive number of seconds"
        with pytest.raises(ValueError, match=message), tpkernels.autotune(limit=limit):
            pass


def saved_job(folder: str, blocked: str) -> tuple[bool, list[str]]:
    with mock.patch.dict(os.environ, XDG_CACHE_HOME=folder):
        with fresh_group() as group, tpkernels.autotune(group, save=True):
            call(OP, group)
            tuned = get_group(group).planner_inputs.tables["cpu"].measurements
        with fresh_group() as group:
            loaded = get_group(group).timing_table("cpu").measurements
    with (
        mock.patch.dict(os.environ, XDG_CACHE_HOME=blocked),
        fresh_group() as group,
        tpkernels.autotune(group, save=True),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        call(OP, group)
    same = [(m.series, m.ms) for m in loaded] == [(m.series, m.ms) for m in tuned]
    return same and bool(tuned), [str(warning.message) for warning in caught]


@pytest.mark.thorough
def test_times_are_saved_on_request(ranks: RanksFixture, tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "tpkernels").write_text("a file, not a folder")
    results = ranks(WORLD).run(saved_job, str(tmp_path), str(blocked))
    assert all(same for same, _ in results)
    assert any("autotune could not save its times" in message for message in results[0][1])
    assert not any("save" in message for _, messages in results[1:] for message in messages)


@on_ranks(WORLD)
def test_ranks_without_shared_memory() -> None:
    """Such ranks have neither a common clock nor a second workspace."""
    slow = {"unfused": 0.02, "ring": 0.01}
    with (
        separate_hosts(),
        fresh_group() as group,
        watch_algorithms(slow) as runs,
        tpkernels.autotune(group),
    ):
        right = torch.equal(call(OP, group, algorithm="unfused"), call(OP, group))
        plan = last_plan(group)
    assert right and set(runs) == {"unfused", "ring"}, runs
    assert plan.algorithm == "ring", plan.reason


@pytest.mark.parametrize("shared", [True, False])
@on_ranks(WORLD)
def test_different_problems_are_detected_promptly(shared: bool) -> None:
    with contextlib.nullcontext() if shared else separate_hosts():
        group = faults.new_group()
        with tpkernels.autotune(group):
            rows = ROWS + WORLD * dist.get_rank()
            report = faults.record_report(lambda: call(OP, group, rows), group, [])
    assert report.first.error == "CollectiveMismatchError", report
    assert report.first.seconds < faults.PROMPT, report


@emulated.on_ranks(2)
def test_no_tuning_in_a_capture() -> None:
    """CPU tensors run the code path of CUDA tensors. A problem that is first called in a capture is
    tuned after it."""
    with cuda_code_path() as patch:
        patch.setattr(Group, "uses_gloo", lambda *_: False)
        group = faults.new_group()
        get_group(group).planner_inputs.tables["cuda"] = Table()
        x = torch.full((8, 4), float(dist.get_rank() + 1))
        with tpkernels.autotune(group):
            for captured in (True, False):
                patch.setattr(streams, "is_captured", lambda _, captured=captured: captured)
                result = tpkernels.all_gather(x, group)
                measured = get_group(group).planner_inputs.tables["cuda"].measurements
                assert (
                    bool(measured) != captured and result[:, 0].tolist() == [1.0] * 8 + [2.0] * 8
                ), f"captured {captured}: {measured}"
            tpkernels.all_gather(x, group)
            assert last_plan(group).reason.startswith("tuned: "), last_plan(group).reason


@pytest.mark.parametrize("fault", ["", "no capture", "no memory"])
@emulated.on_ranks(2)
def test_captures_use_times_of_graphs(fault: str) -> None:
    """Eager calls and captured calls have separate timing tables. Qualified algorithms are tuned
    even without a call of `autotune`.

    The graphs of the tuner are destroyed, so the second group keeps no memory for them. ``fault``:
    `unfused` cannot be captured, or `direct` runs out of memory in a call.
    """
    runs: list[str] = []
    leaked: list[object] = []

    def capture_graph(run: Callable[[], object]) -> Callable[[], object]:
        runs.clear()
        run()
        if fault == "no capture" and runs == ["unfused"]:
            raise RuntimeError("operation not permitted when stream is capturing")
        patch.setattr(streams, "is_captured", lambda _: True)
        run()
        patch.setattr(streams, "is_captured", lambda _: False)
        return run

    def timed(self: Any, call: Any) -> Any:
        name, captured = call.plan.algorithm, self._replays is not None
        if captured:
            self._replays[name]()
        return 0.0, 1.0 if (name == "direct") == captured else 2.0

    def count_runs(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(call: Any, *args: Any) -> Any:
            if (fault, name) == ("no memory", "direct") and call.group is get_group(group):
                raise WorkspaceMemoryError("no memory for a larger workspace")
            runs.append(name)
            return function(call, *args)

        return run

    wrapped = {key: count_runs(key[1], function) for key, function in TABLES["cuda"].items()}
    selected = {}
    with cuda_code_path() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(Group, "uses_gloo", lambda *_: False)
        patch.setattr(tuner, "_uses_graphs", lambda _: True)
        patch.setattr(tuner, "capture_graph", capture_graph)
        patch.setattr(tuner._Tuner, "_time_run", timed)
        patch.setattr("tpkernels.algorithms.backends.TABLES", {**TABLES, "cuda": wrapped})
        group = faults.new_group()
        get_group(group).planner_inputs.tables["cuda"] = Table()
        get_group(group)._qualification["cuda"] = ALL_QUALIFIED
        patch.setattr(CudaWorkspace, "_leak", lambda workspace: leaked.append(workspace.device))
        x = torch.full((8, 4), float(dist.get_rank() + 1))
        tpkernels.all_gather(x, group)
        for captured in (False, True, False):
            runs.clear()
            patch.setattr(streams, "is_captured", lambda _, captured=captured: captured)
            result = tpkernels.all_gather(x, group)
            assert result[:, 0].tolist() == [1.0] * 8 + [2.0] * 8
            selected[captured] = list(runs)
        patch.setattr(streams, "is_captured", lambda _: False)
        series = [
            m.series.options for m in get_group(group).planner_inputs.tables["cuda"].measurements
        ]
    expected = {False: ["unfused"], True: ["unfused" if fault else "direct"]}
    expected_series = [(), ("captured",)][: 1 if fault == "no capture" else 2]
    assert selected == expected and series == expected_series and not leaked, (
        selected,
        series,
        leaked,
    )


class LittleMemory(SharedMemory):
    """A nearly full GPU: rank 1 can allocate only small workspaces."""

    @staticmethod
    def empty(nbytes: int, **options: Any) -> torch.Tensor:
        if nbytes > 1 << 16 and dist.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return torch.empty(nbytes, **options)


@emulated.on_ranks(2)
def test_an_algorithm_without_workspace_memory_is_skipped() -> None:
    """The workspace of `direct` cannot grow on a GPU. The call names `direct`, the tuner tries it,
    or the table lists it as the fastest."""
    with cuda_code_path(LittleMemory) as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(Group, "uses_gloo", lambda *_: False)
        group = faults.new_group()
        few, many = (torch.full((n, 4), float(dist.get_rank() + 1)) for n in (8, 8 << 10))

        def gather(x: torch.Tensor, algorithm: str = "auto") -> None:
            result = tpkernels.all_gather(x, group, algorithm=algorithm)
            assert result[:: len(x), 0].tolist() == [1.0, 2.0], f"{algorithm}, {len(x)} rows"

        def require_failure(label: str) -> None:
            failures = list(get_group(group).planner_inputs.failures.values())
            assert len(failures) == 1 and "CUDA out of memory" in failures[0].get("direct", ""), (
                label
            )
            get_group(group).planner_inputs.failures.clear()

        get_group(group).planner_inputs.tables["cuda"] = Table()
        gather(few, "direct")
        for _ in range(2):
            ending = faults.record_ending(lambda: gather(many, "direct"))
            assert (
                ending.error == "WorkspaceMemoryError"
                and "rank 1 cannot allocate" in ending.message
            ), f"named: {ending}"
        gather(few, "direct")
        with tpkernels.autotune(group):
            gather(many)
        [tuned] = get_group(group).planner_inputs.tables["cuda"].measurements
        assert "direct" not in tuned.ms, f"tuned: {tuned}"
        require_failure("tuned")
        ms = {"unfused": 2.0, "direct": 1.0}
        get_group(group).use_times("cuda", Table((replace(tuned, ms=ms),)))
        gather(many)  # tries `direct` first
        gather(many)
        assert (plan := last_plan(group)).algorithm == "unfused", f"again: {plan}"
        require_failure("measured")
        gather(few, "direct")
    is_reported = [
        "'direct' cannot allocate its workspace" in str(warning.message) for warning in caught
    ]
    assert sum(is_reported) == (2 if dist.get_rank() == 0 else 0), is_reported


@pytest.mark.thorough
@on_ranks(WORLD)
def test_tuned_problems_leak_no_resources() -> None:
    """Further tuned problems leave no descriptors, mappings or keys in the store."""
    store = dist.distributed_c10d._get_default_store()

    def count() -> tuple[int, int, int]:
        gc.collect()
        dist.barrier()
        descriptors = len(os.listdir("/proc/self/fd"))
        mappings = Path("/proc/self/maps").read_text().count("memfd")
        usage = descriptors, mappings, store.num_keys()
        dist.barrier()
        return usage

    with fresh_group() as group, watch_algorithms(), tpkernels.autotune(group, limit=0.1):
        counts = []
        for power in range(6):
            tpkernels.all_reduce(torch.ones(100 << power), group)
            counts.append(count())
        assert len(get_group(group).planner_inputs.tables["cpu"].measurements) == 6
    descriptors, mappings, keys = (
        then - now for now, then in zip(counts[1], counts[-1], strict=True)
    )
    assert (descriptors, mappings) == (0, 0) and keys <= 0, keys


@pytest.mark.thorough
@on_ranks(WORLD)
def test_threads_make_the_same_first_call() -> list[str]:
    """Two threads make the same first call. On rank 1, the second thread calls after tuning."""
    with fresh_group() as group, watch_algorithms(), tpkernels.autotune(group, limit=0.3):

        def work(seconds: float) -> None:
            time.sleep(seconds)
            call("all_gather", group)

        late = 1.0 if dist.get_rank() == 1 else 0.0
        results = faults.run_concurrently(
            functools.partial(work, seconds) for seconds in (0.0, late)
        )
    return [repr(result) for result in results if result is not None]


# Failing algorithms, lack of memory, and lost ranks.


FAULTY = 1


@pytest.mark.parametrize(
    ("op", "failing", "late"),
    [
        ("all_gather_matmul", "direct", False),
        ("matmul_reduce_scatter", "pipelined", True),
        (OP, "direct", True),
        ("matmul_all_reduce_rms_norm", "pipelined", False),
    ],
)
@on_ranks(WORLD)
def test_an_algorithm_that_fails_on_one_rank_is_skipped(op: str, failing: str, late: bool) -> None:
    """The algorithm fails in its first run or in a later run. It is skipped for similar numbers of
    rows as well."""
    runs = 0

    def fail(name: str) -> None:
        nonlocal runs
        runs += name == failing
        if name == failing and dist.get_rank() == FAULTY and runs > 3 * late:
            raise MemoryError("no room for the test")

    with fresh_group() as group, watch_algorithms(before=fail) as calls, tpkernels.autotune(group):
        expected = call(op, group, algorithm="ring")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results = [call(op, group), call(op, group)]
        (reason,) = get_group(group).planner_inputs.failures.values()
        assert all(torch.equal(result, expected) for result in results), "other bits"
        assert last_plan(group).algorithm != failing, f"takes '{failing}' all the same"
        calls.clear()
        call(op, group)
        call(op, group, ROWS + WORLD)
        assert not calls[failing] and max(calls.values(), default=0) <= 2, f"tries again {calls}"
    messages = [str(warning.message) for warning in caught]
    expected_warning = (
        f"algorithm '{failing}' failed during tuning on rank {FAULTY}: MemoryError: no room"
    )
    assert (
        list(reason) == [failing]
        and f"algorithm '{failing}' {reason[failing]}" in f"{expected_warning} for the test"
    ), f"left out {reason}"
    assert any(expected_warning in message for message in messages) == (dist.get_rank() == 0), (
        f"warnings {messages}"
    )


@on_ranks(WORLD)
def test_a_single_remaining_algorithm() -> None:
    """One of two algorithms fails, so no times are compared. The default rule would select the
    failed algorithm."""

    def fail(name: str) -> None:
        if name == "direct" and dist.get_rank() == FAULTY:
            raise ValueError("a test")

    two_candidates = mock.patch.object(
        planned_calls, "candidates", lambda *_: ["unfused", "direct"]
    )
    with (
        fresh_group() as group,
        watch_algorithms(before=fail) as runs,
        two_candidates,
        tpkernels.autotune(group),
    ):
        expected = call(OP, group, algorithm="unfused")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = call(OP, group)
        runs.clear()
        second_result = call(OP, group, residual=torch.zeros_like(result))  # needs a new plan
        right = (
            runs == {"unfused": 1}
            and torch.equal(result, expected)
            and torch.equal(second_result, result)
        )
        plan = last_plan(group)
        assert right and plan.algorithm != "direct", f"{runs}, {plan.reason}"


@on_ranks(WORLD)
def test_failures_outside_the_run() -> None:
    """`pipelined` fails in planning on one rank. `direct` fails after the call, like a kernel on a
    GPU."""
    check, implementation = Group.check_kernels, planned_calls.implementation
    for failing in ("pipelined", "direct"):

        def checked(self: Group, message: str, failing: str = failing) -> None:
            if f"[{failing}" in message and failing == "direct" and dist.get_rank() == FAULTY:
                raise CollectiveTimeoutError("of a test")
            check(self, message)

        def planned(problem: Any, plan: Any, failing: str = failing) -> Any:
            if plan.algorithm == failing == "pipelined" and dist.get_rank() == FAULTY:
                raise MemoryError("no room for the test")
            return implementation(problem, plan)

        with (
            fresh_group() as group,
            watch_algorithms(),
            tpkernels.autotune(group),
            mock.patch.object(planned_calls, "implementation", planned),
            mock.patch.object(Group, "check_kernels", checked),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            call(OP, group)
            (failure,) = get_group(group).planner_inputs.failures.values()
            assert list(failure) == [failing] and last_plan(group).algorithm != failing, (
                failing,
                failure,
            )


@pytest.mark.parametrize(
    ("failing", "error"),
    [
        ("unfused", ValueError),
        ("ring", ValueError),
        pytest.param("ring", KeyboardInterrupt, marks=pytest.mark.slow),
    ],
)
@on_ranks(WORLD)
def test_a_failure_in_the_process_group_is_raised_on_all_ranks(
    failing: str, error: type[BaseException]
) -> None:
    """`unfused` uses the process group, and the tuner has no second process group. Ranks without
    shared memory use only the process group."""

    def fail(name: str) -> None:
        if name == failing and dist.get_rank() == FAULTY:
            raise error("a test")

    with separate_hosts() if failing == "ring" else contextlib.nullcontext():
        group, second_group = faults.new_group(), faults.new_group()
        with watch_algorithms(before=fail), tpkernels.autotune(group):
            report = faults.record_report(lambda: call(OP, group), group, [second_group])
    failed = dist.get_rank() == FAULTY
    assert report.first.error == (error.__name__ if failed else "PeerLostError"), report
    assert report.first.seconds < faults.PROMPT, report
    assert report.next_call.error == "GroupBrokenError"
    assert [ending.error for ending in report.other_groups] == [""]


@pytest.mark.parametrize("lacking", ["second", "shares nothing", "scratch"])
@on_ranks(WORLD)
def test_the_default_rule_decides_without_memory(lacking: str) -> None:
    """If the tuner cannot allocate memory, the call uses the default rule."""
    make_second, make_scratch = Group.make_second_group, tuner._cache_flush_buffer

    def no_second(self: Group, *args: Any) -> Group:
        created = make_second(self, *args)
        if lacking == "shares nothing":
            created.workspace = None
            return created
        created.close("a test")
        raise MemoryError("no room for the test")

    def no_scratch(*args: Any) -> torch.Tensor:
        if dist.get_rank() == FAULTY:
            raise RuntimeError("not enough memory")
        return make_scratch(*args)

    patch = mock.patch.object(Group, "make_second_group", no_second)
    if lacking == "scratch":
        patch = mock.patch.object(tuner, "_cache_flush_buffer", no_scratch)
    with fresh_group() as group, watch_algorithms() as runs, tpkernels.autotune(group), patch:
        expected = call(OP, group, algorithm="unfused")
        runs.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results = [call(OP, group) for _ in range(2)]
    assert set(runs) <= {"direct"}, runs
    assert all(torch.equal(result, expected) for result in results), "bits"
    assert any("not tuned: " in str(warning.message) for warning in caught) == (
        dist.get_rank() == 0
    ), f"{[str(warning.message) for warning in caught]}"
