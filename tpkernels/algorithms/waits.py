"""Start, waits and end of a call that uses torch.distributed.

Sync: before a call sends data, the ranks check that all of them are in the same call. With a
workspace they use its barrier. Later signals do not order data. They report progress: READ after a
rank has called torch.distributed, RESULT after it has finished. Without a workspace the ranks use
handshakes (point_to_point.py), and `hierarchical` also watches the ranks of its host.
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
from tpkernels.local.ranges import TRANSFER, WAIT, record_range

_POLL_INTERVAL = timedelta(seconds=0.02)  # interval between two checks of the peers


def finish(call: Call, work: dist.Work | PendingTransfers) -> None:
    """Wait for torch.distributed, and watch the peers meanwhile.

    gloo reports the death of a rank only to its neighbours, and does not report that a rank gave
    up. On GPUs the stream waits, and torch.distributed watches.
    """
    group = call.group
    if call.problem.device == "cuda":
        work.wait()
        return
    if group.workspace is not None:
        group.workspace.channel.publish(Phase.READ)
    with record_range(TRANSFER), record_range(WAIT):
        while not work.is_completed():
            with contextlib.suppress(RuntimeError):  # not done, or a failure that is raised below
                work.wait(_POLL_INTERVAL)
                return
            _watch(call, 0.0)
    try:
        work.wait()
    except TpkernelsError:
        raise
    except RuntimeError as error:
        raise_failure(call, error, getattr(error, "peer", None))


def raise_failure(call: Call, error: RuntimeError, peer: int | None) -> NoReturn:
    """Raise a tpkernels error for the torch.distributed error ``error``.

    A known failure of a peer takes precedence. Otherwise the error reports ``peer``, the awaited
    rank.
    """
    group, timed_out = call.group, "timed out" in str(error).lower()
    # A connection may close slightly before the operating system reports the end of the process.
    deadline = time.monotonic() + 0.2
    while time.monotonic() < deadline and (group.workspace is not None or call.node is not None):
        _watch(call, group.timeout if timed_out else 0.0)
        time.sleep(0.005)
    error_type = CollectiveTimeoutError if timed_out else PeerLostError
    source = "torch.distributed" if peer is None else f"rank {peer}"
    raise error_type(
        f"{call.plan.description}: rank {group.rank} waited for {source}, timeout "
        f"{group.timeout:g} s: {error}. The group is broken; create a new group.",
        peer=peer,
    ) from error


def _watch(call: Call, waited: float) -> None:
    """Raise if a peer is lost or late. Peers that have not called torch.distributed come first.

    Across hosts this detects only lost peers on this host. A late rank is then not reported here:
    it is the peer of the awaited transfer, on any host.
    """
    workspace = call.group.workspace
    if workspace is not None:
        workspace.channel.watch(Phase.READ, waited)
        workspace.channel.watch(Phase.RESULT, waited)
    elif call.node is not None:
        call.node.channel.watch(Phase.RESULT, 0.0)


def signal_done(call: Call) -> None:
    """Signal that this rank needs no more data from its peers, and that its process may end."""
    shared = call.node or call.group.workspace
    if shared is not None and call.group.world > 1 and call.problem.device == "cpu":
        shared.channel.publish(Phase.RESULT)
