"""The experts of a mixture, split over the ranks: by their width, or whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from tpkernels.groups import GroupLike
from tpkernels.local.packed import check_finite, check_packable, is_packed_stack, pack, unpack
from tpkernels.nn.linear import PackableModule
from tpkernels.nn.regions import copy_to_ranks, gather_from_ranks, split_over_ranks
from tpkernels.nn.sharding import LayerOptions, Split
from tpkernels.ops.experts import (
    all_gather_grouped_matmul,
    dispatch_grouped_matmul,
    grouped_matmul_all_reduce,
    grouped_matmul_combine,
    grouped_matmul_reduce_scatter,
    route,
    rows_by_expert,
)
from tpkernels.ops.grouped_matmul import grouped_matmul
from tpkernels.shards import shard_sizes as balanced_sizes

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

PROJECTIONS = ("gate_up_proj", "down_proj")


class MoE(PackableModule):
    """``sum_k weight_k * down_k(activation(gate_k(x)) * up_k(x))`` over the experts that a router,
    which is the caller's, has chosen for each token.

    Args:
        num_experts, hidden_size, intermediate_size: of the unsharded experts.
        group, options: see `tpkernels.nn`; ``sequence_dim`` is 0.
        activation: applied to the gate.
        expert_parallel: each rank has ``tpkernels.shard_sizes(num_experts, world)`` whole experts,
            and tokens travel to them (`tpkernels.moe_dispatch`). By default each rank has a part of
            every expert's width, which keeps ranks equally busy whatever the router chooses.
        sequence_parallel: a rank passes its own tokens, and gets these. By default all ranks pass
            the same tokens.

    ``gate_up_proj`` is [experts, 2 * width, hidden_size], the gates before the ups, and
    ``down_proj`` [experts, hidden_size, width], with this rank's experts or width.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        group: GroupLike,
        *,
        activation: Callable[[torch.Tensor], torch.Tensor] = F.silu,
        expert_parallel: bool = False,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(group, **options)
        if self.sequence_dim != 0:
            raise ValueError(f"sequence_dim is {self.sequence_dim}; MoE takes tokens along dim 0")
        self.num_experts, self.hidden_size = num_experts, hidden_size
        self.intermediate_size, self.activation = intermediate_size, activation
        self.expert_parallel = expert_parallel
        if expert_parallel:
            split = Split.of(0, num_experts, self.group, "num_experts")
            splits = [split, split]
        else:
            widths = balanced_sizes(intermediate_size, self.world)
            both = Split.packed(1, [widths, widths])
            splits = [
                Split.of(dim, 0, self.group, "width", split)
                for dim, split in ((1, both), (2, Split(2, tuple(widths), 0)))
            ]
        self.empty = splits[1].size == 0  #: this rank has no experts, or no width
        shapes = ((2 * intermediate_size, hidden_size), (hidden_size, intermediate_size))
        for name, shape, split in zip(PROJECTIONS, shapes, splits, strict=True):
            self.add_parameter(name, (num_experts, *shape), split)
        self._packed: dict[str, torch.Tensor] = {}
        self._asked_dtype: torch.dtype | None = None
        self._plain_dtype: torch.dtype | None = None
        self.reset_parameters()

    @classmethod
    def from_experts(cls, experts: Any, group: GroupLike, **options: Any) -> Self:
        """Make a layer with copies of this rank's shards of an experts module as transformers 5
        has them: ``gate_up_proj``, ``down_proj`` and the activation ``act_fn``."""
        num_experts, hidden_size, width = experts.down_proj.shape
        layer = cls(
            num_experts,
            hidden_size,
            width,
            group,
            activation=experts.act_fn,
            device="meta",
            dtype=experts.down_proj.dtype,
            **options,
        )
        layer.adopt(experts)
        return layer

    def reset_parameters(self) -> None:
        """Draw the weights of each expert as ``nn.Linear`` does, by the unsharded fan-in."""

        def draw(inputs: int, full: torch.Tensor) -> None:
            nn.init.uniform_(full, -(inputs**-0.5), inputs**-0.5)

        for name, inputs in zip(
            PROJECTIONS, (self.hidden_size, self.intermediate_size), strict=True
        ):
            self.fill(name, partial(draw, inputs))

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        *,
        shard_sizes: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Map tokens [tokens, hidden_size], of this rank or all, to the same shape.

        Args:
            top_k_index, top_k_weights: [tokens, k], the experts of each token and their weights.
            shard_sizes: tokens of each rank, with ``sequence_parallel``; default: all the same.
        """
        x, ids, weights = hidden_states, top_k_index, top_k_weights
        gate_up, down = self._operands(x)
        if self.expert_parallel:
            return self._by_experts(x, ids, weights, gate_up, down, shard_sizes)
        if self.sequence_parallel:
            inner, routing = all_gather_grouped_matmul(
                x, ids, weights, gate_up, self.group, shard_sizes=shard_sizes
            )
            return grouped_matmul_reduce_scatter(
                self._gate(inner), down, routing, self.group, shard_sizes=shard_sizes
            )
        if torch.is_grad_enabled():
            x, weights = copy_to_ranks(x, self.group), copy_to_ranks(weights, self.group)
        routing = route(ids, weights, self.num_experts)
        inner = grouped_matmul(rows_by_expert(x, routing), gate_up, routing.counts)
        return grouped_matmul_all_reduce(self._gate(inner), down, routing, self.group)

    def _by_experts(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        sizes: Sequence[int] | None,
    ) -> torch.Tensor:
        if not self.sequence_parallel:  # each rank sees to its share of the tokens
            sizes = balanced_sizes(x.shape[0], self.world)
            x, ids, weights = (split_over_ranks(t, self.group, 0, sizes) for t in (x, ids, weights))
        inner, _, handle = dispatch_grouped_matmul(
            x, ids, weights, gate_up, self.num_experts, self.group, shard_sizes=sizes
        )
        y = grouped_matmul_combine(self._gate(inner), down, handle)
        if self.sequence_parallel:
            return y
        assert sizes is not None
        return gather_from_ranks(y, self.group, 0, sizes)

    def _gate(self, inner: torch.Tensor) -> torch.Tensor:
        gate, up = inner.chunk(2, -1)
        return self.activation(gate) * up

    def _operands(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the weights [experts, K, N] as the ops take them."""
        parameters: Any = self._parameters
        if self._packed:
            if torch.is_grad_enabled() and (
                x.requires_grad or parameters[PROJECTIONS[0]].requires_grad
            ):
                raise NotImplementedError(
                    f"{self!r} is packed and has no gradient; call it under torch.no_grad(), or "
                    "unpack_() it"
                )
            return [self._packed[name] for name in PROJECTIONS]
        gate_up, down = (parameters[name] for name in PROJECTIONS)
        if self.empty and not self.expert_parallel:
            # A width of zeros keeps this rank's backward in step with the others'.
            gate_up, down = F.pad(gate_up, (0, 0, 0, 2)), F.pad(down, (0, 1))
        return [gate_up.transpose(1, 2), down.transpose(1, 2)]

    def check_packable(self, what: str, dtype: torch.dtype | None) -> None:
        """Raise what `pack_` raises."""
        if self._packed or self.empty:
            return
        for name in PROJECTIONS:
            w = self.get_parameter(name)
            check_packable(w.transpose(1, 2), f"{what}{name}")
            if dtype == torch.int8:
                check_finite(w, f"{what}{name}")

    def pack_(self, *, drop: bool = False, dtype: torch.dtype | None = None) -> Self:
        """Pack the weights for inference on CPUs, as `ColumnParallelLinear.pack_`; return the
        layer."""
        self.unpack_()
        for name in PROJECTIONS:
            self.pack_parameter(name, drop=drop, dtype=dtype)
        return self

    def pack_parameter(self, name: str, *, drop: bool, dtype: torch.dtype | None) -> None:
        """Pack one of the weights; the layer needs both packed, or none."""
        if self.empty:
            return
        w = self.get_parameter(name)
        self._asked_dtype, self._plain_dtype = dtype, w.dtype
        packed = pack(w.transpose(1, 2), None if w.shape[2] % 4 else dtype)
        if drop:
            trained = w.requires_grad and packed.is_floating_point()
            self.register_parameter(name, nn.Parameter(packed, trained))
        self._packed[name] = packed

    def unpack_(self) -> Self:
        """Undo `pack_`; return the layer. A dropped weight has the values that were packed."""
        self._packed = {}
        for name in PROJECTIONS:
            w = self.get_parameter(name)
            if is_packed_stack(w):
                plain = unpack(w).transpose(1, 2).to(self._plain_dtype)
                self.register_parameter(name, nn.Parameter(plain, w.requires_grad))
        return self

    @contextmanager
    def _plain_weights(self, *, changed: bool) -> Iterator[None]:
        """Unpack the layer within the block; after it, pack it again, or restore what was packed if
        nothing has ``changed``."""
        packed, parameters = self._packed, dict(self._parameters)
        drop = is_packed_stack(self.get_parameter(PROJECTIONS[0]))
        self.unpack_()
        yield
        if packed and changed:
            self.pack_(drop=drop, dtype=self._asked_dtype)
        elif packed:
            self._parameters.update(parameters)
            self._packed = packed

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        with self._plain_weights(changed=True):
            super()._apply(fn, recurse)
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        with self._plain_weights(changed=True):
            super()._load_from_state_dict(*args)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        with self._plain_weights(changed=False):
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_experts}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}, "
            f"expert_parallel={self.expert_parallel}, "
            f"sequence_parallel={self.sequence_parallel}, rank={self.rank}"
        )
