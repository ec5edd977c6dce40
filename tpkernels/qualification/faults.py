"""Fault tests: errors on the ranks whose peer is late, was killed, or made a different call.

On CUDA tensors a call only queues work. After a failure its result is NaN, and the next call
raises. On CPU tensors the failed call raises.
"""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist

import tpkernels
from tpkernels.common.text import describe_error
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
    """Inject a fault, such as "late, direct", on rank `CULPRIT`. Each remaining rank reports a
    failure if it does not get the right error in time."""
    kind, _, algorithm = name.partition(", ")
    torch_device = rank_device(device)
    group = dist.new_group()
    assert group is not None  # the group contains all ranks
    tpkernels.init(group, timeout=_TIMEOUT_S, autotune=False)
    x, w = torch.ones(64, 64, device=torch_device), torch.ones(64, 64, device=torch_device)

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
        except TpkernelsError:  # the faulty rank also gets an error
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
        return _failed(
            name, f"expected {_ERRORS[kind].__name__}; got {error and describe_error(error)}"
        )
    if seconds > 4 * _TIMEOUT_S:
        return _failed(name, f"the error came after {seconds:.1f} s: {error}")
    return StageReport(1)


def _failed(name: str, message: str) -> StageReport:
    return StageReport(0, Failure("error", name, dist.get_rank(), CULPRIT, message))
