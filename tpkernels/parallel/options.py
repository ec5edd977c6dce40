"""Options that describe how a model is split over the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any, Literal

import torch

from tpkernels.local.packed import scale_group
from tpkernels.planning.problem import INVARIANT, ORDERED

SequenceParallel = bool | Literal["prefill"]
Pack = bool | Literal["int8"]
ModelNumerics = Literal["ordered", "invariant"]
# Features that are summed in order, before these sums are added by a tree.
_SUM_UNIT = 64


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of `tpkernels.parallelize`, with the same meanings and defaults, and `defer_weights`.
    Raise ValueError or NotImplementedError if options exclude each other."""

    plan: Mapping[str, Any] | None = None
    sequence_parallel: SequenceParallel | None = None
    ffn_only: bool = False
    expert_parallel: bool = False
    pack: Pack = False
    numerics: ModelNumerics = "ordered"
    defer_weights: bool = False  #: the caller loads and packs the weights later

    def __post_init__(self) -> None:
        if self.sequence_parallel not in (True, False, "prefill", None):
            raise ValueError(
                f"sequence_parallel is {self.sequence_parallel!r}; expected True, False, "
                '"prefill" or None'
            )
        if self.pack not in (True, False, "int8"):
            raise ValueError(f'pack is {self.pack!r}; expected True, False or "int8"')
        if self.uses_torch_styles and self.pack:
            raise NotImplementedError(
                f"pack={self.pack!r} packs the layers of tpkernels.nn, and a plan of torch "
                "styles does not create them; leave out pack or the plan"
            )
        if self.uses_torch_styles and self.expert_parallel:
            raise ValueError(
                "expert_parallel=True cannot be combined with a plan of torch styles; leave out one"
            )
        if self.uses_torch_styles and self.ffn_only:
            raise ValueError(
                "ffn_only=True cannot be combined with a plan of torch styles; leave out one"
            )
        if self.numerics not in (ORDERED, INVARIANT):
            raise ValueError(f'numerics is {self.numerics!r}; expected "ordered" or "invariant"')
        if self.is_invariant and (self.uses_torch_styles or self.ffn_only):
            option = "ffn_only=True" if self.ffn_only else "a plan of torch styles"
            raise NotImplementedError(
                'numerics="invariant" needs layers of tpkernels.nn for all projections, and '
                f"{option} does not create them; leave it out"
            )
        if self.is_invariant and self.sequence_parallel:
            raise NotImplementedError(
                'numerics="invariant" does not support sequence_parallel='
                f"{self.sequence_parallel!r}; leave it out"
            )
        if self.ffn_only and self.sequence_parallel:
            raise ValueError(
                "ffn_only=True needs all rows on every rank for attention; leave out "
                "sequence_parallel"
            )

    @property
    def uses_torch_styles(self) -> bool:
        """Return whether the plan consists of ``ParallelStyle`` objects instead of style names."""
        if self.plan is None:
            return False
        return not self.plan or not all(isinstance(style, str) for style in self.plan.values())

    @property
    def effective_sequence_parallel(self) -> SequenceParallel:
        """Return ``sequence_parallel`` with the default of None resolved."""
        if self.is_invariant:
            return False
        return not self.ffn_only if self.sequence_parallel is None else self.sequence_parallel

    @property
    def is_invariant(self) -> bool:
        """Return whether results must not depend on the number of ranks and the batch."""
        return self.numerics == INVARIANT

    @property
    def packs(self) -> bool:
        """Return whether the weights are packed. Invariant sums need packed weights."""
        return bool(self.pack) or self.is_invariant

    @property
    def packed_dtype(self) -> torch.dtype | None:
        """Return the ``dtype`` argument of `tpkernels.nn.pack_`."""
        return torch.int8 if self.pack == "int8" else None

    def feature_multiple(self, k: int) -> int:
        """Return the number by which the K of a shard must be divisible."""
        return scale_group(k, "") if self.pack == "int8" else 1

    def k_unit(self, k: int, head_dim: int = _SUM_UNIT) -> int | None:
        """Return ``k_unit`` of a row-parallel projection with ``k`` input features."""
        return lcm(self.feature_multiple(k), head_dim) if self.is_invariant else None
