"""Errors of collectives. Invalid input raises ``ValueError`` or ``TypeError``, and valid input that
is not supported ``NotImplementedError``.

    RuntimeError
    |-- TpkernelsError                    the group is broken, or the call was not the peers'
    |   |-- PeerLostError                 a peer ended, or left the call
    |   |-- CollectiveTimeoutError        a peer lives, and did not come in time
    |   |-- CollectiveMismatchError       a peer made another call
    |   `-- GroupBrokenError              an earlier call failed
    `-- CaptureError                      a CUDA graph's capture needs a call before it
    ValueError
    `-- RoutingError                      a token of any rank is routed to no expert
    MemoryError
    `-- WorkspaceMemoryError              no memory for a call's workspace, found by all ranks
"""

from __future__ import annotations


class TpkernelsError(RuntimeError):
    """Base class of the errors of collectives.

    Attributes:
        peer: the rank that caused the error; None if no single rank did.
    """

    def __init__(self, message: str, *, peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), str(self), self.peer))


class PeerLostError(TpkernelsError):
    """A peer's process ended, or an error of its own made it leave the call."""


class CollectiveTimeoutError(TpkernelsError):
    """A peer is alive but did not make the call within the group's timeout."""


class CollectiveMismatchError(TpkernelsError):
    """Ranks of one group made different calls: they differ in op, shapes, dtypes or options."""


class GroupBrokenError(TpkernelsError):
    """The group failed in an earlier call and cannot be used any more; make a new one."""


class CaptureError(RuntimeError):
    """A call that is being captured into a graph needs something that only a call outside a capture
    can set up. Nothing that the call has queued runs if the capture is not replayed, so its group
    can go on."""


class WorkspaceMemoryError(MemoryError):
    """The workspace on GPUs cannot grow for a call, because a rank lacks the memory. All ranks
    raise it before the call sends anything, so their group can go on."""


class RoutingError(ValueError):
    """A token is routed to an expert that there is not, or more than ``max_rows`` routes lead to a
    rank's experts. All ranks know all routes, and raise it before the call sends anything, so their
    group can go on."""


#: After these the group can go on.
HARMLESS = CaptureError, WorkspaceMemoryError, RoutingError


def _rebuild(cls: type[TpkernelsError], message: str, peer: int | None) -> TpkernelsError:
    return cls(message, peer=peer)
