"""Sharded decoder layers of Hugging Face transformers: the modules that replace the originals, and
hooks that split and gather rows. `plans` decides which modules are replaced. transformers is not
imported.

    layers[0]             pre-hook: each rank selects its rows
    norms                 RMSNorm; the weight gradient is summed over ranks (rows or heads)
    q_proj, k_proj, v_proj    column-parallel by key-value group, one all-gather
    gate_proj, up_proj    column-parallel, one all-gather
    o_proj, down_proj     row-parallel
    experts               get the local rows, like the router
    layers[-1]            hook: rows are gathered

The embedding outputs all rows on all ranks, because the model derives positions and the mask from
the number of rows. Without sequence parallelism rows are neither split nor gathered, and the norms
of the layers are not replaced.

Problem: ``q_proj(x)``, ``k_proj(x)`` and ``v_proj(x)`` are three calls in model code that we cannot
change. This code also derives the output shape from x, and under sequence parallelism x has only
the local rows.

Algorithm: a pre-hook on the parent module (attention or MLP) runs all projections with one
all-gather and stores each output in its projection. The parent gets a placeholder for x: a single
zero, expanded to the shape of the gathered x. When the parent calls a projection, it returns its
stored output and drops the reference to it.

A stored output outlives the call of the parent only if an exception ends that call, for example
when an activation checkpoint is recomputed. The next call overwrites it. The hooks are plain
Python, so torch.compile traces the layer into one graph.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from tpkernels.common.shards import shard_sizes
from tpkernels.local.packed import check_finite, check_packable
from tpkernels.nn import (
    ColumnParallelLinear,
    MoE,
    RMSNorm,
    RowParallelLinear,
    column_parallel,
    copy_to_ranks,
    gather_from_ranks,
    split_over_ranks,
)
from tpkernels.nn.linear import QKV, Heads
from tpkernels.nn.moe import PROJECTIONS
from tpkernels.nn.sharding import find_customizations, rank_and_world
from tpkernels.ops.matmul_all_reduce_rms_norm import matmul_all_reduce_rms_norm
from tpkernels.parallel.options import SequenceParallel
from tpkernels.torch_private import direct_children, direct_parameters, make_probe, state_names

if TYPE_CHECKING:
    import transformers

Tensors = tuple[torch.Tensor, ...]
GATE_UP = ("gate_proj", "up_proj")
#: Minimum tokens per rank for ``sequence_parallel="prefill"`` to split the sequence.
PROMPT_ROWS = 16
SEQUENCE_DIM = 1  #: of transformers activations [batch, sequence, width]

#: Model types that `join_norms` supports.
JOINABLE_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass
class ResidualRows:
    """Rows of the residual stream during the current forward: how they are split over the ranks
    and, if `join_norms` was called, how the last projection of a block ends."""

    world: int
    min_tokens: int = 1  #: shorter sequences are not split
    sizes: list[int] | None = None  #: rows per rank; None if all ranks have all rows
    batch: int = 1  #: number of sequences
    #: Residual that the current block adds to its output, or None.
    residual: torch.Tensor | None = None
    norm: RMSNorm | None = None  #: norm of the next block
    sum: torch.Tensor | None = None  #: last block output plus residual
    normed: torch.Tensor | None = None  #: ``sum`` after the norm of the next block

    @classmethod
    def for_group(cls, group: str, sequence_parallel: SequenceParallel) -> ResidualRows:
        """Create the state of a model on the ranks of a group. With False, rows are never
        split."""
        _, world = rank_and_world(group)
        if not sequence_parallel:
            return cls(world, sys.maxsize)
        return cls(world, PROMPT_ROWS * world if sequence_parallel == "prefill" else 1)

    def split(self, batch: int, tokens: int) -> None:
        """Begin a forward of ``batch`` sequences with ``tokens`` tokens each."""
        self.batch = batch
        self.sizes = shard_sizes(tokens, self.world) if tokens >= self.min_tokens else None

    def sizes_for(self, x: torch.Tensor) -> list[int] | None:
        """Return the rows per rank of activations x [batch, sequence, width] or [rows, width]."""
        if self.sizes is None or x.dim() > 2:
            return self.sizes
        return [self.batch * size for size in self.sizes]


@dataclass
class StoredOutput:
    """The pending output of a projection, and the input that the next call must pass. Setting an
    attribute takes 1.3 us on a module and 0.03 us on this object (AMD EPYC Zen 4, torch 2.13,
    2026-11-25)."""

    output: torch.Tensor | None = None
    input: torch.Tensor | None = None


class SharedInputLinear(ColumnParallelLinear):
    """A column-parallel projection whose output is computed by a hook of its parent module."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.stored = StoredOutput()

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        stored = self.stored
        output, expected = stored.output, stored.input
        stored.output = stored.input = None
        if output is None or x is not expected:
            raise RuntimeError(
                "this projection is computed when its parent module is called, together with the "
                f"projections that share its input; call the parent module instead: {self!r}"
            )
        return output


class SplitRowsLinear(RowParallelLinear):
    """A row-parallel projection that scatters its output by the row sizes of `ResidualRows`."""

    rows: ResidualRows | None = None  #: None without sequence parallelism

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        rows = self.rows
        if rows is not None and rows.residual is not None:
            return self._end_block(rows, rows.residual, x)
        sizes = None if rows is None else rows.sizes_for(x)
        return super().forward(x, shard_sizes=sizes, sequence_parallel=sizes is not None)

    def _end_block(
        self, rows: ResidualRows, residual: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        rows.residual = None
        if rows.norm is None:
            rows.sum = super().forward(x, residual=residual, sequence_parallel=False)
            return rows.sum
        x, w = self._matmul_operands(x)
        weight, eps = rows.norm.weight, rows.norm.eps
        rows.normed, rows.sum = matmul_all_reduce_rms_norm(
            x,
            w,
            weight,
            self.group,
            bias=self.bias,
            residual=residual,
            eps=eps,
            **self.sum_options,
        )
        return rows.normed


class SplitRowsMoE(MoE):
    """MoE experts that use the row sizes of `ResidualRows`."""

    rows: ResidualRows | None = None  #: None without sequence parallelism

    def forward(self, hidden_states: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        sizes = None if self.rows is None else self.rows.sizes_for(hidden_states)
        return super().forward(
            hidden_states, *routing, shard_sizes=sizes, sequence_parallel=sizes is not None
        )


class SplitRowsNorm(RMSNorm):
    """RMSNorm of the local rows, or of all rows if the sequence is not split."""

    rows: ResidualRows

    def shared_weight(self) -> torch.Tensor:
        return self.weight if self.rows.sizes is None else super().shared_weight()


def project(
    parent: nn.Module, names: tuple[str, ...], x: torch.Tensor, sizes: list[int] | None = None
) -> torch.Tensor:
    """Compute the projections ``names`` of x, and store their outputs.

    Args:
        sizes: rows of x per rank, or None if every rank has all rows.

    Returns:
        The input that the projections must be called with: x, or a placeholder with all rows.
    """
    modules: Any = direct_children(parent)
    layers = [modules[name] for name in names]
    outputs = column_parallel(x, layers, shard_sizes=sizes, sequence_parallel=sizes is not None)
    expected_input = x
    if sizes is not None:
        shape = list(x.shape)
        shape[-2] = sum(sizes)
        expected_input = x.new_zeros(()).expand(shape)
    for layer, output in zip(layers, outputs, strict=True):
        layer.stored.output, layer.stored.input = output, expected_input
    return expected_input


def share_input(
    names: tuple[str, ...], rows: ResidualRows | None, module: nn.Module, args: Any, kwargs: Any
) -> tuple[Tensors, dict[str, Any]] | None:
    """Forward pre-hook (with keyword arguments) of the parent of the projections ``names``."""
    x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    sizes = None
    if rows is not None:
        # An activation checkpoint recomputes a single layer, possibly after a forward of a
        # different length. So the attention, which runs first, reads the number of tokens from the
        # rotary embedding.
        if "position_embeddings" in kwargs:
            rows.split(x.shape[0], kwargs["position_embeddings"][0].shape[-2])
        sizes = rows.sizes_for(x)
    placeholder = project(module, names, x, sizes)
    if sizes is None:
        return None
    if "hidden_states" in kwargs:
        return args, {**kwargs, "hidden_states": placeholder}
    return (placeholder, *args[1:]), kwargs


def split_rows(group: str, rows: ResidualRows, module: nn.Module, args: Tensors) -> Tensors | None:
    """Forward pre-hook of the first layer: select the local rows."""
    x, *rest = args
    rows.split(x.shape[0], x.shape[SEQUENCE_DIM])
    if rows.sizes is None:
        return None
    return (split_over_ranks(x, group, SEQUENCE_DIM, rows.sizes), *rest)


def gather_rows(
    group: str, rows: ResidualRows, module: nn.Module, args: object, output: torch.Tensor | Tensors
) -> torch.Tensor | tuple[object, ...]:
    """Forward hook of the last norm or layer: gather the rows on all ranks."""
    if rows.sizes is None:
        return output
    if isinstance(output, tuple):
        return (gather_rows(group, rows, module, args, output[0]), *output[1:])
    return gather_from_ranks(output, group, SEQUENCE_DIM, rows.sizes)


def gather_recorded_outputs(
    group: str,
    rows: ResidualRows | None,
    layer_heads: Sequence[list[int] | None],
    module: nn.Module,
    args: object,
    output: tuple[Any, ...] | transformers.utils.ModelOutput,
) -> tuple[object, ...] | None:
    """Forward hook of the base model: gather the hidden states, attention weights and router logits
    that the caller requested. Each rank holds the values of its rows and, in attentions that are
    split, of its heads."""
    last, sizes = output[0], None if rows is None else rows.sizes
    rank, _ = rank_and_world(group)

    def gather(values: object) -> object:
        if not isinstance(values, tuple):
            return values
        pairs = zip([*layer_heads, None], values, strict=False)  # None for the last hidden state
        return tuple(gather_one(heads, value) for heads, value in pairs)

    def gather_one(heads: list[int] | None, value: torch.Tensor | None) -> torch.Tensor | None:
        if value is None or value is last:  # not recorded, or already gathered
            return value
        if value.dim() == 4:
            if heads is None:
                return value
            local = value[:, : heads[rank]].contiguous()
            return gather_from_ranks(local, group, 1, heads)
        if sizes is None or rows is None:
            return value
        if value.dim() == 2:  # router logits [rows, experts]
            by_sequence = value.view(rows.batch, sizes[rank], -1)
            return gather_from_ranks(by_sequence, group, SEQUENCE_DIM, sizes).flatten(0, 1)
        return gather_from_ranks(value, group, SEQUENCE_DIM, sizes)

    if isinstance(output, tuple):  # return_dict=False
        return tuple(map(gather, output))
    for name in ("hidden_states", "attentions", "router_logits"):
        if output.get(name) is not None:
            output[name] = gather(output[name])
    return None


def join_norms(model: transformers.PreTrainedModel) -> None:
    """Fuse the end of each block (attention or MLP) of a parallel model into one op, for forwards
    without split rows: all-reduce, residual and the norm of the next block. Hooks on the blocks are
    then not called. Not for training with activation checkpoints."""
    layers = list(getattr(model, model.base_model_prefix).layers)
    next_norms = [layer.input_layernorm for layer in layers[1:]]
    for layer, norm in zip(layers, [*next_norms, None], strict=True):
        layer.forward = partial(joined_layer_forward, layer, layer.self_attn.o_proj.rows, norm)


def joined_layer_forward(
    layer: transformers.modeling_layers.GradientCheckpointingLayer,
    rows: ResidualRows,
    next_norm: RMSNorm | None,
    hidden_states: torch.Tensor,
    **options: Any,
) -> torch.Tensor | None:
    """Forward of a decoder layer after `join_norms`."""
    rows.residual = None  # may be left over from a forward that raised
    if rows.sizes is not None:
        return type(layer).forward(layer, hidden_states, **options)
    normed = rows.normed if rows.sum is hidden_states else None
    x = layer.input_layernorm(hidden_states) if normed is None else normed
    attention, mlp = layer.self_attn, layer.mlp
    rows.residual, rows.norm = hidden_states, layer.post_attention_layernorm
    project(attention, QKV, x)
    x, _ = attention.forward(hidden_states=x, **options)
    rows.residual, rows.norm = rows.sum, next_norm
    project(mlp, GATE_UP, x)
    mlp.forward(x)
    return rows.sum


def check_packing(model: nn.Module, experts: Container[str], dtype: torch.dtype | None) -> None:
    """Raise the error that `pack_` would raise for the weights of a model and its ``experts``."""
    for name, module in model.named_modules():
        weights = ["weight"] if isinstance(module, nn.Linear) else []
        for key in PROJECTIONS if name in experts else weights:
            check_packable(getattr(module, key), f"{name}.{key}")
            if dtype == torch.int8:
                check_finite(getattr(module, key), f"{name}.{key}")


def set_queries_per_key_head(attention: nn.Module, heads: Heads, group: str) -> None:
    """Set how many local query heads of a transformers attention share a key head."""
    attention.num_key_value_groups = heads.queries_per_group[rank_and_world(group)[0]]  # type: ignore[assignment]


def use_local_head_parameters(
    attention: nn.Module, heads: Heads, names: list[str], group: str
) -> None:
    """Make the forward use only the entries of the parameters ``names`` that belong to the local
    query heads. All ranks hold these parameters in full."""
    rank, _ = rank_and_world(group)
    size = heads.query_heads[rank] or heads.queries_per_group[rank]
    begin = min(sum(heads.query_heads[:rank]), heads.heads - size)
    if names:
        hook = partial(_swap_in_local_entries, group, names, begin, size)
        attention.register_forward_pre_hook(hook)
        attention.register_forward_hook(partial(_restore_parameters, [attention]), always_call=True)


def reduce_rotary_key_gradient(attention: nn.Module, group: str) -> None:
    """All-reduce the gradient of the rotary key of DeepSeek attention, because all heads attend to
    it. The remaining columns of this projection feed a column-parallel layer, which reduces their
    gradient."""
    projection = getattr(attention, "kv_a_proj_with_mqa", None)
    if projection is not None:
        width: int = attention.qk_rope_head_dim  # type: ignore[assignment]
        projection.register_forward_hook(partial(_copy_last, group, width))


def make_parallel_norm(norm: Any, group: str, rows: ResidualRows | None) -> RMSNorm:
    """Return an `RMSNorm` that shares the weight of ``norm`` and reduces its gradient over the
    ranks. Each rank applies it to its rows while rows are split, or without ``rows`` to its
    heads."""
    kind = RMSNorm if rows is None else SplitRowsNorm
    parallel = kind(norm.weight.shape[0], norm.variance_epsilon, group=group, device="meta")
    if rows is not None:
        parallel.rows = rows  # type: ignore[assignment]
    parallel.weight = norm.weight
    return parallel.train(norm.training)


def reduce_weight_gradients(
    module: nn.Module, modules: list[nn.Module], group: str, rows: ResidualRows | None
) -> None:
    """All-reduce the gradients of weights of ``modules`` that only the ``forward`` of ``module``
    uses; see `make_parallel_norm`."""
    module.register_forward_pre_hook(partial(_swap_in_copies, group, rows, modules))
    module.register_forward_hook(partial(_restore_parameters, modules), always_call=True)


def is_rms_norm(norm: nn.Module) -> bool:
    """Return whether `RMSNorm` can replace a norm. `RMSNorm` needs fewer passes over the data."""
    eps = getattr(norm, "variance_epsilon", None)
    if not isinstance(eps, float) or state_names(norm) != ["weight"] or find_customizations(norm):
        return False
    x, weight = torch.tensor([[[1.0, -2.0, 4.0, 0.5]], [[3.0, 1.0, 2.0, 5.0]]], device="cpu")
    probe = make_probe(norm, parameters={"weight": weight[0]})
    return torch.allclose(probe.forward(x), F.rms_norm(x, (4,), weight[0], eps))


def _swap_in_copies(
    group: str, rows: ResidualRows | None, modules: list[nn.Module], module: nn.Module, args: object
) -> None:
    if not torch.is_grad_enabled() or (rows is not None and rows.sizes is None):
        return
    for owner in modules:
        parameters = direct_parameters(owner)
        owner.__dict__["_original_parameters"] = dict(parameters)
        for name, parameter in parameters.items():
            if parameter is not None:
                parameters[name] = copy_to_ranks(parameter, group)


def _swap_in_local_entries(
    group: str, names: list[str], begin: int, size: int, module: nn.Module, args: object
) -> None:
    parameters = direct_parameters(module)
    module.__dict__["_original_parameters"] = {name: parameters[name] for name in names}
    for name in names:
        parameters[name] = copy_to_ranks(parameters[name], group).narrow(0, begin, size)


def _copy_last(
    group: str, width: int, module: nn.Module, args: object, output: torch.Tensor
) -> torch.Tensor:
    if not torch.is_grad_enabled():
        return output
    rest, last = output.tensor_split([-width], -1)
    return torch.cat((rest, copy_to_ranks(last, group)), -1)


def _restore_parameters(
    modules: list[nn.Module], module: nn.Module, args: object, output: object
) -> None:
    for owner in modules:
        direct_parameters(owner).update(owner.__dict__.pop("_original_parameters", {}))
