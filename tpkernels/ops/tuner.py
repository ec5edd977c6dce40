"""``tpkernels.autotune``: time the algorithms of a problem when ``auto`` first meets it.

Problem: every algorithm must be timed by all ranks together. An algorithm that fails, on any rank
and at any point, must leave the group usable and no rank behind.

Algorithm: the ranks run each algorithm on a second group with its own workspace
(`Group.make_second_group`), with the inputs of the call: once to set it up, then in interleaved
rounds. After each run they exchange their times, and whether the run failed, on the real group
(`_Tuner._attempt`). The shortest time counts, because other work on the machine only adds to it. On
CUDA tensors calls in a graph are timed as well, into a series of their own: what a launch costs the
host must not decide about captured calls.

Failure: a call that fails breaks the second group, and that group's peers are told, as in any
group. So all ranks reach the exchange, leave the algorithm out, and start again on a new second
group. There is only one process group, so an error in an algorithm that uses it is raised.
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
from tpkernels.common.text import of_error
from tpkernels.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
    TpkernelsError,
    WorkspaceMemoryError,
)
from tpkernels.groups import GroupLike, named_or_default
from tpkernels.groups.call import Call
from tpkernels.groups.group import TUNING_SECONDS, Group, Tuning
from tpkernels.planning import store
from tpkernels.planning.algorithms import ALGORITHMS
from tpkernels.planning.choose import is_worth_trying
from tpkernels.planning.machine import last_level_cache_bytes, this_machine
from tpkernels.planning.problem import Problem
from tpkernels.planning.table import Measurement
from tpkernels.timing import time_interleaved
from tpkernels.torch_private import all_gather_single

_MAX_ROUNDS = 40
_CLEARLY_SLOWER = 1.25  # than the fastest
_REPORT_SECONDS = 2.0
_MAX_FLUSH_BYTES = 256 << 20
_GRAPH_CALLS = 20
_MIN_SECONDS = 1e-8  # of a call in a graph, if its time is lost in that of the flush

PlanOn = Callable[[Group, str], Call]  # (group, algorithm) -> planned call
MakeRun = Callable[[], Callable[[Call], object]]


@contextlib.contextmanager
def autotune(
    group: GroupLike | None = None, *, limit: float = TUNING_SECONDS, save: bool = False
) -> Iterator[None]:
    """Time the algorithms of a problem when ``algorithm="auto"`` first meets it within the
    context, on all ranks together, and use the fastest for the life of the group. All ranks enter
    and leave the context between the same calls::

        with tpkernels.autotune(group):
            model(x)  # tunes what it meets
        model(x)

    ``tpkernels.init(group, autotune=True)`` does it for all calls. Results are right while tuning:
    the algorithms run on the call's inputs (on a copy of an input that the op overwrites), and the
    call then runs with the fastest. The shortest time of the slowest rank counts, with cold caches.
    A problem is an op, its dtypes and the shape of the tensor that is communicated; row counts
    within a factor of 1.5 share their times. Problems with uneven shards, CUDA tensors that gloo
    moves, and calls in a traced graph are not tuned. A problem first met in the capture of a CUDA
    graph is tuned when it is met again.

    An algorithm that reads its peers' memory and fails on any rank is left out with a warning. An
    error in an algorithm that uses the process group breaks the group, as in any call. If a rank
    lacks memory for the second workspace, for up to 256 MiB to overwrite the caches, or for the
    copies, nothing is tuned, with a warning.

    Args:
        group: the process group; None for the default one.
        limit: seconds after which no further round of a problem starts, after two runs of each
            algorithm; inf for none. Rank 0 reports on stderr when a problem takes longer than two
            seconds.
        save: also add the times to the file of `tpkernels tune`, for later processes.

    Raises:
        ValueError: ``limit`` is not positive.
    """
    if not limit > 0:
        raise ValueError(f"limit is {limit}; it must be a positive number of seconds")
    found = named_or_default(group)
    before = found.measured.tuning
    found.use_tuning(Tuning(float(limit), save))
    try:
        yield
    finally:  # `init` may have turned it on within the block
        found.use_tuning(Tuning() if before is None and found.autotune else before)


def tune_if_new(
    call: Call,
    tuning: Tuning,
    names: Sequence[str],
    plan: PlanOn,
    make_run: MakeRun,
    x: torch.Tensor,
) -> bool:
    """Tune the problem of a call by the algorithms ``names`` if nothing was measured for it; return
    whether to plan the call again. Collective. ``make_run`` makes a function that runs a planned
    call of the op and overwrites no argument."""
    group, problem = call.group, call.problem
    if problem.device == "cpu":
        names = [name for name in names if is_worth_trying(problem, name)]
    key = problem.tuning_key
    if key is None or problem.world == 1 or len(names) < 2 or not group.has_times(problem.device):
        return False

    def is_known() -> bool:
        """Return whether a problem of nearly this size was tuned before, even if no algorithm could
        be timed."""
        was_tuned = group.measured.failures_of(problem) is not None
        return was_tuned or group.tuned(problem.device).near(*key)

    if is_known() or group.note_capture(x.device):
        return False
    try:
        with group.together():
            if not is_known():  # another thread was first
                _Tuner(group, problem, plan, x, tuning).tune(names, make_run)
    except BaseException as error:
        if not group.open:  # between ranks that share no memory nothing else tells the others
            backends.failed(call, error)
        raise
    return True


class _Skipped(Exception):
    """Raised on all ranks: the problem cannot be tuned."""


class _Failed(Exception):
    """Raised on all ranks: leave out algorithm ``args[0]``, for the reason ``args[1]``."""


class _Tuner:
    """Tunes one problem. ``group`` is the real group, whose lock the caller holds."""

    def __init__(
        self, group: Group, problem: Problem, plan: PlanOn, x: torch.Tensor, tuning: Tuning
    ) -> None:
        self._group, self._problem, self._plan, self._tuning = group, problem, plan, tuning
        self._x, self._timeout = x, group.timeout_on(problem.device)
        self._replays: dict[str, Callable[[], object]] | None = None  # by algorithm, in graphs
        self._begun = self._reported = time.perf_counter()

    def tune(self, names: Sequence[str], make_run: MakeRun) -> None:
        """Time the algorithms and make the group use the times."""
        group, problem = self._group, self._problem
        assert problem.tuning_key is not None  # the caller has looked
        series, extent = problem.tuning_key
        failures, measured = group.measured.failures.setdefault((series, extent), {}), []
        try:
            self._prepare(make_run)
            for each in (series, series.captured) if _takes_graphs(self._x) else (series,):
                self._replays = None if each == series else {}
                self._begun = time.perf_counter()
                times = self._times([name for name in names if name not in failures], failures)
                ms = {name: 1e3 * min(seconds) for name, seconds in times.items()}
                if ms:
                    measured.append(Measurement(each, extent, ms, date.today().isoformat()))
        except _Skipped as skipped:
            self._warn(f"not tuned: {skipped}")
        if measured:
            group.use_times(problem.device, group.tuned(problem.device).extended(measured))
            if self._tuning.save and group.rank == 0:
                self._save(measured)

    def _times(self, names: list[str], failures: dict[str, str]) -> dict[str, list[float]]:
        """Return the seconds of the algorithms; leave out those that fail. {} if fewer than two
        are left."""
        while len(names) > 1:
            try:
                with self._second_group() as second:
                    return self._race(names, second)
            except _Failed as failure:
                name, why = failure.args
            if name == "unfused":  # in graphs: there is nothing to compare with
                raise _Skipped(f"'unfused' {why}")
            names = [each for each in names if each != name]
            failures[name] = why
            self._warn(f"algorithm '{name}' {why}")
        return {}

    def _race(self, names: Sequence[str], second: Group) -> dict[str, list[float]]:
        """Time the algorithms on the second group. `_Failed` if one of them failed."""
        calls: dict[str, Call] = {}

        def plan(name: str) -> tuple[()]:
            calls[name] = self._plan(second, name)
            if self._replays is not None:
                self._replays[name] = self._captured(calls[name])
            return ()

        def sample(name: str) -> float:
            ranks = self._attempt(name, second, lambda: self._timed(calls[name]), 2)
            assert ranks is not None  # it can run
            if self._group.workspace is None:  # ranks without a common clock
                return max(end - begin for begin, end in ranks)
            # A rank that comes late is no fault of the algorithm: count from the last arrival.
            return max(end for _, end in ranks) - max(begin for begin, _ in ranks)

        runnable = [
            name
            for name in names
            if self._attempt(name, second, functools.partial(plan, name)) is not None
        ]
        if second.usable_bytes != self._group.usable_bytes:  # other steps than on the real group
            raise _Skipped("not enough memory for a second workspace of the same size")
        if len(runnable) < 2:
            return {}
        for name in runnable:  # a warm-up
            sample(name)
        return time_interleaved(
            runnable,
            sample,
            self._elapsed,
            rounds=_MAX_ROUNDS,
            budget=self._tuning.limit,
            min_rounds=1,
            drop_beyond=_CLEARLY_SLOWER,
        )

    def _timed(self, call: Call) -> tuple[float, float]:
        """Run an algorithm once with cold caches; return when it began and ended."""
        if self._replays is None:
            self._flush_buffer.fill_(1)
            begin, end = _times_of(lambda: self._run(call), self._x.device)
        else:  # the flushes in the graph are timed separately
            (begin, end), (flush_begin, flush_end) = (
                _times_of(self._replays[name], self._x.device)
                for name in (call.plan.algorithm, "flush")
            )
            seconds = (end - begin - (flush_end - flush_begin)) / _GRAPH_CALLS
            begin, end = 0.0, max(seconds, _MIN_SECONDS)
        call.group.check_kernels(call.plan.text)  # a failure on a GPU shows only now
        return begin, end

    def _captured(self, call: Call) -> Callable[[], object]:
        """Return the replay of a graph of calls, with cold caches as between a model's weights."""

        def flush_and_run() -> None:
            self._flush_buffer.fill_(1)
            self._run(call)

        assert self._replays is not None  # the caller has looked
        if "flush" not in self._replays:
            self._replays["flush"] = graph_of(lambda: self._flush_buffer.fill_(1))
        return graph_of(flush_and_run)

    def _prepare(self, make_run: MakeRun) -> None:
        """Allocate what the runs need; `_Skipped` on all ranks if a rank cannot."""
        why, text = "", str(self._problem)
        try:
            self._flush_buffer = _cache_flush_buffer(self._x.device, self._problem.world)
            self._run = make_run()
        except (MemoryError, RuntimeError) as error:  # torch has no class for the CPU's
            why = of_error(error)
        # Not named after the problem: ranks with different ones must meet here.
        ranks = self._group.exchange("preparing to tune", [text, why], self._timeout)
        for rank, (other, _) in enumerate(ranks):
            if other != text:
                raise CollectiveMismatchError(
                    f"rank {self._group.rank} tunes {text}, but rank {rank} tunes {other}. "
                    "The group is broken; create a new group.",
                    peer=rank,
                )
        if any(refusals := [refusal for _, refusal in ranks]):
            raise _Skipped(next(filter(None, refusals)))

    @contextlib.contextmanager
    def _second_group(self) -> Iterator[Group]:
        """Make a second group, whose failure leaves the real one usable."""
        group = self._group
        try:
            second = group.make_second_group("tuning", self._problem.device)
        except MemoryError as error:
            raise _Skipped(of_error(error)) from None
        try:
            if second.shared_memory != group.shared_memory:
                raise _Skipped(
                    f"the second workspace has no shared memory: {second.why_not_shared}"
                )
            yield second
        finally:
            if self._replays is not None and second.workspace is not None:
                self._replays.clear()  # no graph can be replayed: the workspace may go
                for space in second.workspace.on_gpus.values():
                    space.recorded = False
            second.close("the end of tuning")

    def _attempt(
        self, name: str, second: Group, run: Callable[[], Sequence[float]], count: int = 0
    ) -> list[list[float]] | None:
        """Run a step of an algorithm on the second group, on all ranks. Return the ``count``
        numbers of each rank, in rank order, or None if the algorithm cannot run. `_Failed` if it
        fails on any rank. No rank continues before all have left the step."""
        numbers: Sequence[float] = [0.0] * count
        supported, error, refusal = True, None, ""
        try:
            numbers = run()
        except NotImplementedError:  # on all ranks
            supported = False
        except WorkspaceMemoryError as refused:  # on all ranks
            refusal = of_error(refused)
        except Exception as failure:  # of any kind: the others continue without the algorithm
            second.mark_broken(failure)
            if self._group.workspace is None:  # its calls go through the one process group
                raise
            error = failure
        try:
            everyone = self._exchange_numbers(
                f"times of '{name}'", [float(error is not None), *numbers]
            )
            if any(failed for failed, *_ in everyone):
                raise self._failure(name, error)
            if refusal:
                raise _Failed(name, f"cannot allocate its workspace: {refusal}")
        finally:
            error = None  # its traceback holds this frame, and the frames that failed
        return [theirs for _, *theirs in everyone] if supported else None

    def _failure(self, name: str, error: Exception | None) -> Exception:
        """Return `_Failed` with the reason of the rank that failed first, not of a rank that its
        failure has stopped; or the error to raise, if the algorithm cannot be left out."""
        first = error is not None and not isinstance(error, TpkernelsError)
        mine = {"why": "" if error is None else of_error(error), "first": first}
        reports = self._group.exchange("exchanging a tuning failure", mine, self._timeout)
        culprit = max(
            range(len(reports)),
            key=lambda rank: (reports[rank]["first"], reports[rank]["why"] != "", -rank),
        )
        why = f"rank {culprit}: {reports[culprit]['why']}"
        if ALGORITHMS[name].needs_shared_memory or self._replays is not None:
            return _Failed(name, f"failed during tuning on {why}")
        text = f"{self._problem} with algorithm '{name}' failed during tuning on {why}"
        return error or PeerLostError(text, peer=culprit)

    def _exchange_numbers(self, what: str, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of each rank, in rank order. Collective. Between ranks that share no
        memory the process group gathers them: ranks leave the store a millisecond apart, which the
        next sample would count."""
        group, text = self._group, f"{what} for {self._problem}"
        if group.workspace is not None:
            return group.exchange(text, list(numbers), self._timeout)
        sent = torch.tensor(numbers, dtype=torch.float64, device=torch.device(self._problem.device))
        everyone = sent.new_empty(group.world * sent.numel())
        try:
            work = all_gather_single(group.pg, everyone, sent, AllgatherOptions())
            work.wait(timedelta(seconds=self._timeout))
        except RuntimeError as error:
            late = "timed out" in str(error).lower()
            raise (CollectiveTimeoutError if late else PeerLostError)(
                f"{text}: rank {group.rank} waited for torch.distributed, timeout "
                f"{self._timeout:g} s: {error}. The group is broken; create a new group."
            ) from error
        gathered: list[list[float]] = everyone.view(group.world, -1).tolist()
        return gathered

    def _elapsed(self) -> float:
        """Return the seconds so far, by rank 0's clock, which reports them. Collective."""
        now = time.perf_counter()
        seconds = self._exchange_numbers("elapsed time", [now - self._begun])[0][0]
        if self._group.rank == 0 and now - self._reported >= _REPORT_SECONDS:
            self._reported = now
            text = f"tpkernels.autotune: {self._problem}: {seconds:.0f} s"
            print(text, file=sys.stderr, flush=True)
        return seconds

    def _warn(self, text: str) -> None:
        if self._group.rank == 0:
            self._group.notices.append(f"{self._problem}: {text}")

    def _save(self, measured: Sequence[Measurement]) -> None:
        group, device = self._group, self._problem.device
        try:
            machine = this_machine(device, group.world, group.hosts, group.shared_memory)
            store.update(machine, *measured)
        except Exception as error:  # a warning, too, may be one: rank 0 alone must not raise it
            group.notices.append(f"tpkernels.autotune could not save its times: {error}")


def _takes_graphs(x: torch.Tensor) -> bool:
    """Return whether calls are also timed in CUDA graphs."""
    return x.is_cuda


def graph_of(run: Callable[[], object], calls: int = _GRAPH_CALLS) -> Callable[[], object]:
    """Run a function once, which sets it up, and return the replay of a graph of ``calls`` calls.

    ``torch.cuda.graph`` would wait for the whole device, where a receive that was posted before may
    need what this rank does next, and forbid other threads, such as a loader's, calls of CUDA."""
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


def _times_of(run: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Run a function on a device; return when it began and ended."""
    finish = (
        torch.cuda.current_stream(device).synchronize if device.type == "cuda" else lambda: None
    )
    finish()
    begin = time.perf_counter()
    run()
    finish()
    return begin, time.perf_counter()


def _cache_flush_buffer(device: torch.device, world: int) -> torch.Tensor:
    """Allocate this rank's share of the buffer that flushes the last-level cache."""
    cache = last_level_cache_bytes(device.type)
    nbytes = 2 * cache if device.type == "cuda" else 2 * cache // world
    return torch.empty(min(nbytes, _MAX_FLUSH_BYTES), dtype=torch.uint8, device=device)
