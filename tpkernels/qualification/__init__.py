"""Prove, on the machine that will use them, that the algorithms for CUDA tensors are right.

`tpkernels qualify` runs each variant of each algorithm in separate processes and writes a report of
those that passed (`tpkernels.planning.qualification`). On CUDA tensors ``algorithm="auto"`` selects
no others. `qualify` does this for an existing group.
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from tpkernels.common.text import of_error, short
from tpkernels.groups import GroupLike, named_or_default
from tpkernels.planning.qualification import Qualification
from tpkernels.qualification.schedule import AUTOMATIC_S
from tpkernels.symm import streams

_GRACE_S = 60.0  # to start Python, and to end the stage that is under way


def qualify(group: GroupLike | None = None, *, budget: float = AUTOMATIC_S) -> Qualification:
    """Qualify this machine for a group's calls on CUDA tensors, unless its report already covers
    this world size, and plan all later calls by the report. Collective.

    Rank 0 runs `tpkernels qualify` in processes of its own, on the same GPUs, which need some 2 GiB
    of free memory each; its progress goes to stderr. The other ranks wait.

    Args:
        group: the process group; None for the default one.
        budget: seconds for the stages; those that do not fit are not run, and what they check is
            not qualified.

    Returns:
        What ``auto`` may take now, and why not the rest.

    Raises:
        ValueError: ``budget`` is not positive.
        RuntimeError: a CUDA graph is being captured, or no stage could be run; on all ranks.
        NotImplementedError: the ranks share no memory, or see no GPU.
    """
    if not budget > 0:
        raise ValueError(f"budget must be a positive number of seconds, not {budget}")
    found = named_or_default(group).ready("cuda")
    if not torch.cuda.is_available() or not found.shared_memory:
        why = found.why_not_shared or "torch sees no GPU"
        raise NotImplementedError(f"group '{found.name}' cannot be qualified: {why}")
    device = torch.device("cuda", torch.cuda.current_device())
    if streams.is_captured(device):
        raise RuntimeError(
            "tpkernels.qualify cannot run during CUDA graph capture; call it before the capture"
        )
    known = found.qualification()
    if not known.variants:
        why = _run_command(found.world, budget) if found.rank == 0 else ""
        with found.together():
            why = found.exchange("qualify", why, budget + 2 * _GRACE_S)[0]
            known = known if why else found.qualification_of_rank_0()
        if why:
            raise RuntimeError(f"`tpkernels qualify` failed on rank 0: {why}")
        found.use_qualification(known)
    found.warn()
    return known


def _run_command(world: int, budget: float) -> str:
    """Run the command; return why it failed, or "". Exit code 1: some variant was disqualified."""
    command = [sys.executable, "-m", "tpkernels", "qualify"]
    command += ["--tp", str(world), "--budget", f"{budget:g}"]
    try:
        ended = subprocess.run(
            command,
            check=False,
            stdout=sys.stderr,
            timeout=budget + _GRACE_S,
            env=_without_launcher(),
        )
    except (OSError, subprocess.SubprocessError) as error:
        return short(of_error(error), 500)
    return "" if ended.returncode in (0, 1) else f"exit code {ended.returncode}"


def _without_launcher() -> dict[str, str]:
    """Return the environment without what would make the command a rank of this job."""
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return {name: text for name, text in os.environ.items() if name not in launcher}
