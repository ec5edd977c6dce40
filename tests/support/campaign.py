"""A campaign of faults: random ops on random worlds, disturbed at random moments in random ways.

    python -m tests.support.campaign --count 300 --seed 1

Each trial runs one op again and again on 2 to 4 ranks, with random delays in its protocol, until
one rank is killed, stopped, interrupted (also while it waits for another thread's call) or forked,
raises, runs out of memory, makes a different call, comes when the others have left and overwritten
their symmetric input, or uses a group from before another initialisation. Then all ranks must
notice in time and report the right error; no result may ever be wrong; other groups must go on;
nothing may be left behind. A trial follows from its seed, except for the timing.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

import tpkernels
from tests.failures.test_memory import no_memory
from tests.support import faults
from tests.support.faults import CASES, CASES_APART, PROMPT, Ending
from tpkernels import backends, groups
from tpkernels.launch import Outcome

KINDS = ("kill", "stop", "interrupt", "exception", "no memory", "mismatch", "fork")
KINDS += ("turn", "late", "destroyed")
CALLS = 200  # of a rank in a trial that ends well
BY_SIGNAL = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "interrupt": signal.SIGINT}
INTERRUPTS = ("interrupt", "turn")
STOP_TIMEOUT = 1.5
MOST_DELAY_US = 3000


@dataclass(frozen=True)
class Trial:
    """One fault, as all ranks know it."""

    seed: int
    world: int
    op: str
    algorithm: str
    kind: str
    victim: int
    moment: float  #: seconds after the first call, or which call it is to be
    in_set_up: bool  #: in the group's first call

    @classmethod
    def drawn(cls, seed: int) -> Trial:
        draw = random.Random(seed)
        world = draw.randint(2, 4)
        op, algorithm = draw.choice([*CASES, *CASES_APART])
        kind = draw.choice(KINDS)
        in_set_up = kind in BY_SIGNAL and draw.random() < 0.2
        moment = draw.random() * (0.02 if in_set_up else 0.3)
        return cls(seed, world, op, algorithm, kind, draw.randrange(world), moment, in_set_up)

    @property
    def timeout(self) -> float:
        """The group's."""
        short = self.kind in ("stop", "late") or self.in_set_up
        return STOP_TIMEOUT if short else faults.PATIENCE

    @property
    def at_call(self) -> int:
        """The number of the call in which the victim goes wrong by itself."""
        return 2 + int(self.moment * 50)


@dataclass(frozen=True)
class Report:
    """What one rank reports of a trial."""

    ending: Ending
    broken: Ending  #: the next call on the group
    other: Ending | None  #: a call on another group, of the ranks that live
    at: float  #: when the fault happened, on the clock of `Ending.at`; 0.0: unknown
    fork: str = ""  #: what the victim's fork reports


def job(trial: Trial) -> Report:
    """What each rank does."""
    rank = dist.get_rank()
    lives = [r for r in range(trial.world) if r != trial.victim or trial.kind != "kill"]
    destroyed = _destroyed_group() if trial.kind == "destroyed" else None
    other = faults.new_group(ranks=lives) if rank in lives else None
    group = faults.group_of(dist.new_group())
    victim = rank == trial.victim
    if not trial.in_set_up:
        _set_up(trial, group)
        faults.run_op(trial.op, group, trial.algorithm)
    fork: list[str] = []

    def calls() -> None:  # a fault may come while it is being prepared
        with _disturbed(trial, group, fork) if victim else contextlib.nullcontext():
            _calls(trial, group, victim, destroyed)

    ending = faults.ending_of(calls)
    broken = faults.ending_of(lambda: _next_call(trial, group))
    last = None
    if other is not None and trial.kind != "stop":  # one of its ranks is still stopped
        last = faults.ending_of(lambda: faults.run_op("all_gather", other))
    store = dist.distributed_c10d._get_default_store()
    at = float(store.get("disturbed")) if store.check(["disturbed"]) else 0.0
    return Report(ending, broken, last, at, "".join(fork))


def _set_up(trial: Trial, group: dist.ProcessGroup) -> None:
    """Sets the group up, unless it is already."""
    tpkernels.init(group, timeout=trial.timeout, workspace_bytes=faults.WORKSPACE_BYTES)


def _next_call(trial: Trial, group: dist.ProcessGroup) -> None:
    _set_up(trial, group)
    faults.run_op("all_reduce", group, rows=61)


def _destroyed_group() -> dist.ProcessGroup:
    """A group of some ranks, used and destroyed with all others; torch gives its name again."""
    rank, world = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    group = dist.new_group(list(range(world - 1)) if world > 2 else None)
    if rank < world - 1 or world == 2:
        faults.run_op("all_gather", faults.group_of(group))
    dist.destroy_process_group()
    again = dist.PrefixStore("again", store)
    dist.init_process_group("gloo", store=again, rank=rank, world_size=world)
    return group


def _calls(
    trial: Trial, group: dist.ProcessGroup, victim: bool, destroyed: dist.ProcessGroup | None
) -> None:
    _set_up(trial, group)
    workspace = faults.workspace_of(group)
    workspace.set_chaos(seed=trial.seed * 8 + group.rank(), max_delay_us=MOST_DELAY_US)
    if trial.kind == "late":
        return _calls_until_one_is_late(trial, group, victim)
    if trial.kind == "turn" and victim:
        return _calls_of_two_threads(trial, group)
    for number in range(1, (50 if trial.kind in (*BY_SIGNAL, "turn") else 1) * CALLS + 1):
        if victim and number == trial.at_call and trial.kind == "destroyed":
            ending = faults.ending_of(lambda: tpkernels.all_reduce(torch.ones(5), destroyed))
            if ending.error not in ("ValueError", "TypeError"):  # TypeError: never was in it
                raise AssertionError(f"wrong result of a group that was destroyed: {ending}")
        odd = victim and trial.kind == "mismatch" and number == trial.at_call
        lacking = victim and trial.kind == "no memory" and number == trial.at_call
        with no_memory(1 + trial.seed % 3 if lacking else 0):
            faults.run_op(trial.op, group, trial.algorithm, rows=120 if odd else 60)


def _calls_until_one_is_late(trial: Trial, group: dist.ProcessGroup, victim: bool) -> None:
    """The others pass symmetric tensors, and overwrite them once they have given up."""
    x = tpkernels.empty(60, 48, group=group).fill_(1)
    for _ in range(trial.at_call):
        faults.run_op(trial.op, group, trial.algorithm, x=x)
    if victim:
        dist.barrier()
        return faults.run_op(trial.op, group, trial.algorithm)
    try:
        faults.run_op(trial.op, group, trial.algorithm, x=x)
    finally:
        x.fill_(9)
        dist.barrier()


def _calls_of_two_threads(trial: Trial, group: dist.ProcessGroup) -> None:
    """This thread is interrupted, mostly while it waits for the calls of the other."""
    endings: list[Ending] = []
    over = threading.Event()

    def calls() -> None:
        while not over.is_set():
            faults.run_op(trial.op, group, trial.algorithm)

    thread = threading.Thread(target=lambda: endings.append(faults.ending_of(calls)))
    thread.start()
    try:
        calls()
    finally:
        over.set()
        thread.join()
        if "wrong result" in endings[0].text:
            raise AssertionError(endings[0].text)


@contextlib.contextmanager
def _disturbed(trial: Trial, group: dist.ProcessGroup, fork: list[str]) -> Iterator[None]:
    """Makes the fault happen to this rank within the block. ``fork``: takes its fork's report."""
    if trial.kind in (*BY_SIGNAL, "turn"):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        faults.disturb_later(trial.moment, BY_SIGNAL.get(trial.kind, signal.SIGINT))
    elif trial.kind == "fork":
        threading.Timer(trial.moment, lambda: fork.append(_fork(group))).start()
    elif trial.kind == "exception":
        _raise_in_call(trial, group)
    try:
        yield
    finally:
        if trial.kind == "fork":
            while not fork:
                time.sleep(0.01)
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _raise_in_call(trial: Trial, group: dist.ProcessGroup) -> None:
    """Makes a call raise, at its beginning or when all of it is done."""
    groups.get(group.group_name).forget_calls()  # they hold their functions
    backends.bind = lambda *_: None  # type: ignore[assignment]
    run, calls = backends.TABLES["cpu"][trial.op, trial.algorithm], [0]

    def raising(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == trial.at_call and trial.seed % 2:
            raise ArithmeticError("no luck")
        result = run(*args)
        if calls[0] == trial.at_call:  # the peers may be through with this one
            raise ArithmeticError("no luck")
        return result

    backends.TABLES["cpu"][trial.op, trial.algorithm] = raising


def _fork(group: dist.ProcessGroup) -> str:
    """A child that tries to take part, finalizes and ends. Returns "fine" if it was refused,
    otherwise what happened."""

    def child() -> str:
        ending = faults.ending_of(lambda: tpkernels.all_reduce(torch.full((9,), 100.0), group))
        with contextlib.suppress(Exception):
            tpkernels.finalize()
        return "" if ending.error == "GroupBrokenError" else str(ending)

    return faults.in_child(child)


def run_trial(trial: Trial) -> tuple[list[str], float]:
    """What went wrong, and the seconds from the fault to the last report of it."""
    try:
        outcomes = _outcomes(trial)
    except AssertionError as error:  # about what is left behind
        return [str(error)], 0.0
    wrong, slowest = [], 0.0
    for outcome in outcomes:
        if outcome.rank == trial.victim and trial.kind == "kill":
            wrong += [] if outcome.exitcode == -signal.SIGKILL else [f"the victim: {outcome}"]
        elif not outcome.ok:
            wrong.append(f"rank {outcome.rank}: {outcome}")
        else:
            report: Report = outcome.value
            wrong += _judged(trial, outcome.rank, report)
            if outcome.rank != trial.victim and report.at and report.ending.error:
                slowest = max(slowest, report.ending.at - report.at)
    return wrong, slowest


def _outcomes(trial: Trial) -> list[Outcome]:
    with faults.watched_ranks(trial.world) as ranks:
        ranks.submit(job, trial)
        if trial.kind == "stop":
            outcomes = faults.collect_without(ranks, trial.victim)
            os.kill(ranks.pids[trial.victim], signal.SIGCONT)
            after = ranks.collect(2 * trial.timeout + 5.0)
            outcomes[trial.victim] = after[trial.victim]
        else:
            outcomes = ranks.collect(faults.COLLECT_SECONDS)
    return outcomes


def _judged(trial: Trial, rank: int, report: Report) -> list[str]:
    """What is wrong with a rank's report."""
    ending, victim = report.ending, rank == trial.victim
    allowed = _allowed(trial, victim)
    wrong = [] if ending.error in allowed else [f"rank {rank}: {ending}, not one of {allowed}"]
    if report.fork not in ("", "fine"):
        wrong.append(f"a fork of rank {rank}: {report.fork}")
    if "wrong result" in ending.text:
        wrong.append(f"rank {rank}: {ending}")
    between_calls = victim and trial.kind in INTERRUPTS  # then the others find it in another call
    if ending.error and not between_calls and report.broken.error != "GroupBrokenError":
        wrong.append(f"rank {rank}: the next call: {report.broken}")
    if report.other is not None and report.other.error:
        wrong.append(f"rank {rank}: another group: {report.other}")
    if report.at and ending.error and not victim:
        late = trial.timeout + 1.0 if ending.error == "CollectiveTimeoutError" else 0.0
        if ending.at - report.at > late + PROMPT:
            wrong.append(f"rank {rank}: {ending.at - report.at:.2f} s after the fault: {ending}")
    return wrong


def _allowed(trial: Trial, victim: bool) -> set[str]:
    """How a rank's calls may end."""
    lost, late = {"PeerLostError"}, {"CollectiveTimeoutError"}
    if trial.kind == "kill":
        return lost | late if trial.in_set_up else lost  # nobody may know its process yet
    if trial.kind == "stop":
        return late | lost if victim or trial.in_set_up else late
    if trial.kind == "mismatch":
        # A rank in the call sees that the numbers of rows differ; a rank that waits for one of
        # these ranks sees it leave.
        return {"CollectiveMismatchError", *lost}
    if trial.kind in ("fork", "destroyed"):
        return {""}
    if trial.kind == "late":  # it may find all that it needs in workspaces, which stay as they are
        return {"", *late, *lost} if victim else {*late, *lost}
    own = {kind: "KeyboardInterrupt" for kind in INTERRUPTS} | {"exception": "ArithmeticError"}
    if victim:
        return {own.get(trial.kind, "MemoryError"), ""}
    if trial.kind not in INTERRUPTS:
        return {"", *lost}
    # Who is interrupted before it has joined is awaited until the timeout: nobody knows it yet.
    return {"", "CollectiveMismatchError", *lost, *(late if trial.in_set_up else ())}


def main(argv: list[str] | None = None) -> int:
    """Runs trials; the exit code is 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--op", nargs="*", help="only these")
    options = parser.parse_args(argv)
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    failed = 0
    drawn = map(Trial.drawn, itertools.count(options.seed))
    chosen = (trial for trial in drawn if not options.op or trial.op in options.op)
    if options.kind is not None:
        chosen = (replace(trial, kind=options.kind, in_set_up=False) for trial in chosen)
    for trial in itertools.islice(chosen, options.count):
        begin = time.monotonic()
        wrong, slowest = run_trial(trial)
        times[trial.kind].append(slowest)
        failed += bool(wrong)
        print(f"{'WRONG' if wrong else 'right'} {time.monotonic() - begin:5.1f} s {trial}")
        for line in wrong:
            print(f"    {line}")
        sys.stdout.flush()
    print(f"\n{options.count} faults, {failed} of them wrong")
    for kind, each in times.items():
        seen = [seconds for seconds in each if seconds]
        text = f"{statistics.median(seen):.3f} s, slowest {max(seen):.3f} s" if seen else "-"
        print(f"{kind:10} {len(each):4} trials; from the fault to the last report: median {text}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
