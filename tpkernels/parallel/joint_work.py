"""Work that all ranks do at once, each by itself, and that fails on all if it fails on one.

Problem: loading takes longer than the group's timeout, and may fail on one rank alone. The others
must neither wait for it nor go on without it.

Algorithm: while a rank works, a thread takes part in rounds. In a round all ranks exchange whether
they are at work, done, or failed and why. A round begins after a second at the latest, and at once
on a rank that has ended. The first round in which nobody is at work, or somebody has failed, is the
last on all ranks: all see the same messages. So every wait is bounded, and dead ranks are noticed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from enum import IntEnum

import torch

from tpkernels import groups
from tpkernels.ops.all_gather import all_gather
from tpkernels.text import of_error

THREAD = "tpkernels-joint-work"
_INTERVAL = 1.0  # s, between rounds
_LENGTH = 1024  # bytes of a message


class Status(IntEnum):
    """What a rank announces."""

    WORKING = 0
    DONE = 1
    FAILED = 2


class PeerFailedError(RuntimeError):
    """The work failed on another rank."""


class JointWork:
    """One rank's part of the work; see `joint_work`."""

    def __init__(self, group: str, device: torch.device, what: str) -> None:
        self.texts: list[str] = []  #: the final texts of all ranks, in rank order
        self.text = ""  #: what this rank announces when it is done
        self._group, self._device, self._what = group, device, what
        self._status = Status.WORKING
        self._ended, self._over = threading.Event(), threading.Event()
        self._error: BaseException | None = None  # of the rounds

    def check(self) -> None:
        """Raise if the work has failed on another rank; call it between steps."""
        if self._over.is_set() and self._error is not None:
            raise self._error

    def take_part(self) -> None:
        """Exchange statuses with the other ranks until the work is over."""
        interval = min(_INTERVAL, groups.get(self._group).timeout / 4)
        try:
            statuses = [Status.WORKING]
            while Status.WORKING in statuses and Status.FAILED not in statuses:
                self._ended.wait(interval)
                statuses, self.texts = self._exchange()
            failed = [rank for rank, status in enumerate(statuses) if status is Status.FAILED]
            if failed:
                also = f" (also rank {', '.join(map(str, failed[1:]))})" if failed[1:] else ""
                self._error = PeerFailedError(
                    f"{self._what} failed on rank {failed[0]}{also}: {self.texts[failed[0]]}"
                )
        except BaseException as error:
            self._error = error
        finally:
            self._over.set()

    def _exchange(self) -> tuple[list[Status], list[str]]:
        """Return the statuses and the texts of all ranks. Collective."""
        status = self._status
        message = bytes([status, *(self.text.encode() if status else b"")])[:_LENGTH]
        with groups.told_of_errors(self._group):
            data = torch.tensor(list(message.ljust(_LENGTH, b"\0")), device=self._device)
            messages = all_gather(data.float(), self._group).view(-1, _LENGTH).tolist()
        texts = [bytes(map(int, message[1:])).rstrip(b"\0") for message in messages]
        return [Status(int(m[0])) for m in messages], [t.decode(errors="ignore") for t in texts]

    def end(self, status: Status, thread: threading.Thread) -> None:
        """Announce how this rank's part ended, and wait for the last round."""
        with groups.told_of_errors(self._group):
            self._status = status
            self._ended.set()
            if thread.ident is None:  # it could not be started
                self.take_part()
            else:
                thread.join()


@contextlib.contextmanager
def joint_work(group: str, device: torch.device, what: str) -> Iterator[JointWork]:
    """Run the block on all ranks. If it raises on one rank, it raises there, and
    `PeerFailedError` on the others. Collective.

    Args:
        group: the group's name.
        device: of the tensors that the ranks exchange.
        what: what is done, for messages.

    Raises:
        PeerFailedError: the block failed on another rank.
        RuntimeError: this thread is in a call of the group: a signal handler. Nothing was sent.
        TpkernelsError: a peer was lost, timed out or made a different call.
    """
    members = groups.get(group)
    with members.lock:  # else the thread would wait for a call that waits for this block
        members.check_usable()
    work = JointWork(group, device, what)
    thread = threading.Thread(target=work.take_part, name=THREAD, daemon=True)
    status = Status.DONE
    try:
        thread.start()
        yield work
    except BaseException as error:
        status = Status.FAILED
        work.text = of_error(error)
        raise
    finally:
        work.end(status, thread)
    work.check()
