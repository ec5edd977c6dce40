"""What a rank learns of a peer that is late, was killed, or is in another call.

On CUDA tensors a call only queues work: after a failure its result is NaN, and the next call
raises. On CPU tensors the call itself raises.
"""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist

import tpkernels
from tpkernels.common.text import of_error
from tpkernels.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
    TpkernelsError,
)
from tpkernels.launch.session import rank_device, synchronizer
from tpkernels.planning.qualification import Failure
from tpkernels.qualification.checks import StageReport

_TIMEOUT_S = 3.0
_ERRORS = {
    "late": CollectiveTimeoutError,
    "killed": PeerLostError,
    "another call": CollectiveMismatchError,
}
CULPRIT = 1  # the rank with the fault


def check(name: str, device: str) -> StageReport:
    """Make a fault, such as "late, direct", on one rank; the others report whether they are told
    what happened, in time."""
    kind, _, algorithm = name.partition(", ")
    where = rank_device(device)
    group = dist.new_group()
    assert group is not None  # all ranks are in it
    tpkernels.init(group, timeout=_TIMEOUT_S, autotune=False)
    x, w = torch.ones(64, 64, device=where), torch.ones(64, 64, device=where)

    def call(rows: int = 64) -> torch.Tensor | None:
        result = tpkernels.matmul_all_reduce(x[:rows], w, group, algorithm=algorithm)
        if (wait := synchronizer(device)) is not None:
            wait()
        return result

    call()
    dist.barrier()
    if dist.get_rank() == CULPRIT:
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3 * _TIMEOUT_S if kind == "late" else 0)
        try:
            call(32)
        except TpkernelsError:  # it is told as well
            time.sleep(_TIMEOUT_S)
        return StageReport(1)
    begin, result, error = time.monotonic(), None, None
    try:
        result = call()
        if result is not None and not result.isnan().all():
            return _failed(
                name, f"expected NaN after the fault; got {result.flatten()[:4].tolist()}"
            )
        tpkernels.check(group)
        call()
    except TpkernelsError as raised:
        error = raised
    seconds = time.monotonic() - begin
    if not isinstance(error, _ERRORS[kind]) or error.peer not in (None, CULPRIT):
        return _failed(name, f"expected {_ERRORS[kind].__name__}; got {error and of_error(error)}")
    if seconds > 4 * _TIMEOUT_S:
        return _failed(name, f"the error came after {seconds:.1f} s: {error}")
    return StageReport(1)


def _failed(name: str, text: str) -> StageReport:
    return StageReport(0, Failure("error", name, dist.get_rank(), CULPRIT, text))
