"""`tpkernels.init`: what a group is set up with."""

from __future__ import annotations

import torch

from tpkernels import qualification
from tpkernels.common import defaults
from tpkernels.groups import GroupLike, named_or_default
from tpkernels.planning.problem import NUMERICS


def init(
    group: GroupLike | None = None,
    timeout: float | None = None,
    workspace_bytes: int | None = None,
    autotune: bool | None = defaults.AUTOTUNE,
    numerics: str | None = None,
    qualify: bool = False,
) -> None:
    """Set a group up for the ops. Optional: the first op does it with the defaults. Collective.

    Args:
        group: the process group; None for the default one.
        timeout: seconds that one wait for a peer may take before ``CollectiveTimeoutError``, which
            breaks the group. Choose it longer than any pause in which one rank works alone while
            the others wait in an op, such as writing a checkpoint on rank 0. By default 30 s on
            CPUs, and on GPUs the timeout of the process group, which torch sets to 10 minutes for
            NCCL: a queued kernel must outwait what the ranks' hosts do meanwhile.
        workspace_bytes: what each of the two data buffers that a rank shares may grow to; default
            64 MiB. They start at 1 MiB and grow when a call can use more. Larger calls run in
            several steps; not on GPUs, where buffers grow to what a call needs. If a rank lacks the
            memory there, ``auto`` takes `unfused`, a named algorithm raises
            ``WorkspaceMemoryError`` on all ranks, and the group can go on.
        autotune: None: ``algorithm="auto"`` follows rules and the times of `tpkernels tune`. On
            GPUs it also times each problem when it is first met, over the algorithms that
            `tpkernels qualify` has found right there; it takes torch's calls if that has not run.
            True: it times each new problem on CPUs, too (`autotune`). False: it times nothing.
        numerics: how reductions of CUDA tensors sum. "ordered": in fp32, in rank order, rounded
            once; the sum of given partials is bitwise identical in every run and for every
            algorithm. "vendor": `unfused` leaves the sum to NCCL, which adds in the wire dtype in
            any order, and `multimem` to the switch; all other algorithms sum in order. None follows
            torch: "ordered" under ``torch.use_deterministic_algorithms(True)``, else "vendor". CPU
            tensors, and CUDA tensors on gloo, are always summed in order; they accept "vendor",
            so one program runs on both.
        qualify: on GPUs without a qualification report, run `qualify` now, for at most a minute.
            Has no effect if ranks see no GPU or share no memory. All ranks pass the same value.

    Raises:
        ValueError: an argument is out of range, differs between ranks, or the group is in use with
            others.
        MemoryError: the shared memory does not fit.
        RuntimeError: nothing could be qualified, or a CUDA graph is being captured.
    """
    if timeout is not None and not 0 < timeout <= defaults.LONGEST_TIMEOUT:
        raise ValueError(f"timeout must be in (0, 86400] seconds, not {timeout}")
    nbytes = defaults.WORKSPACE_BYTES if workspace_bytes is None else workspace_bytes
    if nbytes < 1 << 16:
        raise ValueError(f"workspace_bytes must be at least 65536, not {nbytes}")
    if nbytes > 1 << 56:  # sizes of whole arenas must fit 64 bits
        raise ValueError(f"workspace_bytes must be at most {1 << 56}, not {nbytes}")
    if numerics not in (None, *NUMERICS):
        raise ValueError(f"numerics is {numerics!r}; it can be 'vendor', 'ordered' or None")
    if autotune not in (None, True, False):
        raise ValueError(f"autotune is {autotune!r}; it can be True, False or None")
    found = named_or_default(group)
    found.init(None if timeout is None else float(timeout), int(nbytes), autotune, numerics)
    if qualify and found.world > 1 and found.shared_memory:
        gpus = found.exchange_in_turn("GPU check", torch.cuda.is_available(), "cpu")
        if all(gpus):
            qualification.qualify(group)
    found.warn()
