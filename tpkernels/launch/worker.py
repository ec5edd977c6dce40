"""A rank process: one loop that handles messages of the parent.

Messages, in the same order on all ranks:

- ``("join",)`` forms the default process group;
- ``("run", path, name)`` calls a function, with ``path`` as ``sys.path``;
- ``("make", path, name)`` calls a function and stores the object that it returns;
- ``("call", path, name, rank)`` calls a method of the object; ``rank`` returns its result, or all
  ranks if ``rank`` is None;
- ``("stream", path, name, rank, steps)`` calls a generator method and runs ``steps`` steps;
  ``("more", steps)`` allows further steps, ``("stop",)`` ends the generator.

The content of messages with a name is ``(function or method name, args, kwargs)``. The loop ends
when the parent shuts down its end of the pipe.

Replies are ``(kind, traceback, type of error, seconds)``, with the value as content. Each join,
run, make, call and stream gets exactly one reply of the kind "last" from every rank. During a
stream, the selected rank sends a reply "item" per item before its last reply. Errors are returned
as text; the ranks print no errors.

Invariant (all ranks stop after the same step): a rank runs a step only after the parent allowed it,
and all ranks read the "more" and "stop" messages in the same order. When a rank reads the stop, it
has run exactly the steps that were allowed before. So no rank waits in a collective that a peer
will not enter.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import inspect
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver, util
from multiprocessing.process import parent_process
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tpkernels import _C
from tpkernels.launch import messages
from tpkernels.launch.messages import Message

LEAVE_SECONDS = 3.0  # limit for destroy_process_group, which may wait for dead peers
STACK_FILE = "tpkernels-stack"  # name of the memfd that SIGUSR1 dumps the Python stacks to


@dataclass(frozen=True)
class Setup:
    """The arguments of a rank process."""

    world: int
    backend: str
    threads: int
    environ: dict[str, str]
    port: int
    timeout: float
    shared: object  #: passed to functions as the keyword ``shared``, unless it is None


class Worker:
    """The state of a rank: its object and its open stream."""

    def __init__(self, rank: int, setup: Setup, pipe: socket.socket) -> None:
        self._rank, self._setup, self._pipe = rank, setup, pipe
        self._object: object = None
        self._items: Iterator[Any] | None = None
        self._sends_items = False  # whether this rank is the selected rank of the stream
        self._begin = 0.0

    def handle(self, head: tuple[Any, ...], content: Message) -> None:
        """Handle a message and send the replies."""
        kind, *fields = head
        if kind not in ("more", "stop"):
            self._begin = time.monotonic()
        try:
            getattr(self, f"_{kind}")(*fields, *([content] if content else []))
        except BaseException as error:  # even SystemExit: a method must not end the rank
            self._items = None
            self._reply("last", error=error)

    def _reply(
        self, kind: str, value: object = None, name: str = "", error: BaseException | None = None
    ) -> None:
        """Send a reply. ``name`` is the name of the value in error messages."""
        content = messages.dumps(value, name)
        failure = (None, None) if error is None else (describe(error), type(error).__name__)
        head = kind, *failure, time.monotonic() - self._begin
        messages.send(self._pipe, messages.encode(head, content))

    def _join(self) -> None:
        join_group(self._rank, self._setup)
        self._reply("last")

    def _invoke(self, path: list[str], content: Message, **shared: Any) -> object:
        """Call the function or the method in a message, and return its result."""
        sys.path[:] = path  # before `loads`, which may import the function
        function, args, kwargs = messages.loads(content)
        if isinstance(function, str):
            function = getattr(self._object, function)
        return function(*args, **kwargs, **shared)

    def _run(self, path: list[str], name: str, content: Message) -> None:
        shared = {} if self._setup.shared is None else {"shared": self._setup.shared}
        try:
            value = self._invoke(path, content, **shared)
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()  # a failure on a peer may kill this rank later
        self._reply("last", value, f"the result of {name}")

    def _make(self, path: list[str], name: str, content: Message) -> None:
        self._object = self._invoke(path, content)
        self._reply("last", public_method_names(self._object))

    def _call(self, path: list[str], name: str, rank: int | None, content: Message) -> None:
        value = self._invoke(path, content)
        is_requested = rank in (None, self._rank)
        self._reply("last", value if is_requested else None, f"the result of {name}")

    def _stream(self, path: list[str], name: str, rank: int, steps: int, content: Message) -> None:
        items = self._invoke(path, content)
        if not isinstance(items, Iterator):
            raise TypeError(f"{name} returned a {type(items).__name__}; stream() needs a generator")
        self._items, self._sends_items = items, rank == self._rank
        self._more(steps)

    def _more(self, steps: int) -> None:
        for _ in range(steps if self._items is not None else 0):
            assert self._items is not None
            try:
                item = next(self._items)
            except StopIteration:
                self._items = None
                self._reply("last")
                return
            if self._sends_items:
                self._reply("item", item, "an item")

    def _stop(self) -> None:
        items, self._items = self._items, None
        if items is not None:  # None if the generator is exhausted
            if hasattr(items, "close"):
                items.close()
            self._reply("last")


def describe(error: BaseException) -> str:
    """Format the traceback, without the leading frames of this folder."""
    frames, folder = error.__traceback__, os.path.dirname(__file__)
    while (
        frames and frames.tb_next and os.path.dirname(frames.tb_frame.f_code.co_filename) == folder
    ):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def public_method_names(target: object) -> list[str]:
    """Return the names of the public methods. Does not evaluate properties."""
    members = {name: inspect.getattr_static(target, name, None) for name in dir(target)}
    wrappers = (classmethod, staticmethod)
    return [
        name
        for name, member in members.items()
        if not name.startswith("_") and (callable(member) or isinstance(member, wrappers))
    ]


# Rank processes.


def main(rank: int, setup: Setup, pipe: socket.socket) -> None:
    """Run a rank process. Does not return. The process dies with its parent."""
    die_with_parent()
    faulthandler.register(signal.SIGUSR1, file=_C.host.open_memfd(STACK_FILE))
    worker = Worker(rank, setup, pipe)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            worker.handle(*messages.receive(pipe))
    shut_down()


def die_with_parent() -> None:
    """Configure the kernel to kill this process and its children when the parent dies.

    multiprocessing detects the death of the parent with a pipe. This function configures the pipe
    to send a signal when its last writer exits: SIGKILL, to the process group of this rank. This
    also kills a rank that is stopped, or that hangs in C++ while holding the GIL. PR_SET_PDEATHSIG
    would follow the fork server instead of the parent.
    """
    os.setpgid(0, 0)
    parent = parent_process()
    if parent is None:
        raise RuntimeError("a rank must be a process started by multiprocessing")
    sentinel = parent.sentinel
    fcntl.fcntl(sentinel, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(sentinel, fcntl.F_SETFL, fcntl.fcntl(sentinel, fcntl.F_GETFL) | os.O_ASYNC)
    if connection.wait([sentinel], 0):  # the parent died before the signal was configured
        os._exit(1)


def join_group(rank: int, setup: Setup) -> None:
    """Set up this process (environment, threads, GPU) and form the default process group."""
    os.environ.clear()
    os.environ.update(setup.environ)
    torch.set_num_threads(setup.threads)
    if "nccl" in setup.backend:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    timeout = timedelta(seconds=setup.timeout)
    store = dist.TCPStore("127.0.0.1", setup.port, is_master=False, timeout=timeout)
    dist.init_process_group(
        setup.backend, store=dist.PrefixStore("ranks", store), rank=rank, world_size=setup.world
    )


def shut_down() -> None:
    """Destroy the process group, within a time limit, and exit without running exit handlers."""

    def leave() -> None:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        with contextlib.suppress(Exception):  # releases semaphores (tqdm); else Python warns
            util._run_finalizers(0)  # type: ignore[attr-defined]

    leaving = threading.Thread(target=leave, daemon=True)
    leaving.start()
    leaving.join(LEAVE_SECONDS)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


# The fork server imports this module once for all ranks. It listens on a socket in a temporary
# folder that the parent removes on exit. A killed parent cannot do that. The server outlives it
# until all ranks have exited, and then removes the folder.
_IMPORTER, _PARENT = os.getpid(), os.getppid()


@atexit.register
def _remove_socket_folder() -> None:
    server = getattr(forkserver, "_forkserver", None)
    address = getattr(server, "_forkserver_address", None)
    serves = os.getpid() == _IMPORTER and getattr(server, "_forkserver_pid", 0) is None
    if serves and os.getppid() != _PARENT and isinstance(address, str) and address[:1] != "\0":
        folder = Path(address).parent
        if folder.name.startswith("pymp-"):  # created by multiprocessing
            shutil.rmtree(folder, ignore_errors=True)
