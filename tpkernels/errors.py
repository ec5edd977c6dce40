"""Errors of collectives. Invalid input raises ``ValueError`` or ``TypeError``. Valid input that is
not supported raises ``NotImplementedError``.

    RuntimeError
    |-- TpkernelsError                    the group is broken, or the calls of the ranks differ
    |   |-- PeerLostError                 a peer exited, or left the call with an error
    |   |-- CollectiveTimeoutError        a peer is alive, but did not start the call in time
    |   |-- CollectiveMismatchError       the call of a peer differs
    |   `-- GroupBrokenError              an earlier call failed
    `-- CaptureError                      a CUDA graph capture needs a warm-up call
    ValueError
    `-- RoutingError                      an expert id is out of range, or max_rows is exceeded
    MemoryError
    `-- WorkspaceMemoryError              the workspace of a call cannot grow
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
    """The process of a peer exited, or the peer left the call with an error."""


class CollectiveTimeoutError(TpkernelsError):
    """A peer is alive but did not start the call within the timeout of the group."""


class CollectiveMismatchError(TpkernelsError):
    """The calls of the ranks differ in op, shapes, dtypes or options."""


class GroupBrokenError(TpkernelsError):
    """An earlier call of the group failed. The group can no longer be used; create a new group."""


class CaptureError(RuntimeError):
    """A call during CUDA graph capture needs setup that is only possible outside a capture.

    The group remains usable, provided that the captured graph is discarded."""


class WorkspaceMemoryError(MemoryError):
    """The GPU workspace cannot grow for a call, because a rank does not have enough memory.

    All ranks raise it before the call sends data, so the group remains usable."""


class RoutingError(ValueError):
    """An expert id is out of range, or more than ``max_rows`` (token, expert) assignments belong to
    the experts of a rank.

    Every rank checks the assignments of all ranks and raises it before the call sends data, so the
    group remains usable."""


#: Errors after which the group remains usable.
RECOVERABLE = CaptureError, WorkspaceMemoryError, RoutingError


def _rebuild(cls: type[TpkernelsError], message: str, peer: int | None) -> TpkernelsError:
    return cls(message, peer=peer)
