"""MoE experts, sharded over the ranks with tensor or expert parallelism."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self, Unpack

import torch
import torch.nn.functional as F
from torch import nn

from tpkernels.common.shards import shard_sizes as balanced_sizes
from tpkernels.groups import GroupLike, group_name
from tpkernels.nn.packing import PackableModule
from tpkernels.nn.regions import copy_to_ranks, gather_from_ranks, split_over_ranks
from tpkernels.nn.sharding import LayerOptions, Sharding
from tpkernels.ops.all_gather import all_gather
from tpkernels.ops.all_reduce import all_reduce
from tpkernels.ops.experts import permute_tokens, reduce_by_token, sort_assignments
from tpkernels.ops.grouped_matmul import grouped_matmul
from tpkernels.ops.moe_combine import moe_combine
from tpkernels.ops.moe_dispatch import Handle, gather_topk_ids, moe_dispatch
from tpkernels.ops.reduce_scatter import reduce_scatter
from tpkernels.ops.validation import group_operands, topk
from tpkernels.torch_private import direct_parameters, make_probe

PROJECTIONS = ("gate_up_proj", "down_proj")
_BIASES = ("gate_up_proj_bias", "down_proj_bias")


def infer_moe_args(experts: nn.Module) -> dict[str, Any] | None:
    """Return the `MoE` arguments that reproduce a transformers experts module, or None."""
    shapes = {name: tuple(p.shape) for name, p in experts.named_parameters()}
    num_experts, *sizes = shapes.get("down_proj", (0, 0, 0))
    transposed = bool(getattr(experts, "is_transposed", False))
    hidden_size, intermediate_size = reversed(sizes) if transposed else sizes
    args: dict[str, Any] = {
        "num_experts": num_experts,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "bias": _BIASES[0] in shapes,
        "transposed": transposed,
    }
    is_supported = shapes == _shapes(**args) and not getattr(experts, "has_post_expert_norm", False)
    weightless = make_probe(experts, parameters={})
    for interleaved in (False, True):
        if is_supported and _is_gate_columnwise(weightless, interleaved):
            apply_gate = partial(_apply_gate, weightless)
            return args | {"interleaved": interleaved, "apply_gate": apply_gate}
    return None


def _apply_gate(experts: nn.Module, inner: torch.Tensor) -> torch.Tensor:
    """Call ``_apply_gate`` of transformers. A module-level function can be pickled."""
    gated: torch.Tensor = experts._apply_gate(inner)  # type: ignore[operator]
    return gated


def _is_gate_columnwise(experts: nn.Module, interleaved: bool) -> bool:
    """Return whether each output column of the gate depends only on its gate and up columns."""
    pairs = torch.linspace(-9, 9, 32, dtype=torch.float64, device="cpu").view(2, 2, 8)
    try:
        full, *slices = (
            _apply_gate(experts, (columns.mT if interleaved else columns).flatten(1))
            for columns in (pairs, *pairs.split((3, 5), 2))
        )
        return full.shape == (2, 8) and torch.allclose(torch.cat(slices, 1), full, 1e-12, 0)
    except Exception:  # the module has no gate, or the gate needs weights
        return False


def _shapes(
    num_experts: int, hidden_size: int, intermediate_size: int, bias: bool, transposed: bool
) -> dict[str, tuple[int, ...]]:
    """Return the unsharded shape of each parameter of `MoE`."""
    shapes: dict[str, tuple[int, ...]] = {}
    pairs = ((2 * intermediate_size, hidden_size), (hidden_size, intermediate_size))
    for name, bias_name, (n, k) in zip(PROJECTIONS, _BIASES, pairs, strict=True):
        shapes[name] = (num_experts, k, n) if transposed else (num_experts, n, k)
        if bias:
            shapes[bias_name] = (num_experts, n)
    return shapes


class MoE(PackableModule):
    """Experts of an MoE layer. The caller computes the routing.

    Equals this program on unsharded experts, for each token::

        sum(weight[k] * down[k](activation(gate[k](x)) * up[k](x)) for k in range(top_k))

    Args:
        num_experts, hidden_size, intermediate_size: sizes of the unsharded experts.
        group, options: see `tpkernels.nn`; ``sequence_dim`` must be 0.
        activation: applied to the gate.
        apply_gate: maps the ``gate_up_proj`` output [rows, 2 * width] to [rows, width], each column
            from its gate and up. By default ``activation(gate) * up``.
        bias: add biases [experts, 2 * width] and [experts, hidden_size] to the projection outputs.
        transposed: weights are [experts, inputs, outputs].
        interleaved: gate and up columns alternate, gate first.
        expert_parallel: each rank holds ``tpkernels.shard_sizes(num_experts, world)`` complete
            experts. Tokens are sent to the experts (`tpkernels.moe_dispatch`) unless all ranks have
            all tokens. By default each rank holds a slice of the width of every expert, so the load
            is balanced for any routing.
        width_sizes: width of each rank; by default balanced.
        sequence_parallel: each rank passes and receives the local tokens. By default all ranks pass
            the same tokens.
        max_rows: capacity of the receive buffer of each rank in rows, see `tpkernels.moe_dispatch`.
            A CUDA graph can then capture the call.

    Raises:
        ValueError: ``width_sizes`` does not match the group or ``intermediate_size``, or
            ``sequence_dim`` is not 0.

    ``gate_up_proj`` is [experts, 2 * width, hidden_size], the gates before the ups, and
    ``down_proj`` [experts, hidden_size, width], with the local experts or the local width. With
    tensor parallelism each rank adds a slice of the columns of ``down_proj_bias``.
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
        sharding = Sharding.of(0, intermediate_size, self.group, "intermediate_size", width_sizes)
        widths = sharding.sizes
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
        self.empty = self.shardings[PROJECTIONS[1]].size == 0  #: no local experts or width
        self.reset_parameters()

    @classmethod
    def from_experts(cls, experts: nn.Module, group: GroupLike, **options: Any) -> Self:
        """Create a layer with copies of the local shards of a transformers 5 experts module.

        Args:
            experts: a module with ``gate_up_proj``, ``down_proj`` and ``_apply_gate``.
            group: see `tpkernels.nn`.
            options: the remaining arguments of the constructor.

        Raises:
            ValueError: the weights or the gate of ``experts`` are not supported.
        """
        args = infer_moe_args(experts)
        if args is None:
            raise ValueError(f"MoE does not support the weights or the gate of {experts}")
        dtype = experts.get_parameter("down_proj").dtype
        return cls(**args, group=group, device="meta", dtype=dtype, **options).adopt(experts)

    def reset_parameters(self) -> None:
        """Initialize the weights of each expert like ``nn.Linear``, with the unsharded fan-in."""

        def draw(inputs: int, full: torch.Tensor) -> None:
            nn.init.uniform_(full, -(inputs**-0.5), inputs**-0.5)

        with self._unpacked():
            for name in self.shardings:
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
        """Apply the experts.

        Args:
            hidden_states: [tokens, hidden_size], the local tokens or all tokens.
            top_k_index: [tokens, k], expert ids of each token.
            top_k_weights: [tokens, k], router weights of each token.
            shard_sizes: number of tokens of each rank, with sequence parallelism; by default equal.
            sequence_parallel: overrides the option of the layer.

        Returns:
            A tensor in the shape of ``hidden_states``.
        """
        is_sequence_parallel = (
            self.sequence_parallel if sequence_parallel is None else sequence_parallel
        )
        x, ids, weights = hidden_states, top_k_index, top_k_weights
        expert_weights = self._weight_operands(x)
        if not torch.is_autocast_enabled(x.device.type):  # autocast casts x and the weights
            group_operands(x, expert_weights[0])  # check before tokens are sent
        forward_fn = (
            self._forward_expert_parallel
            if self.expert_parallel and self.world > 1
            else self._forward_tensor_parallel
        )
        return forward_fn(x, ids, weights, expert_weights, shard_sizes, is_sequence_parallel)

    def _forward_tensor_parallel(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        expert_weights: tuple[torch.Tensor, torch.Tensor],
        sizes: Sequence[int] | None,
        is_sequence_parallel: bool,
    ) -> torch.Tensor:
        """Multiply all tokens by the local width of their experts, and reduce over the ranks."""
        group = self.group
        if is_sequence_parallel:
            ids = gather_topk_ids(x, ids, weights, group_name(group), sizes)
            weights = all_gather(weights, group, shard_sizes=sizes)
        elif torch.is_grad_enabled():
            x, weights = copy_to_ranks(x, group), copy_to_ranks(weights, group)
        assignments = sort_assignments(ids, weights, self.num_experts)
        if is_sequence_parallel:
            x = all_gather(x, group, shard_sizes=sizes)
        rows = permute_tokens(x, assignments)
        y = reduce_by_token(
            self._run_experts(rows, expert_weights, assignments.counts), assignments
        )
        return (
            reduce_scatter(y, group, shard_sizes=sizes)
            if is_sequence_parallel
            else all_reduce(y, group)
        )

    def _forward_expert_parallel(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        expert_weights: tuple[torch.Tensor, torch.Tensor],
        sizes: Sequence[int] | None,
        is_sequence_parallel: bool,
    ) -> torch.Tensor:
        """Run the local experts on the tokens that are routed to them."""
        if is_sequence_parallel:
            rows, counts, handle = moe_dispatch(
                x,
                ids,
                weights,
                self.num_experts,
                self.group,
                shard_sizes=sizes,
                max_rows=self.max_rows,
            )
            # Of the max_rows rows, CPUs multiply only those in use. GPUs multiply all rows, so that
            # the host does not wait for the counts.
            used = rows
            if self.max_rows is not None and not rows.is_cuda:
                used = rows[: int(counts.sum())]
            y = self._run_experts(used, expert_weights, counts)
            if len(y) < len(rows):
                y = F.pad(y, (0, 0, 0, len(rows) - len(y)))
            return moe_combine(y, handle)
        # All ranks have all tokens, so only the expert outputs are sent. On GPUs the buffer has a
        # row for every assignment, so that the host does not wait. Rows of remote experts are
        # unused.
        topk(ids, weights, x)
        if torch.is_grad_enabled():
            x = copy_to_ranks(x, self.group)
        local_experts = self.shardings[PROJECTIONS[0]]
        static = x.is_cuda and self.num_experts >= self.world and not torch.is_grad_enabled()
        permutation, counts = torch.ops.tpkernels._routes_of_experts.default(
            ids, self.num_experts, local_experts.offset, local_experts.size, static
        )
        sizes = balanced_sizes(x.shape[0], self.world)
        handle = Handle(
            routes=ids,
            topk_weights=split_over_ranks(weights, self.group, 0, sizes),
            num_experts=self.num_experts,
            counts=counts,
            group=self.group,
            shard_sizes=sizes,
            max_rows=len(permutation) if static else None,
            scales=None,
        )
        rows = x.index_select(0, permutation // ids.shape[1])
        y = moe_combine(self._run_experts(rows, expert_weights, counts), handle)
        return gather_from_ranks(y, self.group, 0, sizes)

    def _run_experts(
        self,
        rows: torch.Tensor,
        expert_weights: tuple[torch.Tensor, torch.Tensor],
        counts: torch.Tensor,
    ) -> torch.Tensor:
        """Return the expert outputs. ``rows`` are sorted by expert, with ``counts`` rows each."""
        gate_up_bias, down_bias = self._biases()
        inner = self._activate(grouped_matmul(rows, expert_weights[0], counts, gate_up_bias))
        return grouped_matmul(inner, expert_weights[1], counts, down_bias)

    def _activate(self, inner: torch.Tensor) -> torch.Tensor:
        if self.apply_gate is not None:
            return self.apply_gate(inner)
        gate, up = inner.unflatten(1, (-1, 2)).unbind(2) if self.interleaved else inner.chunk(2, 1)
        return self.activation(gate) * up

    def _biases(self) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """Return the biases as operands of the ops."""
        if not self.bias:
            return None, None
        parameters = direct_parameters(self)
        gate_up_bias, down_bias = (parameters[name] for name in _BIASES)
        if not self.expert_parallel:
            sharding = self.shardings[_BIASES[1]]
            columns_after = self.hidden_size - sharding.offset - sharding.size
            down_bias = F.pad(down_bias, (sharding.offset, columns_after))
            gate_up_bias = F.pad(gate_up_bias, (0, 2)) if self.empty else gate_up_bias
        return gate_up_bias, down_bias

    def _transposed(self, weight: torch.Tensor) -> torch.Tensor:
        return weight if self.transposed else weight.mT

    def _weight_operands(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights [experts, K, N] as operands of the ops."""
        if self._packed:
            self._refuse_gradient(x)
            gate_up, down = (self._packed[name] for name in PROJECTIONS)
            return gate_up, down
        gate_up, down = (self._transposed(self.get_parameter(name)) for name in PROJECTIONS)
        if self.empty and not self.expert_parallel:
            # A rank without width pads its weights with zeros. They stay in the autograd graph, so
            # the backward makes the same calls on all ranks.
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
