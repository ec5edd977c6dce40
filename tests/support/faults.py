"""Helpers of the failure tests.

They start ranks that must leave no process or file, record how calls end, and disturb a rank.
"""

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
from tests.support.processes import running_processes
from tpkernels import groups
from tpkernels.algorithms.backends import TABLES
from tpkernels.launch import Outcome, Ranks
from tpkernels.planning.op_spec import OPS
from tpkernels.symm.host import HostWorkspace

WORKSPACE_BYTES = 1 << 16
PATIENCE = 20.0  # s, group timeout if something other than the timeout must end the wait
# Limits in seconds. All ranks report a failure other than a timeout within PROMPT, even on a busy
# machine. The first rank reports a killed rank within IMMEDIATE.
PROMPT = PATIENCE / 4
IMMEDIATE = 1.0
COLLECT_SECONDS = 60.0

# Every (op, algorithm) for CPUs of one host, except those that need the Triton interpreter. MoE ops
# and ops on scaled operands (implemented by the plain ops) are in a separate list.
_CPU_CASES = sorted(case for case in TABLES["cpu"] if case[1] not in ("fused", "hierarchical"))
_SEPARATE_OPS = {op for op, spec in OPS.items() if spec.scaled or spec.routed}
CASES = [case for case in _CPU_CASES if case[0] not in _SEPARATE_OPS and not OPS[case[0]].exchanges]
SCALED_AND_ROUTED_CASES = [case for case in _CPU_CASES if case[0] in _SEPARATE_OPS]


@dataclass(frozen=True)
class Ending:
    """The result of a call on one rank."""

    error: str  #: class name of the exception, empty if the call succeeded
    message: str
    peer: int | None
    time: float  #: time.monotonic(), one clock for all processes
    seconds: float


@dataclass(frozen=True)
class Report:
    """A failure on one rank, and the calls after it."""

    first: Ending
    next_call: Ending  #: the next call on the same group
    other_groups: list[Ending]  #: calls on other groups, which must succeed
    fault_time: float = 0.0  #: on the clock of `Ending.time`; 0.0: unknown
    fork: str = ""  #: report of the child that the victim forked


def require_group(group: object) -> dist.ProcessGroup:
    assert isinstance(group, dist.ProcessGroup)
    return group


def get_workspace(group: dist.ProcessGroup) -> HostWorkspace:
    workspace = groups.get(group.group_name).workspace
    assert workspace is not None
    return workspace


def poison_buffer(workspace: HostWorkspace, epoch: int) -> None:
    """Fill the local data buffer of this epoch with NaN."""
    channel = workspace.channel
    memory = torch.frombuffer(workspace._arena.region(channel.rank), dtype=torch.float32)
    offset = channel.buffer_offset(epoch & 1)
    memory[offset // 4 :][: channel.capacity // 4].fill_(math.nan)


def shares_memory(group: dist.ProcessGroup) -> bool:
    return groups.get(group.group_name).workspace is not None


def new_group(timeout: float = PATIENCE, ranks: list[int] | None = None) -> dist.ProcessGroup:
    """Create a group of all ranks or of ``ranks``. Collective over its members."""
    new = dist.new_group(ranks, use_local_synchronization=ranks is not None)
    group = require_group(new)
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
    """Run one call with known values and check the result.

    Args:
        x: a tensor of ones.
        value: value of the elements of x.
        converts: the call allocates much memory: bf16, a bias, and a transposed x of all_reduce_.
        max_rows: capacity of MoE ops.
    """
    world, k, n = group.size(), 48, 40
    function, options = getattr(tpkernels, op), dict[str, Any](algorithm=algorithm)
    spec = OPS[op.removesuffix("_")]
    dtype = torch.bfloat16 if converts else torch.float32
    x = torch.full((rows, k), value, dtype=dtype) if x is None else x
    if converts and op == "all_reduce_":
        x = x.t()
    operands = [x, torch.ones(k, n, dtype=dtype)] if spec.has_matmul else [x]
    if spec.scaled:
        operands = [factor.to(torch.float8_e4m3fn) for factor in operands]
        operands += [torch.ones(rows, 1), torch.ones(1, n)]
    expected = value * (k if spec.has_matmul else 1) * (world if spec.reduces else 1)
    if converts and spec.has_matmul:
        options["biases" if spec.gathers else "bias"] = torch.full((n,), 16.0, dtype=torch.bfloat16)
        expected += 16.0
    if spec.routed:
        function, options["max_rows"] = getattr(torch.ops.tpkernels, op), max_rows
        topk_ids = (torch.arange(world * rows) % world).view(-1, 1)
        weights = [torch.ones(rows, 1)] if spec.combines else []
        got = function(*operands, *weights, topk_ids, world, group.group_name, **options)
        got = got if spec.combines else got[0]
    elif op.endswith("_rms_norm"):
        weight = torch.ones(n if spec.has_matmul else k, dtype=dtype)
        normed, got = function(*operands, weight, group, eps=0.0, **options)
        assert torch.equal(normed, torch.ones_like(normed)), f"{op} {algorithm}: wrong rows"
    else:
        got = function(*operands, group, **options)
    assert torch.equal(got, torch.full_like(got, expected)), f"{op} {algorithm}: wrong result {got}"


def _all_to_all(x: torch.Tensor, group: dist.ProcessGroup, is_async: bool) -> Any:
    out = torch.zeros(len(x) * group.size(), x.shape[1])
    work = dist.all_to_all_single(out, x.repeat(group.size(), 1), group=group, async_op=is_async)
    return out, work


def _all_gather(x: torch.Tensor, group: dist.ProcessGroup, is_async: bool) -> Any:
    outs = [torch.zeros_like(x) for _ in range(group.size())]
    return outs[-1], dist.all_gather(outs, x, group, is_async)


def _reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup, is_async: bool) -> Any:
    out = torch.zeros_like(x)
    work = dist.reduce_scatter(out, [x] * group.size(), group=group, async_op=is_async)
    return out / group.size() if work is None else out, work


# Collectives of torch.distributed: (x, group, is_async) -> (result, work).
COLLECTIVES: dict[str, Callable[[torch.Tensor, dist.ProcessGroup, bool], Any]] = {
    "all_reduce": lambda x, group, is_async: (
        x,
        dist.all_reduce(x, dist.ReduceOp.MAX, group, is_async),
    ),
    "broadcast": lambda x, group, is_async: (
        x,
        dist.broadcast(x, group=group, group_src=1, async_op=is_async),
    ),
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


def run_collective(
    name: str, group: dist.ProcessGroup, rows: int = 60, *, is_async: bool = False
) -> None:
    """Run a collective of torch.distributed with known values and check the result."""
    got, work = COLLECTIVES[name](torch.ones(rows, 48), group, is_async)
    if work is not None:
        work.wait()
        got = got / group.size() if name == "reduce_scatter" else got
    assert torch.equal(got, torch.ones_like(got)), f"{name}: wrong result {got}"


def record_ending(call: Callable[[], object]) -> Ending:
    start = time.monotonic()
    error, message, peer = "", "", None
    try:
        call()
    except BaseException as failure:  # including KeyboardInterrupt
        error, message = type(failure).__name__, str(failure)
        peer = getattr(failure, "peer", None)
    end = time.monotonic()
    return Ending(error, message, peer, end, end - start)


def run_concurrently(calls: Iterable[Callable[[], Any]]) -> list[Any]:
    """Run each call in a thread. Return its result or exception."""

    def run(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except BaseException as error:
            return error

    calls = list(calls)
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def record_report(
    call: Callable[[], object], group: dist.ProcessGroup, other_groups: list[dist.ProcessGroup]
) -> Report:
    """Record how ``call``, the next call on its group, and calls on other groups end."""
    first = record_ending(call)
    next_call = record_ending(lambda: run_op("all_reduce", group))
    return Report(
        first, next_call, [record_ending(lambda g=g: run_op("all_gather", g)) for g in other_groups]
    )


def run_in_child(work: Callable[[], str], timeout: float = 20.0) -> str:
    """Return the result of ``work`` in a fork of this process, or its failure."""
    gc.collect()  # gloo cannot free process groups of earlier tests in a fork
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            message = work()
        except BaseException:
            message = traceback.format_exc()
        os.write(write, message.encode()[-4000:] or b"fine")
        os._exit(0)
    os.close(write)
    deadline = time.monotonic() + timeout
    while (status := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)
        time.sleep(0.01)
    with os.fdopen(read) as pipe:
        return pipe.read() or f"ended with status {status[1]}"


def disturb_later(seconds: float, number: int) -> None:
    """Send a signal to this process from a thread, and record the time."""

    def disturb() -> None:
        time.sleep(seconds)
        disturb_now(number)

    threading.Thread(target=disturb, daemon=True).start()


def record_disturbance() -> None:
    dist.distributed_c10d._get_default_store().set("disturbed", repr(time.monotonic()))


def disturb_now(number: int) -> None:
    record_disturbance()
    os.kill(os.getpid(), number)
    while number == signal.SIGKILL:  # until the signal is delivered
        time.sleep(1)


def get_disturbance_time() -> float:
    return float(dist.distributed_c10d._get_default_store().get("disturbed"))


def _entries(folder: str) -> set[str]:
    return {entry.name for entry in os.scandir(folder)}


def _mapped() -> str:
    """Return the mappings of all processes that this process may inspect."""
    mappings = []
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mappings.append(path.read_text())
    return "".join(mappings)


def _left_files(before: dict[str, set[str]], pids: list[int]) -> list[str]:
    """Return new entries that persist and that no process maps.

    Other programs use these folders, so only two kinds of names count: names with the pid of one of
    our processes, as torch creates them, and names of this package.
    """
    ours = re.compile(rf"tpk|(?<!\d)({'|'.join(map(str, pids))})(?!\d)")
    deadline = time.monotonic() + PROMPT
    while True:
        new = [
            f"{folder}/{name}"
            for folder, old_names in before.items()
            for name in _entries(folder) - old_names
            if ours.search(name)
        ]
        mapped = _mapped() if new else ""
        unused = [path for path in new if path not in mapped]
        if not unused or time.monotonic() > deadline:
            return unused
        time.sleep(0.05)


def _left_processes(leaders: list[int]) -> list[str]:
    """Return the processes in the process groups of the ranks. Each rank leads one group."""
    return [
        f"{process.pid} ({process.name})"
        for process in running_processes()
        if process.group in leaders
    ]


@contextlib.contextmanager
def watched_ranks(world: int, **env: str) -> Iterator[Ranks]:
    """Start the ranks of one test.

    At the end no process and no file may be left, and the survivors must have exited normally.
    """
    before = {folder: _entries(folder) for folder in ("/dev/shm", tempfile.gettempdir())}
    # Prefix of the semaphore names of the ranks.
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
    """Wait for all ranks except one."""
    deadline = time.monotonic() + COLLECT_SECONDS
    while True:
        outcomes = ranks.collect(0.05)
        late = [outcome.rank for outcome in outcomes if outcome.timed_out]
        if late in ([], [rank]) or time.monotonic() > deadline:
            return outcomes


def values(outcomes: list[Outcome], *excluded: int) -> dict[int, Any]:
    """Return the job results by rank. All ranks must succeed, except ``excluded``."""
    for outcome in outcomes:
        assert outcome.rank in excluded or outcome.ok, outcome
    return {outcome.rank: outcome.value for outcome in outcomes if outcome.rank not in excluded}


def require_broken(report: Report) -> None:
    """Check the calls after a failure.

    The next call fails immediately and names the cause. Calls of other groups succeed.
    """
    assert report.next_call.error == "GroupBrokenError", report.next_call
    assert report.next_call.seconds < PROMPT / 2, report.next_call
    assert "create a new group" in report.next_call.message
    assert report.first.message[:100] in report.next_call.message, report
    for other in report.other_groups:
        assert not other.error, other
