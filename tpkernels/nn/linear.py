"""Linear layers that are split over the ranks, by output features (column-parallel) or by input
features (row-parallel), and several column-parallel layers of one input."""

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
    position,
)
from tpkernels.ops.all_gather_matmul import OP as ALL_GATHER_MATMUL
from tpkernels.ops.column_matmul import column_matmul
from tpkernels.ops.matmul_all_reduce import OP as MATMUL_ALL_REDUCE
from tpkernels.ops.matmul_reduce_scatter import OP as MATMUL_REDUCE_SCATTER
from tpkernels.ops.registration import bias_list

QKV = ("q_proj", "k_proj", "v_proj")


class ParallelLinear(PackableModule):
    """``x @ weight^T + bias``, the weight [out_features, in_features] split along one of its
    dims."""

    packable = ("weight",)
    _split_dim: ClassVar[int]  # 0: the output features, and the bias with them; 1: the input's
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
        what = ("out_features", "in_features")[self._split_dim]
        split = Sharding.of(self._split_dim, getattr(self, what), self.group, what, sizes)
        self.empty = split.size == 0  #: this rank has no features
        self.add_parameter("weight", (out_features, in_features), split)
        if bias:
            self.add_parameter("bias", (out_features,), split if self._split_dim == 0 else None)
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    @classmethod
    def from_linear(cls, linear: nn.Linear, group: GroupLike, **options: Any) -> Self:
        """Make a layer with copies of this rank's shards of ``linear``'s parameters. Features,
        bias, device and dtype are those of ``linear``; ``options`` are the constructor's others.
        Raise TypeError if ``linear`` is not a plain ``nn.Linear``, NotImplementedError if its
        weight is quantised or distributed."""
        return cls.like(check_linear(linear, "linear"), group, **options).adopt(linear)

    @classmethod
    def like(cls, linear: nn.Linear, group: GroupLike, **options: Any) -> Self:
        """Make the layer of `from_linear` on the meta device."""
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
        """Draw weight and bias as ``nn.Linear`` does, by the unsharded fan-in."""

        def draw(full: torch.Tensor) -> None:
            bound = self.in_features**-0.5
            nn.init.uniform_(full, -bound, bound)

        with self._unpacked():
            for name, _ in self.named_parameters():
                self.fill(name, draw)

    def unsharded_k(self, name: str) -> int:
        return self.in_features

    def _operand(self, x: torch.Tensor) -> torch.Tensor:
        """Return the weight [K, N] as the ops take it, or refuse a gradient of a packed one."""
        if not self._packed:
            return self.weight.t()
        if torch.is_grad_enabled():
            self._refuse_gradient(x)
        return self._packed["weight"]

    def extra_repr(self) -> str:
        features: list[Any] = [self.out_features, self.in_features]
        features[self._split_dim] = list(self.splits["weight"].sizes)
        return (
            f"in_features={features[1]}, out_features={features[0]}, bias={self.bias is not None}, "
            f"sequence_parallel={self.sequence_parallel}, rank={self.rank}"
        )


class ColumnParallelLinear(ParallelLinear):
    """``x @ weight^T + bias`` with the output features split over the ranks.

    Args:
        in_features, out_features: of the unsharded layer.
        group, options: see `tpkernels.nn`.
        bias: whether there is a bias; split as the output features are.
        gather_output: every rank gets all output features instead of its own. All ranks must then
            use them in the same way.
        out_sizes: output features of each rank; by default balanced (`tpkernels.shard_sizes`).
            ValueError if they do not fit.
        stand_in: number of zero features that a rank without any features returns.
        sequence_parallel: the input is this rank's rows of the sequence, and the output has all
            rows. By default all ranks pass the same input, and its gradient is summed over them.

    ``weight`` is [out_features of this rank, in_features].
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
        self.out_sizes = self.splits["weight"].sizes  #: output features of each rank

    def forward(self, x: torch.Tensor, *, shard_sizes: Sequence[int] | None = None) -> torch.Tensor:
        """Map x [..., in_features] to [..., out_features of this rank, or all]."""
        return column_parallel(x, [self], shard_sizes=shard_sizes)[0]

    def _zeros(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return zero weight [K, N] and bias for a rank without features. The ops need a column on
        every rank, and the padding keeps this rank's backward in step with the others'."""
        width = max(self.stand_in, 1)
        bias = None if self.bias is None else F.pad(self.bias, (0, width))
        return F.pad(self.weight, (0, 0, 0, width)).t(), bias

    def _finish(self, y: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, given its matmul's result."""
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
    """Apply several column-parallel layers to the same input [..., in_features], as one operation:
    with sequence parallelism they share one all-gather, without it one all-reduce of the input's
    gradient. Return the output of each layer, in order. Raise ValueError if the layers differ in
    group or sequence parallelism. ``sequence_parallel`` is by default the layers'."""
    # Function calls are saved here, since each takes about 1 % of a small layer's time: the ops are
    # called directly, and `_zeros` and `_finish` only where they do something.
    first = layers[0]
    rows_split = first.sequence_parallel if sequence_parallel is None else sequence_parallel
    weights, biases, biased, finished = [], [], False, True
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
        w, bias = layer._zeros() if layer.empty else (layer._operand(x), layer.bias)
        weights.append(w)
        biases.append(bias)
        biased = biased or bias is not None
        finished = finished and not (layer.empty or layer.gather_output)
    bias_per_layer = biases if biased else None
    outputs: list[torch.Tensor]
    if rows_split:
        _, outputs = ALL_GATHER_MATMUL.entry()(
            x,
            weights,
            first.group,
            _from_first(first.sequence_dim, x),
            bias_list(x, bias_per_layer),
            shard_sizes=shard_sizes,
        )
    else:
        outputs = column_matmul(x, weights, first.group, bias_per_layer)
    if finished:
        return outputs
    return [layer._finish(y) for layer, y in zip(layers, outputs, strict=True)]


def _from_first(dim: int, x: torch.Tensor) -> int:
    """Return a dim of x, counted from its first."""
    return dim + x.dim() if dim < 0 else dim


class RowParallelLinear(ParallelLinear):
    """``x @ weight^T + bias`` with the input features split over the ranks.

    Args:
        in_features, out_features: of the unsharded layer.
        group, options: see `tpkernels.nn`.
        bias: whether there is a bias. Every rank has all of it, and its whole gradient; it is added
            once, after the sum. Without the same random state on all ranks, their biases differ.
        in_sizes: input features of each rank; by default balanced (`tpkernels.shard_sizes`).
            ValueError if they do not fit.
        sequence_parallel: the output is this rank's rows of the sequence. By default all ranks get
            all rows.

    ``weight`` is [out_features, in_features of this rank].
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
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(in_features, out_features, group, in_sizes, bias=bias, **options)
        self.in_sizes = self.splits["weight"].sizes  #: input features of each rank

    def forward(
        self,
        x: torch.Tensor,
        *,
        residual: torch.Tensor | None = None,
        shard_sizes: Sequence[int] | None = None,
        sequence_parallel: bool | None = None,
    ) -> torch.Tensor:
        """Map x [..., in_features of this rank] to [..., out_features], all rows or this rank's.
        ``residual``, of that shape, is added after the bias; the output gets its dtype.
        ``sequence_parallel`` is by default the layer's."""
        rows_split = self.sequence_parallel if sequence_parallel is None else sequence_parallel
        x, w = self._factors(x)
        dim = _from_first(self.sequence_dim, x) if rows_split else None
        return row_parallel(x, w, self.group, dim, self.bias, residual, shard_sizes)

    def _factors(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x and the weight [K, N] as the ops take them."""
        w = self._operand(x)
        if self.empty:  # The ops need K >= 1: one zero feature, as in ColumnParallelLinear._zeros.
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
) -> torch.Tensor:
    """Return ``sum_r(x_r @ w_r) + bias + residual``, or this rank's shard of it along
    ``scatter_dim``, in the residual's dtype if there is one: under autocast an fp32 residual stream
    stays fp32. ``w`` [K, N] may be packed."""
    # The ops are called directly, for the reason given in `column_parallel`.
    out_dtype = None if residual is None else residual.dtype
    y: torch.Tensor
    if scatter_dim is None:
        y = MATMUL_ALL_REDUCE.entry()(x, w, group, bias, residual, out_dtype=out_dtype)
    else:
        y = MATMUL_REDUCE_SCATTER.entry()(
            x, w, group, scatter_dim, bias, residual, out_dtype=out_dtype, shard_sizes=shard_sizes
        )
    return y


class _SharedInputLinears(nn.Module):
    """Column-parallel layers of one input, by name, each with options of its own."""

    def __init__(
        self, in_features: int, layers: Mapping[str, Mapping[str, Any]], **options: Any
    ) -> None:
        super().__init__()
        for name, own_options in layers.items():
            self.add_module(name, ColumnParallelLinear(in_features, **own_options, **options))

    @property
    def layers(self) -> list[ColumnParallelLinear]:
        """Return the layers, in order."""
        return cast("list[ColumnParallelLinear]", list(self.children()))

    def pack_(self, *, drop: bool = False, dtype: torch.dtype | None = None) -> Self:
        """Pack each layer's weight; see `ColumnParallelLinear.pack_`."""
        return packing.pack_(self, drop=drop, dtype=dtype)

    @classmethod
    def _from(cls, linears: Mapping[str, nn.Linear], *args: Any, **options: Any) -> Self:
        """Make the layers with copies of this rank's shards of ``linears``, each with a bias if its
        linear has one."""
        first = next(iter(linears.values()))
        dtype = first.weight.dtype
        merged = cls(first.in_features, *args, bias=True, device="meta", dtype=dtype, **options)
        for (name, linear), layer in zip(linears.items(), merged.layers, strict=True):
            if cast("torch.Tensor | None", linear.bias) is None:
                layer.bias = None
                layer.splits.pop("bias", None)
            try:
                layer.adopt(linear)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        return merged


class MergedColumnParallelLinear(_SharedInputLinears):
    """Several `ColumnParallelLinear` of one input, such as gate and up, as one operation.

    Args:
        in_features: of the unsharded layers.
        out_features: of each unsharded layer, by its name; the layers are submodules of these
            names.
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
        """Make the layers with copies of this rank's shards of ``linears``, each with a bias if its
        linear has one. Raise TypeError if one is not a plain ``nn.Linear``, NotImplementedError if
        a weight is quantised or distributed, ValueError if the input features differ."""
        widths = {name: check_linear(ln, name).out_features for name, ln in linears.items()}
        return cls._from(linears, widths, group, **options)

    def forward(
        self, x: torch.Tensor, *, shard_sizes: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        """Map x [..., in_features] to [..., out_features of this rank] for each layer, in order."""
        return column_parallel(x, self.layers, shard_sizes=shard_sizes)


@dataclass(frozen=True)
class Heads:
    """Heads of grouped-query attention, split over ``world`` ranks by whole key-value groups. If
    there are more ranks than groups, and query heads for each, several ranks share a group: each
    has its key-value head and some of its query heads."""

    heads: int
    kv_heads: int
    head_dim: int
    world: int
    together: int = 1  #: features of all heads are cut at multiples of it

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads < 1 or self.heads % self.kv_heads or self.head_dim < 1:
            raise ValueError(
                f"heads={self.heads} must be divisible by kv_heads={self.kv_heads}, and both and "
                f"head_dim={self.head_dim} must be at least 1"
            )

    @property
    def sharers(self) -> list[int]:
        """Return how many ranks share each group; an empty list if none is shared, because there
        are ranks enough for each, or too few query heads: the gradients of what is shared are
        summed in the order of the backward pass, which would differ on ranks without heads."""
        if self.world <= self.kv_heads:
            return []
        sharers = balanced_sizes(self.world, self.kv_heads)
        units, rest = divmod(self.heads // self.kv_heads, self._unit)
        return sharers if max(sharers) <= units and not rest else []

    @property
    def _unit(self) -> int:
        """Return how many query heads stay together."""
        return self.together // gcd(self.together, self.head_dim)

    @property
    def _groups(self) -> list[int]:
        """Return the key-value groups of each rank, if none is shared."""
        unit = self._unit // gcd(self._unit, self.heads // self.kv_heads)
        return balanced_sizes(self.kv_heads, self.world, unit)

    @property
    def query_heads(self) -> list[int]:
        """Return the query heads of each rank."""
        per_group = self.heads // self.kv_heads
        if self.sharers:
            pairs = ((per_group, ranks, self._unit) for ranks in self.sharers)
            return [n for pair in pairs for n in balanced_sizes(*pair)]
        return [count * per_group for count in self._groups]

    @property
    def queries_per_group(self) -> list[int]:
        """Return the query heads for each key-value head of each rank, with the stand-ins of ranks
        without heads."""
        per_group = self.heads // self.kv_heads
        return [max(1, n) if self.sharers else per_group for n in self.query_heads]

    def split_of(self, name: str, width: int | None = None) -> dict[str, Any]:
        """Return how a projection in `QKV`, or another by query heads of ``width``, is split, as
        options of `ColumnParallelLinear`. A rank without heads returns zeros of one key-value
        head and its query heads."""
        width, of_keys = width or self.head_dim, name in ("k_proj", "v_proj")
        if not of_keys:
            stand_in = width if self.sharers else width * (self.heads // self.kv_heads)
            return {"out_sizes": [n * width for n in self.query_heads], "stand_in": stand_in}
        if not self.sharers:
            sizes = [n * width for n in self._groups]
            return {"out_sizes": sizes, "stand_in": width}
        group_of_rank = [group for group, ranks in enumerate(self.sharers) for _ in range(ranks)]
        sizes = [width if n else 0 for n in self.query_heads]
        pairs = zip(group_of_rank, sizes, strict=True)
        ranges = tuple(((group * width, size),) for group, size in pairs)
        return {"out_sizes": Sharding(0, ranges), "stand_in": width}


class QKVParallelLinear(_SharedInputLinears):
    """The query, key and value projections of grouped-query attention, as one operation.

    Each rank gets whole key-value groups: a key head, its value head and the query heads that
    attend to them. Groups that do not divide by the ranks are split as evenly as possible; if there
    are fewer than ranks, and query heads for each rank, ranks share a group: each has its key and
    value head and some of its query heads. A rank without query heads returns one of zeros, so that
    the attention needs no special case; the output projection has no weights for it.

    Args:
        hidden_size: input features.
        heads, kv_heads, head_dim: of the unsharded attention; ValueError if ``heads`` is not a
            multiple of ``kv_heads``.
        group, options: see `tpkernels.nn`.
        bias: whether the projections have biases.
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
        _, world = position(groups.name_of(group))
        split = Heads(heads, kv_heads, head_dim, world)
        layers = {name: split.split_of(name) for name in QKV}
        for name, layer in layers.items():
            layer["out_features"] = (heads if name == "q_proj" else kv_heads) * head_dim
        super().__init__(hidden_size, layers, group=group, bias=bias, **options)
        self.heads = split

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
        """Make the projections with copies of this rank's shards, each with a bias if its linear
        has one. Raises what `MergedColumnParallelLinear.from_linear` does, and ValueError if
        ``head_dim`` does not divide the features of a projection."""
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
        """Map x [..., hidden_size] to queries [..., heads of this rank * head_dim], keys and values
        [..., key-value heads of this rank * head_dim]."""
        q, k, v = column_parallel(x, self.layers, shard_sizes=shard_sizes)
        return q, k, v


def check_linear(module: nn.Module, name: str) -> nn.Linear:
    """Return ``module`` if it is a plain ``nn.Linear``, not a parallel layer or an adapter, without
    hooks and the like, whose weight is neither quantised nor distributed."""
    if isinstance(module, nn.Linear):
        check_parameter(module.weight, f"{name}.weight")
        check_parameter(module.bias, f"{name}.bias")
    if type(module) not in (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear):
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        hint = "; the model is already sharded" if kind.startswith("tpkernels.") else ""
        raise TypeError(f"{name} is a {kind}, not an nn.Linear{hint}")
    assert isinstance(module, nn.Linear)
    check_plain(module, name, ("weight", "bias"))
    return module
