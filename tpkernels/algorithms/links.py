"""Point-to-point transfers of one call, and the greetings that tell whether it is the same one.

Problem: ranks that share no memory, and are in different calls, would take each other's bytes for
their own; where sizes differ gloo even ends the process.

Algorithm: each rank greets every other with the name of its call, under a tag of their own, and
sends data under a tag made from the call's signature. Data of another call thus finds no receiver,
and is never waited for longer than its sender's greeting.

Sync: messages between two ranks under one tag arrive in the order in which they were sent, so the
n-th greeting is that of the n-th call.

Failure: a rank that leaves a call with an error closes its connections, and who waits for it fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tpkernels.algorithms.common import after
from tpkernels.algorithms.waiting import finish, raise_failure
from tpkernels.errors import CollectiveMismatchError

if TYPE_CHECKING:
    from tpkernels.backends import Call

Message = tuple[torch.Tensor, int]  # what, and to or from which rank

_GREETING_TAG = 0x74706B73
_HANG_UP_TAG = _GREETING_TAG + 1
_GREETING_BYTES = 256


class Link:
    """This rank's connection to its peers in one call. Only what it has sent and received by
    `wait` or `meet` is over when the call is."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._greetings: list[tuple[Any, int]] = []
        self._heard: dict[int, torch.Tensor] = {}
        self._said: torch.Tensor | None = None

    def greet(self) -> None:
        """Tells the peers which call this is."""
        self._said = _greeting(self._call)
        self._heard = {peer: torch.empty_like(self._said) for peer in after(self._call)}
        self._greetings = self._start(
            [(self._said, peer) for peer in self._heard],
            [(heard, peer) for peer, heard in self._heard.items()],
            _GREETING_TAG,
        )

    def meet(self) -> None:
        """Returns when all ranks have come to this call.

        Raises:
            CollectiveMismatchError: one of them is in another.
        """
        if not self._greetings:
            return
        self.wait(self._greetings)
        self._greetings = []
        for peer, heard in self._heard.items():
            assert self._said is not None  # there are greetings
            if not torch.equal(heard, self._said):
                raise CollectiveMismatchError(
                    f"rank {self._call.group.rank} is in {self._call.plan.text}, but rank {peer} "
                    f"is in {_text_of(heard)}. The group is broken: make a new one.",
                    peer=peer,
                )

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> list[tuple[Any, int]]:
        """Begins to send and to receive contiguous tensors; those without elements do not travel.
        The peers start the other side of each in the same order."""
        return self._start(sends, receives, self._call.plan.signature & 0x7FFFFFFF)

    def _start(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int
    ) -> list[tuple[Any, int]]:
        pg = self._call.group.pg
        operations = [
            dist.P2POp(function, tensor, group=pg, tag=tag, group_peer=peer)
            for function, messages in ((dist.irecv, receives), (dist.isend, sends))
            for tensor, peer in messages
            if tensor.numel()
        ]
        if not operations:
            return []
        try:
            works = dist.batch_isend_irecv(operations)  # one for all where they are coalesced
        except RuntimeError as error:  # a connection that has closed already
            raise_failure(self._call, error, None)
        return [(work, op.group_peer) for work, op in zip(works, operations, strict=False)]

    def wait(self, works: Sequence[tuple[Any, int]]) -> None:
        """Waits for what `start` has begun. On a GPU the stream waits, not the host."""
        group = self._call.group
        if self._call.problem.device != "cpu":
            for work, _ in works:
                work.wait()
        elif works:
            timeout = timedelta(seconds=group.timeout)
            finish(self._call, group.waiter.wait_for(works, timeout))


def enter(call: Call) -> Link:
    """Begins a call. No data that a peer could mistake may be sent before `Link.meet`, but by
    `Link.start`."""
    link, group = Link(call), call.group
    if group.world > 1 and group.workspace is not None:
        group.workspace.channel.begin(call.plan.signature, call.plan.text)
        group.workspace.channel.barrier()
    elif group.world > 1 and call.problem.device == "cpu":
        link.greet()
    return link


def hang_up(call: Call) -> None:
    """Closes this rank's connections after a failure, where nothing else tells the peers: those
    that wait for it fail at once, and hang up in turn. gloo does so when a wait times out."""
    group = call.group
    if group.workspace is not None or group.world == 1 or call.problem.device != "cpu":
        return
    nothing = torch.empty(1, dtype=torch.uint8)
    for peer in after(call):
        try:
            work = group.pg.recv([nothing], peer, _HANG_UP_TAG)
            work.wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if "timed out" in str(error).lower():
                return  # else this one had closed already, and the others go on


def _greeting(call: Call) -> torch.Tensor:
    """The signature, and the text for messages."""
    said = call.plan.signature.to_bytes(4, "little") + call.plan.text.encode()
    padded = said[:_GREETING_BYTES].ljust(_GREETING_BYTES, b"\0")
    return torch.frombuffer(bytearray(padded), dtype=torch.uint8)


def _text_of(greeting: torch.Tensor) -> str:
    return bytes(greeting.tolist())[4:].rstrip(b"\0").decode(errors="replace")
