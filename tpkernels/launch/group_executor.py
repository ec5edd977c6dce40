"""An executor on processes that exist, such as those of torchrun, also across hosts.

Problem: the ranks share no memory, none of them is another's parent, and rank 0 is one of them.

Algorithm: messages travel through connections of their own, so they meet no collective of the
user. Rank 0 broadcasts a message and handles it too, as a rank (`tpkernels.launch.worker`), then
receives the replies in rank order.

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
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from tpkernels.launch import messages, ranks, worker
from tpkernels.launch.messages import Message

_MESSAGES_PER_TIMEOUT = 4


class GroupExecutor(ranks.Executor):
    """Rank 0's side: calls methods of an object that every rank of a group holds, itself included.

    All other ranks of the group call `serve_group` meanwhile. Rank 0 notices Ctrl-C when a wait for
    another rank ends. A stream's ranks make a step only when its item is asked for.

    Args:
        factory, args, kwargs: as for `Ranks`. Rank 0's are used on all ranks.
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
        timeout: float = ranks.TIMEOUT,
        **kwargs: Any,
    ) -> None:
        super().__init__(dist.get_world_size(group), timeout)
        if dist.get_rank(group) != 0:
            raise ValueError(f"rank {dist.get_rank(group)} calls serve_group(); rank 0 drives")
        name = worker.name_of(factory)
        message = ranks.request("make", name, args, kwargs)
        self._wire = _Wire(group, timeout)
        self._worker = worker.Worker(0)
        self._local: Iterator[Message] = iter(())  # replies of this rank
        self._trouble = "no answer in time"
        self._ended = threading.Event()
        self._keeper = threading.Thread(target=self._keep_alive, daemon=True)
        self._make(name, message)
        self._keeper.start()

    def stream(self, method: str, *args: Any, rank: int = 0, **kwargs: Any) -> Iterator[Any]:
        """Do as `Ranks.stream`; only rank 0's items can be had."""
        if rank != 0:
            raise NotImplementedError(f"items of rank {rank}: a group's stream yields rank 0's")
        return super().stream(method, *args, **kwargs)

    def describe(self, outcome: ranks.Outcome) -> str:
        """Return what went wrong on a rank, for an error's message."""
        text = outcome.error.strip() if outcome.error else self._trouble
        return f"rank {outcome.rank}, after {outcome.seconds:.1f} s: {text}"

    def _send(self, message: Message, job: ranks.Job) -> None:
        try:
            self._wire.broadcast(message)
        except RuntimeError as error:
            self._trouble = f"no answer: {error}"
            raise ranks.GiveUp from error
        copied = messages.decode(bytes(message))  # as other ranks get it
        self._local = chain(self._local, self._worker.handle(copied))

    def _receive(self, job: ranks.Job) -> tuple[int, ranks.Reply] | None:
        for reply in self._local:
            return 0, messages.decode(bytes(reply))
        others = sorted(job.pending - {0})
        if not others:
            return None
        try:
            return others[0], self._wire.receive(others[0], job.left())
        except RuntimeError as error:
            self._trouble = f"no answer: {error}"
            if "timed out" not in str(error).lower():
                lost = ranks.Outcome(others[0], error=self._trouble, error_type="ConnectionError")
                job.lose(lost)
            raise ranks.GiveUp from error

    def _keep_alive(self) -> None:
        while not self._ended.wait(self._timeout / _MESSAGES_PER_TIMEOUT):
            if self._why_closed is None and self._turn.acquire(blocking=False):
                try:
                    self._wire.broadcast(messages.encode(worker.IDLE))
                except RuntimeError as error:
                    self._why_closed = f"a rank was lost: {error}"
                    self._wire.close()
                finally:
                    self._turn.release()

    def _close(self, why: str) -> None:
        self._ended.set()
        if self._keeper.is_alive():
            self._keeper.join(worker.LEAVE_SECONDS)
        super()._close(why)

    def _end(self, idle: bool) -> None:
        if idle:
            with contextlib.suppress(RuntimeError):
                self._wire.broadcast(messages.encode(worker.CLOSE))
        self._wire.close()


def serve_group(group: dist.ProcessGroup | None = None, timeout: float = ranks.TIMEOUT) -> None:
    """Take the part of all ranks but 0 in a `GroupExecutor`; return when rank 0 closes it.

    Raises:
        ConnectionError: rank 0 is gone, or has closed the executor after a failure.
    """
    rank = dist.get_rank(group)
    if rank == 0:
        raise ValueError("rank 0 drives: it makes a GroupExecutor")
    wire = _Wire(group, timeout)
    try:
        worker.Worker(rank).serve(wire.receive_broadcast, wire.send)
    except RuntimeError as error:
        raise ConnectionError(
            f"rank {rank} lost rank 0, which is gone or has closed the executor: {error}"
        ) from error
    finally:
        wire.close()


class _Wire:
    """One rank's gloo connections to the others, which nothing else uses. Raises RuntimeError, as
    gloo does. A message is two transfers of some 0.1 ms each: its length, and its bytes."""

    def __init__(self, group: dist.ProcessGroup | None, timeout: float) -> None:
        pg = group or dist.group.WORLD
        if pg is None:
            raise ValueError("there is no process group: call torch.distributed.init_process_group")
        store = pg.get_group_store()
        # The store keeps what earlier wires have left there. All ranks count their wires alike.
        count = store.add(f"tpkernels-executor/{pg.rank()}", 1)
        prefixed = dist.PrefixStore(f"tpkernels-executor/{count}/", store)
        self._gloo: Any = dist.ProcessGroupGloo(
            prefixed, pg.rank(), pg.size(), timedelta(seconds=timeout)
        )
        self._sent: list[tuple[Any, torch.Tensor]] = []  # works, and the memory they read

    def broadcast(self, message: Message) -> None:
        """Send from rank 0. Returns when all have received it."""
        for part in _transfers(message):
            self._gloo.broadcast(part, 0).wait()

    def receive_broadcast(self) -> Any:
        return _received(lambda out: self._gloo.broadcast(out, 0).wait())

    def send(self, message: Message) -> None:
        """Send to rank 0, which may receive it later."""
        for work, _ in self._sent:
            work.wait()
        self._sent = [(self._gloo.send([part], 0, 0), part) for part in _transfers(message)]

    def receive(self, rank: int, seconds: float) -> Any:
        until = time.monotonic() + seconds

        def take(out: torch.Tensor) -> None:
            left = timedelta(seconds=max(0.001, until - time.monotonic()))
            self._gloo.recv([out], rank, 0).wait(left)

        return _received(take)

    def close(self) -> None:
        """Close the connections. Ranks that wait for this one get an error."""
        self._gloo = None


def _transfers(message: Message) -> list[torch.Tensor]:
    body = torch.frombuffer(bytearray(bytes(message)), dtype=torch.uint8)
    return [torch.tensor([len(body)]), body]


def _received(take: Callable[[torch.Tensor], None]) -> Any:
    length = torch.zeros(1, dtype=torch.int64)
    take(length)
    body = torch.empty(int(length), dtype=torch.uint8)
    take(body)
    return messages.decode(bytes(body.numpy()))
