"""Run long independent work on all ranks, and fail on all ranks if it fails on one.

Problem: loading takes longer than the group timeout and may fail on a single rank. The remaining
ranks must neither wait for that rank until the timeout nor continue without it.

Algorithm: while a rank works, a thread takes part in rounds. In each round the ranks all-gather
their statuses: working, done or failed. A rank joins the next round after one second, or
immediately when its work ends. The rounds end when no rank is working or some rank has failed. All
ranks see the same statuses, so they agree on the last round. Then they exchange their reports. A
round is a call of an op: every wait has a deadline, and failed peers and mismatched calls are
detected.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from tpkernels import groups
from tpkernels.common.text import describe_error
from tpkernels.groups.group import Group
from tpkernels.ops.all_gather import all_gather

THREAD = "tpkernels-joint-work"
_INTERVAL = 1.0  # seconds between rounds
_WORKING, _DONE, _FAILED = 0.0, 1.0, 2.0  # status of a rank in a round


class PeerFailedError(RuntimeError):
    """The work failed on a different rank."""


class JointWork:
    """The work of one rank; see `joint_work`."""

    def __init__(self, group: Group, device: torch.device, action: str) -> None:
        self.reports: list[str] = []  #: final reports of all ranks, in rank order
        self.report = ""  #: report of this rank when its work is done
        self._group, self._device, self._action = group, device, action
        self._status = _WORKING
        self._work_ended, self._rounds_ended = threading.Event(), threading.Event()
        self._error: BaseException | None = None  # error that ended the rounds

    def check(self) -> None:
        """Raise if the work has failed on some rank. Call it between steps."""
        if self._rounds_ended.is_set() and self._error is not None:
            raise self._error

    def run_rounds(self) -> None:
        """Exchange statuses with the peers until the work has ended on all ranks or failed on
        one."""
        interval = min(_INTERVAL, self._group.timeout / 4)
        statuses = [_WORKING]
        try:
            while _WORKING in statuses and _FAILED not in statuses:
                self._work_ended.wait(interval)
                status = torch.tensor([self._status], dtype=torch.float32, device=self._device)
                statuses = all_gather(status, self._group.name).tolist()
            report = "" if self._status == _WORKING else self.report
            self.reports = self._group.lock_and_exchange("joint work", report, self._device.type)
            failed = [rank for rank, status in enumerate(statuses) if status == _FAILED]
            if failed:
                also = f" (also rank {', '.join(map(str, failed[1:]))})" if failed[1:] else ""
                self._error = PeerFailedError(
                    f"{self._action} failed on rank {failed[0]}{also}: {self.reports[failed[0]]}"
                )
        except BaseException as error:
            self._error = error
        finally:
            self._rounds_ended.set()

    def end(self, status: float, thread: threading.Thread) -> None:
        """Publish the final status of this rank, and wait for the last round."""
        with groups.breaking_on_error(self._group.name):
            self._status = status
            self._work_ended.set()
            if thread.ident is None:  # the thread could not be started
                self.run_rounds()
            else:
                thread.join()


@contextlib.contextmanager
def joint_work(group: str, device: torch.device, action: str) -> Iterator[JointWork]:
    """Run the block on all ranks. If it raises on one rank, the remaining ranks raise
    `PeerFailedError`. Collective.

    Args:
        group: name of the group.
        device: device of the tensors that the ranks exchange.
        action: description of the work for error messages.

    Raises:
        PeerFailedError: the block failed on a different rank.
        RuntimeError: this thread is already in a call of the group, in a signal handler. No data
            was sent.
        TpkernelsError: a peer was lost, timed out or made a different call.
    """
    members = groups.get(group)
    # Raise now if this thread is in a call of the group. The thread of the rounds would deadlock
    # with that call.
    with members.lock:
        members.check_usable()
    work = JointWork(members, device, action)
    thread = threading.Thread(target=work.run_rounds, name=THREAD, daemon=True)
    status = _DONE
    try:
        thread.start()
        yield work
    except BaseException as error:
        status = _FAILED
        work.report = describe_error(error)
        raise
    finally:
        work.end(status, thread)
    work.check()
