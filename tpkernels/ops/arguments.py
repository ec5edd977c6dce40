"""What a call of an op is given: one class per family of ops, with the names of their schemas.

A call makes one of them, which takes a named tuple a fifth of the time of a frozen dataclass. What
an op does not take has its default.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

from tpkernels.local.product import Weight
from tpkernels.planning.op_spec import Combine, Dispatch, Exchange, Gather, OpSpec, Reduce


class GatherArguments(NamedTuple):
    """Of `all_gather_matmul`, and of `all_gather`, whose ``weights`` are None."""

    x: torch.Tensor
    group: str
    weights: Sequence[Weight] | None = None
    biases: Sequence[torch.Tensor] | None = None
    gather_dim: int = 0
    out_dtype: torch.dtype | None = None
    return_gathered: bool = False
    shard_sizes: Sequence[int] | None = None
    algorithm: str = "auto"


class ScaledGatherArguments(NamedTuple):
    """Of `all_gather_scaled_matmul`."""

    x: torch.Tensor
    group: str
    weights: Sequence[torch.Tensor]
    scale_x: torch.Tensor
    scales_w: Sequence[torch.Tensor]
    biases: Sequence[torch.Tensor] | None = None
    gather_dim: int = 0
    out_dtype: torch.dtype | None = None
    use_fast_accum: bool = False
    return_gathered: bool = False
    shard_sizes: Sequence[int] | None = None
    algorithm: str = "auto"


class ReduceArguments(NamedTuple):
    """Of the reductions of ``x``, or of ``x @ w``."""

    x: torch.Tensor
    group: str
    w: Weight | None = None
    norm_weight: torch.Tensor | None = None
    weight: torch.Tensor | None = None  #: the norm's, of `all_reduce_rms_norm`
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    scatter_dim: int = 0
    eps: float = 0.0
    out_dtype: torch.dtype | None = None
    wire_dtype: torch.dtype | None = None
    shard_sizes: Sequence[int] | None = None
    algorithm: str = "auto"

    @property
    def norm(self) -> torch.Tensor | None:
        """Return the weight of the normalisation, under either name."""
        return self.weight if self.norm_weight is None else self.norm_weight


class ScaledReduceArguments(NamedTuple):
    """Of `scaled_matmul_reduce_scatter` and `scaled_matmul_all_reduce`."""

    x: torch.Tensor
    group: str
    w: torch.Tensor
    scale_x: torch.Tensor
    scale_w: torch.Tensor
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    scatter_dim: int = 0
    out_dtype: torch.dtype | None = None
    wire_dtype: torch.dtype | None = None
    use_fast_accum: bool = False
    shard_sizes: Sequence[int] | None = None
    algorithm: str = "auto"


class ExchangeArguments(NamedTuple):
    """Of `all_to_all`."""

    x: torch.Tensor
    group: str
    gather_dim: int = 0
    scatter_dim: int = 1
    gather_sizes: Sequence[int] | None = None
    scatter_sizes: Sequence[int] | None = None
    algorithm: str = "auto"


class DispatchArguments(NamedTuple):
    """Of `moe_dispatch`."""

    x: torch.Tensor
    routes: torch.Tensor
    num_experts: int
    group: str
    scale_x: torch.Tensor | None = None
    shard_sizes: Sequence[int] | None = None
    max_rows: int | None = None
    algorithm: str = "auto"


class CombineArguments(NamedTuple):
    """Of `moe_combine`."""

    x: torch.Tensor
    topk_weights: torch.Tensor
    routes: torch.Tensor
    num_experts: int
    group: str
    shard_sizes: Sequence[int] | None = None
    max_rows: int | None = None
    algorithm: str = "auto"


AnyGather: TypeAlias = GatherArguments | ScaledGatherArguments
AnyReduce: TypeAlias = ReduceArguments | ScaledReduceArguments
RoutedArguments: TypeAlias = DispatchArguments | CombineArguments
OpArguments: TypeAlias = AnyGather | AnyReduce | ExchangeArguments | RoutedArguments


_CLASSES: dict[type[OpSpec], type[OpArguments]] = {
    Gather: GatherArguments,
    Reduce: ReduceArguments,
    Exchange: ExchangeArguments,
    Dispatch: DispatchArguments,
    Combine: CombineArguments,
}


def arguments_class(spec: OpSpec) -> type[OpArguments]:
    """Return the class of an op's family."""
    if spec.scaled:
        return ScaledGatherArguments if spec.gathers else ScaledReduceArguments
    return _CLASSES[type(spec)]
