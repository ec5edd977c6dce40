"""The rank's side: one loop that does what messages ask for.

Messages, in one order on all ranks:

- ``("join",)`` forms the default process group;
- ``("run", path, name)`` calls a function, with ``path`` as ``sys.path``;
- ``("make", path, name)`` does so too, and keeps the object that the function returns;
- ``("call", path, name, rank)`` calls a method, whose result is wanted of ``rank``, or of all ranks
  if that is None;
- ``("stream", path, name, rank, steps)`` calls a generator method and takes ``steps`` steps;
  ``("more", steps)`` allows further steps, ``("stop",)`` ends it.

The content of those with a name is the function or the method's name, args and kwargs. The loop
ends when the parent shuts its end of the pipe.

Replies are ``(kind, traceback, type of error, seconds)``, with the value as content. Each join,
run, make, call and stream gets exactly one reply of the kind "last" from every rank. During a
stream, the rank whose items are wanted sends an "item" for each, before its last reply. Errors are
returned as text; nothing is printed.

Invariant (all ranks stop after the same step): a rank takes a step only if it was allowed, and all
ranks read the permissions and the stop in the same order. So when they read the stop, all have
taken all the steps that were allowed before, and no rank is in a collective that another will not
enter.
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

LEAVE_SECONDS = 3.0  # destroy_process_group may wait for peers that are gone
STACK_FILE = "tpkernels-stack"  # the memory file that SIGUSR1 dumps the Python stacks into


@dataclass(frozen=True)
class Setup:
    """Everything a rank process needs to join the group."""

    world: int
    backend: str
    threads: int
    environ: dict[str, str]
    port: int
    timeout: float
    shared: object  #: functions get it as the keyword ``shared``, unless it is None


class Worker:
    """One rank's object, and the stream that is open."""

    def __init__(self, rank: int, setup: Setup, pipe: socket.socket) -> None:
        self._rank, self._setup, self._pipe = rank, setup, pipe
        self._object: object = None
        self._items: Iterator[Any] | None = None
        self._sends_items = False  # this rank's are wanted
        self._begin = 0.0

    def handle(self, head: tuple[Any, ...], content: Message) -> None:
        """Do what a message asks for, and send the replies."""
        kind, *fields = head
        if kind not in ("more", "stop"):
            self._begin = time.monotonic()
        try:
            getattr(self, f"_{kind}")(*fields, *([content] if content else []))
        except BaseException as error:  # even SystemExit: a method must not end the rank
            self._items = None
            self._reply("last", error=error)

    def _reply(
        self, kind: str, value: object = None, what: str = "", error: BaseException | None = None
    ) -> None:
        """Send a reply; ``what`` names its value in errors."""
        content = messages.dumps(value, what)
        failure = (None, None) if error is None else (describe(error), type(error).__name__)
        head = kind, *failure, time.monotonic() - self._begin
        messages.send(self._pipe, messages.encode(head, content))

    def _join(self) -> None:
        join_group(self._rank, self._setup)
        self._reply("last")

    def _called(self, path: list[str], content: Message, **shared: Any) -> object:
        """Return what the function or the method returns that the parent sends."""
        sys.path[:] = path  # first: importing the function may need it
        function, args, kwargs = messages.loads(content)
        if isinstance(function, str):
            function = getattr(self._object, function)
        return function(*args, **kwargs, **shared)

    def _run(self, path: list[str], name: str, content: Message) -> None:
        shared = {} if self._setup.shared is None else {"shared": self._setup.shared}
        try:
            value = self._called(path, content, **shared)
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()  # the rank may be killed after a failure elsewhere
        self._reply("last", value, f"the result of {name}")

    def _make(self, path: list[str], name: str, content: Message) -> None:
        self._object = self._called(path, content)
        self._reply("last", methods_of(self._object))

    def _call(self, path: list[str], name: str, rank: int | None, content: Message) -> None:
        value = self._called(path, content)
        wanted = rank in (None, self._rank)
        self._reply("last", value if wanted else None, f"the result of {name}")

    def _stream(self, path: list[str], name: str, rank: int, steps: int, content: Message) -> None:
        items = self._called(path, content)
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
        if items is not None:  # it has not ended before
            if hasattr(items, "close"):
                items.close()
            self._reply("last")


def describe(error: BaseException) -> str:
    """Return the traceback without the frames of this folder that lead to the user's."""
    frames, here = error.__traceback__, os.path.dirname(__file__)
    while frames and frames.tb_next and os.path.dirname(frames.tb_frame.f_code.co_filename) == here:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def methods_of(held: object) -> list[str]:
    """Return the names of the public methods, without reading properties."""
    members = {name: inspect.getattr_static(held, name, None) for name in dir(held)}
    kinds = (classmethod, staticmethod)
    return [
        name
        for name, member in members.items()
        if not name.startswith("_") and (callable(member) or isinstance(member, kinds))
    ]


# Rank processes.


def main(rank: int, setup: Setup, pipe: socket.socket) -> None:
    """Run a rank process; does not return. It dies with its parent."""
    die_with_parent()
    faulthandler.register(signal.SIGUSR1, file=_C.host.open_memfd(STACK_FILE))
    worker = Worker(rank, setup, pipe)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            worker.handle(*messages.receive(pipe))
    shut_down()


def die_with_parent() -> None:
    """Make the kernel kill this process and its children when the parent dies.

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
    """Leave the group, within a time limit, and exit without running exit handlers."""

    def leave() -> None:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        with contextlib.suppress(Exception):  # of semaphores, as tqdm's, or Python warns of them
            util._run_finalizers(0)  # type: ignore[attr-defined]

    leaving = threading.Thread(target=leave, daemon=True)
    leaving.start()
    leaving.join(LEAVE_SECONDS)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


# The fork server, which imports this module once for all ranks, listens on a socket in a temporary
# folder that the parent removes on exit. A killed parent cannot, but the server outlives it until
# all ranks are gone, and removes the folder then.
_IMPORTER, _PARENT = os.getpid(), os.getppid()


@atexit.register
def _remove_socket_folder() -> None:
    server = getattr(forkserver, "_forkserver", None)
    address = getattr(server, "_forkserver_address", None)
    serves = os.getpid() == _IMPORTER and getattr(server, "_forkserver_pid", 0) is None
    if serves and os.getppid() != _PARENT and isinstance(address, str) and address[:1] != "\0":
        folder = Path(address).parent
        if folder.name.startswith("pymp-"):  # multiprocessing's own
            shutil.rmtree(folder, ignore_errors=True)
