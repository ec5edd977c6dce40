"""``tpkernels.autotune``: problems are timed on the spot, on all ranks together."""

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
from tests.support.cuda_rehearsal import ALL_QUALIFIED, SharedMemory, pretending
from tests.support.ranked import apart, fresh_group, on_ranks
from tests.support.tiers import covering
from tests.support.tuned import ROWS, WAYS, WORLD, call, own, plan_of, watched
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
    for op, fast in itertools.product(PLAIN_OPS, WAYS)
    if fast != "pipelined" or "matmul" in op
]


@pytest.mark.parametrize(("op", "fast", "always"), covering(CASES))
@on_ranks(WORLD)
def test_the_fastest_is_known_after_one_call(op: str, fast: str, always: bool) -> None:
    slow = {name: 0.01 if name == fast else 0.02 for name in WAYS}
    with fresh_group(autotune=always or None) as group, watched(slow) as made:
        expected = call(op, group, algorithm="unfused")
        made.clear()
        with contextlib.nullcontext() if always else tpkernels.autotune(group):
            results = [call(op, group)]
        results.append(call(op, group))
        tried = Counter(made)
        made.clear()
        results.append(call(op, group))
        plan = plan_of(group)
    assert all(torch.equal(result, expected) for result in results), "other bits"
    needed = {"unfused", "direct", "ring"} | ({"pipelined"} if "matmul" in op else set())
    assert set(tried) == needed and min(tried.values()) >= 4, f"tried {tried}"
    assert plan.algorithm == fast and plan.reason.startswith("tuned: "), (
        f"{plan.algorithm}: {plan.reason}"
    )
    # What `direct` does in the extension does not pass through the table.
    assert made in ({}, {fast: 1}), f"afterwards {made}"


@on_ranks(WORLD)
def test_the_slowest_rank_decides() -> None:
    """`direct` is fast on all ranks but one."""
    seconds = dict.fromkeys(WAYS, 0.02) | {"direct": 0.06 if dist.get_rank() == 1 else 0.01}
    with fresh_group() as group, watched(seconds), tpkernels.autotune(group):
        call(OP, group)
        (measured,) = own(group).measured.tables["cpu"].measurements
        found = [plan_of(group).algorithm, *sorted(measured.ms.items())]
        everyone: list[Any] = [None] * WORLD
        dist.all_gather_object(everyone, found)
    alike = everyone == [found] * WORLD and measured.ms["direct"] > measured.ms["unfused"]
    assert alike and found[0] != "direct", everyone


@on_ranks(WORLD)
def test_kinds_of_ops() -> list[str]:
    """Scaled products are not split, and are tuned all the same. An even all-to-all is tuned, one
    that is not split evenly is not. What an op overwrites is overwritten once."""
    failures, rank, one = [], dist.get_rank(), torch.ones([])
    with fresh_group() as group, watched() as made, tpkernels.autotune(group):

        def expect(what: str, right: bool, *names: str) -> None:
            if not right or set(made) != {*names}:
                failures.append(f"{what}: {right}, {made}")
            made.clear()

        x, w = torch.ones(48, 32).to(torch.float8_e4m3fn), torch.ones(40, 32)
        w = w.to(torch.float8_e4m3fn).t()
        out = tpkernels.scaled_matmul_all_reduce(x, w, one, one, group)
        right = torch.equal(out, torch.full_like(out, 32 * WORLD))
        expect("scaled", right, "unfused", "direct")
        columns = [2 + each for each in range(WORLD)]
        x = torch.full((4, sum(columns)), float(rank))
        tpkernels.all_to_all(x, group, scatter_sizes=columns)
        expect("uneven", set(made.values()) == {1}, *made)
        out = tpkernels.all_to_all(torch.full((4, 2 * WORLD), float(rank)), group)
        right = torch.equal(out[:, 0], torch.arange(float(WORLD)).repeat_interleave(4))
        expect("exchange", right, "unfused", "ring", "direct")
        x = torch.arange(6.0) + rank
        tpkernels.all_reduce_(x, group)
        right = x.tolist() == [3.0 + 3 * i for i in range(6)]
        expect("overwritten", right, "unfused", "ring", "direct")
    return failures


@on_ranks(WORLD)
def test_what_is_not_tuned() -> None:
    """What is known, uneven, traced, asked for, or met outside the context."""
    with fresh_group(autotune=False) as group, watched() as made:

        def expect(what: str, run: Callable[[], object], most: int) -> None:
            made.clear()
            run()
            assert sum(made.values()) <= most, f"{what}: {made}"

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
            assert not sum(made.values()), f"traced: {made}"
            return graph.forward

        run = torch.compile(lambda x: tpkernels.all_reduce(x + 1, group) * 2, backend=backend)
        expect("outside, compiled", lambda: run(torch.ones(64)), 1)
        made.clear()
        with tuned():
            got = run(torch.ones(64))
        assert sum(made.values()) >= 6 and torch.equal(got, torch.full((64,), 4.0 * WORLD)), made


@on_ranks(WORLD)
def test_a_limit_on_time_and_none() -> None:
    """Rounds of 0.2 s and more, and a limit of 0.8. All ranks go by rank 0's clock, which reports
    what takes long."""
    clock = mock.Mock(perf_counter=lambda: (1 + dist.get_rank()) * time.perf_counter())
    with (
        fresh_group() as group,
        watched(dict.fromkeys(WAYS, 0.05), sleep=True) as made,
        mock.patch.object(tuner, "time", clock),
        mock.patch.object(tuner, "_REPORT_SECONDS", 0.1),
        contextlib.redirect_stderr(io.StringIO()) as written,
    ):
        began = time.monotonic()
        with tpkernels.autotune(group, limit=0.8):
            call(OP, group)
        seconds, within = time.monotonic() - began, Counter(made)
        other = {"unfused": 0.01, "direct": 0.02, "ring": 0.02}
        with watched(other) as endless, tpkernels.autotune(group, limit=math.inf):
            call("all_gather", group, rows=WORLD)
    assert seconds < 4 and min(within.values()) >= 2 and sum(within.values()) <= 4 * 5
    assert endless["unfused"] > 3
    lines, rank = written.getvalue().splitlines(), dist.get_rank()
    where = r"tpkernels.autotune: matmul_all_reduce\(\[48, 40\].*\): \d s"
    assert bool(lines) == (rank == 0)
    assert rank or re.match(where, lines[0]), lines
    for limit in (0.0, -1.0, math.nan):
        text = f"limit is {limit}; it must be a positive number of seconds"
        with pytest.raises(ValueError, match=text), tpkernels.autotune(limit=limit):
            pass


def saved_job(folder: str, blocked: str) -> tuple[bool, list[str]]:
    with mock.patch.dict(os.environ, XDG_CACHE_HOME=folder):
        with fresh_group() as group, tpkernels.autotune(group, save=True):
            call(OP, group)
            kept = own(group).measured.tables["cpu"].measurements
        with fresh_group() as group:
            read = own(group).tuned("cpu").measurements
    with (
        mock.patch.dict(os.environ, XDG_CACHE_HOME=blocked),
        fresh_group() as group,
        tpkernels.autotune(group, save=True),
        warnings.catch_warnings(record=True) as given,
    ):
        warnings.simplefilter("always")
        call(OP, group)
    same = [(one.series, one.ms) for one in read] == [(one.series, one.ms) for one in kept]
    return same and bool(kept), [str(each.message) for each in given]


@pytest.mark.thorough
def test_the_times_are_saved_if_asked_for(ranks: RanksFixture, tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "tpkernels").write_text("a file, not a folder")
    told = ranks(WORLD).run(saved_job, str(tmp_path), str(blocked))
    assert all(same for same, _ in told)
    assert any("autotune could not save its times" in text for text in told[0][1])
    assert not any("save" in text for _, texts in told[1:] for text in texts)


@on_ranks(WORLD)
def test_ranks_that_share_no_memory() -> None:
    """They have neither one clock nor a second workspace."""
    slow = {"unfused": 0.02, "ring": 0.01}
    with apart(), fresh_group() as group, watched(slow) as made, tpkernels.autotune(group):
        right = torch.equal(call(OP, group, algorithm="unfused"), call(OP, group))
        plan = plan_of(group)
    assert right and set(made) == {"unfused", "ring"}, made
    assert plan.algorithm == "ring", plan.reason


@pytest.mark.parametrize("shared", [True, False])
@on_ranks(WORLD)
def test_ranks_with_different_problems_find_out_at_once(shared: bool) -> None:
    with contextlib.nullcontext() if shared else apart():
        group = faults.new_group()
        with tpkernels.autotune(group):
            rows = ROWS + WORLD * dist.get_rank()
            found = faults.report_of(lambda: call(OP, group, rows), group, [])
    assert found.first.error == "CollectiveMismatchError", found
    assert found.first.seconds < faults.PROMPT, found


@emulated.on_ranks(2)
def test_nothing_is_tuned_in_a_capture() -> None:
    """CPU tensors on the way of CUDA tensors. What is met in a capture is tuned after it."""
    with pretending() as patch:
        patch.setattr(Group, "uses_gloo", lambda *_: False)
        group = faults.new_group()
        own(group).measured.tables["cuda"] = Table()
        x = torch.full((8, 4), float(dist.get_rank() + 1))
        with tpkernels.autotune(group):
            for captured in (True, False):
                patch.setattr(streams, "is_captured", lambda _, captured=captured: captured)
                got = tpkernels.all_gather(x, group)
                measured = own(group).measured.tables["cuda"].measurements
                assert bool(measured) != captured and got[:, 0].tolist() == [1.0] * 8 + [2.0] * 8, (
                    f"captured {captured}: {measured}"
                )
            tpkernels.all_gather(x, group)
            assert plan_of(group).reason.startswith("tuned: "), plan_of(group).reason


@pytest.mark.parametrize("fault", ["", "no capture", "no memory"])
@emulated.on_ranks(2)
def test_captures_go_by_times_of_graphs(fault: str) -> None:
    """Eager calls and those in graphs have tables of their own; without being asked, where
    algorithms are qualified. Nothing of the second group is kept for graphs, which are gone.
    ``fault``: `unfused` cannot be captured, or `direct` has no memory when it is called."""
    made: list[str] = []
    kept: list[object] = []

    def graph_of(run: Callable[[], object]) -> Callable[[], object]:
        made.clear()
        run()
        if fault == "no capture" and made == ["unfused"]:
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

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(call: Any, *args: Any) -> Any:
            if (fault, name) == ("no memory", "direct") and call.group is own(group):
                raise WorkspaceMemoryError("no memory for a larger workspace")
            made.append(name)
            return function(call, *args)

        return run

    wrapped = {key: counted(key[1], function) for key, function in TABLES["cuda"].items()}
    taken = {}
    with pretending() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(Group, "uses_gloo", lambda *_: False)
        patch.setattr(tuner, "_takes_graphs", lambda _: True)
        patch.setattr(tuner, "graph_of", graph_of)
        patch.setattr(tuner._Tuner, "_timed", timed)
        patch.setattr("tpkernels.algorithms.backends.TABLES", {**TABLES, "cuda": wrapped})
        group = faults.new_group()
        own(group).measured.tables["cuda"] = Table()
        own(group)._qualification["cuda"] = ALL_QUALIFIED
        patch.setattr(CudaWorkspace, "_keep", lambda workspace: kept.append(workspace.device))
        x = torch.full((8, 4), float(dist.get_rank() + 1))
        tpkernels.all_gather(x, group)
        for captured in (False, True, False):
            made.clear()
            patch.setattr(streams, "is_captured", lambda _, captured=captured: captured)
            got = tpkernels.all_gather(x, group)
            assert got[:, 0].tolist() == [1.0] * 8 + [2.0] * 8
            taken[captured] = list(made)
        patch.setattr(streams, "is_captured", lambda _: False)
        series = [one.series.options for one in own(group).measured.tables["cuda"].measurements]
    expected = {False: ["unfused"], True: ["unfused" if fault else "direct"]}
    known = [(), ("captured",)][: 1 if fault == "no capture" else 2]
    assert taken == expected and series == known and not kept, (taken, series, kept)


class LittleMemory(SharedMemory):
    """Rank 1 has memory for a few workspaces of a page or two, as on a GPU that is nearly full."""

    @staticmethod
    def empty(nbytes: int, **options: Any) -> torch.Tensor:
        if nbytes > 1 << 16 and dist.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return torch.empty(nbytes, **options)


@emulated.on_ranks(2)
def test_a_workspace_without_memory_is_left_out() -> None:
    """A call on GPUs whose workspace cannot grow: named, measured to be fastest, and tuned."""
    with pretending(LittleMemory) as patch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        patch.setattr(Group, "uses_gloo", lambda *_: False)
        group = faults.new_group()
        few, many = (torch.full((n, 4), float(dist.get_rank() + 1)) for n in (8, 8 << 10))

        def gather(x: torch.Tensor, algorithm: str = "auto") -> None:
            got = tpkernels.all_gather(x, group, algorithm=algorithm)
            assert got[:: len(x), 0].tolist() == [1.0, 2.0], f"{algorithm}, {len(x)} rows"

        def left_out(how: str) -> None:
            found = list(own(group).measured.failures.values())
            assert len(found) == 1 and "CUDA out of memory" in found[0].get("direct", ""), how
            own(group).measured.failures.clear()

        own(group).measured.tables["cuda"] = Table()
        gather(few, "direct")
        for _ in range(2):
            ending = faults.ending_of(lambda: gather(many, "direct"))
            assert (
                ending.error == "WorkspaceMemoryError" and "rank 1 cannot allocate" in ending.text
            ), f"named: {ending}"
        gather(few, "direct")
        with tpkernels.autotune(group):
            gather(many)
        [tuned] = own(group).measured.tables["cuda"].measurements
        assert "direct" not in tuned.ms, f"tuned: {tuned}"
        left_out("tuned")
        ms = {"unfused": 2.0, "direct": 1.0}
        own(group).use_times("cuda", Table((replace(tuned, ms=ms),)))
        gather(many)  # by `direct` first
        gather(many)
        assert (plan := plan_of(group)).algorithm == "unfused", f"again: {plan}"
        left_out("measured")
        gather(few, "direct")
    told = ["'direct' cannot allocate its workspace" in str(warning.message) for warning in warned]
    assert sum(told) == (2 if dist.get_rank() == 0 else 0), told


@pytest.mark.thorough
@on_ranks(WORLD)
def test_tuned_problems_leave_nothing() -> None:
    """Descriptors, mappings and keys of the store that more tuned problems leave."""
    store = dist.distributed_c10d._get_default_store()

    def count() -> tuple[int, int, int]:
        gc.collect()
        dist.barrier()
        descriptors = len(os.listdir("/proc/self/fd"))
        mappings = Path("/proc/self/maps").read_text().count("memfd")
        found = descriptors, mappings, store.num_keys()
        dist.barrier()
        return found

    with fresh_group() as group, watched(), tpkernels.autotune(group, limit=0.1):
        counts = []
        for power in range(6):
            tpkernels.all_reduce(torch.ones(100 << power), group)
            counts.append(count())
        assert len(own(group).measured.tables["cpu"].measurements) == 6
    descriptors, mappings, keys = (
        then - now for now, then in zip(counts[1], counts[-1], strict=True)
    )
    assert (descriptors, mappings) == (0, 0) and keys <= 0, keys


@pytest.mark.thorough
@on_ranks(WORLD)
def test_threads_make_the_same_first_call() -> list[str]:
    """Two threads make the same first call; on one rank the second comes when it is tuned."""
    with fresh_group() as group, watched(), tpkernels.autotune(group, limit=0.3):

        def work(seconds: float) -> None:
            time.sleep(seconds)
            call("all_gather", group)

        late = 1.0 if dist.get_rank() == 1 else 0.0
        results = faults.together(functools.partial(work, seconds) for seconds in (0.0, late))
    return [repr(result) for result in results if result is not None]


# Algorithms that fail, no memory, and ranks that are lost.


FAULTY = 1


@pytest.mark.parametrize(
    ("op", "way", "late"),
    [
        ("all_gather_matmul", "direct", False),
        ("matmul_reduce_scatter", "pipelined", True),
        (OP, "direct", True),
        ("matmul_all_reduce_rms_norm", "pipelined", False),
    ],
)
@on_ranks(WORLD)
def test_what_fails_on_one_rank_is_left_out(op: str, way: str, late: bool) -> None:
    """An algorithm fails on one rank, in its first run or in a later one. It is not taken for
    nearly as many rows either."""
    runs = 0

    def fail(name: str) -> None:
        nonlocal runs
        runs += name == way
        if name == way and dist.get_rank() == FAULTY and runs > 3 * late:
            raise MemoryError("no room for the test")

    with fresh_group() as group, watched(before=fail) as made, tpkernels.autotune(group):
        expected = call(op, group, algorithm="ring")
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            results = [call(op, group), call(op, group)]
        (reason,) = own(group).measured.failures.values()
        assert all(torch.equal(result, expected) for result in results), "other bits"
        assert plan_of(group).algorithm != way, f"takes '{way}' all the same"
        made.clear()
        call(op, group)
        call(op, group, ROWS + WORLD)
        assert not made[way] and max(made.values(), default=0) <= 2, f"tries again {made}"
    texts = [str(each.message) for each in given]
    why = f"algorithm '{way}' failed during tuning on rank {FAULTY}: MemoryError: no room"
    assert list(reason) == [way] and f"algorithm '{way}' {reason[way]}" in f"{why} for the test", (
        f"left out {reason}"
    )
    assert any(why in text for text in texts) == (dist.get_rank() == 0), f"warnings {texts}"


@on_ranks(WORLD)
def test_only_one_is_left() -> None:
    """One of two algorithms fails, so there is nothing to compare; the rule would take it."""

    def fail(name: str) -> None:
        if name == "direct" and dist.get_rank() == FAULTY:
            raise ValueError("a test")

    two = mock.patch.object(planned_calls, "candidates", lambda *_: ["unfused", "direct"])
    with fresh_group() as group, watched(before=fail) as made, two, tpkernels.autotune(group):
        expected = call(OP, group, algorithm="unfused")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = call(OP, group)
        made.clear()
        again = call(OP, group, residual=torch.zeros_like(got))  # planned anew
        right = made == {"unfused": 1} and torch.equal(got, expected) and torch.equal(again, got)
        plan = plan_of(group)
        assert right and plan.algorithm != "direct", f"{made}, {plan.reason}"


@on_ranks(WORLD)
def test_failures_beside_the_run() -> None:
    """`pipelined` cannot be planned on one rank; a failure of `direct` shows after the call, as
    that of a kernel on a GPU."""
    check, implementation = Group.check_kernels, planned_calls.implementation
    for way in ("pipelined", "direct"):

        def checked(self: Group, text: str, way: str = way) -> None:
            if f"[{way}" in text and way == "direct" and dist.get_rank() == FAULTY:
                raise CollectiveTimeoutError("of a test")
            check(self, text)

        def planned(problem: Any, plan: Any, way: str = way) -> Any:
            if plan.algorithm == way == "pipelined" and dist.get_rank() == FAULTY:
                raise MemoryError("no room for the test")
            return implementation(problem, plan)

        with (
            fresh_group() as group,
            watched(),
            tpkernels.autotune(group),
            mock.patch.object(planned_calls, "implementation", planned),
            mock.patch.object(Group, "check_kernels", checked),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            call(OP, group)
            (left,) = own(group).measured.failures.values()
            assert list(left) == [way] and plan_of(group).algorithm != way, (way, left)


@pytest.mark.parametrize(
    ("way", "error"),
    [
        ("unfused", ValueError),
        ("ring", ValueError),
        pytest.param("ring", KeyboardInterrupt, marks=pytest.mark.slow),
    ],
)
@on_ranks(WORLD)
def test_a_failure_in_the_process_group_is_raised_on_all_ranks(
    way: str, error: type[BaseException]
) -> None:
    """`unfused` goes through the process group, of which there is only one; ranks that share no
    memory have only that."""

    def fail(name: str) -> None:
        if name == way and dist.get_rank() == FAULTY:
            raise error("a test")

    with apart() if way == "ring" else contextlib.nullcontext():
        group, other = faults.new_group(), faults.new_group()
        with watched(before=fail), tpkernels.autotune(group):
            found = faults.report_of(lambda: call(OP, group), group, [other])
    failed = dist.get_rank() == FAULTY
    assert found.first.error == (error.__name__ if failed else "PeerLostError"), found
    assert found.first.seconds < faults.PROMPT, found
    assert found.again.error == "GroupBrokenError"
    assert [each.error for each in found.others] == [""]


@pytest.mark.parametrize("what", ["second", "shares nothing", "scratch"])
@on_ranks(WORLD)
def test_without_memory_the_rule_decides(what: str) -> None:
    """Nothing is tuned where there is no memory for it; the call is made by the rule."""
    second, scratch = Group.make_second_group, tuner._cache_flush_buffer

    def no_second(self: Group, *args: Any) -> Group:
        made = second(self, *args)
        if what == "shares nothing":
            made.workspace = None
            return made
        made.close("a test")
        raise MemoryError("no room for the test")

    def no_scratch(*args: Any) -> torch.Tensor:
        if dist.get_rank() == FAULTY:
            raise RuntimeError("not enough memory")
        return scratch(*args)

    patch = mock.patch.object(Group, "make_second_group", no_second)
    if what == "scratch":
        patch = mock.patch.object(tuner, "_cache_flush_buffer", no_scratch)
    with fresh_group() as group, watched() as made, tpkernels.autotune(group), patch:
        expected = call(OP, group, algorithm="unfused")
        made.clear()
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            got = [call(OP, group) for _ in range(2)]
    assert set(made) <= {"direct"}, made
    assert all(torch.equal(each, expected) for each in got), "bits"
    assert any("not tuned: " in str(each.message) for each in given) == (dist.get_rank() == 0), (
        f"{[str(each.message) for each in given]}"
    )
