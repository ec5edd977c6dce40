"""How the ranks of a group come to make one communicator: each says through the store whether and
how it can take part, and rank 0 the id. So all go on or all fail before NCCL waits for anybody."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tpkernels import _C
from tpkernels.errors import TpkernelsError
from tpkernels.nccl.library import facts, load
from tpkernels.symm.exchange import Participant, exchange
from tpkernels.text import of_error


@dataclass(frozen=True)
class Bootstrap:
    """What this rank brings to the communicator."""

    library: _C.NcclLibrary
    device: torch.device
    unique_id: bytes


def current_device() -> torch.device:
    """The CUDA device that is current, with its context made: NCCL takes that one."""
    if not torch.cuda.is_available():
        found = facts()
        library = found.get("unsupported") or f"NCCL {found['version']} is here ({found['path']})"
        raise NotImplementedError(
            f"a NCCL communicator needs a CUDA device, and torch {torch.__version__} sees none; "
            f"{library}"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    torch.empty(1, device=device)
    return device


def meet(participant: Participant, library: str | None, options: dict[str, Any]) -> Bootstrap:
    """Collective.

    Raises:
        ValueError: the ranks give different options.
        TpkernelsError: another rank cannot take part, or has another NCCL.
        CollectiveTimeoutError: one did not come.
    """
    mine: Bootstrap | None = None
    own_error: Exception | None = None
    try:
        device = current_device()
        loaded = load(library)
        mine = Bootstrap(loaded, device, loaded.unique_id() if participant.rank == 0 else b"")
    except Exception as error:  # all ranks must hear of it, whatever it is
        own_error = error
    say: dict[str, Any] = {"options": {**options, "timeout": participant.timeout}}
    if mine is None:
        assert own_error is not None  # one of the two
        say["error"] = of_error(own_error)
    else:
        say |= {"version": mine.library.version, "unique_id": mine.unique_id.hex()}
    said = exchange(participant, "NCCL communicator", say)
    if own_error is not None:
        raise own_error
    assert mine is not None
    _compare(participant, said)
    return Bootstrap(mine.library, mine.device, bytes.fromhex(said[0]["unique_id"]))


def _compare(participant: Participant, said: list[dict[str, Any]]) -> None:
    where = f"NCCL communicator of group '{participant.group}'"
    own = said[participant.rank]
    for rank, other in enumerate(said):
        if "error" in other:
            raise TpkernelsError(
                f"{where}: rank {rank} cannot take part: {other['error']}", peer=rank
            )
    for rank, other in enumerate(said):
        if other["options"] != own["options"]:
            raise ValueError(
                f"{where}: rank {participant.rank} gives {own['options']}, rank {rank} "
                f"{other['options']}; all ranks must give the same"
            )
        if other["version"] != own["version"]:
            raise TpkernelsError(
                f"{where}: rank {participant.rank} has NCCL {own['version']}, rank {rank} "
                f"{other['version']}; all ranks must have the same",
                peer=rank,
            )
