"""What ranks learn of a late peer, a killed one, and one in another call, for the GPU suite.

On GPUs a call only queues work: after a failure its result is NaN, and the next call raises. On CPU
tensors the call itself raises.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

import tpkernels
from benchmarks.gpu.stage import Result, Setting, stage, synchronize
from tpkernels.launch import RankError, Ranks

TIMEOUT = 3.0
KINDS = {
    "late": tpkernels.CollectiveTimeoutError,
    "killed": tpkernels.PeerLostError,
    "another call": tpkernels.CollectiveMismatchError,
}


def _fault_job(device: str, algorithm: str, kind: str) -> tuple[str, bool, float]:
    """On rank 0: the error's name, whether the result was NaN (or there was none), and seconds."""
    rank = dist.get_rank()
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    group = dist.new_group()
    tpkernels.init(group, timeout=TIMEOUT)
    x, w = torch.ones(64, 64, device=device), torch.ones(64, 64, device=device)

    def call(rows: int = 64) -> torch.Tensor:
        return tpkernels.matmul_all_reduce(x[:rows], w, group, algorithm=algorithm)

    call()
    synchronize(device)
    dist.barrier()
    if rank == 1:
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "late":
            time.sleep(3 * TIMEOUT)
        else:
            _ended(lambda: call(32), device)
            time.sleep(TIMEOUT)
        return "", True, 0.0
    begin = time.monotonic()
    error, first = _ended(call, device)
    nan = first is None or bool(first.isnan().all())
    if not error:
        error, _ = _ended(call, device)
    return error, nan, time.monotonic() - begin


def _ended(call, device: str) -> tuple[str, torch.Tensor | None]:  # type: ignore[no-untyped-def]
    """The name of the error that a call ends in, and its result."""
    try:
        result = call()
        synchronize(device)
    except tpkernels.TpkernelsError as error:
        return type(error).__name__, None
    return "", result


@stage()
def fault_check(setting: Setting) -> Iterator[Result]:
    """Each kind of failure with each algorithm that waits in memory that the ranks share."""
    env = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    for algorithm in ("direct",) if setting.rehearsal else ("direct", "pipelined", "fused"):
        for kind, expected in KINDS.items():
            args = setting.device, algorithm, kind
            with Ranks(2, env=env) as ranks:
                try:
                    outcome = ranks.run(_fault_job, *args, timeout=setting.budget_s)[0]
                except RankError as error:  # the killed rank has no result
                    outcome = error.outcomes[0].value
            if outcome is None:
                yield Result(f"{kind} by {algorithm}", "rank 0 failed", ok=False)
                continue
            name, nan, seconds = outcome
            right = name == expected.__name__ and nan and seconds < 5 * TIMEOUT
            value = f"{name or 'no error'} after {seconds:.1f} s{'' if nan else ', not NaN'}"
            yield Result(f"a peer {kind}, by {algorithm}", value, right)
