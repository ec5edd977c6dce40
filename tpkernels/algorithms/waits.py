"""What the algorithms over torch.distributed share: how a call begins, waits for a work, and ends.

Sync: before a call sends anything, its ranks check that they are in the same call. With a
workspace, they use its barrier. The words that follow order nothing; they report progress: READ
means that a rank has called torch.distributed, RESULT that it has finished. Without a workspace,
they use greetings (point_to_point.py); `hierarchical` watches the ranks of its host as well.
"""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from tpkernels._C.host import Phase
from tpkernels.errors import CollectiveTimeoutError, PeerLostError, TpkernelsError
from tpkernels.groups.call import Call
from tpkernels.groups.waiting_thread import PendingTransfers
from tpkernels.local.ranges import TRANSFER, WAIT, recorded

_LOOK = timedelta(seconds=0.02)  # between two looks at the peers


def finish(call: Call, work: dist.Work | PendingTransfers) -> None:
    """Wait for torch.distributed and watch the peers meanwhile: gloo reports a rank's death only
    to its neighbours, and tells nobody that a rank has given up. On GPUs the stream waits, and
    torch.distributed watches."""
    group = call.group
    if call.problem.device == "cuda":
        work.wait()
        return
    if group.workspace is not None:
        group.workspace.channel.publish(Phase.READ)
    with recorded(TRANSFER), recorded(WAIT):
        while not work.is_completed():
            with contextlib.suppress(RuntimeError):  # not done yet, or a failure, raised below
                work.wait(_LOOK)
                return
            _watch(call, 0.0)
    try:
        work.wait()
    except TpkernelsError:
        raise
    except RuntimeError as error:
        raise_failure(call, error, getattr(error, "peer", None))


def raise_failure(call: Call, error: RuntimeError, peer: int | None) -> NoReturn:
    """Raise our exception for torch.distributed's ``error``: what is known about the peers, or
    about ``peer``, the rank that was waited for."""
    group, late = call.group, "timed out" in str(error).lower()
    # A connection may close slightly before the kernel reports that the process has ended.
    until = time.monotonic() + 0.2
    while time.monotonic() < until and (group.workspace is not None or call.node is not None):
        _watch(call, group.timeout if late else 0.0)
        time.sleep(0.005)
    kind = CollectiveTimeoutError if late else PeerLostError
    whom = "torch.distributed" if peer is None else f"rank {peer}"
    raise kind(
        f"{call.plan.text}: rank {group.rank} waited for {whom}, timeout {group.timeout:g} s: "
        f"{error}. The group is broken; create a new group.",
        peer=peer,
    ) from error


def _watch(call: Call, waited: float) -> None:
    """Raise if a peer is lost or late. Peers that have not called torch.distributed come first.
    Across hosts the late one is at the other end of the transfer, wherever that is."""
    workspace = call.group.workspace
    if workspace is not None:
        workspace.channel.watch(Phase.READ, waited)
        workspace.channel.watch(Phase.RESULT, waited)
    elif call.node is not None:
        call.node.channel.watch(Phase.RESULT, 0.0)


def announce_done(call: Call) -> None:
    """Tell the peers that this rank needs nothing more from them, and that its process may end."""
    shared = call.node or call.group.workspace
    if shared is not None and call.group.world > 1 and call.problem.device == "cpu":
        shared.channel.publish(Phase.RESULT)
