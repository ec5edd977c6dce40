"""The decoder layers of Hugging Face transformers on shards: what replaces their modules, and the
hooks that lead rows to these. `plans` says which module is replaced. transformers is not imported.

    layers[0]             before it, each rank takes its rows
    norms                 RMSNorm; its weight's gradient is summed over the ranks' rows or heads
    q_proj, k_proj, v_proj    column-parallel by key-value group, one all-gather
    gate_proj, up_proj    column-parallel, one all-gather
    o_proj, down_proj     row-parallel
    experts               get this rank's rows, as the router does
    layers[-1]            after it, rows are gathered

All ranks get all rows of the embedding, because the model derives positions and mask from their
number. Without sequence parallelism, rows are neither split nor gathered, and the layers' norms
stay as they are.

Problem: ``q_proj(x)``, ``k_proj(x)`` and ``v_proj(x)`` are three calls in code that is not ours.
The code around them also derives the output's shape from x, which under sequence parallelism has
only this rank's rows.

Algorithm: a hook on the parent module (the attention or the MLP) runs all projections at once when
the parent is called, with one all-gather, and stores each output in its projection. The parent gets
a placeholder for x, a single zero expanded to the shape of the gathered x. A projection that is
called returns the stored output and forgets it.

A stored output outlives the parent's call only if an exception ends that call, as recomputing an
activation checkpoint may do; the next call overwrites it. All of this is plain Python, which
torch.compile traces into one graph.
"""

from __future__ import annotations

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
from tpkernels.nn.sharding import additions, position
from tpkernels.ops.matmul_all_reduce_rms_norm import matmul_all_reduce_rms_norm
from tpkernels.parallel.options import SequenceParallel
from tpkernels.torch_private import children_of, parameters_of, probe_of, state_of

if TYPE_CHECKING:
    import transformers

Tensors = tuple[torch.Tensor, ...]
GATE_UP = ("gate_proj", "up_proj")
PROMPT_ROWS = 16  #: tokens per rank from which ``sequence_parallel="prefill"`` splits a sequence
SEQUENCE_DIM = 1  #: transformers' activations are [batch, sequence, width]

#: Model types whose layers `join_norms` knows.
JOINED = ("llama", "mistral", "qwen2", "qwen3")


@dataclass
class ResidualRows:
    """The rows of the residual stream in the forward that is running: how they are split and, where
    `join_norms` was called, what a block's last projection does besides."""

    world: int
    fewest: int = 1  #: shorter sequences are not split; all ranks have all their rows
    sizes: list[int] | None = None  #: rows of each rank; None: not split
    batch: int = 1  #: sequences
    residual: torch.Tensor | None = None  #: which the running block adds to its output, if any
    norm: RMSNorm | None = None  #: of the block after it
    sum: torch.Tensor | None = None  #: the last such sum
    normed: torch.Tensor | None = None  #: that sum, normalised

    @classmethod
    def of(cls, group: str, when: SequenceParallel) -> ResidualRows:
        """Make those of a model on the ranks of a group."""
        _, world = position(group)
        return cls(world, PROMPT_ROWS * world if when == "prefill" else 1)

    def split(self, batch: int, tokens: int) -> None:
        """Begin a batch of sequences of this many tokens."""
        self.batch = batch
        self.sizes = shard_sizes(tokens, self.world) if tokens >= self.fewest else None

    def sizes_of(self, x: torch.Tensor) -> list[int] | None:
        """Return the rows of each rank of activations, which may be flattened to [rows, width]."""
        if self.sizes is None or x.dim() > 2:
            return self.sizes
        return [self.batch * size for size in self.sizes]


@dataclass
class StoredOutput:
    """The output of a projection that has not been called yet, and what it is to be called with. An
    attribute of the module itself takes 1.3 us to set (AMD EPYC Zen 4, torch 2.13, 2026-11-25), of
    this object 0.03."""

    output: torch.Tensor | None = None
    input: torch.Tensor | None = None


class SharedInputLinear(ColumnParallelLinear):
    """A column-parallel projection whose output is computed by the hook of its parent module."""

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
    """A row-parallel projection that knows the split of the sequence."""

    rows: ResidualRows | None = None  #: None: no sequence parallelism

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        rows = self.rows
        if rows is not None and rows.residual is not None:
            return self._end_block(rows, rows.residual, x)
        sizes = None if rows is None else rows.sizes_of(x)
        return super().forward(x, shard_sizes=sizes, sequence_parallel=sizes is not None)

    def _end_block(
        self, rows: ResidualRows, residual: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        rows.residual = None
        if rows.norm is None:
            rows.sum = super().forward(x, residual=residual, sequence_parallel=False)
            return rows.sum
        x, w = self._factors(x)
        weight, eps = rows.norm.weight, rows.norm.eps
        rows.normed, rows.sum = matmul_all_reduce_rms_norm(
            x, w, weight, self.group, bias=self.bias, residual=residual, eps=eps
        )
        return rows.normed


class SplitRowsMoE(MoE):
    """Experts that know the split of the sequence."""

    rows: ResidualRows | None = None  #: None: no sequence parallelism

    def forward(self, hidden_states: torch.Tensor, *routes: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        sizes = None if self.rows is None else self.rows.sizes_of(hidden_states)
        return super().forward(
            hidden_states, *routes, shard_sizes=sizes, sequence_parallel=sizes is not None
        )


class SplitRowsNorm(RMSNorm):
    """A norm of this rank's rows, or of all rows while the sequence is not split."""

    rows: ResidualRows

    def shared_weight(self) -> torch.Tensor:
        return self.weight if self.rows.sizes is None else super().shared_weight()


def project(
    parent: nn.Module, names: tuple[str, ...], x: torch.Tensor, sizes: list[int] | None = None
) -> torch.Tensor:
    """Store the outputs of projections of x, of which each rank has ``sizes`` rows, or all. Return
    what they are to be called with: x, or a placeholder for all rows."""
    modules: Any = children_of(parent)
    layers = [modules[name] for name in names]
    outputs = column_parallel(x, layers, shard_sizes=sizes, sequence_parallel=sizes is not None)
    passed = x
    if sizes is not None:
        shape = list(x.shape)
        shape[-2] = sum(sizes)
        passed = x.new_zeros(()).expand(shape)
    for layer, output in zip(layers, outputs, strict=True):
        layer.stored.output, layer.stored.input = output, passed
    return passed


def share_input(
    names: tuple[str, ...], rows: ResidualRows | None, module: nn.Module, args: Any, kwargs: Any
) -> tuple[Tensors, dict[str, Any]] | None:
    """Forward pre-hook (with keyword arguments) of the parent of the projections ``names``."""
    x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    sizes = None
    if rows is not None:
        # A checkpointed layer is recomputed alone, perhaps after a forward of another length. Its
        # attention runs first and reads the number of tokens from the rotary embedding.
        if "position_embeddings" in kwargs:
            rows.split(x.shape[0], kwargs["position_embeddings"][0].shape[-2])
        sizes = rows.sizes_of(x)
    placeholder = project(module, names, x, sizes)
    if sizes is None:
        return None
    if "hidden_states" in kwargs:
        return args, {**kwargs, "hidden_states": placeholder}
    return (placeholder, *args[1:]), kwargs


def split_rows(group: str, rows: ResidualRows, module: nn.Module, args: Tensors) -> Tensors | None:
    """Forward pre-hook of the first layer: each rank keeps its rows."""
    x, *others = args
    rows.split(x.shape[0], x.shape[SEQUENCE_DIM])
    if rows.sizes is None:
        return None
    return (split_over_ranks(x, group, SEQUENCE_DIM, rows.sizes), *others)


def gather_rows(
    group: str, rows: ResidualRows, module: nn.Module, args: object, output: torch.Tensor | Tensors
) -> torch.Tensor | tuple[object, ...]:
    """Forward hook of the last norm or layer: all ranks get all rows again."""
    if rows.sizes is None:
        return output
    if isinstance(output, tuple):
        return (gather_rows(group, rows, module, args, output[0]), *output[1:])
    return gather_from_ranks(output, group, SEQUENCE_DIM, rows.sizes)


def gather_recorded(
    group: str,
    rows: ResidualRows | None,
    heads_of_layers: Sequence[list[int] | None],
    module: nn.Module,
    args: object,
    output: tuple[Any, ...] | transformers.utils.ModelOutput,
) -> tuple[object, ...] | None:
    """Forward hook of the base model: gather the hidden states, attention weights and routers'
    logits that it was asked to return, of which each rank has its rows and, where they are split,
    its heads."""
    last, sizes = output[0], None if rows is None else rows.sizes
    rank, _ = position(group)

    def gather(values: object) -> object:
        if not isinstance(values, tuple):
            return values
        pairs = zip([*heads_of_layers, None], values, strict=False)  # None: the last hidden state
        return tuple(gather_one(heads, value) for heads, value in pairs)

    def gather_one(heads: list[int] | None, value: torch.Tensor | None) -> torch.Tensor | None:
        if value is None or value is last:  # not recorded, or whole already
            return value
        if value.dim() == 4:
            if heads is None:
                return value
            local = value[:, : heads[rank]].contiguous()
            return gather_from_ranks(local, group, 1, heads)
        if sizes is None or rows is None:
            return value
        if value.dim() == 2:  # of a router
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
    """Let a block (attention or MLP) of a parallel model end in one op, unless rows are split: it
    sums over the ranks, adds the residual and normalises the rows for the next block. Hooks on
    blocks are not called then. Not for training with activation checkpoints."""
    layers = list(getattr(model, model.base_model_prefix).layers)
    next_norms = [layer.input_layernorm for layer in layers[1:]]
    for layer, norm in zip(layers, [*next_norms, None], strict=True):
        layer.forward = partial(joined_layer, layer, layer.self_attn.o_proj.rows, norm)


def joined_layer(
    layer: transformers.modeling_layers.GradientCheckpointingLayer,
    rows: ResidualRows,
    next_norm: RMSNorm | None,
    hidden_states: torch.Tensor,
    **options: Any,
) -> torch.Tensor | None:
    """Do what the decoder layer's ``forward`` does; see `join_norms`."""
    rows.residual = None  # of a forward that an exception has ended
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
    """Raise what `pack_` would raise for the weights of a model and its ``experts``."""
    for name, module in model.named_modules():
        weights = ["weight"] if isinstance(module, nn.Linear) else []
        for key in PROJECTIONS if name in experts else weights:
            check_packable(getattr(module, key), f"{name}.{key}")
            if dtype == torch.int8:
                check_finite(getattr(module, key), f"{name}.{key}")


def set_groups(attention: nn.Module, heads: Heads, group: str) -> None:
    """Tell an attention of transformers how many of this rank's query heads share a key head."""
    attention.num_key_value_groups = heads.queries_per_group[position(group)[0]]  # type: ignore[assignment]


def share_heads(attention: nn.Module, heads: Heads, names: list[str], group: str) -> None:
    """Let each rank use its query heads' entries of parameters that all ranks have whole."""
    rank, _ = position(group)
    size = heads.query_heads[rank] or heads.queries_per_group[rank]
    begin = min(sum(heads.query_heads[:rank]), heads.heads - size)
    if names:
        hook = partial(_lend_entries, group, names, begin, size)
        attention.register_forward_pre_hook(hook)
        attention.register_forward_hook(partial(_take_back, [attention]), always_call=True)


def share_rotary_key(attention: nn.Module, group: str) -> None:
    """Sum the gradient of the rotary key of DeepSeek's attention over the ranks' heads, which all
    attend to it. The other columns that are projected with it lead to a column-parallel layer,
    which sums their gradient."""
    projection = getattr(attention, "kv_a_proj_with_mqa", None)
    if projection is not None:
        width: int = attention.qk_rope_head_dim  # type: ignore[assignment]
        projection.register_forward_hook(partial(_copy_last, group, width))


def parallel_norm(norm: Any, group: str, rows: ResidualRows | None) -> RMSNorm:
    """Return a norm with the weight of `is_rms_norm`'s, whose gradient is summed over the ranks,
    each of which applies it to its part of the input: its rows, while they are split, or without
    ``rows`` its heads."""
    kind = RMSNorm if rows is None else SplitRowsNorm
    parallel = kind(norm.weight.shape[0], norm.variance_epsilon, group=group, device="meta")
    if rows is not None:
        parallel.rows = rows  # type: ignore[assignment]
    parallel.weight = norm.weight
    return parallel.train(norm.training)


def share_weights(
    module: nn.Module, parts: list[nn.Module], group: str, rows: ResidualRows | None
) -> None:
    """Sum the gradients of weights that only the ``forward`` of a module uses, as
    `parallel_norm`."""
    module.register_forward_pre_hook(partial(_lend_copies, group, rows, parts))
    module.register_forward_hook(partial(_take_back, parts), always_call=True)


def is_rms_norm(norm: nn.Module) -> bool:
    """Return whether a norm does what `RMSNorm` does, which takes fewer passes, and no more."""
    eps = getattr(norm, "variance_epsilon", None)
    if not isinstance(eps, float) or state_of(norm) != ["weight"] or additions(norm):
        return False
    x, weight = torch.tensor([[[1.0, -2.0, 4.0, 0.5]], [[3.0, 1.0, 2.0, 5.0]]], device="cpu")
    probe = probe_of(norm, parameters={"weight": weight[0]})
    return torch.allclose(probe.forward(x), F.rms_norm(x, (4,), weight[0], eps))


def _lend_copies(
    group: str, rows: ResidualRows | None, parts: list[nn.Module], module: nn.Module, args: object
) -> None:
    if not torch.is_grad_enabled() or (rows is not None and rows.sizes is None):
        return
    for part in parts:
        parameters = parameters_of(part)
        part.__dict__["_lent"] = dict(parameters)
        for name, parameter in parameters.items():
            if parameter is not None:
                parameters[name] = copy_to_ranks(parameter, group)


def _lend_entries(
    group: str, names: list[str], begin: int, size: int, module: nn.Module, args: object
) -> None:
    parameters = parameters_of(module)
    module.__dict__["_lent"] = {name: parameters[name] for name in names}
    for name in names:
        parameters[name] = copy_to_ranks(parameters[name], group).narrow(0, begin, size)


def _copy_last(
    group: str, width: int, module: nn.Module, args: object, output: torch.Tensor
) -> torch.Tensor:
    if not torch.is_grad_enabled():
        return output
    others, last = output.tensor_split([-width], -1)
    return torch.cat((others, copy_to_ranks(last, group)), -1)


def _take_back(parts: list[nn.Module], module: nn.Module, args: object, output: object) -> None:
    for part in parts:
        parameters_of(part).update(part.__dict__.pop("_lent", {}))
