"""How a group ends: by a failure, by the end of its process group, with the process."""

from __future__ import annotations

import contextlib

from tpkernels.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupBrokenError,
    TpkernelsError,
)
from tpkernels.groups.turns import Turns
from tpkernels.groups.waiting_thread import Waiter
from tpkernels.symm.exchange import Participant, tell_left
from tpkernels.symm.host import HostWorkspace
from tpkernels.symm.node import Node
from tpkernels.text import of_error


class Endings(Turns):
    """The part of a `Group` that ends it."""

    timeout: float
    workspace: HostWorkspace | None
    node: Node | None
    waiter: Waiter
    _ready: bool

    @property
    def nearby(self) -> HostWorkspace | None:
        """What this rank shares with those of its host: all ranks, or those of its node."""
        return self.workspace if self.node is None else self.node.workspace

    def participant(self, timeout: float) -> Participant:
        """This rank's place in the group, for an exchange through its store."""
        raise NotImplementedError

    def break_between_calls(self, error: BaseException) -> None:
        """This rank left with ``error`` on the way to a call, or between two. A call of another
        thread ends first, but none begins."""
        # Within a call, in a signal handler, all calls are refused: this rank is not out of step.
        if self._broken is None and not self.within_call():
            self._broken, self.open = of_error(error), False
            with self.lock:
                self._tell_peers(error)

    def mark_broken(self, error: BaseException) -> None:
        """This rank left a call with ``error``: peers that wait for it are told, and no further
        call can run."""
        if self._broken is not None:
            return
        self._broken, self.open = of_error(error), False
        self._tell_peers(error)

    def _tell_peers(self, error: BaseException) -> None:
        if self.nearby is None:
            if not self._ready:
                self._tell_in_store(error)
        elif self.node is None or not isinstance(error, CollectiveMismatchError):
            # Across hosts each rank detects a mismatch by itself, from the greetings.
            peer = error.peer if isinstance(error, TpkernelsError) else None
            late = isinstance(error, CollectiveTimeoutError)
            self.nearby.abandon(of_error(error), late, -1 if peer is None else peer)

    def tell_outside_calls(self, error: BaseException) -> None:
        """Tells the ranks that may wait in the store for what this one was to say there. Those that
        share its memory know already, and each rank detects a mismatch by itself."""
        found_by_all = self.workspace is not None or isinstance(error, CollectiveMismatchError)
        if self._ready and not found_by_all:
            self._tell_in_store(error)

    def _tell_in_store(self, error: BaseException) -> None:
        with contextlib.suppress(GroupBrokenError):  # destroyed meanwhile
            tell_left(self.participant(self.timeout), error)

    def disown(self, owner: int) -> None:
        """See `Turns.disown`."""
        super().disown(owner)
        self.waiter = Waiter()

    def check_kernels(self, text: str) -> None:
        """Raises what has failed in kernels on GPUs so far; ``text`` says what has found it."""
        if self.workspace is not None:
            self.workspace.check_kernels(text)

    def check(self) -> None:
        """See ``tpkernels.check``."""
        with self.lock:
            self.check_usable()
            try:
                if self.nearby is not None:
                    self.nearby.check()
            except TpkernelsError as error:
                self.mark_broken(error)
                raise

    def leave(self) -> None:
        """For the end of the process."""
        if self.nearby is not None and not self.is_forked:
            self.nearby.leave()

    def close(self, by: str) -> None:
        """Refuses further calls and frees the workspace. Does nothing while a thread is in a call:
        then the workspace goes with its last use."""
        if not self.lock.acquire(blocking=False):
            return
        try:
            if self.in_call:
                return
            self._closed, self.open = by, False
            self.forget_calls()
            self.waiter.close()
            nearby, self.workspace, self.node = self.nearby, None, None
            if nearby is not None:
                nearby.close()
        finally:
            self.lock.release()
