"""Work that all ranks do at once, each by itself, and that fails on all if it fails on one.

Problem: loading takes longer than the group's timeout, and may fail on one rank alone. The others
must neither wait for it nor go on without it.

Algorithm: while a rank works, a thread takes part in rounds. In a round all ranks gather whether
they are at work, done or failed. A round begins after a second at the latest, and at once on a rank
that has ended. The first round in which nobody is at work, or somebody has failed, is the last on
all ranks, as all see the same statuses; then they exchange their texts. A round is a call of an op,
so every wait is bounded, and dead ranks and ranks in another call are noticed as in any other.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from tpkernels import groups
from tpkernels.common.text import of_error
from tpkernels.groups.group import Group
from tpkernels.ops.all_gather import all_gather

THREAD = "tpkernels-joint-work"
_INTERVAL = 1.0  # s, between rounds
_AT_WORK, _DONE, _FAILED = 0.0, 1.0, 2.0  # what a rank announces in a round


class PeerFailedError(RuntimeError):
    """The work failed on another rank."""


class JointWork:
    """One rank's part of the work; see `joint_work`."""

    def __init__(self, group: Group, device: torch.device, what: str) -> None:
        self.texts: list[str] = []  #: the final texts of all ranks, in rank order
        self.text = ""  #: what this rank announces when it is done
        self._group, self._device, self._what = group, device, what
        self._status = _AT_WORK
        self._ended, self._over = threading.Event(), threading.Event()
        self._error: BaseException | None = None  # of the rounds

    def check(self) -> None:
        """Raise if the work has failed on another rank; call it between steps."""
        if self._over.is_set() and self._error is not None:
            raise self._error

    def take_part(self) -> None:
        """Exchange reports with the other ranks until the work is over."""
        interval = min(_INTERVAL, self._group.timeout / 4)
        statuses = [_AT_WORK]
        try:
            while _AT_WORK in statuses and _FAILED not in statuses:
                self._ended.wait(interval)
                status = torch.tensor([self._status], dtype=torch.float32, device=self._device)
                statuses = all_gather(status, self._group.name).tolist()
            text = "" if self._status == _AT_WORK else self.text
            self.texts = self._group.exchange_in_turn("joint work", text, self._device.type)
            failed = [rank for rank, status in enumerate(statuses) if status == _FAILED]
            if failed:
                also = f" (also rank {', '.join(map(str, failed[1:]))})" if failed[1:] else ""
                self._error = PeerFailedError(
                    f"{self._what} failed on rank {failed[0]}{also}: {self.texts[failed[0]]}"
                )
        except BaseException as error:
            self._error = error
        finally:
            self._over.set()

    def end(self, status: float, thread: threading.Thread) -> None:
        """Announce how this rank's part ended, and wait for the last round."""
        with groups.breaking_on_error(self._group.name):
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
    work = JointWork(members, device, what)
    thread = threading.Thread(target=work.take_part, name=THREAD, daemon=True)
    status = _DONE
    try:
        thread.start()
        yield work
    except BaseException as error:
        status = _FAILED
        work.text = of_error(error)
        raise
    finally:
        work.end(status, thread)
    work.check()
