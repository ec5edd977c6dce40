"""How a group's reductions of CUDA tensors sum: as ``tpkernels.init`` was told, or by torch's flag
for deterministic algorithms. The flag may change between calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tpkernels.planning.problem import ORDERED, VENDOR


class CudaNumerics:
    """One rank's view of it. ``given`` holds for all calls; without it the flag does."""

    def __init__(self, given: str | None = None) -> None:
        self._given = given
        self._agreed: str | None = None

    @property
    def agreed(self) -> str:
        """Return what all ranks wanted when they last agreed."""
        assert self._agreed is not None  # the caller has settled it
        return self._agreed

    @property
    def wanted(self) -> str:
        """Return what this rank wants of the next call."""
        if self._given is not None:
            return self._given
        return ORDERED if torch.are_deterministic_algorithms_enabled() else VENDOR

    @property
    def settled(self) -> bool:
        """Return whether all ranks are known to want the same as this one."""
        return self._agreed == self.wanted

    @property
    def follows(self) -> bool | None:
        """Return the value of torch's flag that planned calls hold for; None: for both."""
        if self._given is not None or self._agreed is None:
            return None
        return self._agreed == ORDERED

    @property
    def changed(self) -> bool:
        """Return whether calls have been planned that sum otherwise than this rank now wants."""
        return self._agreed is not None and not self.settled

    def settle(self, rank: int, everyone: Sequence[str]) -> None:
        """Compare what the ranks want. ``ValueError``, on all ranks, if they differ."""
        wanted = everyone[rank]
        for other, theirs in enumerate(everyone):
            if theirs != wanted:
                raise ValueError(
                    f"rank {rank} wants numerics '{wanted}', rank {other} '{theirs}': call "
                    "torch.use_deterministic_algorithms alike on all ranks, or give numerics to "
                    "tpkernels.init"
                )
        self._agreed = wanted
