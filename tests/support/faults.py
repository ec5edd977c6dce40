"""What the failure tests share: ranks that are watched for what they leave behind, calls that are
expected to fail, and ways to disturb a rank."""

from __future__ import annotations

import contextlib
import gc
import math
import multiprocessing
import os
import re
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import tpkernels
from tests.support.processes import running
from tpkernels import groups
from tpkernels.algorithms.backends import TABLES
from tpkernels.launch import Outcome, Ranks
from tpkernels.planning.op_spec import OPS
from tpkernels.symm.host import HostWorkspace

WORKSPACE_BYTES = 1 << 16
PATIENCE = 20.0  # a group's timeout if something else must end the wait
# A failure other than a timeout is reported well before the group's timeout, even on a busy
# machine. The first rank to report a killed one does so at once.
PROMPT = PATIENCE / 4
AT_ONCE = 1.0
COLLECT_SECONDS = 60.0

# Every op with every algorithm that it has on the CPUs of one host, without the Triton interpreter.
# Those on scaled operands, which the functions of others carry out, and on routed tokens are by
# themselves.
_HERE = sorted(case for case in TABLES["cpu"] if case[1] not in ("fused", "hierarchical"))
_APART = {op for op, spec in OPS.items() if spec.scaled or spec.routed}
CASES = [case for case in _HERE if case[0] not in _APART and not OPS[case[0]].exchanges]
CASES_APART = [case for case in _HERE if case[0] in _APART]


@dataclass(frozen=True)
class Ending:
    """How a call ended on one rank."""

    error: str  #: the exception's class name, empty if the call succeeded
    text: str
    peer: int | None
    at: float  #: time.monotonic(), one clock for all processes
    seconds: float


@dataclass(frozen=True)
class Report:
    """What a rank reports of a failure and of the calls after it."""

    first: Ending
    again: Ending  #: the next call on the same group
    others: list[Ending]  #: calls on other groups, which must go on
    at: float = 0.0  #: when the fault happened, on the clock of `Ending.at`; 0.0: unknown
    fork: str = ""  #: what the victim's fork reports


def group_of(group: object) -> dist.ProcessGroup:
    assert isinstance(group, dist.ProcessGroup)
    return group


def workspace_of(group: dist.ProcessGroup) -> HostWorkspace:
    workspace = groups.get(group.group_name).workspace
    assert workspace is not None
    return workspace


def poison_buffer(workspace: HostWorkspace, epoch: int) -> None:
    """Fill this rank's buffer of the epoch's parity with NaN."""
    channel = workspace.channel
    memory = torch.frombuffer(workspace._arena.region(channel.rank), dtype=torch.float32)
    offset = channel.buffer_offset(epoch & 1)
    memory[offset // 4 :][: channel.capacity // 4].fill_(math.nan)


def shares_memory(group: dist.ProcessGroup) -> bool:
    return groups.get(group.group_name).workspace is not None


def new_group(timeout: float = PATIENCE, ranks: list[int] | None = None) -> dist.ProcessGroup:
    """A group of all ranks, or of ``ranks``, which alone take part in making it."""
    made = dist.new_group(ranks, use_local_synchronization=ranks is not None)
    group = group_of(made)
    tpkernels.init(group, timeout=timeout, workspace_bytes=WORKSPACE_BYTES)
    return group


def run_op(
    op: str,
    group: dist.ProcessGroup,
    algorithm: str = "auto",
    rows: int = 60,
    x: torch.Tensor | None = None,
    *,
    value: float = 1.0,
    converts: bool = False,
    max_rows: int | None = None,
) -> None:
    """One call with known numbers; checks the result.

    Args:
        x: where its ones are.
        value: of x.
        converts: it is a call for which much memory is allocated, with bf16, a bias, and a
            transposed x of all_reduce_.
        max_rows: of routed tokens.
    """
    world, k, n = group.size(), 48, 40
    function, options = getattr(tpkernels, op), dict[str, Any](algorithm=algorithm)
    spec = OPS[op.removesuffix("_")]
    dtype = torch.bfloat16 if converts else torch.float32
    x = torch.full((rows, k), value, dtype=dtype) if x is None else x
    if converts and op == "all_reduce_":
        x = x.t()
    factors = [x, torch.ones(k, n, dtype=dtype)] if spec.has_matmul else [x]
    if spec.scaled:
        factors = [factor.to(torch.float8_e4m3fn) for factor in factors]
        factors += [torch.ones(rows, 1), torch.ones(1, n)]
    expected = value * (k if spec.has_matmul else 1) * (world if spec.reduces else 1)
    if converts and spec.has_matmul:
        options["biases" if spec.gathers else "bias"] = torch.full((n,), 16.0, dtype=torch.bfloat16)
        expected += 16.0
    if spec.routed:
        function, options["max_rows"] = getattr(torch.ops.tpkernels, op), max_rows
        routes = (torch.arange(world * rows) % world).view(-1, 1)
        weights = [torch.ones(rows, 1)] if spec.combines else []
        got = function(*factors, *weights, routes, world, group.group_name, **options)
        got = got if spec.combines else got[0]
    elif op.endswith("_rms_norm"):
        weight = torch.ones(n if spec.has_matmul else k, dtype=dtype)
        normed, got = function(*factors, weight, group, eps=0.0, **options)
        assert torch.equal(normed, torch.ones_like(normed)), f"{op} {algorithm}: wrong rows"
    else:
        got = function(*factors, group, **options)
    assert torch.equal(got, torch.full_like(got, expected)), f"{op} {algorithm}: wrong result {got}"


def ending_of(call: Callable[[], object]) -> Ending:
    start = time.monotonic()
    error, text, peer = "", "", None
    try:
        call()
    except BaseException as failure:  # including KeyboardInterrupt
        error, text = type(failure).__name__, str(failure)
        peer = getattr(failure, "peer", None)
    at = time.monotonic()
    return Ending(error, text, peer, at, at - start)


def together(calls: Iterable[Callable[[], Any]]) -> list[Any]:
    """Run each call in a thread of its own; return its result, or its exception."""

    def run(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except BaseException as error:
            return error

    calls = list(calls)
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def report_of(
    call: Callable[[], object], group: dist.ProcessGroup, others: list[dist.ProcessGroup]
) -> Report:
    """How ``call`` ends, and how the next calls on its group and on other groups end."""
    first = ending_of(call)
    again = ending_of(lambda: run_op("all_reduce", group))
    return Report(first, again, [ending_of(lambda g=g: run_op("all_gather", g)) for g in others])


def in_child(work: Callable[[], str], within: float = 20.0) -> str:
    """What ``work`` returns in a fork of this process, or what happens to that instead."""
    gc.collect()  # process groups that earlier tests have left: gloo cannot free them in a fork
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = work()
        except BaseException:
            said = traceback.format_exc()
        os.write(write, said.encode()[-4000:] or b"fine")
        os._exit(0)
    os.close(write)
    deadline = time.monotonic() + within
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            ended = os.waitpid(pid, 0)
        time.sleep(0.01)
    with os.fdopen(read) as pipe:
        return pipe.read() or f"ended with status {ended[1]}"


def disturb_later(seconds: float, number: int) -> None:
    """Sends a signal to this process from a thread, and records when it did."""

    def disturb() -> None:
        time.sleep(seconds)
        disturb_now(number)

    threading.Thread(target=disturb, daemon=True).start()


def record_disturbance() -> None:
    dist.distributed_c10d._get_default_store().set("disturbed", repr(time.monotonic()))


def disturb_now(number: int) -> None:
    record_disturbance()
    os.kill(os.getpid(), number)
    while number == signal.SIGKILL:  # the kernel takes a moment
        time.sleep(1)


def disturbed_at() -> float:
    return float(dist.distributed_c10d._get_default_store().get("disturbed"))


def _entries(folder: str) -> set[str]:
    return {entry.name for entry in os.scandir(folder)}


def _mapped() -> str:
    """The mappings of all processes that this one may inspect."""
    texts = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            texts.append(maps.read_text())
    return "".join(texts)


def _left_files(before: dict[str, set[str]], pids: list[int]) -> list[str]:
    """New entries that stay and that no process uses. Other programs use these folders too, so only
    names with the pid of one of ours count, as torch gives them, or with the package's name."""
    ours = re.compile(rf"tpk|(?<!\d)({'|'.join(map(str, pids))})(?!\d)")
    deadline = time.monotonic() + PROMPT
    while True:
        new = [
            f"{folder}/{name}"
            for folder, known in before.items()
            for name in _entries(folder) - known
            if ours.search(name)
        ]
        used = _mapped() if new else ""
        left = [path for path in new if path not in used]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def _left_processes(leaders: list[int]) -> list[str]:
    """Processes in the ranks' process groups, of which each rank leads one."""
    return [f"{one.pid} ({one.name})" for one in running() if one.group in leaders]


@contextlib.contextmanager
def watched_ranks(world: int, **env: str) -> Iterator[Ranks]:
    """Ranks of one test. Nothing may be left of them afterwards, no process and no file, and the
    survivors must have exited by themselves."""
    before = {folder: _entries(folder) for folder in ("/dev/shm", tempfile.gettempdir())}
    # Names of the ranks' semaphores begin with this.
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    with mock.patch.dict(config, semprefix=f"/mp-{os.getpid()}"), Ranks(world, env=env) as ranks:
        pids = ranks.pids
        yield ranks
    for code in ranks.exitcodes:
        assert code in (0, -signal.SIGKILL), ranks.exitcodes
    processes, files = _left_processes(pids), _left_files(before, [os.getpid(), *pids])
    assert not processes and not files, f"left behind: {processes} {files}"


def collect(ranks: Ranks, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Outcome]:
    ranks.submit(fn, *args, **kwargs)
    return ranks.collect(COLLECT_SECONDS)


def collect_without(ranks: Ranks, rank: int) -> list[Outcome]:
    """Waits for all ranks but one."""
    deadline = time.monotonic() + COLLECT_SECONDS
    while True:
        outcomes = ranks.collect(0.05)
        late = [outcome.rank for outcome in outcomes if outcome.timed_out]
        if late in ([], [rank]) or time.monotonic() > deadline:
            return outcomes


def values(outcomes: list[Outcome], *without: int) -> dict[int, Any]:
    """What the jobs returned, by rank. All must have succeeded, except on the ranks ``without``."""
    for outcome in outcomes:
        assert outcome.rank in without or outcome.ok, outcome
    return {outcome.rank: outcome.value for outcome in outcomes if outcome.rank not in without}


def require_broken(report: Report) -> None:
    """The next call fails at once, saying what broke the group; other groups go on."""
    assert report.again.error == "GroupBrokenError", report.again
    assert report.again.seconds < PROMPT / 2, report.again
    assert "create a new group" in report.again.text
    assert report.first.text[:100] in report.again.text, report
    for other in report.others:
        assert not other.error, other
