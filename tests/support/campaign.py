"""A campaign of faults: random ops on random world sizes, disturbed at random moments.

    python -m tests.support.campaign --count 300 --seed 1
    python -m tests.support.campaign --count 100 --backend

Each trial repeats one op on 2 to 4 ranks, with random delays in its protocol, until a fault hits
one rank:

- it is killed, stopped or forked;
- it is interrupted, possibly while it waits for a call of a second thread;
- it raises an exception, or runs out of memory;
- it calls a different op;
- it arrives after its peers have left and overwritten their symmetric input;
- it uses a group that was destroyed before torch.distributed was initialized again.

All ranks must then detect the fault in time and report the right error. No result may be wrong,
calls of other groups must succeed, and no process or file may be left. A trial is determined by its
seed, except for the timing.
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
from tests.support.faults import CASES, IMMEDIATE, PROMPT, SCALED_AND_ROUTED_CASES, Ending, Report
from tests.support.ranked import on_hosts, separate_hosts
from tests.support.tuned import call
from tpkernels import groups
from tpkernels.algorithms import backends, unfused
from tpkernels.launch import Outcome
from tpkernels.ops import execution, tuner
from tpkernels.symm import host, rendezvous

KINDS = ("kill", "stop", "interrupt", "exception", "no memory", "mismatch", "fork")
KINDS += ("turn", "late", "destroyed")
# With --backend: collectives of torch.distributed, on groups with the backend "tpkernels".
BACKEND_KINDS = ("kill", "stop", "interrupt", "no memory", "mismatch", "fork", "turn", "late")
CALLS = 200  # per rank, in a trial without a failure
BY_SIGNAL = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "interrupt": signal.SIGINT}
INTERRUPTS = ("interrupt", "turn")
MAX_DELAY_US = 3000
# Which ranks share memory.
MEMORY: dict[str, Callable[[], Any]] = {
    "shared": contextlib.nullcontext,
    "hosts": lambda: on_hosts("0011"),  # the host of the victim has two ranks
    "apart": separate_hosts,
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
# Function in which the victim fails, by step and moment.
INJECTION_POINTS: dict[tuple[str, str], tuple[Any, str]] = {
    ("growth", "before"): (host.HostWorkspace, "grow"),
    ("growth", "map"): (host.HostWorkspace, "_commit"),
    ("empty", "before"): (host, "make_arena"),
    ("empty", "map"): (rendezvous._ArenaSetup, "_map"),
    ("init", "map"): (rendezvous._ArenaSetup, "_map"),
    ("backward", "before"): (torch.Tensor, "backward"),
    ("autotune", "run"): (tuner._Tuner, "_time_run"),
    ("autotune", "times"): (tuner._Tuner, "_exchange_numbers"),
}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One fault, identical on all ranks.

    ``moment`` is a time in seconds after the first call, and then also determines `fault_call`. Or
    it names the place where the victim fails:

    before   the peers are in the call or step, and the victim never enters it;
    map      instead of mapping the memory of the step;
    run      instead of running an algorithm in the tuner;
    times    instead of sending times to the peers;
    matmul   within the local matmul;
    gloo     all ranks have entered the call, and the peers are in torch.distributed;
    kernel   at a wait of the Triton kernel;
    waiting  the victim waits for late peers, in torch.distributed if the algorithm is "unfused".
    """

    op: str = "all_gather"
    algorithm: str = "auto"
    kind: str
    moment: float | str
    step: str = ""  #: step of the fault: "init", or one of STEPS
    memory: str = "shared"
    world: int = 4
    victim: int = 2
    seed: int = 0
    message: str = ""  #: expected in an error that names the victim
    backend: bool = False  #: op is a collective of torch.distributed, algorithm "sync" or "async"

    @classmethod
    def drawn_for_backend(cls, seed: int) -> Trial:
        draw = random.Random(seed)
        trial = replace(
            cls.drawn(seed),
            op=draw.choice(list(faults.COLLECTIVES)),
            algorithm=draw.choice(("sync", "async")),
            kind=draw.choice(BACKEND_KINDS),
            backend=True,
        )
        in_set_up = trial.step == "init" and trial.kind in BY_SIGNAL
        return trial if in_set_up else replace(trial, step="", moment=draw.random() * 0.3)

    @classmethod
    def drawn(cls, seed: int) -> Trial:
        draw = random.Random(seed)
        world = draw.randint(2, 4)
        op, algorithm = draw.choice([*CASES, *SCALED_AND_ROUTED_CASES])
        kind = draw.choice(KINDS)
        in_set_up = kind in BY_SIGNAL and draw.random() < 0.2
        moment, victim = draw.random() * (0.02 if in_set_up else 0.3), draw.randrange(world)
        return cls(
            op=op, algorithm=algorithm, kind=kind, moment=moment, step="init" * in_set_up,
            world=world, victim=victim, seed=seed,
        )  # fmt: skip

    @property
    def exact(self) -> bool:
        """Return True if all ranks must report the same fault."""
        return isinstance(self.moment, str)

    @property
    def timeout(self) -> float:
        """Return the group timeout in seconds."""
        short = self.kind in ("stop", "late") or self.step == "init"
        return (1.0 if self.exact else 1.5) * (1 + self.fused) if short else faults.PATIENCE

    @property
    def fault_call(self) -> int:
        """Return the number of the call in which the victim itself fails."""
        return 0 if isinstance(self.moment, str) else 2 + int(self.moment * 50)

    @property
    def fused(self) -> bool:
        """Return True if the kernels are interpreted, at half a second per call."""
        return self.algorithm == "fused"

    @property
    def unregistered(self) -> bool:
        """Return True if no peer has received the process id of the victim."""
        return (self.step, self.moment) == ("init", "before")


def job(trial: Trial) -> Report:
    """Run a trial on one rank."""
    rank = dist.get_rank()
    ends = trial.kind in ("kill", "stop")
    survivors = [r for r in range(trial.world) if r != trial.victim or not ends]
    destroyed = _destroyed_group() if trial.kind == "destroyed" else None
    other = faults.new_group(ranks=survivors) if rank in survivors else None
    backend = "tpkernels" if trial.backend else None
    group = faults.require_group(dist.new_group(backend=backend))
    victim = rank == trial.victim
    if trial.step != "init":
        _set_up(trial, group)
        _run(trial, group)
    fork: list[str] = []

    def calls() -> None:  # a fault may occur during its preparation
        with _disturbed(trial, group, fork) if victim else contextlib.nullcontext():
            _calls(trial, group, victim, destroyed)

    first = faults.record_ending(calls)
    next_call = faults.record_ending(lambda: _next_call(trial, group))
    other_groups = []
    if other is not None:
        other_groups.append(faults.record_ending(lambda: faults.run_op("all_gather", other)))
    if trial.kind == "exception":
        new = faults.require_group(dist.new_group())
        _set_up(trial, new)
        other_groups.append(faults.record_ending(lambda: _run(trial, new)))
    store = dist.distributed_c10d._get_default_store()
    fault_time = faults.get_disturbance_time() if store.check(["disturbed"]) else 0.0
    return Report(first, next_call, other_groups, fault_time, "".join(fork))


def _set_up(trial: Trial, group: dist.ProcessGroup) -> None:
    """Initialize the group, if it is not initialized."""
    nbytes = 8 << 20 if trial.step == "growth" else faults.WORKSPACE_BYTES
    with MEMORY[trial.memory]():
        tpkernels.init(group, timeout=trial.timeout, workspace_bytes=nbytes)
    assert faults.shares_memory(group) == (trial.memory == "shared")


def _run(trial: Trial, group: dist.ProcessGroup, rows: int = 60, **options: Any) -> None:
    rows = 12 if trial.fused else rows
    if trial.backend:
        return faults.run_collective(trial.op, group, rows, is_async=trial.algorithm == "async")
    faults.run_op(trial.op, group, trial.algorithm, rows, **options)


def _next_call(trial: Trial, group: dist.ProcessGroup) -> None:
    _set_up(trial, group)
    faults.run_op("all_reduce", group, rows=61)


def _destroyed_group() -> dist.ProcessGroup:
    """Use a group, then destroy all groups. torch gives its name to a later group."""
    rank, world = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    group = dist.new_group(list(range(world - 1)) if world > 2 else None)
    if rank < world - 1 or world == 2:
        faults.run_op("all_gather", faults.require_group(group))
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
        chaos = {"seed": trial.seed * 8 + group.rank(), "max_delay_us": MAX_DELAY_US}
        faults.get_workspace(group).set_chaos(**chaos)
    if trial.moment == "waiting" and not victim:
        late = functools.partial(time.sleep, 0.5)
        _run_in_gloo(late) if trial.algorithm == "unfused" else late()
    if trial.kind == "late" and not trial.backend:
        return _calls_until_one_is_late(trial, group, victim)
    if trial.kind == "turn" and victim:
        return _calls_of_two_threads(trial, group)
    endless = trial.exact or trial.kind in (*BY_SIGNAL, "turn")
    for number in range(1, (50 if endless else 1) * CALLS + 1):
        if victim and number == trial.fault_call and trial.kind == "destroyed":
            ending = faults.record_ending(lambda: tpkernels.all_reduce(torch.ones(5), destroyed))
            # TypeError: this rank was not a member.
            if ending.error not in ("ValueError", "TypeError"):
                raise AssertionError(f"wrong result of a group that was destroyed: {ending}")
        mismatched = victim and trial.kind == "mismatch" and number == trial.fault_call
        fails_allocation = victim and trial.kind == "no memory" and number == trial.fault_call
        if victim and trial.kind == "late" and number == trial.fault_call:
            time.sleep(trial.timeout + 1.0)
        with no_memory(1 + trial.seed % 3 if fails_allocation else 0):
            _run(trial, group, rows=120 if mismatched else 60)


def _calls_until_one_is_late(trial: Trial, group: dist.ProcessGroup, victim: bool) -> None:
    """Run calls until the victim is late.

    The peers pass symmetric tensors and overwrite them after their last call has failed.
    """
    x = tpkernels.empty(60, 48, group=group).fill_(1)
    for _ in range(trial.fault_call):
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
    """Interrupt this thread, mostly while it waits for calls of the second thread."""
    endings: list[Ending] = []
    done = threading.Event()

    def calls() -> None:
        while not done.is_set():
            _run(trial, group)

    thread = threading.Thread(target=lambda: endings.append(faults.record_ending(calls)))
    thread.start()
    try:
        calls()
    finally:
        done.set()
        thread.join()
        if "wrong result" in endings[0].message:
            raise AssertionError(endings[0].message)


@contextlib.contextmanager
def _disturbed(trial: Trial, group: dist.ProcessGroup, fork: list[str]) -> Iterator[None]:
    """Inject the fault into this rank. ``fork`` receives the report of the forked child."""
    if trial.kind in INTERRUPTS:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if isinstance(trial.moment, str):
        _inject_fault(trial, group)
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


def _inject_fault(trial: Trial, group: dist.ProcessGroup) -> None:
    """Inject the fault at its exact moment."""

    def act(*_: Any) -> None:
        time.sleep(0.1)
        if trial.kind == "exception":
            faults.record_disturbance()
            raise ArithmeticError("no luck")
        if trial.fused:
            sync.pause_for = lambda _: None
        faults.disturb_now(BY_SIGNAL[trial.kind])

    if (trial.step, trial.moment) in INJECTION_POINTS:
        owner, name = INJECTION_POINTS[trial.step, str(trial.moment)]
        step = getattr(owner, name)
        setattr(owner, name, lambda *args, **options: (act(), step(*args, **options))[1])
    elif trial.moment == "before":
        act()
    elif trial.moment == "waiting":
        faults.disturb_later(0.2, BY_SIGNAL[trial.kind])
    elif trial.moment == "matmul":
        _run_in_matmul(trial.algorithm, act)
    elif trial.moment == "kernel":
        from tpkernels.kernels import sync

        sync.pause_for = act
    else:
        _run_in_gloo(act)


def _run_in_matmul(algorithm: str, then: Callable[[], object]) -> None:
    """Run ``then()`` within the next local matmul.

    pipelined and ring have then sent one of several chunks.
    """
    matmul, remaining = torch.mm, [2 if algorithm in ("pipelined", "ring") else 1]

    def mm(*args: Any, **options: Any) -> Any:
        remaining[0] -= 1
        if remaining[0] == 0:
            then()
        return matmul(*args, **options)

    torch.mm = mm


def _run_in_gloo(then: Callable[[], object]) -> None:
    """Run ``then()`` when the peers are already in torch.distributed."""

    def late(transport: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            then()
            return transport(*args)

        return wrapped

    unfused._gather = late(unfused._gather)  # type: ignore[assignment]
    unfused._exchange = late(unfused._exchange)  # type: ignore[assignment]


def _raise_in_call(trial: Trial, group: dist.ProcessGroup) -> None:
    """Let a call raise at its start, or after its work is complete."""
    groups.get(group.group_name).clear_planned_calls()  # they store functions of TABLES
    execution.bind = lambda *_: None  # type: ignore[assignment]
    run, calls = backends.TABLES["cpu"][trial.op, trial.algorithm], [0]

    def raising(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == trial.fault_call and trial.seed % 2:
            raise ArithmeticError("no luck")
        result = run(*args)
        if calls[0] == trial.fault_call:  # the peers may have completed this call
            raise ArithmeticError("no luck")
        return result

    backends.TABLES["cpu"][trial.op, trial.algorithm] = raising


def _fork(group: dist.ProcessGroup) -> str:
    """Fork a child that tries an op, finalizes and exits.

    Returns "fine" if the op was refused, otherwise a description.
    """

    def child() -> str:
        ending = faults.record_ending(lambda: tpkernels.all_reduce(torch.full((9,), 100.0), group))
        with contextlib.suppress(Exception):
            tpkernels.finalize()
        return "" if ending.error == "GroupBrokenError" else str(ending)

    return faults.run_in_child(child)


def run_trial(trial: Trial) -> tuple[list[str], float]:
    """Run a trial. Return its errors, and the seconds from the fault to the last report."""
    try:
        outcomes, pid = _outcomes(trial)
    except AssertionError as error:  # processes or files are left
        return [str(error)], 0.0
    wrong, survivors = [], []
    for outcome in outcomes:
        if outcome.rank == trial.victim and trial.kind == "kill":
            wrong += [] if outcome.exitcode == -signal.SIGKILL else [f"the victim: {outcome}"]
        elif not outcome.ok:
            wrong.append(f"rank {outcome.rank}: {outcome}")
        else:
            wrong += _find_report_errors(trial, outcome.rank, outcome.value, pid)
            survivors += [outcome.value] if outcome.rank != trial.victim else []
    if trial.exact and not wrong:
        wrong += _find_joint_errors(trial, survivors, pid)
    return wrong, max(
        (r.first.time - r.fault_time for r in survivors if r.fault_time and r.first.error),
        default=0.0,
    )


def _outcomes(trial: Trial) -> tuple[list[Outcome], int]:
    """Return the outcomes of the jobs, and the process id of the victim."""
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


def _find_report_errors(trial: Trial, rank: int, report: Report, pid: int) -> list[str]:
    """Describe the errors in the report of a rank."""
    first, next_call, victim = report.first, report.next_call, rank == trial.victim
    allowed = _allowed(trial, victim)
    # An interrupt between two calls leaves the group intact. The next call of the victim then
    # mismatches the call of its peers.
    between_calls = victim and trial.kind in INTERRUPTS
    checks = {
        f"not one of {allowed}": first.error in allowed,
        "a fork": report.fork in ("", "fine"),
        "the result": "wrong result" not in first.message,
        "the next call": next_call.error == "GroupBrokenError"
        or (between_calls if first.error else not trial.exact or bool(next_call.error)),
        "another group": not any(ending.error for ending in report.other_groups),
    }
    if report.fault_time and first.error:
        late = first.error == "CollectiveTimeoutError"
        max_delay = (trial.timeout + (rendezvous._GRACE if trial.step else 1.0)) * late + PROMPT
        checks["too late"] = first.time - report.fault_time <= max_delay or (
            victim and trial.kind == "stop"
        )
    if trial.exact and first.error:
        checks["the error of the next call"] = (
            next_call.seconds < PROMPT / 2
            and "create a new group" in next_call.message
            and first.message[:100] in next_call.message
        )
        checks["what it says"] = victim or _names_victim(trial, rank, first, pid)
    return [f"rank {rank}, {label}: {report}" for label, ok in checks.items() if not ok]


def _names_victim(trial: Trial, rank: int, first: Ending, pid: int) -> bool:
    """Return True if a survivor of an exact fault reports all that its rank can determine."""
    name = f"rank {trial.victim}" + (f" (pid {pid})" if trial.step != "init" else "")
    named = first.peer == trial.victim and name in first.message
    if trial.step:
        return named and trial.message in first.message
    cause = {
        "exception": "ArithmeticError: no luck",
        "interrupt": "it left the call with KeyboardInterrupt",
    }.get(trial.kind, "")
    names_cause = (
        trial.kind == "stop" or trial.memory != "shared" or (named and cause in first.message)
    )
    phrases = (f"rank {rank} ", "he group is broken; create a new group")
    return (
        names_cause
        and first.message.startswith(trial.op)
        and all(phrase in first.message for phrase in phrases)
    )


def _find_joint_errors(trial: Trial, reports: list[Report], pid: int) -> list[str]:
    """Describe the errors in the joint reports of the survivors of an exact fault."""
    firsts = [report.first for report in reports]
    soonest = min(report.first.time - report.fault_time for report in reports)
    if trial.kind != "stop":
        late = trial.timeout * trial.unregistered + (PROMPT if trial.fused else IMMEDIATE)
        return [] if soonest < late else [f"nobody noticed for {soonest:.2f} s"]
    # Ranks with a shorter wait were notified by a rank that timed out.
    late = [first for first in firsts if first.error == "CollectiveTimeoutError"]
    # Kernels do not report process ids.
    by_pid = trial.memory == "shared" and not trial.step and not trial.fused
    name = f"rank {trial.victim} (pid {pid})" if by_pid else ""
    blamed = any(name in first.message and trial.message in first.message for first in firsts)
    names_peer = trial.moment not in ("before", "gloo") or any(
        f.peer == trial.victim for f in firsts
    )
    waited = max(first.seconds for first in firsts) >= trial.timeout
    return [] if late and blamed and names_peer and waited else [f"they report {firsts}"]


def _allowed(trial: Trial, victim: bool) -> set[str]:
    """Return the errors that may end the calls of a rank."""
    lost, late = {"PeerLostError"}, {"CollectiveTimeoutError"}
    own = {kind: "KeyboardInterrupt" for kind in INTERRUPTS} | {"exception": "ArithmeticError"}
    if trial.exact and trial.kind in own:
        return {own[trial.kind]} if victim else lost
    if trial.kind == "kill":
        if trial.exact:
            return late if trial.unregistered else lost
        return lost | late if trial.step else lost  # the peers may not have its process id yet
    if trial.kind == "stop":
        is_reported = trial.exact and (trial.step or trial.memory == "shared")
        done = {""} if victim and trial.step else set[str]()  # its next call fails
        return (
            late
            if not victim and (is_reported or not (trial.step or trial.exact))
            else late | lost | done
        )
    if trial.kind == "mismatch":
        # A rank in the call detects the different row counts. A rank that waits for such a rank
        # detects that it left.
        return {"CollectiveMismatchError", *lost}
    if trial.kind in ("fork", "destroyed"):
        return {""}
    if trial.kind == "late":  # workspaces may still contain all data that it reads
        return {"", *late, *lost} if victim else {*late, *lost}
    if victim:
        return {own.get(trial.kind, "MemoryError"), ""}
    if trial.kind not in INTERRUPTS:
        return {"", *lost}
    # During set-up, a rank may be interrupted before its peers have its process id. They time out.
    return {"", "CollectiveMismatchError", *lost, *(late if trial.step else ())}


def main(argv: list[str] | None = None) -> int:
    """Run trials. The exit code is 1 if any trial failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--op", nargs="*", help="only these")
    parser.add_argument("--backend", action="store_true", help="collectives of torch.distributed")
    options = parser.parse_args(argv)
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    failed = 0
    draw = Trial.drawn_for_backend if options.backend else Trial.drawn
    drawn = map(draw, itertools.count(options.seed))
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
    for kind, values in times.items():
        seen = [seconds for seconds in values if seconds]
        stats = f"{statistics.median(seen):.3f} s, slowest {max(seen):.3f} s" if seen else "-"
        print(
            f"{kind:10} {len(values):4} trials; from the fault to the last report: median {stats}"
        )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
