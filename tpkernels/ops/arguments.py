"""Arguments of a call: one class per family of ops, with the argument names of the schemas.

The classes are named tuples because each call creates an instance, and frozen dataclasses are
slower to create. Arguments that an op does not accept keep their default.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

from tpkernels.local.weight import Weight
from tpkernels.planning.op_spec import OpSpec


class GatherArguments(NamedTuple):
    x: torch.Tensor
    group: str
    weights: Sequence[Weight] = ()
    scale_x: torch.Tensor | None = None
    scales_w: Sequence[torch.Tensor] = ()
    biases: Sequence[torch.Tensor] | None = None
    gather_dim: int = 0
    out_dtype: torch.dtype | None = None
    use_fast_accum: bool = False
    return_gathered: bool = False
    shard_sizes: Sequence[int] | None = None
    algorithm: str = "auto"


class ReduceArguments(NamedTuple):
    x: torch.Tensor
    group: str
    w: Weight | None = None
    scale_x: torch.Tensor | None = None
    scale_w: torch.Tensor | None = None
    norm_weight: torch.Tensor | None = None
    weight: torch.Tensor | None = None  #: RMSNorm weight of `all_reduce_rms_norm`
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    scatter_dim: int = 0
    eps: float = 0.0
    out_dtype: torch.dtype | None = None
    wire_dtype: torch.dtype | None = None
    use_fast_accum: bool = False
    shard_sizes: Sequence[int] | None = None
    k_sizes: Sequence[int] | None = None  #: K of each rank, of a sum by a tree
    k_unit: int = 64
    algorithm: str = "auto"

    @property
    def norm(self) -> torch.Tensor | None:
        """Return the RMSNorm weight, ``norm_weight`` or ``weight``."""
        return self.weight if self.norm_weight is None else self.norm_weight


class ExchangeArguments(NamedTuple):
    x: torch.Tensor
    group: str
    gather_dim: int = 0
    scatter_dim: int = 1
    gather_sizes: Sequence[int] | None = None
    scatter_sizes: Sequence[int] | None = None
    algorithm: str = "auto"


class RoutedArguments(NamedTuple):
    x: torch.Tensor
    routes: torch.Tensor
    num_experts: int
    group: str
    scale_x: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None  #: argument of `moe_combine`
    shard_sizes: Sequence[int] | None = None
    max_rows: int | None = None
    algorithm: str = "auto"


OpArguments: TypeAlias = GatherArguments | ReduceArguments | ExchangeArguments | RoutedArguments


def arguments_class(spec: OpSpec) -> type[OpArguments]:
    """Return the argument class of the op family."""
    if spec.gathers:
        return GatherArguments
    if spec.reduces:
        return ReduceArguments
    return ExchangeArguments if spec.exchanges else RoutedArguments
