"""How the ranks of a group agree on a communicator before NCCL is initialised.

Through the store, each rank reports whether it can take part, and with which NCCL and options; rank
0 adds the unique id. So either all ranks go on or all fail, before NCCL waits for any of them.
"""

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
    """What a rank needs to join the communicator."""

    library: _C.nccl.Library
    device: torch.device
    unique_id: bytes  #: rank 0's; empty on the other ranks until they have received it


def current_device() -> torch.device:
    """The current CUDA device, with its context created, as NCCL needs it.

    Raises:
        NotImplementedError: there is none.
    """
    if not torch.cuda.is_available():
        nccl = facts()
        library = nccl.get("unsupported") or f"NCCL {nccl['version']} is here ({nccl['path']})"
        raise NotImplementedError(
            f"a NCCL communicator needs a CUDA device, and torch {torch.__version__} sees none; "
            f"{library}"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    torch.empty(1, device=device)
    return device


def bootstrap(participant: Participant, library: str | None, options: dict[str, Any]) -> Bootstrap:
    """Agrees with the other ranks. Collective.

    Args:
        participant: this rank.
        library: path of the NCCL to use; None: the one that `library.load` finds.
        options: what all ranks must pass alike.

    Raises:
        ValueError: the ranks pass different options.
        TpkernelsError: another rank cannot take part, or has another NCCL.
        CollectiveTimeoutError: a rank did not come in time.
    """
    own: Bootstrap | None = None
    own_error: Exception | None = None
    try:
        device = current_device()
        loaded = load(library)
        own = Bootstrap(loaded, device, loaded.unique_id() if participant.rank == 0 else b"")
    except Exception as error:  # of any kind: the other ranks must learn of it
        own_error = error
    report: dict[str, Any] = {"options": {**options, "timeout": participant.timeout}}
    if own is None:
        assert own_error is not None  # one of the two
        report["error"] = of_error(own_error)
    else:
        report |= {"version": own.library.version, "unique_id": own.unique_id.hex()}
    reports = exchange(participant, "NCCL communicator", report)
    if own_error is not None:
        raise own_error
    assert own is not None  # there was no error
    _compare(participant, reports)
    return Bootstrap(own.library, own.device, bytes.fromhex(reports[0]["unique_id"]))


def _compare(participant: Participant, reports: list[dict[str, Any]]) -> None:
    """Raises unless all ranks can take part, with the same options and NCCL."""
    where = f"NCCL communicator of group '{participant.group}'"
    own = reports[participant.rank]
    for rank, report in enumerate(reports):
        if "error" in report:
            raise TpkernelsError(
                f"{where}: rank {rank} cannot take part: {report['error']}", peer=rank
            )
    for rank, report in enumerate(reports):
        if report["options"] != own["options"]:
            raise ValueError(
                f"{where}: rank {participant.rank} passes {own['options']}, rank {rank} "
                f"{report['options']}; all ranks must pass the same"
            )
        if report["version"] != own["version"]:
            raise TpkernelsError(
                f"{where}: rank {participant.rank} has NCCL {own['version']}, rank {rank} "
                f"{report['version']}; all ranks must have the same",
                peer=rank,
            )
