"""Failed waits of kernels as exceptions."""

from __future__ import annotations

from collections.abc import Collection

from tpkernels.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
    TpkernelsError,
)
from tpkernels.symm import device

_ERRORS = {
    device.TIMEOUT: CollectiveTimeoutError,
    device.MISMATCH: CollectiveMismatchError,
    device.ABORTED: PeerLostError,
}


def kernel_error(
    failure: tuple[int, int, int, int],
    *,
    where: str,
    rank: int,
    timeout: float,
    groups: Collection[str] = (),
) -> TpkernelsError:
    """Return the exception for a failed wait of a kernel of ``rank``.

    Args:
        failure: see ``DeviceWorkspace.failure``.
        where: which call it was in, or which has found it.
        groups: the groups whose calls have run on this rank's device.
    """
    kind, peer, expected, seen = failure
    hint = ""
    if kind == device.TIMEOUT and len(groups) > 1:
        names = ", ".join(f"'{name}'" for name in sorted(groups))
        hint = (
            f" Groups {names} use this GPU: all ranks must issue the calls of groups that share "
            "GPUs in one order."
        )
    return _ERRORS[kind](
        f"{where}: rank {rank} waited in its kernel for rank {peer}: expected word "
        f"{expected:#018x}, seen {seen:#018x}, timeout {timeout:g} s. The results are NaN and the "
        f"group is broken: make a new one.{hint}",
        peer=peer,
    )
