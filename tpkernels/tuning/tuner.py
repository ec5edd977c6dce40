"""The tuner: ``auto`` finds out by a `Contest` which algorithm is the fastest for a problem, in the
first calls that are made anyway (`with_trial`), or on the spot (`tune_if_new`:
``tpkernels.autotune``, and `tpkernels tune` for each of its cases).

On the spot

On CUDA tensors twice, one call at a time and as a graph of calls: launches that cost the host more
than the GPU must not decide about what is captured.

Problem: every algorithm must be timed on all ranks alike, and one that fails, on whatever rank and
however far it has come, must leave the group usable and no rank behind.

Algorithm: the ranks plan each algorithm on a second group with a workspace of its own
(`Group.make_second_group`), and make the op's call there, with its own inputs: first each algorithm
once, then the rounds of the contest. After each run they exchange their times on the real group,
and whether it failed (`_Tuner._attempt`).

Failure: a call that fails breaks the second group, which tells the peers, as in any group. So all
ranks come to the exchange, leave the algorithm out, and go on with a new second group. No rank is
in another algorithm by then. There is only one process group, so an error in an algorithm that goes
through it is raised.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import AllgatherOptions

from tpkernels import backends
from tpkernels.call import Call
from tpkernels.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
    TpkernelsError,
    WorkspaceMemoryError,
)
from tpkernels.groups import GroupLike, named_or_default
from tpkernels.groups.group import TUNING_SECONDS, Group, Tuning
from tpkernels.local.packed import columns_of
from tpkernels.local.product import Product
from tpkernels.planning import store
from tpkernels.planning.algorithms import ALGORITHMS
from tpkernels.planning.choose import is_worth_trying
from tpkernels.planning.machine import last_level_cache_bytes, this_machine
from tpkernels.planning.problem import Problem
from tpkernels.planning.table import Measurement
from tpkernels.text import of_error
from tpkernels.tuning.contest import ELIGIBLE, Contest, Sample, Trial, is_eligible

_MOST_TRIALS = 1024  # of one group
_STAGE_ROUNDS = 5
_FEWEST_ROUNDS = 3  # before a candidate drops out
_REPORT_SECONDS = 2.0
_MOST_FLUSH_BYTES = 256 << 20
_GRAPH_CALLS = 20
_FLUSH = ""  # the graph without calls
_SHORTEST_S = 1e-8  # of a call whose time is lost in that of the flush

PlanOn = Callable[[Group, str], Call]  # (group, algorithm) -> planned call
MakeRun = Callable[[], Callable[[Call], object]]


@contextlib.contextmanager
def autotune(
    group: GroupLike | None = None, *, limit: float = TUNING_SECONDS, save: bool = False
) -> Iterator[None]:
    """Time every algorithm of a problem on the spot when ``algorithm="auto"`` first meets it within
    the context, on all ranks together, and keep the fastest for the life of the group. All ranks
    enter and leave the context between the same calls::

        with tpkernels.autotune(group):
            model(x)  # tunes what it meets
        model(x)

    ``tpkernels.init(group, autotune=True)`` does it for all calls. Results are right while tuning:
    the algorithms run on the call's own inputs (on a copy of one that an op overwrites), and the
    call then runs with the winner. The slowest rank's time counts, with cold caches. A problem has
    its op, dtypes and the shape of the tensor that travels; row counts within a factor of 1.5 share
    their times. Not tuned are problems with uneven shards, CUDA tensors that gloo moves, and what
    is met while a graph is traced; what is met in the capture of a CUDA graph, when it is met
    again.

    An algorithm that reads its peers' memory, and fails on any rank, is left out with a warning: it
    runs in a workspace of its own. An error in one that goes through the process group breaks the
    group, as in any call. If a rank has no memory for the second workspace, for up to 256 MiB that
    overwrite the caches, and for the copies, nothing is tuned, with a warning.

    Args:
        group: the process group; None for the default one.
        limit: seconds after which no further round of a problem starts, after two runs of each
            algorithm; inf for none. Rank 0 reports on stderr what takes longer than two seconds.
        save: also add the times to the file of `tpkernels tune`, for later processes.

    Raises:
        ValueError: ``limit`` is not positive.
    """
    if not limit > 0:
        raise ValueError(f"limit must be positive, in seconds, not {limit}")
    with tuning_by(named_or_default(group), Tuning(float(limit), save)):
        yield


@contextlib.contextmanager
def tuning_by(group: Group, tuning: Tuning) -> Iterator[None]:
    """Tune on the spot what calls of a group meet within the block."""
    before = group.measured.tuning
    group.use_tuning(tuning)
    try:
        yield
    finally:  # `init` may have turned it on within the block
        group.use_tuning(Tuning() if before is None and group.autotune else before)


# In the first calls of a problem.


def with_trial(call: Call, plan: Callable[[str], Call]) -> Call:
    """Return the call as ``auto`` makes it: one that takes part in a trial, unless there is none
    for its problem or it is over. ``plan`` plans the same call with another algorithm, or raises
    ``NotImplementedError``. All ranks plan the same problems in the same order, and so have the
    same trials."""
    group, problem = call.group, call.problem
    if group.autotune is False or problem.device != "cpu":
        # No trial, so do not read rank 0's times: that is collective.
        return call
    if not is_eligible(problem, group.shared_memory, group.tuned(problem.device)):
        return call
    key, calls = problem.tuning_key, {}
    assert key is not None  # it is eligible
    for name in ELIGIBLE:
        if name == call.plan.algorithm or is_worth_trying(problem, name):
            with contextlib.suppress(NotImplementedError):
                calls[name] = plan(name)
    chosen, trials = call.plan.algorithm, group.measured.trials
    if len(calls) < 2 or chosen not in calls:
        return call
    trial = trials.get((*key, *calls))
    if trial is None:
        if len(trials) >= _MOST_TRIALS:
            return call
        trial = trials[(*key, *calls)] = Trial(*key, tuple(calls), chosen)
    return call if trial.over else replace(call, function=TrialRunner(trial, calls))


class TrialRunner:
    """The implementation of an op during a trial: runs the algorithm whose turn it is, and measures
    it."""

    def __init__(self, trial: Trial, calls: Mapping[str, Call]) -> None:
        self._trial, self._calls = trial, calls

    def __call__(self, call: Call, x: torch.Tensor, factor: Any, *operands: Any) -> Any:
        """Make the call; ``factor``: None, a weight, or what has several ``weights``."""
        trial, chosen = self._trial, self._calls[self._trial.algorithm]
        begin = time.perf_counter()
        result = chosen.function(chosen, x, factor, *operands)
        end = time.perf_counter()
        trial.samples.append(Sample(begin, end, _other_extent(x, factor)))
        if trial.stage_over:
            self._end_stage(call)
        return result

    def _end_stage(self, call: Call) -> None:
        trial, group, problem = self._trial, call.group, call.problem
        if not trial.begun:
            trial.begin()
            return
        numbers = list(itertools.chain(*trial.samples))
        times = exchange_numbers(
            group, problem, f"the times of {len(trial.samples)} calls", numbers
        )
        trial.advance([list(map(Sample, *(rank[i::3] for i in range(3)))) for rank in times])
        if trial.over:
            known = group.tuned(problem.device)
            group.use_times(problem.device, known.extended(trial.measurements))


# On the spot.


def tune_if_new(
    call: Call,
    tuning: Tuning,
    names: Sequence[str],
    plan: PlanOn,
    make_run: MakeRun,
    arguments: Any,
) -> bool:
    """Tune the problem of a call that ``auto`` makes, by the algorithms ``names``, if nothing was
    measured for it; return whether it is to be planned again. Collective. ``make_run`` makes what
    runs the op's planned call with ``arguments``, of which it overwrites none."""
    group, problem = call.group, call.problem
    if tuning.among is not None:
        names = [name for name in names if name in tuning.among]
    elif problem.device == "cpu":
        names = [name for name in names if is_worth_trying(problem, name)]
    key = problem.tuning_key
    if key is None or problem.world == 1 or len(names) < 2 or not group.has_times(problem.device):
        return False

    def is_known() -> bool:
        """Return whether this problem, or one of nearly the same extent, was tuned before, even if
        no algorithm could be timed."""
        if tuning.anew:
            return False
        was_tuned = group.measured.failures_of(problem) is not None
        return was_tuned or group.tuned(problem.device).near(*key)

    if is_known() or group.note_capture(arguments.x.device):
        return False
    try:
        with group.together():
            if not is_known():  # another thread was first
                _Tuner(group, problem, plan, arguments, tuning).tune(names, make_run)
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
    """Tunes one problem. ``group`` is the real one, whose turn the caller has."""

    def __init__(
        self, group: Group, problem: Problem, plan: PlanOn, arguments: Any, tuning: Tuning
    ) -> None:
        self._group, self._problem, self._plan, self._tuning = group, problem, plan, tuning
        self._x: torch.Tensor = arguments.x
        w = getattr(arguments, "weights", None) or getattr(arguments, "w", None)
        self._other, self._timeout = _other_extent(self._x, w), group.timeout_on(problem.device)
        self._exchange_numbers = functools.partial(exchange_numbers, group, problem)
        self._rounds = 0  # counted so far
        self._replays: dict[str, Callable[[], object]] | None = None  # of calls, if in graphs
        self._begun = self._reported = time.perf_counter()

    def tune(self, names: Sequence[str], make_run: MakeRun) -> None:
        """Time the algorithms and make the group use the times."""
        group, problem, key = self._group, self._problem, self._problem.tuning_key
        assert key is not None  # the caller has looked
        if group.workspace is None:  # whose exchanges would tell that a rank is in another call
            text = str(problem)
            for rank, other in enumerate(group.exchange("tuning", text, self._timeout)):
                if other != text:
                    raise CollectiveMismatchError(
                        f"rank {group.rank} tunes {text}, but rank {rank} {other}. "
                        "The group is broken: make a new one.",
                        peer=rank,
                    )
        failures, measurements = group.measured.failures.setdefault(key, {}), list[Measurement]()
        try:
            self._prepare(make_run)
            for series in (key[0], key[0].captured) if _takes_graphs(self._x) else key[:1]:
                self._replays = None if series == key[0] else {}
                self._rounds, self._begun = 0, time.perf_counter()
                contest = Contest([name for name in names if name not in failures])
                self._settle(contest, failures)
                if self._rounds:
                    measurements += contest.measurements(series, key[1])
        except _Skipped as skipped:
            self._warn(f"not tuned: {skipped}")
        if measurements:
            group.use_times(problem.device, group.tuned(problem.device).extended(measurements))
            if self._tuning.save and group.rank == 0:
                self._save(measurements)

    def _settle(self, contest: Contest, failures: dict[str, str]) -> None:
        """Let the candidates compete; one that fails is left out, and the others begin anew."""
        while len(contest.remaining) > 1:
            try:
                with self._second() as second:
                    self._compete(contest, second)
                return
            except _Failed as failure:
                name, why = failure.args
            if name == "unfused":  # in graphs: there is nothing to compare with
                raise _Skipped(f"'unfused' {why}")
            contest.leave_out(name)
            failures[name] = why
            self._warn(f"algorithm '{name}' {why}")

    def _warn(self, text: str) -> None:
        if self._group.rank == 0:
            self._group.notices.append(f"{self._problem}: {text}")

    def _prepare(self, make_run: MakeRun) -> None:
        """Allocate what the runs need; `_Skipped` on all ranks if one of them cannot."""
        why = ""
        try:
            self._flush_buffer = _cache_flush_buffer(self._x.device, self._problem.world)
            self._run = make_run()
        except (MemoryError, RuntimeError) as error:  # torch has no class for the CPU's
            why = of_error(error)
        if any(failed for (failed,) in self._exchange_numbers("preparing", [float(bool(why))])):
            raise _Skipped(why or "a rank has no memory for it")

    @contextlib.contextmanager
    def _second(self) -> Iterator[Group]:
        """Make a second group whose failure leaves the real one usable."""
        group = self._group
        try:
            second = group.make_second_group("tuning", self._problem.device)
        except MemoryError as error:
            raise _Skipped(of_error(error)) from None
        try:
            if second.shared_memory != group.shared_memory:
                raise _Skipped(f"a second workspace has no shared memory: {second.why_not_shared}")
            yield second
        finally:
            if self._replays is not None and second.workspace is not None:
                self._replays.clear()  # no graph can be replayed: the workspace may go
                for space in second.workspace.on_gpus.values():
                    space.recorded = False
            second.close("the end of tuning")

    def _compete(self, contest: Contest, second: Group) -> None:
        """Run the candidates on the second group until the outcome is clear or the time is up.
        `_Failed` if one of them did."""
        calls: dict[str, Call] = {}

        def plan(name: str) -> tuple[()]:
            calls[name] = self._plan(second, name)
            if self._replays is not None:
                self._replays[name] = self._captured(calls[name])
            return ()

        for name in list(contest.remaining):
            if self._attempt(name, second, functools.partial(plan, name)) is None:
                contest.leave_out(name)
        if second.usable_bytes != self._group.usable_bytes:  # other steps than on the real group
            raise _Skipped("no memory for a second workspace of the same size")
        limit, most = self._tuning.limit, self._tuning.rounds
        order, counts, begun = list(calls), False, self._elapsed()  # a warm-up comes first
        while len(contest.remaining) > 1:
            self._report(contest)
            samples = [self._sample(name, calls[name]) for name in order]
            if counts:
                contest.add(order, samples, one_clock=self._group.workspace is not None)
                self._rounds += len(order) // len(contest.remaining)
            if self._rounds >= _FEWEST_ROUNDS:
                contest.drop_slower()
            now = self._elapsed()
            round_seconds = (now - begun) / len(order) * len(contest.remaining)
            if self._rounds >= most or (self._rounds and limit - now < round_seconds):
                break
            rounds = min(_STAGE_ROUNDS, most - self._rounds, (limit - now) / round_seconds)
            order, counts, begun = contest.rounds(max(1, int(rounds)), self._rounds), True, now

    def _sample(self, name: str, call: Call) -> list[Sample]:
        """Run an algorithm once; return the samples of all ranks."""
        timed = functools.partial(self._timed, call)
        samples = self._attempt(name, call.group, timed, len(Sample._fields))
        assert samples is not None  # it can run
        return [Sample(*sample) for sample in samples]

    def _timed(self, call: Call) -> Sample:
        if self._replays is not None:
            replay, alone = self._replays[call.plan.algorithm], self._replays[_FLUSH]
            seconds = (_seconds(replay, self._x) - _seconds(alone, self._x)) / _GRAPH_CALLS
            call.group.check_kernels(call.plan.text)
            return Sample(0.0, max(seconds, _SHORTEST_S), self._other)
        self._flush_buffer.fill_(1)  # evicts the inputs from the caches
        _synchronize(self._x.device)
        begin = time.perf_counter()
        self._run(call)
        _synchronize(self._x.device)
        end = time.perf_counter()
        call.group.check_kernels(call.plan.text)  # a failure on a GPU shows only now
        return Sample(begin, end, self._other)

    def _captured(self, call: Call) -> Callable[[], object]:
        """Return what replays a graph of calls, each with cold caches, as between a model's
        weights. What that costs is measured by itself."""

        def flush_and_run() -> None:
            self._flush_buffer.fill_(1)
            self._run(call)

        assert self._replays is not None  # the caller has looked
        if _FLUSH not in self._replays:
            self._replays[_FLUSH] = graph_of(lambda: self._flush_buffer.fill_(1))
        return graph_of(flush_and_run)

    def _attempt(
        self, name: str, second: Group, run: Callable[[], Sequence[float]], count: int = 0
    ) -> list[list[float]] | None:
        """Run, on all ranks, what they do on the second group for an algorithm; return the
        ``count`` numbers that each returns, in rank order; None: it cannot run, on any rank.
        `_Failed` if it fails on one. No rank goes on before all have left it."""
        numbers: Sequence[float] = [0.0] * count
        supported, error, refusal = True, None, ""
        try:
            numbers = run()
        except NotImplementedError:  # on all ranks
            supported = False
        except WorkspaceMemoryError as refused:  # on all ranks
            refusal = of_error(refused)
        except Exception as failure:  # whatever it is, the others go on without
            second.mark_broken(failure)
            if self._group.workspace is None:  # its calls go through the one process group
                raise
            error = failure
        try:
            everyone = self._exchange_numbers(f"'{name}'", [float(error is not None), *numbers])
            if any(failed for failed, *_ in everyone):
                raise self._failure(name, error)
            if refusal:
                raise _Failed(name, f"has no memory: {refusal}")
        finally:
            error = None  # it has this frame, and what failed in it, in its traceback
        return [theirs for _, *theirs in everyone] if supported else None

    def _failure(self, name: str, error: Exception | None) -> Exception:
        """Return why an algorithm has failed on one rank or more, or what is to be raised if it
        cannot be left out. What a peer's failure has caused does not say why."""
        first = error is not None and not isinstance(error, TpkernelsError)
        mine = {"why": "" if error is None else of_error(error), "first": first}
        reports = self._group.exchange("a failure while tuning", mine, self._timeout)
        culprit = max(
            range(len(reports)),
            key=lambda rank: (reports[rank]["first"], reports[rank]["why"] != "", -rank),
        )
        why = f"rank {culprit}: {reports[culprit]['why']}"
        if ALGORITHMS[name].needs_shared_memory or self._replays is not None:
            return _Failed(name, f"failed when it was tuned: {why}")
        text = f"{self._problem} by '{name}', which was tuned, failed on {why}"
        return error or PeerLostError(text, peer=culprit)

    def _elapsed(self) -> float:
        """Return the seconds so far, by rank 0's clock. Collective."""
        return self._exchange_numbers("the time", [time.perf_counter() - self._begun])[0][0]

    def _report(self, contest: Contest) -> None:
        now = time.perf_counter()
        if self._group.rank == 0 and now - self._reported >= _REPORT_SECONDS:
            self._reported = now
            done = f"{self._rounds} rounds of {', '.join(contest.remaining)}"
            where = f"tpkernels.autotune: {self._problem}: {now - self._begun:.0f} s"
            print(f"{where}, {done}", file=sys.stderr, flush=True)

    def _save(self, measurements: Sequence[Measurement]) -> None:
        group, device = self._group, self._problem.device
        try:
            machine = this_machine(device, group.world, group.hosts, group.shared_memory)
            store.update(machine, *measurements)
        except Exception as error:  # a warning, too, may be one: rank 0 alone must not raise it
            group.notices.append(f"tpkernels.autotune could not save its times: {error}")


def _takes_graphs(x: torch.Tensor) -> bool:
    """Return whether calls are also timed in CUDA graphs."""
    return x.is_cuda


def graph_of(run: Callable[[], object], calls: int = _GRAPH_CALLS) -> Callable[[], object]:
    """Run something once, which sets it up, and return what replays a graph of ``calls`` of it.

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


def _seconds(replay: Callable[[], object], x: torch.Tensor) -> float:
    """Return how long a replay takes."""
    _synchronize(x.device)
    begin = time.perf_counter()
    replay()
    _synchronize(x.device)
    return time.perf_counter() - begin


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _cache_flush_buffer(device: torch.device, world: int) -> torch.Tensor:
    """Allocate this rank's share of the buffer that flushes the last-level cache."""
    cache = last_level_cache_bytes(device.type)
    nbytes = 2 * cache if device.type == "cuda" else 2 * cache // world
    return torch.empty(min(nbytes, _MOST_FLUSH_BYTES), dtype=torch.uint8, device=device)


def _other_extent(x: torch.Tensor, factor: Any) -> int:
    """Return the extent of the matmul that is not part of the problem, on this rank: N of
    column-parallel ``factor.weights``, K of a row-parallel weight; 0 without a matmul."""
    if isinstance(factor, (torch.Tensor, Product)):
        return int(x.shape[-1])
    return sum(map(columns_of, getattr(factor, "weights", ())))


def exchange_numbers(
    group: Group, problem: Problem, what: str, numbers: Sequence[float]
) -> list[list[float]]:
    """Return the numbers of each rank, in rank order. Collective, in the caller's turn. Between
    ranks that share no memory the process group gathers them: the store would delay some ranks."""
    text, seconds = f"{what} of {problem}", group.timeout_on(problem.device)
    if group.workspace is not None:
        return group.exchange(text, list(numbers), seconds)
    sent = torch.tensor(numbers, dtype=torch.float64, device=torch.device(problem.device))
    everyone = sent.new_empty(problem.world * sent.numel())
    try:
        work = group.pg._allgather_base(everyone, sent, AllgatherOptions())
        work.wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        late = "timed out" in str(error).lower()
        raise (CollectiveTimeoutError if late else PeerLostError)(
            f"{text}: rank {group.rank} waited for torch.distributed, timeout {seconds:g} s: "
            f"{error}. The group is broken: make a new one."
        ) from error
    gathered: list[list[float]] = everyone.view(problem.world, -1).tolist()
    return gathered
