"""The rank's side: one loop that does what messages ask for.

Messages, in one order on all ranks:

- ``("join",)`` forms the default process group;
- ``("run",)`` calls a function that the parent sends, pickled, through the pipe of each rank;
- ``("make",)`` does so too, and keeps the object that the function returns;
- ``("call", method, args, kwargs, rank)`` calls a method, whose result is wanted of ``rank``, or of
  all ranks if that is None;
- ``("stream", method, args, kwargs, rank, steps)`` calls a generator method and takes ``steps``
  steps; ``("more", steps)`` allows further steps, ``("stop",)`` ends it;
- ``("close",)`` ends the loop.

Replies are ``(kind, value, traceback, type of error, seconds)``. Each join, run, make, call and
stream gets exactly one last reply from every rank. Its kind is "last", or "pickled" if the value
comes through the pipe. During a stream, the rank whose items are wanted sends an "item" for each,
before its last reply. Errors are returned as text; nothing is printed.

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
import io
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import connection, forkserver, util
from multiprocessing.process import parent_process
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tpkernels import _C
from tpkernels._C.host import Arena, Mailbox
from tpkernels.launch import messages
from tpkernels.launch.messages import Bytes, Message

CLOSE = ("close",)
LEAVE_SECONDS = 3.0  # destroy_process_group may wait for peers that are gone
STACK_FILE = "tpkernels-stack"  # the memory file that SIGUSR1 dumps the Python stacks into
RING_BYTES = 1 << 20
# Waking from sleep takes some 50 us, and a wait polls before it sleeps, but not where the polling
# would keep a core from the process that is waited for.
_SPIN_US, _CROWDED_SPIN_US = 50.0, 0.0
_SLICE_S = 10.0  # of a rank's waits, which last for as long as the parent lives


@dataclass(frozen=True)
class Setup:
    """Everything a rank process needs to join the group."""

    world: int
    backend: str
    threads: int
    environ: dict[str, str]
    port: int
    timeout: float
    memory: connection.Connection  #: the mailboxes' memfd: multiprocessing hands its copies over
    shared: Any  #: functions get it as the keyword ``shared``, unless it is None


class Worker:
    """One rank's object, and the stream that is open."""

    def __init__(
        self, rank: int, setup: Setup, pipe: connection.Connection, send: Callable[[Message], None]
    ) -> None:
        self._rank, self._setup, self._pipe, self._send = rank, setup, pipe, send
        self._object: Any = None
        self._items: Iterator[Any] | None = None
        self._sends_items = False  # this rank's are wanted
        self._begin = 0.0

    def handle(self, message: tuple[Any, ...]) -> None:
        """Do what a message asks for, and send the replies."""
        kind, *fields = message
        if kind not in ("more", "stop"):
            self._begin = time.monotonic()
        try:
            getattr(self, f"_{kind}")(*fields)
        except BaseException as error:  # even SystemExit: a method must not end the rank
            self._items = None
            self._reply("last", error=error)

    def _reply(
        self, kind: str, value: Any = None, what: str = "", error: BaseException | None = None
    ) -> None:
        """Send a reply; ``what`` names its value in errors."""
        failure = (None, None) if error is None else (describe(error), type(error).__name__)
        reply = kind, value, *failure, time.monotonic() - self._begin
        self._send(messages.encode(reply, ["", what, "", "", ""]))

    def _join(self) -> None:
        join_group(self._rank, self._setup)
        self._reply("last")

    def _result(self, **shared: Any) -> Any:
        """Return what the function returns that the parent sends."""
        job = io.BytesIO(self._pipe.recv_bytes())
        sys.path[:] = pickle.load(job)  # first: importing the function may need it
        function, args, kwargs = pickle.load(job)
        return function(*args, **kwargs, **shared)

    def _run(self) -> None:
        shared = {} if self._setup.shared is None else {"shared": self._setup.shared}
        try:
            value = pickle.dumps(self._result(**shared))
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()  # the rank may be killed after a failure elsewhere
        self._reply("pickled")
        self._pipe.send_bytes(value)  # after the reply: the parent reads the pipe only then

    def _make(self) -> None:
        self._object = self._result()
        self._reply("last", methods_of(self._object))

    def _call(
        self, method: str, args: Sequence[Any], kwargs: dict[str, Any], rank: int | None
    ) -> None:
        value = getattr(self._object, method)(*args, **kwargs)
        wanted = rank in (None, self._rank)
        self._reply("last", value if wanted else None, f"the result of {method}")

    def _stream(
        self, method: str, args: Sequence[Any], kwargs: dict[str, Any], rank: int, steps: int
    ) -> None:
        items = getattr(self._object, method)(*args, **kwargs)
        if not isinstance(items, Iterator):
            raise TypeError(
                f"{method} returned a {type(items).__name__}; stream() needs a generator"
            )
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


def methods_of(held: Any) -> list[str]:
    """Return the names of the public methods, without reading properties."""
    members = {name: inspect.getattr_static(held, name, None) for name in dir(held)}
    kinds = (classmethod, staticmethod)
    return [
        name
        for name, member in members.items()
        if not name.startswith("_") and (callable(member) or isinstance(member, kinds))
    ]


# Messages through shared memory.


def mailboxes(fd: int, world: int, commit: bool = False) -> tuple[Mailbox, list[Mailbox]]:
    """Map the ring of messages to all ranks, and the ring of each rank's replies.

    All ranks ring one bell for replies. A message larger than a ring goes through it in parts:
    `csrc/host/mailbox.h`.
    """
    region_bytes = Mailbox.region_bytes(RING_BYTES, world)
    arena = Arena(fd, region_bytes, world + 1)
    for region in range(world + 1 if commit else 0):
        arena.commit(region, 0, region_bytes)
    spin_us = _CROWDED_SPIN_US if world >= len(os.sched_getaffinity(0)) else _SPIN_US
    replies = [Mailbox(arena, rank + 1, 1, 1, spin_us) for rank in range(world)]
    return Mailbox(arena, 0, world, 0, spin_us), replies


def transfer(
    move: Callable[[Bytes, float], int],
    data: Bytes,
    slice_s: float = _SLICE_S,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Move all of ``data``, and call ``check`` between slices of the wait; it raises to end it."""
    done = move(data, slice_s)
    while done < len(data):
        check()
        done += move(memoryview(data)[done:], slice_s)


# Rank processes.


def main(rank: int, setup: Setup, pipe: connection.Connection) -> None:
    """Run a rank process; does not return. It dies with its parent."""
    die_with_parent()
    faulthandler.register(signal.SIGUSR1, file=_C.host.open_memfd(STACK_FILE))
    requests, replies = mailboxes(setup.memory.fileno(), setup.world)
    setup.memory.close()

    def send(message: Message) -> None:
        for part in message:
            transfer(replies[rank].write, part)

    read = partial(transfer, partial(requests.read, rank))
    worker = Worker(rank, setup, pipe, send)
    while (message := messages.receive(read)) != CLOSE:
        worker.handle(message)
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
