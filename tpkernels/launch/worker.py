"""The main function of a rank process started by `tpkernels.launch`.

A rank joins the group, then runs jobs from its pipe one by one and answers each with an `Outcome`.
Errors are returned as text; nothing is printed. It leaves on request, and dies with its parent: see
`die_with_parent`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import io
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from multiprocessing import connection
from multiprocessing.process import parent_process
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from tpkernels import _C
from tpkernels.defaults import result_pool_bytes

LEAVE = b""  # the message that ends a rank
LEAVE_SECONDS = 3.0  # destroy_process_group may wait for peers that are gone
STACK_FILE = "tpkernels-stack"  # the memory file that SIGUSR1 dumps the Python stacks into


@dataclass(frozen=True)
class Outcome:
    """The outcome of one job on one rank."""

    rank: int
    value: Any = None
    error: str | None = None  #: the traceback, as text
    error_type: str | None = None  #: the exception's class name
    exitcode: int | None = None  #: of a rank that died; negative: the signal
    timed_out: bool = False  #: no answer by the deadline
    seconds: float = 0.0  #: run time of the function; after a death or timeout, since `submit`
    ended: float = 0.0  #: time.monotonic() at the end, one clock for all processes

    @property
    def ok(self) -> bool:
        """The function returned `value`."""
        return self.error is None and self.exitcode is None and not self.timed_out


@dataclass(frozen=True)
class Setup:
    """Everything a rank needs to join the group."""

    world: int
    backend: str
    threads: int
    environ: dict[str, str]
    port: int
    timeout: float
    shared: Any = None  #: handed over by multiprocessing; jobs get it as the keyword ``shared``


def main(rank: int, setup: Setup, pipe: connection.Connection) -> None:
    """Runs a rank process; does not return."""
    die_with_parent()
    faulthandler.register(signal.SIGUSR1, file=_C.host.open_memfd(STACK_FILE))
    if answer(pipe, rank, partial(join_group, rank, setup)):
        with contextlib.suppress(EOFError, OSError):
            while job := pipe.recv_bytes():  # LEAVE is empty
                answer(pipe, rank, partial(run_job, job, setup.shared))
    shut_down()


def die_with_parent() -> None:
    """Makes the kernel kill this process and its children when the parent dies.

    The pipe by which multiprocessing detects the parent's death is set to send a signal when its
    last writer exits: SIGKILL, to the process group of this rank. This also reaches a rank that is
    stopped, or stuck in C++ while holding the GIL. PR_SET_PDEATHSIG would follow the fork server
    instead of the parent.
    """
    os.setpgid(0, 0)
    parent = parent_process()
    if parent is None:
        raise RuntimeError("a rank must be a process started by multiprocessing")
    alive = parent.sentinel
    fcntl.fcntl(alive, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(alive, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC)
    if connection.wait([alive], 0):  # it died before the signal was armed
        os._exit(1)


def join_group(rank: int, setup: Setup) -> None:
    os.environ.clear()
    os.environ.update(setup.environ)
    _C.calls.limit_result_pool(result_pool_bytes())  # the fork server has imported the package
    torch.set_num_threads(setup.threads)
    if "nccl" in setup.backend:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    timeout = timedelta(seconds=setup.timeout)
    store = dist.TCPStore("127.0.0.1", setup.port, is_master=False, timeout=timeout)
    dist.init_process_group(
        setup.backend, store=dist.PrefixStore("ranks", store), rank=rank, world_size=setup.world
    )


def run_job(job: bytes, shared: Any) -> Any:
    stream = io.BytesIO(job)
    sys.path[:] = pickle.load(stream)  # first: importing the function may need it
    fn, args, kwargs = pickle.load(stream)
    if shared is not None:
        kwargs["shared"] = shared
    return fn(*args, **kwargs)


def answer(pipe: connection.Connection, rank: int, work: Callable[[], Any]) -> bool:
    """Runs ``work``, sends the outcome, and returns whether it succeeded."""
    begin = time.monotonic()
    try:
        outcome = Outcome(rank, value=work())
    except BaseException as error:  # even SystemExit: a job must not end the rank
        outcome = failure(rank, error)
    end = time.monotonic()
    outcome = replace(outcome, seconds=end - begin, ended=end)
    try:
        message = pickle.dumps(outcome)
    except Exception as error:
        outcome = replace(failure(rank, error), seconds=end - begin, ended=end)
        message = pickle.dumps(outcome)
    pipe.send_bytes(message)
    return outcome.ok


def failure(rank: int, error: BaseException) -> Outcome:
    frames, ours = error.__traceback__, os.path.dirname(__file__)
    while frames and frames.tb_next and _folder_of(frames) == ours:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    return Outcome(rank, error=text, error_type=type(error).__name__)


def _folder_of(frames: TracebackType) -> str:
    return os.path.dirname(frames.tb_frame.f_code.co_filename)


def shut_down() -> None:
    """Leaves the group, within a time limit, and exits without running exit handlers."""

    def leave_group() -> None:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()

    worker = threading.Thread(target=leave_group, daemon=True)
    worker.start()
    worker.join(LEAVE_SECONDS)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)
