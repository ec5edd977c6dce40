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
import functools
import itertools
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

import tpkernels
from tests.failures.test_memory import no_memory
from tests.support import faults
from tests.support.faults import AT_ONCE, CASES, CASES_APART, PROMPT, Ending, Report
from tests.support.ranked import apart, on_hosts
from tests.support.tuned import call
from tpkernels import groups
from tpkernels.algorithms import backends, unfused
from tpkernels.launch import Outcome
from tpkernels.ops import execution, tuner
from tpkernels.symm import host, rendezvous

KINDS = ("kill", "stop", "interrupt", "exception", "no memory", "mismatch", "fork")
KINDS += ("turn", "late", "destroyed")
CALLS = 200  # of a rank in a trial that ends well
BY_SIGNAL = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "interrupt": signal.SIGINT}
INTERRUPTS = ("interrupt", "turn")
MOST_DELAY_US = 3000
# Which ranks share memory.
MEMORY: dict[str, Callable[[], Any]] = {
    "shared": contextlib.nullcontext,
    "hosts": lambda: on_hosts("0011"),  # the victim's has another rank
    "apart": apart,
}


def _backward(group: dist.ProcessGroup) -> None:
    x, w = torch.ones(60, 48, requires_grad=True), torch.ones(48, 40, requires_grad=True)
    tpkernels.all_gather_matmul(x, w, group).sum().backward()


def _tune(group: dist.ProcessGroup) -> None:
    with tpkernels.autotune(group):
        call("matmul_all_reduce", group)


STEPS: dict[str, Callable[[dist.ProcessGroup], object]] = {
    "growth": lambda group: tpkernels.all_gather_matmul(
        torch.ones(512, 1024), torch.ones(1024, 2), group, algorithm="pipelined"
    ),
    "empty": lambda group: tpkernels.empty(1 << 20, group=group),
    "backward": _backward,
    "autotune": _tune,
}
# The function that the victim is to run at a moment of a step.
PLACES: dict[tuple[str, str], tuple[Any, str]] = {
    ("growth", "before"): (host.HostWorkspace, "grow"),
    ("growth", "map"): (host.HostWorkspace, "_commit"),
    ("empty", "before"): (host, "make_arena"),
    ("empty", "map"): (rendezvous._Arena, "_map"),
    ("init", "map"): (rendezvous._Arena, "_map"),
    ("backward", "before"): (torch.Tensor, "backward"),
    ("autotune", "run"): (tuner._Tuner, "_timed"),
    ("autotune", "times"): (tuner._Tuner, "_exchange_numbers"),
}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One fault, as all ranks know it.

    Its moment is a number of seconds after the first call, which also says which call it is to be,
    or one of these:

    before   the others are in the call or step, and this rank never enters it;
    map, run, times   instead of mapping the memory of the step, of the run of an algorithm that is
                      tuned, or of telling the others its times;
    matmul   within the local matmul;
    gloo     all have entered the call, and the others are in torch.distributed;
    kernel   at a wait of the Triton kernel;
    waiting  it waits for the others, which come late; in torch.distributed if "unfused".
    """

    op: str = "all_gather"
    algorithm: str = "auto"
    kind: str
    moment: float | str
    step: str = ""  #: in which it happens: "init", or one of STEPS
    memory: str = "shared"
    world: int = 4
    victim: int = 2
    seed: int = 0
    text: str = ""  #: in an error that names the victim

    @classmethod
    def drawn(cls, seed: int) -> Trial:
        draw = random.Random(seed)
        world = draw.randint(2, 4)
        op, algorithm = draw.choice([*CASES, *CASES_APART])
        kind = draw.choice(KINDS)
        in_set_up = kind in BY_SIGNAL and draw.random() < 0.2
        moment, victim = draw.random() * (0.02 if in_set_up else 0.3), draw.randrange(world)
        return cls(
            op=op, algorithm=algorithm, kind=kind, moment=moment, step="init" * in_set_up,
            world=world, victim=victim, seed=seed,
        )  # fmt: skip

    @property
    def exact(self) -> bool:
        """Whether all ranks must find the same."""
        return isinstance(self.moment, str)

    @property
    def timeout(self) -> float:
        """The group's."""
        short = self.kind in ("stop", "late") or self.step == "init"
        return (1.0 if self.exact else 1.5) * (1 + self.fused) if short else faults.PATIENCE

    @property
    def at_call(self) -> int:
        """The number of the call in which the victim goes wrong by itself."""
        return 0 if isinstance(self.moment, str) else 2 + int(self.moment * 50)

    @property
    def fused(self) -> bool:
        """Whether its kernels are interpreted, which takes half a second."""
        return self.algorithm == "fused"

    @property
    def alone(self) -> bool:
        """Whether nobody knows the victim's process yet."""
        return (self.step, self.moment) == ("init", "before")


def job(trial: Trial) -> Report:
    """What each rank does."""
    rank = dist.get_rank()
    ends = trial.kind in ("kill", "stop")
    lives = [r for r in range(trial.world) if r != trial.victim or not ends]
    destroyed = _destroyed_group() if trial.kind == "destroyed" else None
    other = faults.new_group(ranks=lives) if rank in lives else None
    group = faults.group_of(dist.new_group())
    victim = rank == trial.victim
    if trial.step != "init":
        _set_up(trial, group)
        _run(trial, group)
    fork: list[str] = []

    def calls() -> None:  # a fault may come while it is being prepared
        with _disturbed(trial, group, fork) if victim else contextlib.nullcontext():
            _calls(trial, group, victim, destroyed)

    first = faults.ending_of(calls)
    again = faults.ending_of(lambda: _next_call(trial, group))
    others = []
    if other is not None:
        others.append(faults.ending_of(lambda: faults.run_op("all_gather", other)))
    if trial.kind == "exception":
        new = faults.group_of(dist.new_group())
        _set_up(trial, new)
        others.append(faults.ending_of(lambda: _run(trial, new)))
    store = dist.distributed_c10d._get_default_store()
    at = faults.disturbed_at() if store.check(["disturbed"]) else 0.0
    return Report(first, again, others, at, "".join(fork))


def _set_up(trial: Trial, group: dist.ProcessGroup) -> None:
    """Sets the group up, unless it is already."""
    nbytes = 8 << 20 if trial.step == "growth" else faults.WORKSPACE_BYTES
    with MEMORY[trial.memory]():
        tpkernels.init(group, timeout=trial.timeout, workspace_bytes=nbytes)
    assert faults.shares_memory(group) == (trial.memory == "shared")


def _run(trial: Trial, group: dist.ProcessGroup, rows: int = 60, **options: Any) -> None:
    rows = 12 if trial.fused else rows
    faults.run_op(trial.op, group, trial.algorithm, rows, **options)


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
    if trial.step in STEPS:
        STEPS[trial.step](group)
        return
    if trial.memory == "shared":
        chaos = {"seed": trial.seed * 8 + group.rank(), "max_delay_us": MOST_DELAY_US}
        faults.workspace_of(group).set_chaos(**chaos)
    if trial.moment == "waiting" and not victim:
        late = functools.partial(time.sleep, 0.5)
        _in_gloo(late) if trial.algorithm == "unfused" else late()
    if trial.kind == "late":
        return _calls_until_one_is_late(trial, group, victim)
    if trial.kind == "turn" and victim:
        return _calls_of_two_threads(trial, group)
    endless = trial.exact or trial.kind in (*BY_SIGNAL, "turn")
    for number in range(1, (50 if endless else 1) * CALLS + 1):
        if victim and number == trial.at_call and trial.kind == "destroyed":
            ending = faults.ending_of(lambda: tpkernels.all_reduce(torch.ones(5), destroyed))
            if ending.error not in ("ValueError", "TypeError"):  # TypeError: never was in it
                raise AssertionError(f"wrong result of a group that was destroyed: {ending}")
        odd = victim and trial.kind == "mismatch" and number == trial.at_call
        lacking = victim and trial.kind == "no memory" and number == trial.at_call
        with no_memory(1 + trial.seed % 3 if lacking else 0):
            _run(trial, group, rows=120 if odd else 60)


def _calls_until_one_is_late(trial: Trial, group: dist.ProcessGroup, victim: bool) -> None:
    """The others pass symmetric tensors, and overwrite them once they have given up."""
    x = tpkernels.empty(60, 48, group=group).fill_(1)
    for _ in range(trial.at_call):
        _run(trial, group, x=x)
    if victim:
        dist.barrier()
        return _run(trial, group)
    try:
        _run(trial, group, x=x)
    finally:
        x.fill_(9)
        dist.barrier()


def _calls_of_two_threads(trial: Trial, group: dist.ProcessGroup) -> None:
    """This thread is interrupted, mostly while it waits for the calls of the other."""
    endings: list[Ending] = []
    over = threading.Event()

    def calls() -> None:
        while not over.is_set():
            _run(trial, group)

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
    if trial.kind in INTERRUPTS:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if isinstance(trial.moment, str):
        _disturb_at(trial, group)
    elif trial.kind in (*BY_SIGNAL, "turn"):
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


def _disturb_at(trial: Trial, group: dist.ProcessGroup) -> None:
    """Makes the fault happen at its exact moment."""

    def act(*_: Any) -> None:
        time.sleep(0.1)
        if trial.kind == "exception":
            faults.record_disturbance()
            raise ArithmeticError("no luck")
        if trial.fused:
            sync.pause_for = lambda _: None
        faults.disturb_now(BY_SIGNAL[trial.kind])

    if (trial.step, trial.moment) in PLACES:
        place, name = PLACES[trial.step, str(trial.moment)]
        step = getattr(place, name)
        setattr(place, name, lambda *args, **options: (act(), step(*args, **options))[1])
    elif trial.moment == "before":
        act()
    elif trial.moment == "waiting":
        faults.disturb_later(0.2, BY_SIGNAL[trial.kind])
    elif trial.moment == "matmul":
        _in_product(trial.algorithm, act)
    elif trial.moment == "kernel":
        from tpkernels.kernels import sync

        sync.pause_for = act
    else:
        _in_gloo(act)


def _in_product(algorithm: str, then: Callable[[], object]) -> None:
    """Runs ``then()`` within the next local matmul; pipelined and ring have then passed on one part
    of several."""
    whole, left = torch.mm, [2 if algorithm in ("pipelined", "ring") else 1]

    def mm(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            then()
        return whole(*args, **options)

    torch.mm = mm


def _in_gloo(then: Callable[[], object]) -> None:
    """Runs ``then()`` when the others are in torch.distributed already."""

    def late(transport: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            then()
            return transport(*args)

        return wrapped

    unfused._gather = late(unfused._gather)  # type: ignore[assignment]
    unfused._exchange = late(unfused._exchange)  # type: ignore[assignment]


def _raise_in_call(trial: Trial, group: dist.ProcessGroup) -> None:
    """Makes a call raise, at its beginning or when all of it is done."""
    groups.get(group.group_name).forget_calls()  # they hold their functions
    execution.bind = lambda *_: None  # type: ignore[assignment]
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
        outcomes, pid = _outcomes(trial)
    except AssertionError as error:  # about what is left behind
        return [str(error)], 0.0
    wrong, others = [], []
    for outcome in outcomes:
        if outcome.rank == trial.victim and trial.kind == "kill":
            wrong += [] if outcome.exitcode == -signal.SIGKILL else [f"the victim: {outcome}"]
        elif not outcome.ok:
            wrong.append(f"rank {outcome.rank}: {outcome}")
        else:
            wrong += _judged(trial, outcome.rank, outcome.value, pid)
            others += [outcome.value] if outcome.rank != trial.victim else []
    if trial.exact and not wrong:
        wrong += _judged_together(trial, others, pid)
    return wrong, max((r.first.at - r.at for r in others if r.at and r.first.error), default=0.0)


def _outcomes(trial: Trial) -> tuple[list[Outcome], int]:
    """How the ranks' jobs end, and the victim's process."""
    env = {"TRITON_INTERPRET": "1"} if trial.fused else {}
    with faults.watched_ranks(trial.world, **env) as ranks:
        pid = ranks.pids[trial.victim]
        ranks.submit(job, trial)
        if trial.kind == "stop":
            outcomes = faults.collect_without(ranks, trial.victim)
            os.kill(pid, signal.SIGCONT)
            after = ranks.collect(2 * trial.timeout + 5.0)
            outcomes[trial.victim] = after[trial.victim]
        else:
            outcomes = ranks.collect(faults.COLLECT_SECONDS)
    return outcomes, pid


def _judged(trial: Trial, rank: int, report: Report, pid: int) -> list[str]:
    """What is wrong with a rank's report."""
    first, again, victim = report.first, report.again, rank == trial.victim
    allowed = _allowed(trial, victim)
    between_calls = victim and trial.kind in INTERRUPTS  # then the others find it in another call
    right = {
        f"not one of {allowed}": first.error in allowed,
        "a fork": report.fork in ("", "fine"),
        "the result": "wrong result" not in first.text,
        "the next call": again.error == "GroupBrokenError"
        or (between_calls if first.error else not trial.exact or bool(again.error)),
        "another group": not any(other.error for other in report.others),
    }
    if report.at and first.error:
        late = first.error == "CollectiveTimeoutError"
        most = (trial.timeout + (rendezvous._GRACE if trial.step else 1.0)) * late + PROMPT
        right["too late"] = first.at - report.at <= most or (victim and trial.kind == "stop")
    if trial.exact and first.error:
        right["the error of the next call"] = (
            again.seconds < PROMPT / 2
            and "create a new group" in again.text
            and first.text[:100] in again.text
        )
        right["what it says"] = victim or _names_the_victim(trial, rank, first, pid)
    return [f"rank {rank}, {what}: {report}" for what, fine in right.items() if not fine]


def _names_the_victim(trial: Trial, rank: int, first: Ending, pid: int) -> bool:
    """Whether an error says all that a survivor of an exact fault can know."""
    name = f"rank {trial.victim}" + (f" (pid {pid})" if trial.step != "init" else "")
    named = first.peer == trial.victim and name in first.text
    if trial.step:
        return named and trial.text in first.text
    cause = {
        "exception": "ArithmeticError: no luck",
        "interrupt": "it left the call with KeyboardInterrupt",
    }.get(trial.kind, "")
    known = trial.kind == "stop" or trial.memory != "shared" or (named and cause in first.text)
    texts = (f"rank {rank} ", "he group is broken; create a new group")
    return known and first.text.startswith(trial.op) and all(text in first.text for text in texts)


def _judged_together(trial: Trial, reports: list[Report], pid: int) -> list[str]:
    """What is wrong with the reports of all survivors of an exact fault."""
    firsts = [report.first for report in reports]
    soonest = min(report.first.at - report.at for report in reports)
    if trial.kind != "stop":
        late = trial.timeout * trial.alone + (PROMPT if trial.fused else AT_ONCE)
        return [] if soonest < late else [f"nobody noticed for {soonest:.2f} s"]
    # Those that waited for less were notified by one that waited that long.
    late = [first for first in firsts if first.error == "CollectiveTimeoutError"]
    by_pid = trial.memory == "shared" and not trial.step and not trial.fused  # no kernel knows it
    name = f"rank {trial.victim} (pid {pid})" if by_pid else ""
    blamed = any(name in first.text and trial.text in first.text for first in firsts)
    known = trial.moment not in ("before", "gloo") or any(f.peer == trial.victim for f in firsts)
    waited = max(first.seconds for first in firsts) >= trial.timeout
    return [] if late and blamed and known and waited else [f"they report {firsts}"]


def _allowed(trial: Trial, victim: bool) -> set[str]:
    """How a rank's calls may end."""
    lost, late = {"PeerLostError"}, {"CollectiveTimeoutError"}
    own = {kind: "KeyboardInterrupt" for kind in INTERRUPTS} | {"exception": "ArithmeticError"}
    if trial.exact and trial.kind in own:
        return {own[trial.kind]} if victim else lost
    if trial.kind == "kill":
        if trial.exact:
            return late if trial.alone else lost
        return lost | late if trial.step else lost  # nobody may know its process yet
    if trial.kind == "stop":
        known = trial.exact and (trial.step or trial.memory == "shared")
        done = {""} if victim and trial.step else set[str]()  # then its next call fails
        return (
            late
            if not victim and (known or not (trial.step or trial.exact))
            else late | lost | done
        )
    if trial.kind == "mismatch":
        # A rank in the call sees that the numbers of rows differ; a rank that waits for one of
        # these ranks sees it leave.
        return {"CollectiveMismatchError", *lost}
    if trial.kind in ("fork", "destroyed"):
        return {""}
    if trial.kind == "late":  # it may find all that it needs in workspaces, which stay as they are
        return {"", *late, *lost} if victim else {*late, *lost}
    if victim:
        return {own.get(trial.kind, "MemoryError"), ""}
    if trial.kind not in INTERRUPTS:
        return {"", *lost}
    # Who is interrupted before it has joined is awaited until the timeout: nobody knows it yet.
    return {"", "CollectiveMismatchError", *lost, *(late if trial.step else ())}


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
        chosen = (replace(trial, kind=options.kind, step="") for trial in chosen)
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
