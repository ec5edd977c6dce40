"""Whose turn it is on a group: one call at a time, and none after a failure, after the group has
been closed, or in a fork."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from tpkernels import _C
from tpkernels.errors import GroupBrokenError


class Turns(_C.calls.Turns):
    """The part of a `Group` that admits calls. Who holds ``lock`` has the turn. ``in_call`` is set
    while the ranks do something together on that thread. ``open`` says that calls can run; where
    it is false, `check_usable` says why."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self._broken: str | None = None
        self._closed: str | None = None  # by what
        self._owner: int | None = None  # the process that has the group, where it is not this one

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """A call: waits for those of other threads. What a signal handler asks for meanwhile is
        refused."""
        with self.lock:
            self.check_usable()
            try:
                self.in_call = True
                yield
            finally:
                self.in_call = False

    def check_usable(self) -> None:
        """Raises ``GroupBrokenError`` after a failure, once closed, and in a fork of the rank;
        ``RuntimeError`` within a call. The caller holds ``lock``."""
        if self._owner is not None:
            raise GroupBrokenError(
                f"group '{self.name}' belongs to process {self._owner}, and process {os.getpid()} "
                "was forked from it: use the group there, or make a process group here"
            )
        if self.in_call:  # of this thread, which holds the lock
            raise RuntimeError(
                f"group '{self.name}' is in a call already on this thread: a signal handler, or a "
                "callback, cannot use it within a call"
            )
        if self._broken is not None:
            raise GroupBrokenError(
                f"group '{self.name}' is broken and can run no more calls; make a new group. "
                f"It broke with: {self._broken}"
            )
        if self._closed is not None:
            raise GroupBrokenError(
                f"group '{self.name}' was closed by {self._closed} before this call had its turn"
            )

    def within_call(self) -> bool:
        """Whether this very thread is in a call."""
        if not self.lock.acquire(blocking=False):
            return False
        try:
            return self.in_call
        finally:
            self.lock.release()

    @property
    def is_forked(self) -> bool:
        """Whether the group belongs to another process, which this one was forked from."""
        return self._owner is not None

    def disown(self, owner: int) -> None:
        """This process is a fork of the rank, process ``owner``: it can neither take its place nor
        end its calls."""
        if self._owner is None:  # otherwise it was a fork's already
            self._owner = owner
        self.open = False
        self.in_call = False
        self.renew_lock()  # a thread that the fork did not copy may have held it
