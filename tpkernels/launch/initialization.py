"""`tpkernels.init`: explicit setup of a group."""

from __future__ import annotations

import torch

from tpkernels import qualification
from tpkernels.common import defaults
from tpkernels.groups import GroupLike, get_or_default
from tpkernels.planning.problem import NUMERICS


def init(
    group: GroupLike | None = None,
    timeout: float | None = None,
    workspace_bytes: int | None = None,
    autotune: bool | None = defaults.AUTOTUNE,
    numerics: str | None = None,
    qualify: bool = False,
) -> None:
    """Set up a group for the ops. Optional: the first op sets it up with the defaults. Collective.

    Args:
        group: the process group; None for the default process group.
        timeout: limit in seconds for one wait for a peer. After it, the op raises
            ``CollectiveTimeoutError`` and the group is broken. Choose a limit longer than any pause
            during which peers wait in an op, such as rank 0 writing a checkpoint. The default is
            30 s on CPUs. On GPUs it is the timeout of the process group, 10 minutes for NCCL,
            because a queued kernel also waits for the hosts of its peers.
        workspace_bytes: limit for each of the two shared data buffers of a rank; default 64 MiB.
            The buffers start at 1 MiB and grow on demand. On CPUs, larger calls run in several
            steps. On GPUs, the buffers grow to the size of the call. If a rank does not have that
            memory, ``auto`` falls back to `unfused`, and a named algorithm raises
            ``WorkspaceMemoryError`` on all ranks. The group remains usable.
        autotune: whether ``algorithm="auto"`` times new problems.
            None: on CPUs it uses rules and the times of `tpkernels tune`. On GPUs it also times
            each problem at its first call, over the algorithms that `tpkernels qualify` qualified.
            Without a report it uses the torch calls.
            True: it also times each new problem on CPUs (`autotune`).
            False: it never times problems.
        numerics: summation in reductions, on GPUs unless stated otherwise.
            "ordered": in fp32, in rank order, rounded once. The sum of given partials is bitwise
            identical across runs and algorithms.
            "vendor": `unfused` uses NCCL, which adds in the wire dtype in any order, and `multimem`
            uses the NVLink switch. All other algorithms sum in order.
            "invariant": on CPUs, `matmul_all_reduce` and `matmul_all_reduce_rms_norm` add K by a
            fixed tree, so results do not depend on the number of ranks. They need packed weights.
            All other ops with a matmul and a reduction, and CUDA tensors, raise
            NotImplementedError.
            None: "ordered" under ``torch.use_deterministic_algorithms(True)``, else "vendor".
            Without "invariant", CPU tensors and CUDA tensors on gloo are summed in order. "vendor"
            is accepted there, so the same program runs on both.
        qualify: on GPUs without a qualification report, run `qualify` now, for at most a minute.
            No effect if the ranks see no GPU or do not share memory. Pass the same value on all
            ranks.

    Raises:
        ValueError: an argument is out of range, differs between ranks, or differs from the settings
            of a group in use.
        MemoryError: the shared memory is not available.
        RuntimeError: no algorithm could be qualified, or a CUDA graph is being captured.
    """
    if timeout is not None and not 0 < timeout <= defaults.MAX_TIMEOUT:
        raise ValueError(f"timeout must be in (0, 86400] seconds, not {timeout}")
    nbytes = defaults.WORKSPACE_BYTES if workspace_bytes is None else workspace_bytes
    if nbytes < 1 << 16:
        raise ValueError(f"workspace_bytes must be at least 65536, not {nbytes}")
    if nbytes > 1 << 56:  # the size of an arena must fit in 64 bits
        raise ValueError(f"workspace_bytes must be at most {1 << 56}, not {nbytes}")
    if numerics not in (None, *NUMERICS):
        raise ValueError(
            f"numerics is {numerics!r}; it can be {', '.join(map(repr, NUMERICS))} or None"
        )
    if autotune not in (None, True, False):
        raise ValueError(f"autotune is {autotune!r}; it can be True, False or None")
    target = get_or_default(group)
    target.init(None if timeout is None else float(timeout), int(nbytes), autotune, numerics)
    if qualify and target.world > 1 and target.shared_memory:
        gpus = target.lock_and_exchange("GPU check", torch.cuda.is_available(), "cpu")
        if all(gpus):
            qualification.qualify(group)
    target.warn()
