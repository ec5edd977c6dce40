"""``tpkernels.autotune``: time the algorithms of a problem at the first ``auto`` call.

Problem: all ranks must time each algorithm together. If an algorithm fails, on any rank and at any
point, the group must remain usable and all ranks must continue.

Algorithm: the ranks run each algorithm on a second group with a separate workspace
(`Group.make_second_group`) and the inputs of the call: a setup run, then interleaved rounds. After
each run they exchange the times and a failure flag on the real group (`_Tuner._attempt`). The
shortest time counts, because unrelated load only adds time. On CUDA tensors, calls in a CUDA graph
are timed separately: the launch cost on the host must not affect the choice for captured calls.

Failure: a failed call breaks the second group, which notifies the peers. All ranks then reach the
exchange, exclude the algorithm, and continue on a new second group. The process group is shared
with the real group, so an error in an algorithm that uses it is raised.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date, timedelta

import torch
from torch.distributed.distributed_c10d import AllgatherOptions

from tpkernels.algorithms import backends
from tpkernels.common.text import describe_error
from tpkernels.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
    TpkernelsError,
    WorkspaceMemoryError,
)
from tpkernels.groups import GroupLike, get_or_default
from tpkernels.groups.call import Call
from tpkernels.groups.group import TUNING_SECONDS, Group, Tuning
from tpkernels.planning import store
from tpkernels.planning.algorithms import ALGORITHMS
from tpkernels.planning.choose import is_worth_timing
from tpkernels.planning.machine import last_level_cache_bytes, this_machine
from tpkernels.planning.problem import Problem
from tpkernels.planning.table import Measurement
from tpkernels.timing import time_interleaved
from tpkernels.torch_private import all_gather_single

_MAX_ROUNDS = 40
_DROP_RATIO = 1.25  # ratio to the fastest time; slower algorithms are dropped
_REPORT_SECONDS = 2.0
_MAX_FLUSH_BYTES = 256 << 20
_GRAPH_CALLS = 20
_MIN_SECONDS = 1e-8  # lower limit of a call in a graph, after subtraction of the flush time

PlanFunction = Callable[[Group, str], Call]  # (group, algorithm) -> planned call
RunFactory = Callable[[], Callable[[Call], object]]


@contextlib.contextmanager
def autotune(
    group: GroupLike | None = None, *, limit: float = TUNING_SECONDS, save: bool = False
) -> Iterator[None]:
    """Autotune the calls with ``algorithm="auto"`` within the context.

    At the first call of a problem all ranks time the algorithms together. The group uses the
    fastest algorithm from then on. All ranks must enter and leave the context between the same
    calls::

        with tpkernels.autotune(group):
            model(x)  # tunes new problems
        model(x)  # uses the fastest algorithms

    ``tpkernels.init(group, autotune=True)`` autotunes all calls of the group.

    A problem is an op, the dtypes and the shape of the communicated tensor. Row counts within a
    factor of 1.5 share times. The score of an algorithm is the shortest time of the slowest rank,
    with cold caches. Results remain correct: the algorithms run on the inputs of the call (an
    in-place op on a copy), and the call then runs with the fastest algorithm.

    The tuner skips problems with uneven shards, CUDA tensors on gloo, and calls in a traced graph.
    A problem first seen during CUDA graph capture is tuned at its next call outside a capture.

    An algorithm that uses shared memory and fails on any rank is excluded with a warning. An error
    in an algorithm that uses the process group breaks the group, as in any call. If a rank lacks
    memory for the second workspace, for up to 256 MiB to flush the caches, or for the copies, the
    problem is not tuned and the group warns.

    Args:
        group: Process group. None selects the default group.
        limit: Time limit in seconds for a problem. After two runs of each algorithm no round starts
            beyond the limit. ``inf`` disables it. Rank 0 reports on stderr if a problem lasts
            longer than two seconds.
        save: Also add the times to the file of ``tpkernels tune``, for later processes.

    Raises:
        ValueError: ``limit`` is not positive.
    """
    if not limit > 0:
        raise ValueError(f"limit is {limit}; it must be a positive number of seconds")
    tuned_group = get_or_default(group)
    before = tuned_group.planner_inputs.tuning
    tuned_group.use_tuning(Tuning(float(limit), save))
    try:
        yield
    finally:  # `init` may have enabled autotuning within the block
        tuned_group.use_tuning(Tuning() if before is None and tuned_group.autotune else before)


def tune_if_new(
    call: Call,
    tuning: Tuning,
    names: Sequence[str],
    plan: PlanFunction,
    make_run: RunFactory,
    x: torch.Tensor,
) -> bool:
    """Tune the problem of a call over the algorithms ``names`` if it is new. Collective.

    Returns True if the call must be planned again. ``make_run`` returns a function that runs a
    planned call of the op and overwrites no argument.
    """
    group, problem = call.group, call.problem
    if problem.device == "cpu":
        names = [name for name in names if is_worth_timing(problem, name)]
    key = problem.tuning_key
    if key is None or problem.world == 1 or len(names) < 2 or not group.has_times(problem.device):
        return False

    def is_tuned() -> bool:
        """Return True if a problem of similar size was tuned, even if no algorithm was timed."""
        was_tuned = group.planner_inputs.find_failures(problem) is not None
        return was_tuned or group.timing_table(problem.device).has_close_extent(*key)

    if is_tuned() or group.note_capture(x.device):
        return False
    try:
        with group.collective_step():
            if not is_tuned():  # a concurrent thread may have tuned it
                _Tuner(group, problem, plan, x, tuning).tune(names, make_run)
    except BaseException as error:
        if not group.open:  # without shared memory only this notifies the peers
            backends.handle_error(call, error)
        raise
    return True


class _Skipped(Exception):
    """Raised on all ranks: the problem cannot be tuned."""


class _Failed(Exception):
    """Raised on all ranks: exclude algorithm ``args[0]`` for the reason ``args[1]``."""


class _Tuner:
    """Tunes one problem. ``group`` is the real group, whose lock the caller holds."""

    def __init__(
        self, group: Group, problem: Problem, plan: PlanFunction, x: torch.Tensor, tuning: Tuning
    ) -> None:
        self._group, self._problem, self._plan, self._tuning = group, problem, plan, tuning
        self._x, self._timeout = x, group.timeout_on(problem.device)
        # Graph replays by algorithm, or None for eager calls.
        self._replays: dict[str, Callable[[], object]] | None = None
        self._begun = self._reported = time.perf_counter()

    def tune(self, names: Sequence[str], make_run: RunFactory) -> None:
        """Time the algorithms and store the times in the group."""
        group, problem = self._group, self._problem
        assert problem.tuning_key is not None  # checked by the caller
        series, extent = problem.tuning_key
        failures, measured = group.planner_inputs.failures.setdefault((series, extent), {}), []
        try:
            self._prepare(make_run)
            for timed_series in (series, series.captured) if _uses_graphs(self._x) else (series,):
                self._replays = None if timed_series == series else {}
                self._begun = time.perf_counter()
                times = self._time_algorithms(
                    [name for name in names if name not in failures], failures
                )
                ms = {name: 1e3 * min(seconds) for name, seconds in times.items()}
                if ms:
                    measured.append(Measurement(timed_series, extent, ms, date.today().isoformat()))
        except _Skipped as skipped:
            self._warn(f"not tuned: {skipped}")
        if measured:
            group.use_times(problem.device, group.timing_table(problem.device).extended(measured))
            if self._tuning.save and group.rank == 0:
                self._save(measured)

    def _time_algorithms(
        self, names: list[str], failures: dict[str, str]
    ) -> dict[str, list[float]]:
        """Return the seconds of the algorithms, without those that fail.

        Returns {} if fewer than two algorithms remain.
        """
        while len(names) > 1:
            try:
                with self._second_group() as second:
                    return self._time_interleaved(names, second)
            except _Failed as failure:
                failed, reason = failure.args
            if failed == "unfused":  # fails in graphs only; the baseline is missing then
                raise _Skipped(f"'unfused' {reason}")
            names = [name for name in names if name != failed]
            failures[failed] = reason
            self._warn(f"algorithm '{failed}' {reason}")
        return {}

    def _time_interleaved(self, names: Sequence[str], second: Group) -> dict[str, list[float]]:
        """Time the algorithms on the second group. Raises `_Failed` if an algorithm fails."""
        calls: dict[str, Call] = {}

        def plan(name: str) -> tuple[()]:
            calls[name] = self._plan(second, name)
            if self._replays is not None:
                self._replays[name] = self._capture(calls[name])
            return ()

        def sample(name: str) -> float:
            ranks = self._attempt(name, second, lambda: self._time_run(calls[name]), 2)
            assert ranks is not None  # the algorithm is runnable
            if self._group.workspace is None:  # ranks may have no common clock
                return max(end - begin for begin, end in ranks)
            # A late rank does not count against the algorithm: start at the last arrival.
            return max(end for _, end in ranks) - max(begin for begin, _ in ranks)

        runnable = [
            name
            for name in names
            if self._attempt(name, second, functools.partial(plan, name)) is not None
        ]
        if second.usable_bytes != self._group.usable_bytes:  # chunk sizes would differ
            raise _Skipped("not enough memory for a second workspace of the same size")
        if len(runnable) < 2:
            return {}
        for name in runnable:  # warm-up
            sample(name)
        return time_interleaved(
            runnable,
            sample,
            self._elapsed,
            rounds=_MAX_ROUNDS,
            budget=self._tuning.limit,
            min_rounds=1,
            drop_beyond=_DROP_RATIO,
        )

    def _time_run(self, call: Call) -> tuple[float, float]:
        """Run an algorithm with cold caches and return the begin and end times in seconds."""
        if self._replays is None:
            self._flush_buffer.fill_(1)
            begin, end = _time(lambda: self._run(call), self._x.device)
        else:  # subtract the flushes of the graph, which a second graph times
            (begin, end), (flush_begin, flush_end) = (
                _time(self._replays[name], self._x.device)
                for name in (call.plan.algorithm, "flush")
            )
            seconds = (end - begin - (flush_end - flush_begin)) / _GRAPH_CALLS
            begin, end = 0.0, max(seconds, _MIN_SECONDS)
        call.group.check_kernels(call.plan.description)  # reports asynchronous GPU failures
        return begin, end

    def _capture(self, call: Call) -> Callable[[], object]:
        """Return the replay of a graph of calls with cold caches, as between layers of a model."""

        def flush_and_run() -> None:
            self._flush_buffer.fill_(1)
            self._run(call)

        assert self._replays is not None  # checked by the caller
        if "flush" not in self._replays:
            self._replays["flush"] = capture_graph(lambda: self._flush_buffer.fill_(1))
        return capture_graph(flush_and_run)

    def _prepare(self, make_run: RunFactory) -> None:
        """Allocate the buffers of the runs. Raises `_Skipped` on all ranks if a rank fails."""
        reason, problem = "", str(self._problem)
        try:
            self._flush_buffer = _cache_flush_buffer(self._x.device, self._problem.world)
            self._run = make_run()
        except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError on CPUs
            reason = describe_error(error)
        # The exchange has a fixed name, so that ranks with different problems meet here.
        ranks = self._group.exchange("preparing to tune", [problem, reason], self._timeout)
        for rank, (peer_problem, _) in enumerate(ranks):
            if peer_problem != problem:
                raise CollectiveMismatchError(
                    f"rank {self._group.rank} tunes {problem}, but rank {rank} tunes "
                    f"{peer_problem}. The group is broken; create a new group.",
                    peer=rank,
                )
        if any(refusals := [refusal for _, refusal in ranks]):
            raise _Skipped(next(filter(None, refusals)))

    @contextlib.contextmanager
    def _second_group(self) -> Iterator[Group]:
        """Create a second group. If it breaks, the real group remains usable."""
        group = self._group
        try:
            second = group.make_second_group("tuning", self._problem.device)
        except MemoryError as error:
            raise _Skipped(describe_error(error)) from None
        try:
            if second.shared_memory != group.shared_memory:
                raise _Skipped(
                    f"the second workspace has no shared memory: {second.unshared_reason}"
                )
            yield second
        finally:
            if self._replays is not None and second.workspace is not None:
                self._replays.clear()  # no graph uses the workspace any more
                for workspace in second.workspace.cuda_workspaces.values():
                    workspace.used_in_graph = False
            second.close("the end of tuning")

    def _attempt(
        self, name: str, second: Group, run: Callable[[], Sequence[float]], count: int = 0
    ) -> list[list[float]] | None:
        """Run a step of an algorithm on the second group, on all ranks.

        Returns the ``count`` numbers of each rank in rank order, or None if the algorithm cannot
        run. Raises `_Failed` if it fails on any rank. All ranks finish the step before any rank
        continues.
        """
        numbers: Sequence[float] = [0.0] * count
        supported, error, refusal = True, None, ""
        try:
            numbers = run()
        except NotImplementedError:  # on all ranks
            supported = False
        except WorkspaceMemoryError as refused:  # on all ranks
            refusal = describe_error(refused)
        except Exception as failure:  # any error: peers continue without the algorithm
            second.mark_broken(failure)
            if self._group.workspace is None:  # the second group shares the process group
                raise
            error = failure
        try:
            all_numbers = self._exchange_numbers(
                f"times of '{name}'", [float(error is not None), *numbers]
            )
            if any(failed for failed, *_ in all_numbers):
                raise self._failure(name, error)
            if refusal:
                raise _Failed(name, f"cannot allocate its workspace: {refusal}")
        finally:
            error = None  # breaks the reference cycle of the traceback and this frame
        return [peer_numbers for _, *peer_numbers in all_numbers] if supported else None

    def _failure(self, name: str, error: Exception | None) -> Exception:
        """Return `_Failed`, or the error to raise if the algorithm cannot be excluded.

        `_Failed` carries the reason of the rank that failed first. Failures that followed from it
        are ignored.
        """
        first = error is not None and not isinstance(error, TpkernelsError)
        report = {"why": "" if error is None else describe_error(error), "first": first}
        reports = self._group.exchange("exchanging a tuning failure", report, self._timeout)
        culprit = max(
            range(len(reports)),
            key=lambda rank: (reports[rank]["first"], reports[rank]["why"] != "", -rank),
        )
        reason = f"rank {culprit}: {reports[culprit]['why']}"
        if ALGORITHMS[name].needs_shared_memory or self._replays is not None:
            return _Failed(name, f"failed during tuning on {reason}")
        message = f"{self._problem} with algorithm '{name}' failed during tuning on {reason}"
        return error or PeerLostError(message, peer=culprit)

    def _exchange_numbers(self, label: str, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of each rank in rank order. Collective.

        Without shared memory the process group gathers them. With the store, ranks would finish a
        millisecond apart, and the next sample would include that delay.
        """
        group, title = self._group, f"{label} for {self._problem}"
        if group.workspace is not None:
            return group.exchange(title, list(numbers), self._timeout)
        sent = torch.tensor(numbers, dtype=torch.float64, device=torch.device(self._problem.device))
        all_numbers = sent.new_empty(group.world * sent.numel())
        try:
            pg = group.collectives_on(self._problem.device)
            work = all_gather_single(pg, all_numbers, sent, AllgatherOptions())
            work.wait(timedelta(seconds=self._timeout))
        except RuntimeError as error:
            late = "timed out" in str(error).lower()
            raise (CollectiveTimeoutError if late else PeerLostError)(
                f"{title}: rank {group.rank} waited for torch.distributed, timeout "
                f"{self._timeout:g} s: {error}. The group is broken; create a new group."
            ) from error
        gathered: list[list[float]] = all_numbers.view(group.world, -1).tolist()
        return gathered

    def _elapsed(self) -> float:
        """Return the elapsed seconds on the clock of rank 0, and report them. Collective."""
        now = time.perf_counter()
        seconds = self._exchange_numbers("elapsed time", [now - self._begun])[0][0]
        if self._group.rank == 0 and now - self._reported >= _REPORT_SECONDS:
            self._reported = now
            line = f"tpkernels.autotune: {self._problem}: {seconds:.0f} s"
            print(line, file=sys.stderr, flush=True)
        return seconds

    def _warn(self, message: str) -> None:
        if self._group.rank == 0:
            self._group.notices.append(f"{self._problem}: {message}")

    def _save(self, measured: Sequence[Measurement]) -> None:
        group, device = self._group, self._problem.device
        try:
            machine = this_machine(device, group.world, group.hosts, group.shared_memory)
            store.update(machine, *measured)
        except Exception as error:  # includes warnings as errors: rank 0 must not raise alone
            group.notices.append(f"tpkernels.autotune could not save its times: {error}")


def _uses_graphs(x: torch.Tensor) -> bool:
    """Return True if calls are also timed in CUDA graphs."""
    return x.is_cuda


def capture_graph(run: Callable[[], object], calls: int = _GRAPH_CALLS) -> Callable[[], object]:
    """Capture ``calls`` calls of a function, after a setup run, and return the graph replay.

    ``torch.cuda.graph`` is unsuitable. It synchronizes the device, but a pending receive may depend
    on later work of this rank. It also forbids CUDA calls of all other threads, such as a loader.
    """
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(calls):
                run()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph.replay


def _time(run: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Run a function on a device and return the begin and end times in seconds."""
    finish = (
        torch.cuda.current_stream(device).synchronize if device.type == "cuda" else lambda: None
    )
    finish()
    begin = time.perf_counter()
    run()
    finish()
    return begin, time.perf_counter()


def _cache_flush_buffer(device: torch.device, world: int) -> torch.Tensor:
    """Allocate the local share of the buffer that flushes the last-level cache."""
    cache = last_level_cache_bytes(device.type)
    nbytes = 2 * cache if device.type == "cuda" else 2 * cache // world
    return torch.empty(min(nbytes, _MAX_FLUSH_BYTES), dtype=torch.uint8, device=device)
