"""What can go wrong in a collective, beyond wrong input (``ValueError``, ``TypeError``) and input
that is right but not supported (``NotImplementedError``)."""

from __future__ import annotations


class TpkernelsError(RuntimeError):
    """Base of the errors below. ``peer`` is the rank that is to blame, where there is one."""

    def __init__(self, message: str, *, peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), str(self), self.peer))


class PeerLostError(TpkernelsError):
    """A peer's process ended, or it left the call with an error of its own."""


class CollectiveTimeoutError(TpkernelsError):
    """A peer lives but did not come within the group's timeout."""


class CollectiveMismatchError(TpkernelsError):
    """Ranks of one group are in different calls: another op, other shapes, dtypes or options."""


class GroupBrokenError(TpkernelsError):
    """The group failed in an earlier call; only a new group can go on."""


def _rebuild(cls: type[TpkernelsError], message: str, peer: int | None) -> TpkernelsError:
    return cls(message, peer=peer)
