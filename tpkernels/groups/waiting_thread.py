"""A thread that waits for torch.distributed on behalf of another.

gloo's point-to-point ``Work`` objects report nothing until ``wait`` is called, and a ``wait`` that
times out closes all connections of the process group. So this thread waits for as long as the group
allows, and the op's own thread polls the outcome, between which it can be interrupted and can check
its peers.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from tpkernels.errors import TpkernelsError


class TransferError(RuntimeError):
    """A transfer failed; ``peer`` is the rank at its other end."""

    def __init__(self, message: str, peer: int) -> None:
        super().__init__(message)
        self.peer = peer


class PendingTransfers:
    """Works that a `Waiter` waits for, as one work of torch.distributed that can be polled."""

    def __init__(self, works: Sequence[tuple[Any, int]], timeout: timedelta) -> None:
        self._works, self._timeout = works, timeout
        self._done = threading.Event()
        self._error: TransferError | TpkernelsError | None = None

    def run(self) -> None:
        """Wait for one after the other, ``timeout`` for each."""
        for work, peer in self._works:
            try:
                work.wait(self._timeout)
            except TpkernelsError as error:
                self._error = error
                break
            except RuntimeError as error:
                self._error = TransferError(str(error), peer)
                break
        self._done.set()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Raise ``RuntimeError`` if the works failed, or are not over within ``timeout``."""
        if not self._done.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("not completed yet")
        if self._error is not None:
            raise self._error


class Waiter:
    """The thread of one group; it starts with the first wait."""

    def __init__(self) -> None:
        self._todo: queue.SimpleQueue[PendingTransfers | None] = queue.SimpleQueue()
        self._started = False

    def wait_for(self, works: Sequence[tuple[Any, int]], timeout: timedelta) -> PendingTransfers:
        """Begin to wait for (work, peer) pairs; the calls of a group come one after the other."""
        if not self._started:
            threading.Thread(target=_serve, args=(self._todo,), daemon=True).start()
            self._started = True
        waiting = PendingTransfers(works, timeout)
        self._todo.put(waiting)
        return waiting

    def close(self) -> None:
        """Make the thread end when it is through with what it waits for."""
        if self._started:
            self._todo.put(None)
            self._started = False


def _serve(todo: queue.SimpleQueue[PendingTransfers | None]) -> None:
    while (waiting := todo.get()) is not None:
        waiting.run()
        del waiting  # and with it the tensors, also while there is nothing to do
