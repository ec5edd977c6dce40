"""Validate the algorithms for CUDA tensors on the machine that will use them.

`tpkernels qualify` runs each variant of each algorithm in separate processes and writes a report
(`tpkernels.planning.qualification`). On CUDA tensors ``algorithm="auto"`` selects only variants
that passed. The function `qualify` runs the command for an existing group.
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from tpkernels.common.text import describe_error, shorten
from tpkernels.groups import GroupLike, get_or_default
from tpkernels.planning.qualification import Qualification
from tpkernels.qualification.schedule import AUTOMATIC_S
from tpkernels.symm import streams

_GRACE_S = 60.0  # seconds to start Python and to finish the current stage


def qualify(group: GroupLike | None = None, *, budget: float = AUTOMATIC_S) -> Qualification:
    """Qualify this machine for calls of a group on CUDA tensors. Collective.

    If the report of this machine already covers the world size, no stage runs. Later calls of the
    group use the variants that the report allows.

    Rank 0 runs `tpkernels qualify` in separate processes on the same GPUs. Each process needs about
    2 GiB of free GPU memory. Progress is printed to stderr. The remaining ranks wait.

    Args:
        group: the process group; None means the default group.
        budget: time limit for all stages, in seconds. Stages that do not fit are skipped, and their
            variants are not qualified.

    Returns:
        The variants that ``auto`` may select, and the reasons against the remaining variants.

    Raises:
        ValueError: ``budget`` is not positive.
        RuntimeError: a CUDA graph is being captured, or no stage could be run. Raised on all ranks.
        NotImplementedError: the ranks do not share memory, or torch sees no GPU.
    """
    if not budget > 0:
        raise ValueError(f"budget must be a positive number of seconds, not {budget}")
    tp_group = get_or_default(group).ready("cuda")
    if not torch.cuda.is_available() or not tp_group.shared_memory:
        reason = tp_group.unshared_reason or "torch sees no GPU"
        raise NotImplementedError(f"group '{tp_group.name}' cannot be qualified: {reason}")
    device = torch.device("cuda", torch.cuda.current_device())
    if streams.is_captured(device):
        raise RuntimeError(
            "tpkernels.qualify cannot run during CUDA graph capture; call it before the capture"
        )
    qualification = tp_group.qualification()
    if not qualification.variants:
        error = _run_command(tp_group.world, budget) if tp_group.rank == 0 else ""
        with tp_group.collective_step():
            error = tp_group.exchange("qualify", error, budget + 2 * _GRACE_S)[0]
            qualification = qualification if error else tp_group.read_qualification()
        if error:
            raise RuntimeError(f"`tpkernels qualify` failed on rank 0: {error}")
        tp_group.use_qualification(qualification)
    tp_group.warn()
    return qualification


def _run_command(world: int, budget: float) -> str:
    """Run `tpkernels qualify`. Return the reason why it failed, or "". Exit code 1 (a variant was
    disqualified) is not a failure."""
    command = [sys.executable, "-m", "tpkernels", "qualify"]
    command += ["--tp", str(world), "--budget", f"{budget:g}"]
    try:
        process = subprocess.run(
            command,
            check=False,
            stdout=sys.stderr,
            timeout=budget + _GRACE_S,
            env=_clean_environment(),
        )
    except (OSError, subprocess.SubprocessError) as error:
        return shorten(describe_error(error), 500)
    return "" if process.returncode in (0, 1) else f"exit code {process.returncode}"


def _clean_environment() -> dict[str, str]:
    """Return the environment without the variables that would turn the command into a rank of this
    job."""
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return {name: value for name, value in os.environ.items() if name not in launcher}
