"""``tpkernels.autotune``: a problem is timed on the spot when it is first met.

Problem: every algorithm must be timed on all ranks alike, and one that fails, on whatever rank and
however far it has come, must leave the group usable and no rank behind.

Algorithm: the ranks plan each algorithm on a second group with a workspace of its own
(`Group.second`), and make the op's call there, with its own inputs: first each algorithm once, then
the rounds of a `Contest`. After each run they exchange their times on the real group, and whether
it failed (`_Attempts`).

Failure: a call that fails breaks the second group, which tells the peers, as in any group. So all
ranks come to the exchange, leave the algorithm out, and go on with a new second group. No rank is
in another algorithm by then. There is only one process group, so an error in an algorithm that goes
through it is raised.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tpkernels import backends
from tpkernels.call import Call
from tpkernels.errors import CollectiveMismatchError, PeerLostError, TpkernelsError
from tpkernels.groups.group import Group
from tpkernels.planning import store
from tpkernels.planning.algorithms import ALGORITHMS
from tpkernels.planning.choose import is_worth_trying
from tpkernels.planning.contest import Contest, Sample
from tpkernels.planning.machine import last_level_cache_bytes, this_machine
from tpkernels.planning.problem import Problem
from tpkernels.planning.table import Measurement
from tpkernels.text import of_error
from tpkernels.tuning.together import FLOAT64, exchanged, other_extent

_MOST_ROUNDS = 40
_STAGE_ROUNDS = 5
_FEWEST_ROUNDS = 3  # before a candidate drops out
_REPORT_SECONDS = 2.0
_MOST_SCRATCH_BYTES = 256 << 20

Plan = Callable[[Group, str], Call]  # on a group, by an algorithm
MakeRun = Callable[[], Callable[[Call], object]]


class _Skipped(Exception):
    """A problem cannot be tuned, on any rank."""


def tuned(call: Call, names: Sequence[str], plan: Plan, make_run: MakeRun, given: Any) -> bool:
    """Tune the problem of a call that ``auto`` makes, if nothing was measured for it; return
    whether it is to be planned again. Collective.

    Args:
        names: the algorithms that ``auto`` may take.
        make_run: makes what runs the op's planned call, with the arguments ``given``, of which it
            overwrites none.
    """
    group, problem = call.group, call.problem
    if problem.tuning_key is None or problem.world == 1 or len(names) < 2:
        return False
    if not group.has_times(problem.device):
        return False
    if _is_known(group, problem) or group.is_met_in_capture(given.x.device):
        return False
    try:
        with group.together():
            if not _is_known(group, problem):  # another thread was first
                _Tuner(group, problem, plan, given).tune(names, make_run)
    except BaseException as error:
        if not group.open:  # between ranks that share no memory nothing else tells the others
            backends.failed(call, error)
        raise
    return True


def _is_known(group: Group, problem: Problem) -> bool:
    """Return whether the problem, or one of nearly the same extent, was measured, or nothing can
    be."""
    key = problem.tuning_key
    assert key is not None  # the caller has looked
    return group.measured.left_out_of(problem) is not None or group.tuned(problem.device).near(*key)


class _Failed(Exception):
    """An algorithm is to be left out, on all ranks."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(why)
        self.name = name


class _Attempts:
    """What all ranks do on a second group, which a failure may break, for one problem. ``group`` is
    the real one, whose turn the caller has."""

    def __init__(self, group: Group, problem: Problem) -> None:
        self._group, self._problem = group, problem

    def agree(self) -> None:
        """Check that all ranks tune the same problem. Collective."""
        seconds = self._group.timeout_on(self._problem.device)
        problems = self._group.exchange("tuning", str(self._problem), seconds)
        for rank, problem in enumerate(problems):
            if problem != str(self._problem):
                raise CollectiveMismatchError(
                    f"rank {self._group.rank} tunes {self._problem}, but rank {rank} "
                    f"{problem}. The group is broken: make a new one.",
                    peer=rank,
                )

    def exchanged(self, what: str, *mine: float) -> list[list[float]]:
        """Return the numbers of all ranks, in rank order. Collective."""
        numbers = torch.tensor(mine, **FLOAT64)
        found: list[list[float]] = exchanged(self._group, self._problem, what, numbers).tolist()
        return found

    def make(
        self, name: str, second: Group, run: Callable[[], Sequence[float]], count: int = 0
    ) -> list[list[float]] | None:
        """Run, on all ranks, what they do on the second group for an algorithm; return the
        ``count`` numbers that each returns, in rank order; None: it cannot run, on any rank.
        `_Failed` if it fails on one. No rank goes on before all have left it."""
        numbers: Sequence[float] = [0.0] * count
        supported, error = True, None
        try:
            numbers = run()
        except NotImplementedError:  # on all ranks
            supported = False
        except Exception as failure:  # whatever it is, the others go on without
            second.mark_broken(failure)
            if self._group.workspace is None:  # its calls go through the one process group
                raise
            error = failure
        try:
            everyone = self.exchanged(f"'{name}'", float(error is not None), *numbers)
            if any(failed for failed, *_ in everyone):
                raise self._failure(name, error)
        finally:
            error = None  # it has this frame, and what failed in it, in its traceback
        return [theirs for _, *theirs in everyone] if supported else None

    def _failure(self, name: str, error: Exception | None) -> Exception:
        """Return why an algorithm has failed on one rank or more, or what is to be raised if it
        cannot be left out."""
        # What a peer's failure has caused does not say why.
        own = error is not None and not isinstance(error, TpkernelsError)
        say = {"why": "" if error is None else of_error(error), "own": own}
        seconds = self._group.timeout_on(self._problem.device)
        said = self._group.exchange("a failure while tuning", say, seconds)
        culprit = max(
            range(len(said)), key=lambda rank: (said[rank]["own"], said[rank]["why"] != "", -rank)
        )
        why = f"rank {culprit}: {said[culprit]['why']}"
        if ALGORITHMS[name].needs_shared_memory:
            return _Failed(name, why)
        text = f"{self._problem} by '{name}', which was tuned, failed on {why}"
        return error or PeerLostError(text, peer=culprit)


class _Tuner:
    """Tunes one problem."""

    def __init__(self, group: Group, problem: Problem, plan: Plan, given: Any) -> None:
        self._group, self._problem, self._plan = group, problem, plan
        self._x: torch.Tensor = given.x
        w = getattr(given, "weights", None) or getattr(given, "w", None)
        self._other = other_extent(given.x, w)
        self._attempts = _Attempts(group, problem)
        self._rounds = 0  # counted so far
        self._begun = self._reported = time.perf_counter()

    def tune(self, names: Sequence[str], make_run: MakeRun) -> None:
        """Time the algorithms and make the group use the times."""
        group, problem = self._group, self._problem
        tuning, key = group.measured.tuning, problem.tuning_key
        assert tuning is not None and key is not None  # the caller has looked
        if group.workspace is None:  # whose exchanges would tell that a rank is in another call
            self._attempts.agree()
        left_out = group.measured.left_out.setdefault(key, {})
        contest = Contest(self._worth_trying(names))
        try:
            self._prepare(make_run)
            while len(contest.remaining) > 1:
                try:
                    with self._second() as second:
                        self._compete(contest, second, tuning.limit)
                    break
                except _Failed as failure:
                    name, why = failure.name, f"failed when it was tuned: {failure}"
                contest.leave_out(name)
                left_out[name] = why
                self._warn(f"algorithm '{name}' {why}")
        except _Skipped as skipped:
            self._warn(f"not tuned: {skipped}")
        if self._rounds:
            found = contest.measurements(*key)
            group.use_times(problem.device, group.tuned(problem.device).extended(found))
            if tuning.save and group.rank == 0:
                self._save(found)

    def _warn(self, text: str) -> None:
        if self._group.rank == 0:
            self._group.notices.append(f"{self._problem}: {text}")

    def _prepare(self, make_run: MakeRun) -> None:
        """Allocate what the runs need; `_Skipped` on all ranks if one of them cannot."""
        why = ""
        try:
            self._scratch = _scratch(self._x.device, self._problem.world)
            self._run = make_run()
        except (MemoryError, RuntimeError) as error:  # torch has no class for the CPU's
            why = of_error(error)
        everyone = self._attempts.exchanged("preparing", float(bool(why)))
        if any(failed for (failed,) in everyone):
            raise _Skipped(why or "a rank has no memory for it")

    @contextlib.contextmanager
    def _second(self) -> Iterator[Group]:
        """Make a second group whose failure leaves the real one usable."""
        group, device = self._group, self._problem.device
        try:
            second = group.second("tuning", device)
        except MemoryError as error:
            raise _Skipped(of_error(error)) from None
        try:
            if second.shared_memory != group.shared_memory:
                raise _Skipped(f"a second workspace has no shared memory: {second.why_not_shared}")
            yield second
        finally:
            second.close("the end of tuning")

    def _worth_trying(self, names: Sequence[str]) -> list[str]:
        problem = self._problem
        return [name for name in names if problem.device != "cpu" or is_worth_trying(problem, name)]

    def _compete(self, contest: Contest, second: Group, limit: float) -> None:
        """Run the candidates on the second group until the outcome is clear or the time is up.
        `_Failed` if one of them did."""
        calls: dict[str, Call] = {}

        def plan(name: str) -> tuple[()]:
            calls[name] = self._plan(second, name)
            return ()

        for name in list(contest.remaining):
            if self._attempts.make(name, second, functools.partial(plan, name)) is None:
                contest.leave_out(name)
        if second.usable_bytes != self._group.usable_bytes:  # other steps than on the real group
            raise _Skipped("no memory for a second workspace of the same size")
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
            if self._rounds >= _MOST_ROUNDS or (self._rounds and limit - now < round_seconds):
                break
            rounds = int(max(1, min(_STAGE_ROUNDS, (limit - now) / round_seconds)))
            order, counts, begun = contest.rounds(rounds, self._rounds), True, now

    def _sample(self, name: str, call: Call) -> list[Sample]:
        """Run an algorithm once; return the samples of all ranks."""
        timed = functools.partial(self._timed, call)
        samples = self._attempts.make(name, call.group, timed, len(Sample._fields))
        assert samples is not None  # it can run
        return [Sample(*each) for each in samples]

    def _timed(self, call: Call) -> Sample:
        self._scratch.fill_(1)  # takes the place of the inputs in the caches
        _finish(self._x.device)
        begin = time.perf_counter()
        self._run(call)
        _finish(self._x.device)
        end = time.perf_counter()
        call.group.check_kernels(call.plan.text)  # a failure on a GPU shows only now
        return Sample(begin, end, self._other)

    def _elapsed(self) -> float:
        """Return the seconds since the tuning began, by rank 0's clock. Collective."""
        return self._attempts.exchanged("the time", time.perf_counter() - self._begun)[0][0]

    def _report(self, contest: Contest) -> None:
        now = time.perf_counter()
        if self._group.rank == 0 and now - self._reported >= _REPORT_SECONDS:
            self._reported = now
            print(
                f"tpkernels.autotune: {self._problem}: {now - self._begun:.0f} s, "
                f"{self._rounds} rounds of {', '.join(contest.remaining)}",
                file=sys.stderr,
                flush=True,
            )

    def _save(self, found: Sequence[Measurement]) -> None:
        group, device = self._group, self._problem.device
        try:
            machine = this_machine(device, group.world, group.hosts, group.shared_memory)
            store.update(machine, *found)
        except Exception as error:  # a warning, too, may be one: rank 0 alone must not raise it
            group.notices.append(f"tpkernels.autotune could not save its times: {error}")


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _scratch(device: torch.device, world: int) -> torch.Tensor:
    """Allocate this rank's part of what overwrites the last-level cache."""
    cache = last_level_cache_bytes(device.type)
    nbytes = 2 * cache if device.type == "cuda" else 2 * cache // world
    return torch.empty(min(nbytes, _MOST_SCRATCH_BYTES), dtype=torch.uint8, device=device)
