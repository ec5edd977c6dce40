"""`Executor` on processes that exist, such as those of torchrun, also across hosts.

Problem: the ranks share no memory, none of them is another's parent, and rank 0 is one of them.

Algorithm: messages travel through connections of their own, so they meet no collective of the
user. Rank 0 broadcasts a message and handles it too, as a rank (`tpkernels.launch.servant`), then
receives the replies in rank order. Both kinds of executor do the same with the same messages.

Waits: the group's timeout bounds each. So that ranks can be idle for longer, rank 0 sends an empty
message four times per timeout while nobody calls. gloo reports a rank that died as soon as rank 0
waits for it, and the death of rank 0 to all.

Invariant (no deadlock): a broadcast returns when the others have received it, and in a stream they
cannot if they are in a step that rank 0 has not begun. So rank 0 allows one step at a time, and the
next when it has made that one. Ranks do not wait until a reply has arrived, but go on to receive.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch.distributed as dist

from tpkernels.launch import messages
from tpkernels.launch.driver import Driver, request
from tpkernels.launch.executor import TIMEOUT
from tpkernels.launch.group_wire import Wire
from tpkernels.launch.job import GiveUp, Job
from tpkernels.launch.messages import Message
from tpkernels.launch.servant import Servant, name_of
from tpkernels.launch.worker import LEAVE_SECONDS, Outcome

_MESSAGES_PER_TIMEOUT = 4
_CLOSE, _IDLE = ("close",), ("idle",)


class GroupExecutor(Driver):
    """Rank 0's side: calls methods of an object that every rank of a group holds, itself included.

    All other ranks of the group call `serve_group` meanwhile. Rank 0 notices Ctrl-C when a wait for
    another rank ends.

    A stream's ranks make a step only when its item is asked for.

    Args:
        factory, args, kwargs: as for `Executor`. Rank 0's are used on all ranks.
        group: a process group with any backend; by default the default group.
        timeout: seconds for a call. Also for the time between the ends of a method on two ranks,
            and between two items of a stream, which no call can raise. Pass the same to
            `serve_group`.

    Raises:
        ValueError: this is not rank 0 of the group, or the factory or an argument cannot be sent.
        RankError: the factory failed.
    """

    _ahead = 1

    def __init__(
        self,
        factory: str | Callable[..., Any],
        *args: Any,
        group: dist.ProcessGroup | None = None,
        timeout: float = TIMEOUT,
        **kwargs: Any,
    ) -> None:
        super().__init__(dist.get_world_size(group), timeout)
        if dist.get_rank(group) != 0:
            raise ValueError(f"rank {dist.get_rank(group)} calls serve_group(); rank 0 drives")
        name = name_of(factory)
        message = request("make", name, args, kwargs)
        self._wire = Wire(group, timeout)
        self._servant = Servant(0)
        self._mine: Iterator[Message] = iter(())  # replies of this rank
        self._trouble = "no answer in time"
        self._ended = threading.Event()
        self._keeper = threading.Thread(
            target=self._keep_alive, name="tpkernels-executor", daemon=True
        )
        self._make(name, message)
        self._keeper.start()

    def stream(
        self,
        method: str,
        *args: Any,
        timeout: float | None = None,
        rank: int = 0,
        **kwargs: Any,
    ) -> Iterator[Any]:
        """As `Executor.stream`; only rank 0's items can be had."""
        if rank != 0:
            raise NotImplementedError(f"items of rank {rank}: a group's stream yields rank 0's")
        return super().stream(method, *args, timeout=timeout, **kwargs)

    def _send(self, message: Message, job: Job) -> None:
        try:
            self._wire.broadcast(message)
        except RuntimeError as error:
            self._trouble = f"no answer: {error}"
            raise GiveUp from error
        asked = messages.decode(bytes(message))  # a copy, as other ranks get
        self._mine = chain(self._mine, self._servant.handle(asked))

    def _receive(self, job: Job) -> tuple[int, tuple[Any, ...]] | None:
        for mine in self._mine:
            return 0, messages.decode(bytes(mine))
        others = sorted(job.pending - {0})
        if not others:
            return None
        try:
            return others[0], self._wire.receive(others[0], job.left())
        except RuntimeError as error:
            self._trouble = f"no answer: {error}"
            if "timed out" not in str(error).lower():
                job.lose(Outcome(others[0], error=self._trouble, error_type="ConnectionError"))
            raise GiveUp from error

    def _describe(self, outcome: Outcome) -> str:
        text = outcome.error.strip() if outcome.error else self._trouble
        return f"rank {outcome.rank}, after {outcome.seconds:.1f} s: {text}"

    def _keep_alive(self) -> None:
        while not self._ended.wait(self._timeout / _MESSAGES_PER_TIMEOUT):
            if self._why_closed is None and self._turn.acquire(blocking=False):
                try:
                    self._wire.broadcast(messages.encode(_IDLE))
                except RuntimeError as error:
                    self._why_closed = f"a rank was lost: {error}"
                    self._wire.close()
                finally:
                    self._turn.release()

    def _close(self, why: str) -> None:
        if hasattr(self, "_ended"):
            self._ended.set()
            if self._keeper.ident is not None:
                self._keeper.join(LEAVE_SECONDS)
        super()._close(why)

    def _end(self, idle: bool) -> None:
        if idle:
            with contextlib.suppress(RuntimeError):
                self._wire.broadcast(messages.encode(_CLOSE))
        self._wire.close()


def serve_group(group: dist.ProcessGroup | None = None, timeout: float = TIMEOUT) -> None:
    """The part of all ranks but 0 in a `GroupExecutor`: returns when rank 0 closes it.

    Raises:
        ConnectionError: rank 0 is gone, or has closed the executor after a failure.
    """
    rank = dist.get_rank(group)
    if rank == 0:
        raise ValueError("rank 0 drives: it makes a GroupExecutor")
    wire, servant = Wire(group, timeout), Servant(rank)
    try:
        while (message := wire.receive_broadcast()) != _CLOSE:
            if message != _IDLE:
                for reply in servant.handle(message):
                    wire.send(reply)
    except RuntimeError as error:
        raise ConnectionError(
            f"rank {rank} lost rank 0, which is gone or has closed the executor: {error}"
        ) from error
    finally:
        wire.close()
