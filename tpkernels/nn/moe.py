"""The experts of a mixture, split over the ranks: by their width, or whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self, Unpack

import torch
import torch.nn.functional as F
from torch import nn

from tpkernels.common.shards import shard_sizes as balanced_sizes
from tpkernels.groups import GroupLike, name_of
from tpkernels.nn.packing import PackableModule
from tpkernels.nn.regions import copy_to_ranks, gather_from_ranks, split_over_ranks
from tpkernels.nn.sharding import LayerOptions, Sharding
from tpkernels.ops.all_gather import all_gather
from tpkernels.ops.all_reduce import all_reduce
from tpkernels.ops.experts import route, rows_by_expert, sum_routes
from tpkernels.ops.grouped_matmul import grouped_matmul
from tpkernels.ops.moe_combine import moe_combine
from tpkernels.ops.moe_dispatch import Handle, gather_routes, moe_dispatch
from tpkernels.ops.reduce_scatter import reduce_scatter
from tpkernels.ops.validation import group_operands, topk
from tpkernels.torch_private import parameters_of, probe_of

PROJECTIONS = ("gate_up_proj", "down_proj")
_BIASES = ("gate_up_proj_bias", "down_proj_bias")


def form_of(experts: nn.Module) -> dict[str, Any] | None:
    """Return the arguments with which `MoE` computes what an experts module of transformers does,
    or None if it cannot."""
    shapes = {name: tuple(p.shape) for name, p in experts.named_parameters()}
    num_experts, *sizes = shapes.get("down_proj", (0, 0, 0))
    transposed = bool(getattr(experts, "is_transposed", False))
    hidden_size, width = reversed(sizes) if transposed else sizes
    form: dict[str, Any] = {
        "num_experts": num_experts,
        "hidden_size": hidden_size,
        "intermediate_size": width,
        "bias": _BIASES[0] in shapes,
        "transposed": transposed,
    }
    fits = shapes == _shapes(**form) and not getattr(experts, "has_post_expert_norm", False)
    without_weights = probe_of(experts, parameters={})
    for interleaved in (False, True):
        if fits and _is_by_column(without_weights, interleaved):
            apply_gate = partial(_apply_gate, without_weights)
            return form | {"interleaved": interleaved, "apply_gate": apply_gate}
    return None


def _apply_gate(experts: nn.Module, inner: torch.Tensor) -> torch.Tensor:
    """Call a method by the name that it has for transformers, by which it can be pickled."""
    gated: torch.Tensor = experts._apply_gate(inner)  # type: ignore[operator]
    return gated


def _is_by_column(experts: nn.Module, interleaved: bool) -> bool:
    """Return whether each column that leaves the gate depends on its own gate and up alone."""
    pairs = torch.linspace(-9, 9, 32, dtype=torch.float64, device="cpu").view(2, 2, 8)
    try:
        whole, *parts = (
            _apply_gate(experts, (part.mT if interleaved else part).flatten(1))
            for part in (pairs, *pairs.split((3, 5), 2))
        )
        return whole.shape == (2, 8) and torch.allclose(torch.cat(parts, 1), whole, 1e-12, 0)
    except Exception:  # it has none, or one that needs weights
        return False


def _shapes(
    num_experts: int, hidden_size: int, intermediate_size: int, bias: bool, transposed: bool
) -> dict[str, tuple[int, ...]]:
    """Return the unsharded shape of each parameter of `MoE`."""
    shapes: dict[str, tuple[int, ...]] = {}
    pairs = ((2 * intermediate_size, hidden_size), (hidden_size, intermediate_size))
    for name, name_of_bias, (n, k) in zip(PROJECTIONS, _BIASES, pairs, strict=True):
        shapes[name] = (num_experts, k, n) if transposed else (num_experts, n, k)
        if bias:
            shapes[name_of_bias] = (num_experts, n)
    return shapes


class MoE(PackableModule):
    """``sum_k weight_k * down_k(activation(gate_k(x)) * up_k(x))`` over the experts that a router,
    which is the caller's, has chosen for each token.

    Args:
        num_experts, hidden_size, intermediate_size: of the unsharded experts.
        group, options: see `tpkernels.nn`; ``sequence_dim`` is 0.
        activation: applied to the gate.
        apply_gate: maps the product with ``gate_up_proj``, [rows, 2 * width], to [rows, width],
            each column by its own gate and up. By default ``activation(gate) * up``.
        bias: add biases [experts, 2 * width] and [experts, hidden_size] to the products.
        transposed: weights are [experts, inputs, outputs].
        interleaved: each gate is followed by its up.
        expert_parallel: each rank has ``tpkernels.shard_sizes(num_experts, world)`` whole experts,
            and tokens travel to them (`tpkernels.moe_dispatch`) unless all ranks have them. By
            default each rank has a part of every expert's width, which keeps ranks equally busy
            whatever the router chooses.
        width_sizes: the width of each rank; by default balanced. ValueError if it does not fit.
        sequence_parallel: a rank passes its own tokens, and gets these. By default all ranks pass
            the same tokens.
        max_rows: rows that each rank's experts get of tokens that travel, as `moe_dispatch` takes
            it, so that a CUDA graph can hold the call.

    ``gate_up_proj`` is [experts, 2 * width, hidden_size], the gates before the ups, and
    ``down_proj`` [experts, hidden_size, width], with this rank's experts or width. Where the width
    is split, a rank adds its columns of ``down_proj_bias``.
    """

    packable = PROJECTIONS

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        group: GroupLike,
        *,
        activation: Callable[[torch.Tensor], torch.Tensor] = F.silu,
        apply_gate: Callable[[torch.Tensor], torch.Tensor] | None = None,
        bias: bool = False,
        transposed: bool = False,
        interleaved: bool = False,
        expert_parallel: bool = False,
        width_sizes: Sequence[int] | None = None,
        max_rows: int | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(group, **options)
        if self.sequence_dim != 0:
            raise ValueError(
                f"sequence_dim is {self.sequence_dim}; MoE supports 0, tokens along dim 0"
            )
        self.num_experts, self.hidden_size = num_experts, hidden_size
        self.intermediate_size, self.activation = intermediate_size, activation
        self.expert_parallel, self.apply_gate = expert_parallel, apply_gate
        self.bias, self.transposed, self.interleaved = bias, transposed, interleaved
        self.max_rows = max_rows
        outer, inner = (2, 1) if transposed else (1, 2)
        self._k_dim = inner
        width = Sharding.of(0, intermediate_size, self.group, "intermediate_size", width_sizes)
        widths = width.sizes
        for name, shape in _shapes(
            num_experts, hidden_size, intermediate_size, bias, transposed
        ).items():
            dim = outer if name == PROJECTIONS[0] else 1
            sizes: Sequence[int] | Sharding | None = None
            if expert_parallel:
                dim = 0
            elif name == PROJECTIONS[1]:
                dim, sizes = inner, widths
            elif name != _BIASES[1]:
                pairs = [2 * width for width in widths]
                sizes = pairs if interleaved else Sharding.packed(dim, [widths, widths])
            self.add_parameter(name, shape, Sharding.of(dim, shape[dim], self.group, name, sizes))
        self.empty = self.splits[PROJECTIONS[1]].size == 0  #: no experts here, or no width
        self.reset_parameters()

    @classmethod
    def from_experts(cls, experts: nn.Module, group: GroupLike, **options: Any) -> Self:
        """Make a layer with copies of this rank's shards of an experts module as transformers 5
        has them, with ``gate_up_proj``, ``down_proj`` and ``_apply_gate``. Raise ValueError if it
        computes anything else."""
        form = form_of(experts)
        if form is None:
            raise ValueError(f"MoE does not support the weights or the gate of {experts}")
        dtype = experts.get_parameter("down_proj").dtype
        return cls(**form, group=group, device="meta", dtype=dtype, **options).adopt(experts)

    def reset_parameters(self) -> None:
        """Draw the weights of each expert as ``nn.Linear`` does, by the unsharded fan-in."""

        def draw(inputs: int, full: torch.Tensor) -> None:
            nn.init.uniform_(full, -(inputs**-0.5), inputs**-0.5)

        with self._unpacked():
            for name in self.splits:
                self.fill(name, partial(draw, self.unsharded_k(name.removesuffix("_bias"))))

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        *,
        shard_sizes: Sequence[int] | None = None,
        sequence_parallel: bool | None = None,
    ) -> torch.Tensor:
        """Map tokens [tokens, hidden_size], of this rank or all, to the same shape.

        Args:
            top_k_index, top_k_weights: [tokens, k], the experts of each token and their weights.
            shard_sizes: tokens of each rank, with ``sequence_parallel``; default: all the same.
            sequence_parallel: by default the layer's.
        """
        split = self.sequence_parallel if sequence_parallel is None else sequence_parallel
        x, ids, weights = hidden_states, top_k_index, top_k_weights
        factors = self._operands(x)
        if not torch.is_autocast_enabled(x.device.type):  # autocast casts both
            group_operands(x, factors[0])  # before tokens travel
        run = self._by_experts if self.expert_parallel and self.world > 1 else self._by_width
        return run(x, ids, weights, factors, shard_sizes, split)

    def _by_width(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        factors: tuple[torch.Tensor, torch.Tensor],
        sizes: Sequence[int] | None,
        split: bool,
    ) -> torch.Tensor:
        """Multiply all tokens by this rank's width of their experts, and sum over the ranks."""
        group = self.group
        if split:
            ids = gather_routes(x, ids, weights, name_of(group), sizes)
            weights = all_gather(weights, group, shard_sizes=sizes)
        elif torch.is_grad_enabled():
            x, weights = copy_to_ranks(x, group), copy_to_ranks(weights, group)
        routing = route(ids, weights, self.num_experts)
        if split:
            x = all_gather(x, group, shard_sizes=sizes)
        rows = rows_by_expert(x, routing)
        y = sum_routes(self._multiply(rows, factors, routing.counts), routing)
        return reduce_scatter(y, group, shard_sizes=sizes) if split else all_reduce(y, group)

    def _by_experts(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        factors: tuple[torch.Tensor, torch.Tensor],
        sizes: Sequence[int] | None,
        split: bool,
    ) -> torch.Tensor:
        """Multiply this rank's experts by the tokens that are routed to them."""
        if split:
            rows, counts, handle = moe_dispatch(
                x,
                ids,
                weights,
                self.num_experts,
                self.group,
                shard_sizes=sizes,
                max_rows=self.max_rows,
            )
            # Of max_rows rows CPUs multiply those that are counted. GPUs multiply all of them, so
            # that no host waits for the counts.
            used = rows
            if self.max_rows is not None and not rows.is_cuda:
                used = rows[: int(counts.sum())]
            y = self._multiply(used, factors, counts)
            if len(y) < len(rows):
                y = F.pad(y, (0, 0, 0, len(rows) - len(y)))
            return moe_combine(y, handle)
        # All ranks have all tokens, so that only the experts' outputs travel. A GPU has rows for
        # all routes, for which no host waits; rows for experts of other ranks are not used.
        topk(ids, weights, x)
        if torch.is_grad_enabled():
            x = copy_to_ranks(x, self.group)
        here = self.splits[PROJECTIONS[0]]
        static = x.is_cuda and self.num_experts >= self.world and not torch.is_grad_enabled()
        order, counts = torch.ops.tpkernels._routes_of_experts.default(
            ids, self.num_experts, here.offset, here.size, static
        )
        sizes = balanced_sizes(x.shape[0], self.world)
        handle = Handle(
            routes=ids,
            topk_weights=split_over_ranks(weights, self.group, 0, sizes),
            num_experts=self.num_experts,
            counts=counts,
            group=self.group,
            shard_sizes=sizes,
            max_rows=len(order) if static else None,
            scales=None,
        )
        rows = x.index_select(0, order // ids.shape[1])
        y = moe_combine(self._multiply(rows, factors, counts), handle)
        return gather_from_ranks(y, self.group, 0, sizes)

    def _multiply(
        self, rows: torch.Tensor, factors: tuple[torch.Tensor, torch.Tensor], counts: torch.Tensor
    ) -> torch.Tensor:
        """Return the experts' outputs; ``rows`` are sorted by expert, ``counts`` of each."""
        of_gate_up, of_down = self._biases()
        inner = self._gate(grouped_matmul(rows, factors[0], counts, of_gate_up))
        return grouped_matmul(inner, factors[1], counts, of_down)

    def _gate(self, inner: torch.Tensor) -> torch.Tensor:
        if self.apply_gate is not None:
            return self.apply_gate(inner)
        gate, up = inner.unflatten(1, (-1, 2)).unbind(2) if self.interleaved else inner.chunk(2, 1)
        return self.activation(gate) * up

    def _biases(self) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """Return the biases as the ops take them."""
        if not self.bias:
            return None, None
        parameters = parameters_of(self)
        of_gate_up, of_down = (parameters[name] for name in _BIASES)
        if not self.expert_parallel:
            split = self.splits[_BIASES[1]]
            after = self.hidden_size - split.offset - split.size
            of_down = F.pad(of_down, (split.offset, after))
            of_gate_up = F.pad(of_gate_up, (0, 2)) if self.empty else of_gate_up
        return of_gate_up, of_down

    def _transposed(self, weight: torch.Tensor) -> torch.Tensor:
        return weight if self.transposed else weight.mT

    def _operands(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights [experts, K, N] as the ops take them."""
        if self._packed:
            self._refuse_gradient(x)
            gate_up, down = (self._packed[name] for name in PROJECTIONS)
            return gate_up, down
        gate_up, down = (self._transposed(self.get_parameter(name)) for name in PROJECTIONS)
        if self.empty and not self.expert_parallel:
            # A width of zeros keeps this rank's backward in step with the others'.
            gate_up, down = F.pad(gate_up, (0, 2)), F.pad(down, (0, 0, 0, 1))
        return gate_up, down

    def unsharded_k(self, name: str) -> int:
        return self.hidden_size if name == PROJECTIONS[0] else self.intermediate_size

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_experts}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}, "
            f"expert_parallel={self.expert_parallel}, "
            f"sequence_parallel={self.sequence_parallel}, rank={self.rank}"
        )
