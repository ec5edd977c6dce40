"""How a group ends: by a failure, by the end of its process group, with the process."""

from __future__ import annotations

import contextlib

from tpkernels.errors import CollectiveTimeoutError, GroupBrokenError, TpkernelsError
from tpkernels.groups.turns import Turns
from tpkernels.groups.waiting_thread import Waiter
from tpkernels.symm.exchange import Participant, tell_left
from tpkernels.symm.host import HostWorkspace
from tpkernels.text import of_error


class Endings(Turns):
    """The part of a `Group` that ends it."""

    timeout: float
    workspace: HostWorkspace | None
    waiter: Waiter
    _ready: bool

    def participant(self, timeout: float) -> Participant:
        """This rank's place in the group, for an exchange through its store."""
        raise NotImplementedError

    def mark_broken(self, error: BaseException) -> None:
        """This rank left a call with ``error``: peers that wait for it are told, and no further
        call can run."""
        if self._broken is not None:
            return
        self._broken, self.open = of_error(error), False
        if self.workspace is not None:
            peer = error.peer if isinstance(error, TpkernelsError) else None
            late = isinstance(error, CollectiveTimeoutError)
            self.workspace.abandon(self._broken, late, -1 if peer is None else peer)
        elif not self._ready:
            with contextlib.suppress(GroupBrokenError):  # destroyed meanwhile
                tell_left(self.participant(self.timeout), error)

    def disown(self, owner: int) -> None:
        """See there."""
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
                if self.workspace is not None:
                    self.workspace.check()
            except TpkernelsError as error:
                self.mark_broken(error)
                raise

    def leave(self) -> None:
        """For the end of the process."""
        if self.workspace is not None and not self.is_forked:
            self.workspace.leave()

    def close(self, by: str) -> None:
        """Has no more calls run, and gives the workspace back; in a call, on any thread, nothing:
        then the workspace goes with the last use of it."""
        if not self.lock.acquire(blocking=False):
            return
        try:
            if self.in_call:
                return
            self._closed, self.open = by, False
            self.forget_calls()
            self.waiter.close()
            workspace, self.workspace = self.workspace, None
            if workspace is not None:
                workspace.close()
        finally:
            self.lock.release()
