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
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from tpkernels.call import Call
from tpkernels.errors import CollectiveMismatchError
from tpkernels.transport.waits import finish, raise_failure

Message: TypeAlias = tuple[torch.Tensor, int]  # what, and to or from which rank
Started: TypeAlias = tuple[Any, int]  # a work, and the rank on its other side

_GREETING_TAG = 0x74706B73
_HANG_UP_TAG = _GREETING_TAG + 1
_GREETING_BYTES = 256


class _Greetings:
    """What this rank and its peers say at the begin of a call. It waits like a work."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.said = _greeting(call)
        self.heard = {peer: torch.empty_like(self.said) for peer in call.peers_in_ring_order}

    def wait(self, _: timedelta) -> None:
        """Compares them, which are all here. Raises ``CollectiveMismatchError``."""
        for peer, heard in self.heard.items():
            if not torch.equal(heard, self.said):
                raise CollectiveMismatchError(
                    f"rank {self.call.group.rank} is in {self.call.plan.text}, but rank {peer} "
                    f"is in {_text_of(heard)}. The group is broken: make a new one.",
                    peer=peer,
                )


class PeerLinks:
    """This rank's connection to its peers in one call."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._greetings: list[Started] = []

    def greet(self) -> None:
        """Tells the peers which call this is; the next `wait` hears them."""
        greetings = _Greetings(self._call)
        self._greetings = [
            *self._start(
                [(greetings.said, peer) for peer in greetings.heard],
                [(heard, peer) for peer, heard in greetings.heard.items()],
                _GREETING_TAG,
            ),
            (greetings, self._call.group.rank),
        ]

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> list[Started]:
        """Begins to send and to receive contiguous tensors; those without elements do not travel.
        The peers start the other side of each in the same order."""
        return self._start(sends, receives, self._call.plan.signature & 0x7FFFFFFF)

    def _start(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int
    ) -> list[Started]:
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

    def wait(self, started: Sequence[Started] = ()) -> None:
        """Waits for what `start` has begun, and first until all ranks have come to this call. On a
        GPU the stream waits, not the host.

        Raises:
            CollectiveMismatchError: one of them is in another.
        """
        group, works = self._call.group, [*self._greetings, *started]
        self._greetings = []
        if self._call.problem.device != "cpu":
            for work, _ in works:
                work.wait()
        elif works:
            timeout = timedelta(seconds=group.timeout)
            finish(self._call, group.waiter.wait_for(works, timeout))


def enter(call: Call) -> PeerLinks:
    """Begins a call. Until the first `PeerLinks.wait`, send only through `PeerLinks.start`."""
    link, group = PeerLinks(call), call.group
    if group.world == 1 or call.problem.device != "cpu":
        return link
    if group.workspace is not None:
        group.workspace.channel.begin(call.plan.signature, call.plan.text)
        group.workspace.channel.barrier()
    else:
        link.greet()
    return link


def hang_up(call: Call, error: BaseException) -> None:
    """Closes this rank's connections after a failure, where nothing else tells the peers: those
    that wait for it fail at once, and hang up in turn. gloo does so when a wait times out."""
    group = call.group
    if group.workspace is not None or group.world == 1 or call.problem.device != "cpu":
        return
    if isinstance(error, CollectiveMismatchError):
        return  # each rank hears all others, so all find that not all are in one call
    if not group.by_gloo("cpu"):
        return
    nothing = torch.empty(1, dtype=torch.uint8)
    for peer in call.peers_in_ring_order:
        try:
            work = group.pg.recv([nothing], peer, _HANG_UP_TAG)
            work.wait(timedelta(milliseconds=1))
        except RuntimeError as said:
            if "timed out" in str(said).lower():
                return  # else this one had closed already, and the others go on


def _greeting(call: Call) -> torch.Tensor:
    """The signature, and the text for messages."""
    said = call.plan.signature.to_bytes(4, "little") + call.plan.text.encode()
    padded = said[:_GREETING_BYTES].ljust(_GREETING_BYTES, b"\0")
    return torch.frombuffer(bytearray(padded), dtype=torch.uint8)


def _text_of(greeting: torch.Tensor) -> str:
    return bytes(greeting.tolist())[4:].rstrip(b"\0").decode(errors="replace")
