"""Linear layers that are sharded over the ranks.

Column-parallel layers shard the output features, row-parallel layers the input features. Several
column-parallel layers with the same input run as one operation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, ClassVar, Self, Unpack, cast

import torch
import torch.nn.functional as F
from torch import nn

from tpkernels import groups
from tpkernels.common.shards import shard_sizes as balanced_sizes
from tpkernels.groups import GroupLike
from tpkernels.nn import packing
from tpkernels.nn.packing import PackableModule
from tpkernels.nn.regions import gather_from_ranks
from tpkernels.nn.sharding import (
    LayerOptions,
    SequenceOptions,
    Sharding,
    check_parameter,
    check_plain,
    rank_and_world,
)
from tpkernels.ops.all_gather_matmul import OP as ALL_GATHER_MATMUL
from tpkernels.ops.column_matmul import column_matmul
from tpkernels.ops.matmul_all_reduce import OP as MATMUL_ALL_REDUCE
from tpkernels.ops.matmul_reduce_scatter import OP as MATMUL_REDUCE_SCATTER
from tpkernels.ops.registration import bias_list

QKV = ("q_proj", "k_proj", "v_proj")


class ParallelLinear(PackableModule):
    """``x @ weight^T + bias`` with one dim of ``weight`` [out_features, in_features] sharded."""

    packable = ("weight",)
    _split_dim: ClassVar[int]  # 0: output features and bias; 1: input features
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: GroupLike,
        sizes: Sequence[int] | Sharding | None,
        *,
        bias: bool = True,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(group, **options)
        self.in_features, self.out_features = in_features, out_features
        dim_name = ("out_features", "in_features")[self._split_dim]
        sharding = Sharding.of(
            self._split_dim, getattr(self, dim_name), self.group, dim_name, sizes
        )
        self.empty = sharding.size == 0  #: this rank holds no features
        self.add_parameter("weight", (out_features, in_features), sharding)
        if bias:
            self.add_parameter("bias", (out_features,), sharding if self._split_dim == 0 else None)
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    @classmethod
    def from_linear(cls, linear: nn.Linear, group: GroupLike, **options: Any) -> Self:
        """Create a layer with copies of the local shards of an ``nn.Linear``.

        Args:
            linear: the unsharded layer. It determines features, bias, device and dtype.
            group: see `tpkernels.nn`.
            options: the remaining arguments of the constructor.

        Raises:
            TypeError: ``linear`` is not a plain ``nn.Linear``.
            NotImplementedError: the weight is quantised or distributed.
        """
        return cls.like(check_linear(linear, "linear"), group, **options).adopt(linear)

    @classmethod
    def like(cls, linear: nn.Linear, group: GroupLike, **options: Any) -> Self:
        """Create the layer of `from_linear` on the meta device."""
        return cls(
            linear.in_features,
            linear.out_features,
            group,
            bias=linear.bias is not None,
            device="meta",
            dtype=linear.weight.dtype,
            **options,
        )

    def reset_parameters(self) -> None:
        """Initialize weight and bias like ``nn.Linear``, with the unsharded fan-in."""

        def draw(full: torch.Tensor) -> None:
            bound = self.in_features**-0.5
            nn.init.uniform_(full, -bound, bound)

        with self._unpacked():
            for name, _ in self.named_parameters():
                self.fill(name, draw)

    def unsharded_k(self, name: str) -> int:
        return self.in_features

    def _weight_operand(self, x: torch.Tensor) -> torch.Tensor:
        """Return the weight [K, N]. Raise NotImplementedError if a packed one needs a gradient."""
        if not self._packed:
            return self.weight.t()
        if torch.is_grad_enabled():
            self._refuse_gradient(x)
        return self._packed["weight"]

    def extra_repr(self) -> str:
        features: list[Any] = [self.out_features, self.in_features]
        features[self._split_dim] = list(self.shardings["weight"].sizes)
        return (
            f"in_features={features[1]}, out_features={features[0]}, bias={self.bias is not None}, "
            f"sequence_parallel={self.sequence_parallel}, rank={self.rank}"
        )


class ColumnParallelLinear(ParallelLinear):
    """Linear layer with sharded output features.

    Without sharding, equals ``nn.Linear(in_features, out_features)``::

        y = x @ weight.t() + bias

    Each rank returns the local columns of ``y``, or all columns with ``gather_output``.

    Args:
        in_features, out_features: features of the unsharded layer.
        group, options: see `tpkernels.nn`.
        bias: whether the layer has a bias. It is sharded like the output features.
        gather_output: return all output features on every rank. All ranks must use them
            identically.
        out_sizes: output features of each rank; by default balanced (`tpkernels.shard_sizes`).
        stand_in: number of zero features that a rank without features returns.
        sequence_parallel: the input holds the local rows of the sequence, and the output all rows.
            By default all ranks pass the same input, and the backward sums its gradient over the
            ranks.

    Raises:
        ValueError: ``out_sizes`` does not match the group or ``out_features``.

    ``weight`` is [local out_features, in_features].
    """

    _split_dim: ClassVar[int] = 0

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: GroupLike,
        *,
        bias: bool = True,
        gather_output: bool = False,
        out_sizes: Sequence[int] | Sharding | None = None,
        stand_in: int = 0,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(in_features, out_features, group, out_sizes, bias=bias, **options)
        self.gather_output, self.stand_in = gather_output, stand_in
        self.out_sizes = self.shardings["weight"].sizes  #: output features of each rank

    def forward(self, x: torch.Tensor, *, shard_sizes: Sequence[int] | None = None) -> torch.Tensor:
        """Apply the layer.

        Args:
            x: [..., in_features].
            shard_sizes: number of rows of each rank, with ``sequence_parallel``.

        Returns:
            [..., local out_features], or [..., out_features] with ``gather_output``.
        """
        return column_parallel(x, [self], shard_sizes=shard_sizes)[0]

    def _zero_weight(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a zero weight [K, N] and bias for a rank without features.

        The ops need at least one column on every rank. The padding, unlike new zeros, leaves weight
        and bias in the autograd graph, so the backward makes the same calls on all ranks.
        """
        num_features = max(self.stand_in, 1)
        bias = None if self.bias is None else F.pad(self.bias, (0, num_features))
        return F.pad(self.weight, (0, 0, 0, num_features)).t(), bias

    def _postprocess(self, y: torch.Tensor) -> torch.Tensor:
        """Return the output of the layer from the matmul result."""
        if self.empty and (self.gather_output or not self.stand_in):
            y = y[..., :0]
        if self.gather_output:
            y = gather_from_ranks(y, self.group, y.dim() - 1, self.out_sizes)
        return y

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, gather_output={self.gather_output}"


def column_parallel(
    x: torch.Tensor,
    layers: Sequence[ColumnParallelLinear],
    *,
    shard_sizes: Sequence[int] | None = None,
    sequence_parallel: bool | None = None,
) -> list[torch.Tensor]:
    """Apply several column-parallel layers to the same input as one operation.

    Equals ``[layer(x) for layer in layers]``, but the layers share one all-gather with sequence
    parallelism, and one all-reduce of the input gradient without it.

    Args:
        x: [..., in_features].
        layers: layers with the same group and sequence options.
        shard_sizes: number of rows of each rank, with sequence parallelism.
        sequence_parallel: overrides the option of the layers.

    Returns:
        The output of each layer, in order.

    Raises:
        ValueError: the layers differ in group or sequence parallelism.
    """
    # A function call costs about 1 % of the time of a small layer. So the ops are called directly,
    # and `_zero_weight` and `_postprocess` only if they have an effect.
    first = layers[0]
    is_sequence_parallel = (
        first.sequence_parallel if sequence_parallel is None else sequence_parallel
    )
    weights, biases, has_bias, outputs_are_final = [], [], False, True
    for layer in layers:
        if (
            layer.group != first.group
            or layer.sequence_parallel != first.sequence_parallel
            or layer.sequence_dim != first.sequence_dim
        ):
            raise ValueError(
                "layers that share an input must have the same group, sequence_parallel and "
                f"sequence_dim; got {first!r} and {layer!r}"
            )
        w, bias = layer._zero_weight() if layer.empty else (layer._weight_operand(x), layer.bias)
        weights.append(w)
        biases.append(bias)
        has_bias = has_bias or bias is not None
        outputs_are_final = outputs_are_final and not (layer.empty or layer.gather_output)
    bias_per_layer = biases if has_bias else None
    outputs: list[torch.Tensor]
    if is_sequence_parallel:
        _, outputs = ALL_GATHER_MATMUL.entry()(
            x,
            weights,
            first.group,
            _nonnegative_dim(first.sequence_dim, x),
            bias_list(x, bias_per_layer),
            shard_sizes=shard_sizes,
        )
    else:
        outputs = column_matmul(x, weights, first.group, bias_per_layer)
    if outputs_are_final:
        return outputs
    return [layer._postprocess(y) for layer, y in zip(layers, outputs, strict=True)]


def _nonnegative_dim(dim: int, x: torch.Tensor) -> int:
    """Return a dim of x as a nonnegative index."""
    return dim + x.dim() if dim < 0 else dim


class RowParallelLinear(ParallelLinear):
    """Linear layer with sharded input features.

    Without sharding, equals ``nn.Linear(in_features, out_features)``. Each rank computes a partial
    sum over the local input features, and the ranks reduce them::

        y = sum(x_r @ weight_r.t() for r in ranks) + bias

    Args:
        in_features, out_features: features of the unsharded layer.
        group, options: see `tpkernels.nn`.
        bias: whether the layer has a bias. Every rank holds the full bias and its full gradient. It
            is added once, after the reduction. Unless all ranks have the same random state, their
            initial biases differ.
        in_sizes: input features of each rank; by default balanced (`tpkernels.shard_sizes`).
        k_unit: sum the input features by a tree over units of this many features. The result then
            does not depend on the number of ranks (`tpkernels.matmul_all_reduce`). ``in_sizes``
            must be multiples of it, except the last, and the weight must be packed.
        sequence_parallel: the output holds the local rows of the sequence. By default all ranks
            return all rows.

    Raises:
        ValueError: ``in_sizes`` does not match the group or ``in_features``.

    ``weight`` is [out_features, local in_features].
    """

    _split_dim: ClassVar[int] = 1

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: GroupLike,
        *,
        bias: bool = True,
        in_sizes: Sequence[int] | None = None,
        k_unit: int | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(in_features, out_features, group, in_sizes, bias=bias, **options)
        self.in_sizes = self.shardings["weight"].sizes  #: input features of each rank
        #: Options of the ops for a sum by a tree.
        self.sum_options: dict[str, Any] = (
            {} if k_unit is None else {"k_sizes": list(self.in_sizes), "k_unit": k_unit}
        )

    def forward(
        self,
        x: torch.Tensor,
        *,
        residual: torch.Tensor | None = None,
        shard_sizes: Sequence[int] | None = None,
        sequence_parallel: bool | None = None,
    ) -> torch.Tensor:
        """Apply the layer.

        Args:
            x: [..., local in_features].
            residual: added after the bias. It has the shape of the output, which gets its dtype.
            shard_sizes: number of output rows of each rank, with sequence parallelism.
            sequence_parallel: overrides the option of the layer.

        Returns:
            [..., out_features], all rows or, with sequence parallelism, the local rows.
        """
        is_sequence_parallel = (
            self.sequence_parallel if sequence_parallel is None else sequence_parallel
        )
        x, w = self._matmul_operands(x)
        dim = _nonnegative_dim(self.sequence_dim, x) if is_sequence_parallel else None
        return row_parallel(
            x, w, self.group, dim, self.bias, residual, shard_sizes, **self.sum_options
        )

    def _matmul_operands(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x and the weight [K, N] as operands of the ops."""
        w = self._weight_operand(x)
        if self.empty:  # The ops need K >= 1. Pad w with zeros to the features of x, at least 1.
            x = x if x.shape[-1] else F.pad(x, (0, 1))
            w = F.pad(self.weight, (0, x.shape[-1])).t()
        return x, w


def row_parallel(
    x: torch.Tensor,
    w: torch.Tensor,
    group: str,
    scatter_dim: int | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    shard_sizes: Sequence[int] | None = None,
    **sum_options: Any,
) -> torch.Tensor:
    """Return ``sum_r(x_r @ w_r) + bias + residual``, or the local shard along ``scatter_dim``.

    The result has the dtype of ``residual``, if passed: under autocast an fp32 residual stream
    stays fp32. ``w`` [K, N] may be packed. ``sum_options`` are ``k_sizes`` and ``k_unit`` of
    `tpkernels.matmul_all_reduce`.
    """
    if sum_options and scatter_dim is not None:
        raise NotImplementedError(
            "a sum by a tree (k_unit) does not support sequence parallelism; pass "
            "sequence_parallel=False"
        )
    # The ops are called directly to save function calls, see `column_parallel`.
    out_dtype = None if residual is None else residual.dtype
    y: torch.Tensor
    if scatter_dim is None:
        y = MATMUL_ALL_REDUCE.entry()(
            x, w, group, bias, residual, out_dtype=out_dtype, **sum_options
        )
    else:
        y = MATMUL_REDUCE_SCATTER.entry()(
            x, w, group, scatter_dim, bias, residual, out_dtype=out_dtype, shard_sizes=shard_sizes
        )
    return y


class _SharedInputLinears(nn.Module):
    """Named column-parallel layers with the same input and individual options."""

    def __init__(
        self, in_features: int, layers: Mapping[str, Mapping[str, Any]], **options: Any
    ) -> None:
        super().__init__()
        for name, layer_options in layers.items():
            self.add_module(name, ColumnParallelLinear(in_features, **layer_options, **options))

    @property
    def layers(self) -> list[ColumnParallelLinear]:
        """Return the layers, in order."""
        return cast("list[ColumnParallelLinear]", list(self.children()))

    def pack_(self, *, drop: bool = False, dtype: torch.dtype | None = None) -> Self:
        """Pack the weight of each layer; see `ColumnParallelLinear.pack_`."""
        return packing.pack_(self, drop=drop, dtype=dtype)

    @classmethod
    def _from(cls, linears: Mapping[str, nn.Linear], *args: Any, **options: Any) -> Self:
        """Create the layers with copies of the local shards of ``linears``.

        A layer has a bias if its linear has a bias.
        """
        first = next(iter(linears.values()))
        dtype = first.weight.dtype
        merged = cls(first.in_features, *args, bias=True, device="meta", dtype=dtype, **options)
        for (name, linear), layer in zip(linears.items(), merged.layers, strict=True):
            if cast("torch.Tensor | None", linear.bias) is None:
                layer.bias = None
                layer.shardings.pop("bias", None)
            try:
                layer.adopt(linear)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        return merged


class MergedColumnParallelLinear(_SharedInputLinears):
    """Several `ColumnParallelLinear` with the same input, such as gate and up, as one operation.

    Without sharding, equals ``[nn.Linear(in_features, n)(x) for n in out_features.values()]``.

    Args:
        in_features: input features of the unsharded layers.
        out_features: output features of each unsharded layer, by name. The layers are submodules
            with these names.
        group, options: see `tpkernels.nn`.
        bias: whether the layers have biases.
    """

    def __init__(
        self,
        in_features: int,
        out_features: Mapping[str, int],
        group: GroupLike,
        *,
        bias: bool = True,
        **options: Unpack[LayerOptions],
    ) -> None:
        layers = {name: {"out_features": features} for name, features in out_features.items()}
        super().__init__(in_features, layers, group=group, bias=bias, **options)

    @classmethod
    def from_linear(
        cls, linears: Mapping[str, nn.Linear], group: GroupLike, **options: Unpack[SequenceOptions]
    ) -> Self:
        """Create the layers with copies of the local shards of several ``nn.Linear``.

        A layer has a bias if its linear has a bias.

        Raises:
            TypeError: a module is not a plain ``nn.Linear``.
            NotImplementedError: a weight is quantised or distributed.
            ValueError: the input features differ.
        """
        widths = {name: check_linear(ln, name).out_features for name, ln in linears.items()}
        return cls._from(linears, widths, group, **options)

    def forward(
        self, x: torch.Tensor, *, shard_sizes: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        """Apply the layers.

        Args:
            x: [..., in_features].
            shard_sizes: number of rows of each rank, with ``sequence_parallel``.

        Returns:
            [..., local out_features] for each layer, in order.
        """
        return column_parallel(x, self.layers, shard_sizes=shard_sizes)


@dataclass(frozen=True)
class Heads:
    """Heads of grouped-query attention, sharded over ``world`` ranks.

    Each rank gets complete key-value groups. If there are more ranks than groups, and enough query
    heads, several ranks share a group: each holds its key-value head and a slice of its query
    heads.
    """

    heads: int
    kv_heads: int
    head_dim: int
    world: int
    feature_multiple: int = 1  #: shards start and end at multiples of this many features

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads < 1 or self.heads % self.kv_heads or self.head_dim < 1:
            raise ValueError(
                f"heads={self.heads} must be divisible by kv_heads={self.kv_heads}, and both and "
                f"head_dim={self.head_dim} must be at least 1"
            )

    @property
    def ranks_per_shared_group(self) -> list[int]:
        """Return the number of ranks that share each group, or an empty list if ranks do not share.

        Ranks do not share if there is a group for each rank, or if the query heads of a group
        cannot be divided so that each of its ranks gets some. The backward reduces the gradients of
        shared heads in the order of the autograd graph, and that order would differ on a rank
        without query heads.
        """
        if self.world <= self.kv_heads:
            return []
        ranks_per_group = balanced_sizes(self.world, self.kv_heads)
        multiples, remainder = divmod(self.heads // self.kv_heads, self._query_multiple)
        return ranks_per_group if max(ranks_per_group) <= multiples and not remainder else []

    @property
    def _query_multiple(self) -> int:
        """Return the number of query heads that must stay on the same rank."""
        return self.feature_multiple // gcd(self.feature_multiple, self.head_dim)

    @property
    def _groups_per_rank(self) -> list[int]:
        """Return the number of key-value groups of each rank, if ranks do not share groups."""
        multiple = self._query_multiple // gcd(self._query_multiple, self.heads // self.kv_heads)
        return balanced_sizes(self.kv_heads, self.world, multiple)

    @property
    def query_heads(self) -> list[int]:
        """Return the number of query heads of each rank."""
        per_group = self.heads // self.kv_heads
        if self.ranks_per_shared_group:
            split_args = (
                (per_group, ranks, self._query_multiple) for ranks in self.ranks_per_shared_group
            )
            return [n for args in split_args for n in balanced_sizes(*args)]
        return [count * per_group for count in self._groups_per_rank]

    @property
    def queries_per_group(self) -> list[int]:
        """Return the number of query heads per key-value head of each rank.

        Includes the stand-ins of ranks without heads.
        """
        per_group = self.heads // self.kv_heads
        return [max(1, n) if self.ranks_per_shared_group else per_group for n in self.query_heads]

    def plan_split(self, name: str, width: int | None = None) -> dict[str, Any]:
        """Return the options of `ColumnParallelLinear` that shard a projection by heads.

        A rank without heads returns zeros for one key-value head and its query heads.

        Args:
            name: a name in `QKV`, or any other name for a projection by query heads.
            width: features per head; by default ``head_dim``.
        """
        width, is_key_or_value = width or self.head_dim, name in ("k_proj", "v_proj")
        if not is_key_or_value:
            stand_in = (
                width if self.ranks_per_shared_group else width * (self.heads // self.kv_heads)
            )
            return {"out_sizes": [n * width for n in self.query_heads], "stand_in": stand_in}
        if not self.ranks_per_shared_group:
            sizes = [n * width for n in self._groups_per_rank]
            return {"out_sizes": sizes, "stand_in": width}
        group_of_rank = [
            group for group, ranks in enumerate(self.ranks_per_shared_group) for _ in range(ranks)
        ]
        sizes = [width if n else 0 for n in self.query_heads]
        pairs = zip(group_of_rank, sizes, strict=True)
        ranges = tuple(((group * width, size),) for group, size in pairs)
        return {"out_sizes": Sharding(0, ranges), "stand_in": width}


class QKVParallelLinear(_SharedInputLinears):
    """Query, key and value projections of grouped-query attention, as one operation.

    Without sharding, equals three ``nn.Linear`` with ``heads * head_dim``, ``kv_heads * head_dim``
    and ``kv_heads * head_dim`` output features.

    Each rank gets complete key-value groups: a key head, its value head, and the query heads that
    attend to them.

    - If the number of groups is not divisible by the number of ranks, they are distributed as
      evenly as possible.
    - If there are fewer groups than ranks, and enough query heads, ranks share a group. Each of
      these ranks holds the key and value head, and a slice of the query heads.
    - A rank without query heads returns zeros for one group, so that the attention needs no special
      case. The output projection has no weights for it.

    Args:
        hidden_size: input features.
        heads, kv_heads, head_dim: sizes of the unsharded attention.
        group, options: see `tpkernels.nn`.
        bias: whether the projections have biases.

    Raises:
        ValueError: ``heads`` is not divisible by ``kv_heads``, or a size is below 1.
    """

    q_proj: ColumnParallelLinear
    k_proj: ColumnParallelLinear
    v_proj: ColumnParallelLinear

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        group: GroupLike,
        *,
        bias: bool = False,
        **options: Unpack[LayerOptions],
    ) -> None:
        _, world = rank_and_world(groups.group_name(group))
        head_split = Heads(heads, kv_heads, head_dim, world)
        layers = {name: head_split.plan_split(name) for name in QKV}
        for name, layer in layers.items():
            layer["out_features"] = (heads if name == "q_proj" else kv_heads) * head_dim
        super().__init__(hidden_size, layers, group=group, bias=bias, **options)
        self.heads = head_split

    @classmethod
    def from_linear(
        cls,
        q: nn.Linear,
        k: nn.Linear,
        v: nn.Linear,
        head_dim: int,
        group: GroupLike,
        **options: Unpack[SequenceOptions],
    ) -> Self:
        """Create the projections with copies of the local shards of three ``nn.Linear``.

        A projection has a bias if its linear has a bias.

        Raises:
            TypeError: a module is not a plain ``nn.Linear``.
            NotImplementedError: a weight is quantised or distributed.
            ValueError: the input features differ, or the output features of a projection are not
                divisible by ``head_dim``.
        """
        linears = dict(zip(QKV, (q, k, v), strict=True))
        for name, linear in linears.items():
            check_linear(linear, name)
            if linear.out_features % head_dim:
                raise ValueError(
                    f"{name} has {linear.out_features} output features, which is not divisible by "
                    f"head_dim={head_dim}"
                )
        heads, kv_heads = q.out_features // head_dim, k.out_features // head_dim
        return cls._from(linears, heads, kv_heads, head_dim, group, **options)

    def forward(
        self, x: torch.Tensor, *, shard_sizes: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Apply the projections.

        Args:
            x: [..., hidden_size].
            shard_sizes: number of rows of each rank, with ``sequence_parallel``.

        Returns:
            Queries [..., local heads * head_dim], keys and values [..., local key-value heads *
            head_dim].
        """
        q, k, v = column_parallel(x, self.layers, shard_sizes=shard_sizes)
        return q, k, v


def check_linear(module: nn.Module, name: str) -> nn.Linear:
    """Return ``module`` if it is a plain ``nn.Linear`` that can be sharded.

    It must not be a parallel layer or an adapter, and must have no hooks or other customizations.
    Its weight must be neither quantised nor distributed.
    """
    if isinstance(module, nn.Linear):
        check_parameter(module.weight, f"{name}.weight")
        check_parameter(module.bias, f"{name}.bias")
    if type(module) not in (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear):
        type_name = f"{type(module).__module__}.{type(module).__qualname__}"
        hint = "; the model is already sharded" if type_name.startswith("tpkernels.") else ""
        raise TypeError(f"{name} is a {type_name}, not an nn.Linear{hint}")
    assert isinstance(module, nn.Linear)
    check_plain(module, name, ("weight", "bias"))
    return module
