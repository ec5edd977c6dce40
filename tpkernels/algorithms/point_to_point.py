"""Point-to-point transfers of one call, with a handshake that detects a rank in a different call.

Problem: if ranks without shared memory run different calls, a rank would accept the data of a
different call. If the sizes differ, gloo even terminates the process.

Algorithm: each rank sends a description of its call to every peer, under a reserved tag. It sends
data under a tag derived from the call signature. So data of a different call matches no receive,
and a receiver waits for it only until the handshake of the sender arrives.

Sync: messages between two ranks under the same tag arrive in the order of the sends, so the n-th
handshake belongs to the n-th call.

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

Message: TypeAlias = tuple[torch.Tensor, int]  # tensor, peer
PendingWork: TypeAlias = tuple[Any, int]  # work, peer

_HANDSHAKE_TAG = 0x74706B73
_CLOSE_TAG = _HANDSHAKE_TAG + 1
_HANDSHAKE_BYTES = 256


class _Handshakes:
    """Handshakes of this rank and its peers at the start of a call. Has the `wait` of a work."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.local = _encode(call)
        self.received = {peer: torch.empty_like(self.local) for peer in call.peers_in_ring_order}

    def wait(self, _: timedelta) -> None:
        """Compare the received handshakes. Raises ``CollectiveMismatchError``."""
        for peer, handshake in self.received.items():
            if not torch.equal(handshake, self.local):
                raise CollectiveMismatchError(
                    f"rank {self.call.group.rank} is in {self.call.plan.description}, but rank "
                    f"{peer} is in {_decode(handshake)}. The group is broken; create a new group.",
                    peer=peer,
                )


class PeerLinks:
    """Connections of this rank to its peers in one call."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._handshakes: list[PendingWork] = []

    def start_handshake(self) -> None:
        """Send the handshake. The next `wait` receives and compares the peer handshakes."""
        handshakes = _Handshakes(self._call)
        self._handshakes = [
            *self._start(
                [(handshakes.local, peer) for peer in handshakes.received],
                [(handshake, peer) for peer, handshake in handshakes.received.items()],
                _HANDSHAKE_TAG,
            ),
            (handshakes, self._call.group.rank),
        ]

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> list[PendingWork]:
        """Start sends and receives of contiguous tensors. Empty tensors are not sent.

        The peers must start the matching receives and sends in the same order.
        """
        return self._start(sends, receives, self._call.plan.signature & 0x7FFFFFFF)

    def _start(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int
    ) -> list[PendingWork]:
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
            works = dist.batch_isend_irecv(operations)  # one work if the backend coalesces them
        except RuntimeError as error:  # the connection is closed
            raise_failure(self._call, error, None)
        return [(work, op.group_peer) for work, op in zip(works, operations, strict=False)]

    def wait(self, started: Sequence[PendingWork] = ()) -> None:
        """Wait until all ranks have entered this call, then for the transfers in ``started``.

        On a GPU the stream waits, not the host.

        Raises:
            CollectiveMismatchError: a rank is in a different call.
        """
        group, works = self._call.group, [*self._handshakes, *started]
        self._handshakes = []
        if self._call.problem.device != "cpu":
            for work, _ in works:
                work.wait()
        elif works:
            timeout = timedelta(seconds=group.timeout)
            finish(self._call, group.waiter.wait_for(works, timeout))


def enter(call: Call) -> PeerLinks:
    """Begin a call. Until the first `PeerLinks.wait`, send only through `PeerLinks.start`."""
    links, group = PeerLinks(call), call.group
    if group.world == 1 or call.problem.device != "cpu":
        return links
    if group.workspace is not None:
        group.workspace.channel.begin(call.plan.signature, call.plan.description)
        group.workspace.channel.barrier()
    else:
        if call.node is not None:
            call.node.channel.begin(call.plan.signature, call.plan.description)
        links.start_handshake()
    return links


def close_connections(call: Call, error: BaseException) -> None:
    """Close the connections of this rank after a failure that peers cannot detect otherwise.

    Peers that wait for this rank then fail immediately, and also close their connections. gloo
    closes connections when a wait times out, so a receive with a short timeout is sufficient.
    """
    group = call.group
    if group.workspace is not None or group.world == 1 or call.problem.device != "cpu":
        return
    if isinstance(error, CollectiveMismatchError):
        return  # all ranks receive all handshakes and detect the mismatch
    if not group.uses_gloo("cpu"):
        return
    dummy = torch.empty(1, dtype=torch.uint8)
    for peer in call.peers_in_ring_order:
        try:
            work = group.pg.recv([dummy], peer, _CLOSE_TAG)
            work.wait(timedelta(milliseconds=1))
        except RuntimeError as failure:
            # A timeout closes all connections. Any other error: this connection was closed before.
            if "timed out" in str(failure).lower():
                return


def _encode(call: Call) -> torch.Tensor:
    """Encode the call signature and the call description for error messages."""
    handshake = call.plan.signature.to_bytes(4, "little") + call.plan.description.encode()
    padded = handshake[:_HANDSHAKE_BYTES].ljust(_HANDSHAKE_BYTES, b"\0")
    return torch.frombuffer(bytearray(padded), dtype=torch.uint8)


def _decode(handshake: torch.Tensor) -> str:
    return bytes(handshake.tolist())[4:].rstrip(b"\0").decode(errors="replace")
