"""Point-to-point transfers of one call, and greetings that detect a rank in another call.

Problem: ranks that share no memory and are in different calls would mistake each other's data for
their own. If the sizes differ, gloo even ends the process.

Algorithm: each rank greets every other with the name of its call, under a reserved tag, and sends
data under a tag made from the call's signature. So data of another call finds no receiver, and
nobody waits for it longer than for its sender's greeting.

Sync: messages between two ranks under one tag arrive in the order in which they were sent, so the
n-th greeting belongs to the n-th call.

Failure: a rank that leaves a call with an error closes its connections. The ranks that wait for it
fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from tpkernels.algorithms.waits import finish, raise_failure
from tpkernels.errors import CollectiveMismatchError
from tpkernels.groups.call import Call

Message: TypeAlias = tuple[torch.Tensor, int]  # the data, and the rank at the other end
Started: TypeAlias = tuple[Any, int]  # a work, and the rank at the other end

_GREETING_TAG = 0x74706B73
_HANG_UP_TAG = _GREETING_TAG + 1
_GREETING_BYTES = 256


class _Greetings:
    """The greetings of this rank and its peers at the start of a call. Waits like a work."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.own = _greeting(call)
        self.received = {peer: torch.empty_like(self.own) for peer in call.peers_in_ring_order}

    def wait(self, _: timedelta) -> None:
        """Compare the greetings, all of which have arrived. Raises ``CollectiveMismatchError``."""
        for peer, greeting in self.received.items():
            if not torch.equal(greeting, self.own):
                raise CollectiveMismatchError(
                    f"rank {self.call.group.rank} is in {self.call.plan.text}, but rank {peer} "
                    f"is in {_text_of(greeting)}. The group is broken; create a new group.",
                    peer=peer,
                )


class PeerLinks:
    """This rank's connections to its peers in one call."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._greetings: list[Started] = []

    def greet(self) -> None:
        """Greet the peers; the next `wait` waits for their greetings and compares them."""
        greetings = _Greetings(self._call)
        self._greetings = [
            *self._start(
                [(greetings.own, peer) for peer in greetings.received],
                [(greeting, peer) for peer, greeting in greetings.received.items()],
                _GREETING_TAG,
            ),
            (greetings, self._call.group.rank),
        ]

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> list[Started]:
        """Start sends and receive of contiguous tensors; empty ones do not travel. The peers must
        start the matching receives and sends in the same order."""
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
            works = dist.batch_isend_irecv(operations)  # a single work if they are coalesced
        except RuntimeError as error:  # the connection is closed already
            raise_failure(self._call, error, None)
        return [(work, op.group_peer) for work, op in zip(works, operations, strict=False)]

    def wait(self, started: Sequence[Started] = ()) -> None:
        """Wait until all ranks have entered this call, then for what `start` returned. On a GPU
        the stream waits, not the host.

        Raises:
            CollectiveMismatchError: a rank is in another call.
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
    """Begin a call. Before the first `PeerLinks.wait`, send only through `PeerLinks.start`."""
    link, group = PeerLinks(call), call.group
    if group.world == 1 or call.problem.device != "cpu":
        return link
    if group.workspace is not None:
        group.workspace.channel.begin(call.plan.signature, call.plan.text)
        group.workspace.channel.barrier()
    else:
        if call.node is not None:
            call.node.channel.begin(call.plan.signature, call.plan.text)
        link.greet()
    return link


def hang_up(call: Call, error: BaseException) -> None:
    """Close this rank's connections after a failure, if nothing else tells the peers. Peers that
    wait for this rank then fail at once and hang up too. gloo closes connections when a wait times
    out, so a receive with a short timeout is enough."""
    group = call.group
    if group.workspace is not None or group.world == 1 or call.problem.device != "cpu":
        return
    if isinstance(error, CollectiveMismatchError):
        return  # each rank receives all greetings, so all ranks detect the mismatch
    if not group.uses_gloo("cpu"):
        return
    nothing = torch.empty(1, dtype=torch.uint8)
    for peer in call.peers_in_ring_order:
        try:
            work = group.pg.recv([nothing], peer, _HANG_UP_TAG)
            work.wait(timedelta(milliseconds=1))
        except RuntimeError as failure:
            if "timed out" in str(failure).lower():
                return  # otherwise this connection was closed already; try the next


def _greeting(call: Call) -> torch.Tensor:
    """Return the signature, and the text for error messages."""
    greeting = call.plan.signature.to_bytes(4, "little") + call.plan.text.encode()
    padded = greeting[:_GREETING_BYTES].ljust(_GREETING_BYTES, b"\0")
    return torch.frombuffer(bytearray(padded), dtype=torch.uint8)


def _text_of(greeting: torch.Tensor) -> str:
    return bytes(greeting.tolist())[4:].rstrip(b"\0").decode(errors="replace")
