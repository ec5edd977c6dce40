"""What the ranks find out together about a problem before algorithms are tried for it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import AllgatherOptions

from tpkernels import _C
from tpkernels.errors import CollectiveTimeoutError, PeerLostError
from tpkernels.groups.group import Group
from tpkernels.local.packed import columns_of
from tpkernels.local.product import Product, Weight
from tpkernels.planning.problem import Problem

FLOAT64: Any = {"dtype": torch.float64, "device": "cpu"}


def exchanged(group: Group, problem: Problem, what: str, mine: torch.Tensor) -> torch.Tensor:
    """Return a tensor of float64 of each rank, in rank order: [W, ...]. Collective: the caller has
    the turn."""
    text, workspace = f"{what} of {problem}", group.workspace
    if workspace is None:
        return _by_process_group(group, problem, text, mine)
    everyone = torch.empty((problem.world, *mine.shape), **FLOAT64)
    signature = zlib.crc32(text.encode()) or 1
    layout = _C.host.ShardLayout(1, mine.numel(), (1,) * problem.world)
    collective = _C.calls.Collective(
        workspace.channel, workspace.segments, signature, text, _C.calls.Kind.ALL_GATHER, layout
    )
    with workspace.waiting(group.timeout_on(problem.device)):
        collective.run(mine, everyone)
    return everyone


def _by_process_group(
    group: Group, problem: Problem, text: str, mine: torch.Tensor
) -> torch.Tensor:
    sent = mine.flatten().to(torch.device(problem.device))
    everyone = sent.new_empty(problem.world * sent.numel())
    seconds = group.timeout_on(problem.device)
    try:
        work = group.pg._allgather_base(everyone, sent, AllgatherOptions())
        work.wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        late = "timed out" in str(error).lower()
        raise (CollectiveTimeoutError if late else PeerLostError)(
            f"{text}: rank {group.rank} waited for torch.distributed, timeout {seconds:g} s: "
            f"{error}. The group is broken: make a new one."
        ) from error
    return everyone.cpu().view(problem.world, *mine.shape)


def other_extent(x: torch.Tensor, w: Weight | Sequence[Weight] | None) -> int:
    """Return the extent of the matmul that is not part of the problem, on this rank: N of
    column-parallel weights, which come in a list, K of a row-parallel one; 0 without a matmul."""
    if w is None:
        return 0
    if isinstance(w, (torch.Tensor, Product)):
        return int(x.shape[-1])
    return sum(map(columns_of, w))
