"""The Llama family of Hugging Face transformers: which layer replaces which module.

    embed_tokens          VocabParallelEmbedding; all ranks get all rows, because the model derives
                          positions and mask from their number
    layers[0]             before it, each rank takes its rows
    input_layernorm, post_attention_layernorm
                          RMSNorm; its weight's gradient is summed over the ranks' rows
    q_proj, k_proj, v_proj    column-parallel by key-value group, one all-gather
    q_norm, k_norm        RMSNorm; its weight's gradient is summed over the ranks' heads
    o_proj, down_proj     RowParallelLinear
    gate_proj, up_proj    column-parallel, one all-gather
    norm                  like the other norms; after it the rows are gathered, so that any head
                          gets the whole ``last_hidden_state``
    lm_head               ParallelLMHead; its logits are gathered

Without sequence parallelism, rows are neither split nor gathered, and the layers' norms stay as
they are. With ``ffn_only``, nothing but gate_proj, up_proj and down_proj is replaced, without
sequence parallelism. Modules are found by name; transformers is not imported.

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from tpkernels.local.packed import check_finite, check_packable
from tpkernels.nn import (
    ColumnParallelLinear,
    ParallelLMHead,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    column_parallel,
    gather_from_ranks,
    pack_,
    split_over_ranks,
)
from tpkernels.nn.linear import QKV, Heads, check_linear
from tpkernels.nn.sharding import check_parameter, position
from tpkernels.nn.vocabulary import check_embedding
from tpkernels.ops.matmul_all_reduce_rms_norm import matmul_all_reduce_rms_norm
from tpkernels.shards import shard_sizes

GATE_UP = ("gate_proj", "up_proj")
LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
PROMPT_ROWS = 16  #: tokens per rank from which ``sequence_parallel="prefill"`` splits a sequence
SEQUENCE_DIM = 1  #: transformers' activations are [batch, sequence, width]

SequenceParallel = bool | Literal["prefill"]
Pack = bool | Literal["int8"]

#: By ``config.model_type``, the norms of the attention that are applied to each head. All else has
#: the names of the family.
HEAD_NORMS: dict[str, tuple[str, ...]] = {
    "llama": (),
    "mistral": (),
    "qwen2": (),
    "qwen3": ("q_norm", "k_norm"),
}


@dataclass
class Rows:
    """The rows of the residual stream in the forward that is running: how they are split and, where
    `join_norms` was called, what a block's last projection does besides."""

    world: int
    fewest: int = 1  #: shorter sequences are not split; all ranks have all their rows
    sizes: list[int] | None = None  #: rows of each rank; None: not split
    residual: torch.Tensor | None = None  #: which the running block adds to its output, if any
    norm: RMSNorm | None = None  #: of the block after it
    sum: torch.Tensor | None = None  #: the last such sum
    normed: torch.Tensor | None = None  #: that sum, normalised

    @classmethod
    def of(cls, group: str, when: SequenceParallel) -> Rows:
        """Make those of a model on the ranks of a group."""
        _, world = position(group)
        return cls(world, PROMPT_ROWS * world if when == "prefill" else 1)

    def split(self, tokens: int) -> None:
        """Begin a sequence of this many tokens."""
        self.sizes = shard_sizes(tokens, self.world) if tokens >= self.fewest else None


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
                "this projection shares its input with others and is computed when its parent "
                f"module is called, for the parent's own input; call the parent instead: {self!r}"
            )
        return output


class SplitRowsLinear(RowParallelLinear):
    """A row-parallel projection that knows the split of the sequence."""

    rows: Rows | None = None  #: None: no sequence parallelism

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        rows = self.rows
        if rows is not None and rows.residual is not None:
            return self._end_block(rows, rows.residual, x)
        sizes = None if rows is None else rows.sizes
        return super().forward(x, shard_sizes=sizes, sequence_parallel=sizes is not None)

    def _end_block(self, rows: Rows, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
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


class SplitRowsNorm(RMSNorm):
    """A norm of this rank's rows, or of all rows while the sequence is not split."""

    rows: Rows

    def shared_weight(self) -> torch.Tensor:
        return self.weight if self.rows.sizes is None else super().shared_weight()


def project(
    parent: nn.Module, names: tuple[str, ...], x: torch.Tensor, sizes: list[int] | None = None
) -> torch.Tensor:
    """Store the outputs of projections of x, of which each rank has ``sizes`` rows, or all. Return
    what they are to be called with: x, or a placeholder for all rows."""
    modules: Any = parent._modules
    layers = [modules[name] for name in names]
    outputs = column_parallel(x, layers, shard_sizes=sizes, sequence_parallel=sizes is not None)
    passed = x
    if sizes is not None:
        shape = list(x.shape)
        shape[SEQUENCE_DIM] = sum(sizes)
        passed = x.new_zeros(()).expand(shape)
    for layer, output in zip(layers, outputs, strict=True):
        layer.stored.output, layer.stored.input = output, passed
    return passed


def share_input(
    names: tuple[str, ...], rows: Rows | None, module: nn.Module, args: Any, kwargs: Any
) -> Any:
    """Forward pre-hook (with keyword arguments) of the parent of the projections ``names``."""
    x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    sizes = None
    if rows is not None:
        # A checkpointed layer is recomputed alone, perhaps after a forward of another length. Its
        # attention runs first and reads the number of tokens from the rotary embedding.
        if "position_embeddings" in kwargs:
            rows.split(kwargs["position_embeddings"][0].shape[SEQUENCE_DIM])
        sizes = rows.sizes
    placeholder = project(module, names, x, sizes)
    if sizes is None:
        return None
    if "hidden_states" in kwargs:
        return args, {**kwargs, "hidden_states": placeholder}
    return (placeholder, *args[1:]), kwargs


def split_rows(group: str, rows: Rows, module: nn.Module, args: Any) -> Any:
    """Forward pre-hook of the first layer: each rank keeps its rows."""
    x, *others = args
    rows.split(x.shape[SEQUENCE_DIM])
    if rows.sizes is None:
        return None
    return (split_over_ranks(x, group, SEQUENCE_DIM, rows.sizes), *others)


def gather_rows(group: str, rows: Rows, module: nn.Module, args: Any, output: Any) -> Any:
    """Forward hook of the last norm or layer: all ranks get all rows again."""
    if rows.sizes is None:
        return output
    if isinstance(output, tuple):
        return (gather_rows(group, rows, module, args, output[0]), *output[1:])
    return gather_from_ranks(output, group, SEQUENCE_DIM, rows.sizes)


def gather_recorded(
    group: str,
    rows: Rows | None,
    heads_of_layers: Sequence[list[int] | None],
    module: Any,
    args: Any,
    output: Any,
) -> tuple[Any, ...] | None:
    """Forward hook of the base model: gather the hidden states and attention weights that it was
    asked to return, of which each rank has its rows and, where they are split, its heads."""
    last, sizes = output[0], None if rows is None else rows.sizes
    rank, _ = position(group)

    def gather(values: Any) -> Any:
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
        return value if sizes is None else gather_from_ranks(value, group, SEQUENCE_DIM, sizes)

    if isinstance(output, tuple):  # return_dict=False
        return tuple(map(gather, output))
    for name in ("hidden_states", "attentions"):
        if output.get(name) is not None:
            output[name] = gather(output[name])
    return None


def join_norms(model: Any) -> None:
    """Let a block (attention or MLP) of a parallel model end in one op, unless rows are split: it
    sums over the ranks, adds the residual and normalises the rows for the next block. Hooks on
    blocks are not called then. Not for training with activation checkpoints."""
    layers = list(getattr(model, model.base_model_prefix).layers)
    next_norms = [layer.input_layernorm for layer in layers[1:]]
    for layer, norm in zip(layers, [*next_norms, None], strict=True):
        layer.forward = partial(joined_layer, layer, layer.self_attn.o_proj.rows, norm)


def joined_layer(
    layer: Any, rows: Rows, next_norm: RMSNorm | None, hidden_states: torch.Tensor, **options: Any
) -> torch.Tensor | None:
    """Do what the decoder layer's ``forward`` does; see `join_norms`."""
    rows.residual = None  # of a forward that an exception has ended
    if rows.sizes is not None:
        split: torch.Tensor = type(layer).forward(layer, hidden_states, **options)
        return split
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


def packed_dtype(pack: Pack) -> torch.dtype | None:
    """Return the dtype by which `pack_` does what ``pack`` says."""
    return torch.int8 if pack == "int8" else None


def head_norms_of(config: Any, what: str) -> tuple[str, ...]:
    """Return the entry of `HEAD_NORMS` for a ``config`` of transformers; ``what`` names its owner
    in messages.

    Raises:
        NotImplementedError: its architecture is not supported.
    """
    model_type = getattr(config, "model_type", None)
    if model_type not in HEAD_NORMS:
        raise NotImplementedError(
            f"{what} (model_type {model_type!r}) is not supported without a plan; "
            f"these are: {', '.join(HEAD_NORMS)}; pass plan={{...}}"
        )
    return HEAD_NORMS[model_type]


def apply(
    model: nn.Module,
    group: str,
    *,
    sequence_parallel: SequenceParallel,
    ffn_only: bool = False,
    pack: Pack = False,
) -> None:
    """Apply `tpkernels.parallelize` without a plan. All modules are checked before the first is
    replaced.

    Args:
        group: a group's name, which may be `tpkernels.nn.sharding.planned`.
    """
    head_norms = head_norms_of(getattr(model, "config", None), type(model).__name__)
    _, world = position(group)
    inner = getattr(model, "base_model_prefix", "")
    base: Any = getattr(model, inner, model)
    prefix = "" if base is model else f"{inner}."
    check_embedding(_module(base, "embed_tokens", prefix), f"{prefix}embed_tokens")
    _check_norm(base, "norm", prefix)
    layers: list[tuple[Any, Heads]] = [
        (layer, _check_layer(layer, f"{prefix}layers.{number}.", head_norms, world))
        for number, layer in _module(base, "layers", prefix).named_children()
    ]
    head = getattr(model, "lm_head", None)
    if head is not None:
        check_linear(head, "lm_head")
    check_packing(model, pack)
    rows = Rows.of(group, sequence_parallel) if sequence_parallel and not ffn_only else None
    for layer, heads in layers:
        _replace_inputs(layer.mlp, {name: {} for name in GATE_UP}, group, rows)
        _replace_linear(layer.mlp, "down_proj", SplitRowsLinear, group, rows)
        if not ffn_only:
            splits = {name: heads.split_of(name) for name in QKV}
            in_sizes = splits["q_proj"]["out_sizes"]
            attention = layer.self_attn
            _replace_inputs(attention, splits, group, rows)
            set_groups(attention, heads, group)
            _replace_linear(attention, "o_proj", SplitRowsLinear, group, rows, in_sizes=in_sizes)
            for name in head_norms:
                _replace_norm(attention, name, group, None)
        for name in LAYER_NORMS if rows is not None else ():
            _replace_norm(layer, name, group, rows)
    if not ffn_only:
        _replace_ends(model, base, group, rows, [heads.query_heads for _, heads in layers])
    if pack:
        pack_(model, dtype=packed_dtype(pack))


def check_packing(model: nn.Module, pack: Pack) -> None:
    """Raise if the weights of a model are to be packed and cannot be."""
    for name, module in model.named_modules():
        if pack and isinstance(module, nn.Linear):
            check_packable(module.weight, f"{name}.weight")
            if pack == "int8":
                check_finite(module.weight, f"{name}.weight")


def _module(parent: nn.Module, name: str, prefix: str) -> nn.Module:
    try:
        return parent.get_submodule(name)
    except AttributeError:
        raise TypeError(
            f"the model has no module {prefix}{name}, which models of its architecture have"
        ) from None


def _check_norm(parent: nn.Module, name: str, prefix: str) -> None:
    norm = _module(parent, name, prefix)
    if not isinstance(getattr(norm, "variance_epsilon", None), float):
        raise TypeError(
            f"{prefix}{name} is a {type(norm).__name__}, not an RMSNorm of the Llama family"
        )
    check_parameter(norm.get_parameter("weight"), f"{prefix}{name}.weight")


def _check_layer(layer: nn.Module, prefix: str, head_norms: tuple[str, ...], world: int) -> Heads:
    """Check the modules of a decoder layer; return the split of its heads."""

    def linear(name: str) -> nn.Linear:
        return check_linear(_module(layer, name, prefix), prefix + name)

    q, k, v, o = (linear(f"self_attn.{name}") for name in (*QKV, "o_proj"))
    for name in (*GATE_UP, "down_proj"):
        linear(f"mlp.{name}")
    for name in (*LAYER_NORMS, *(f"self_attn.{norm}" for norm in head_norms)):
        _check_norm(layer, name, prefix)
    attention: Any = layer.get_submodule("self_attn")
    head_dim, queries, keys = attention.head_dim, q.out_features, k.out_features
    try:
        heads = Heads(queries // head_dim, keys // head_dim, head_dim, world)
    except ValueError as error:
        raise ValueError(f"{prefix}self_attn: {error}") from None
    for name, width, expected in (
        ("v_proj", v.out_features, keys),
        ("o_proj", o.in_features, queries),
    ):
        if width != expected:
            raise ValueError(
                f"{prefix}self_attn.{name} has {width} features, expected {expected}: q_proj has "
                f"{queries} and k_proj {keys}"
            )
    if queries % head_dim or keys % head_dim:
        raise ValueError(
            f"{prefix}self_attn: q_proj has {queries} features and k_proj {keys}; both must be "
            f"multiples of head_dim, {head_dim}"
        )
    return heads


def _replace_ends(
    model: Any, base: Any, group: str, rows: Rows | None, heads: Sequence[list[int] | None]
) -> None:
    """Replace what comes before and after the layers."""
    head = getattr(model, "lm_head", None)
    embedding = VocabParallelEmbedding.from_embedding(base.embed_tokens, group)
    if head is not None:
        model.lm_head = ParallelLMHead.from_linear(head, group, gather_output=True)
        if head.weight is base.embed_tokens.weight:
            model.lm_head.tie(embedding)
    base.embed_tokens = embedding
    base.register_forward_hook(partial(gather_recorded, group, rows, heads))
    if rows is not None:
        _replace_norm(base, "norm", group, rows)
        base.layers[0].register_forward_pre_hook(partial(split_rows, group, rows))
        base.norm.register_forward_hook(partial(gather_rows, group, rows))


def set_groups(attention: Any, heads: Heads, group: str) -> None:
    """Tell an attention of transformers how many of this rank's query heads share a key head."""
    attention.num_key_value_groups = heads.queries_per_group[position(group)[0]]


def _replace_inputs(
    parent: nn.Module, projections: Mapping[str, Any], group: str, rows: Rows | None
) -> None:
    """Replace projections of one input, each with options of its layer."""
    for name, options in projections.items():
        _replace_linear(parent, name, SharedInputLinear, group, rows, **options)
    hook = partial(share_input, tuple(projections), rows)
    parent.register_forward_pre_hook(hook, with_kwargs=True)


def _replace_linear(
    parent: nn.Module,
    name: str,
    kind: type[SharedInputLinear | SplitRowsLinear],
    group: str,
    rows: Rows | None,
    **options: Any,
) -> None:
    """Replace a linear layer by a parallel one; without ``rows``, no sequence is split."""
    options |= {"sequence_parallel": rows is not None, "sequence_dim": SEQUENCE_DIM}
    layer = kind.from_linear(getattr(parent, name), group, **options)
    if isinstance(layer, SplitRowsLinear):
        layer.rows = rows
    setattr(parent, name, layer)


def _replace_norm(parent: nn.Module, name: str, group: str, rows: Rows | None) -> None:
    """Replace a norm by one that each rank applies to its rows; without ``rows``, to its heads."""
    norm = getattr(parent, name)
    kind = RMSNorm if rows is None else SplitRowsNorm
    parallel: Any = kind(norm.weight.shape[0], norm.variance_epsilon, group=group, device="meta")
    if rows is not None:
        parallel.rows = rows
    parallel.weight = norm.weight
    setattr(parent, name, parallel.train(norm.training))
