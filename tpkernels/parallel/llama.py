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
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from tpkernels.nn import ParallelLMHead, RMSNorm, VocabParallelEmbedding, check, pack_
from tpkernels.nn.embedding import sharded_embedding
from tpkernels.nn.heads import QKV, Heads
from tpkernels.nn.linear import sharded_linear
from tpkernels.nn.sharding import SequenceOptions
from tpkernels.nn.split import position
from tpkernels.parallel.shared_input import (
    SEQUENCE_DIM,
    GatherRows,
    OwnRowsLinear,
    OwnRowsNorm,
    Rows,
    SharedInputLinear,
    ShareInput,
    SplitRows,
)

GATE_UP = ("gate_proj", "up_proj")
LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
PROMPT_ROWS = 16  #: tokens per rank from which ``sequence_parallel="prefill"`` splits a sequence

SequenceParallel = bool | Literal["prefill"]


@dataclass(frozen=True)
class Architecture:
    """What a ``config.model_type`` has in addition to the names that the whole family has."""

    head_norms: tuple[str, ...] = ()  #: norms of the attention, applied to each head


ARCHITECTURES = {
    "llama": Architecture(),
    "mistral": Architecture(),
    "qwen2": Architecture(),
    "qwen3": Architecture(head_norms=("q_norm", "k_norm")),
}


@dataclass(frozen=True)
class Parts:
    """A decoder layer whose modules have been checked, and the split of its heads."""

    layer: nn.Module
    heads: Heads


def apply(
    model: nn.Module,
    group: str,
    *,
    sequence_parallel: SequenceParallel,
    ffn_only: bool = False,
    pack: bool,
) -> None:
    """Apply `tpkernels.parallelize` without a plan. All modules are checked before the first is
    replaced.

    Args:
        group: a group's name, which may be `tpkernels.nn.split.planned`.
    """
    architecture = architecture_of(getattr(model, "config", None), type(model).__name__)
    _, world = position(group)
    inner = getattr(model, "base_model_prefix", "")
    base: Any = getattr(model, inner, model)
    prefix = "" if base is model else f"{inner}."
    check.embedding(_module(base, "embed_tokens", prefix), f"{prefix}embed_tokens")
    _check_norm(base, "norm", prefix)
    layers = list(_parts(base, prefix, architecture, world))
    head = getattr(model, "lm_head", None)
    if head is not None:
        check.linear(head, "lm_head")
    if pack:
        check.packable(model)

    if ffn_only:
        for parts in layers:
            _replace_mlp(parts.layer.get_submodule("mlp"), group, None)
    else:
        _replace_all(model, base, layers, group, architecture, sequence_parallel)
    if pack:
        pack_(model)


def _replace_all(
    model: Any,
    base: Any,
    layers: list[Parts],
    group: str,
    architecture: Architecture,
    sequence_parallel: SequenceParallel,
) -> None:
    world = position(group)[1]
    fewest = PROMPT_ROWS * world if sequence_parallel == "prefill" else 1
    rows = Rows(world, fewest) if sequence_parallel else None
    head = getattr(model, "lm_head", None)
    embedding = sharded_embedding(VocabParallelEmbedding, base.embed_tokens, group)
    if head is not None:
        parallel_head = sharded_linear(ParallelLMHead, head, group, gather_output=True)
        if head.weight is base.embed_tokens.weight:
            parallel_head.tie(embedding)
        model.lm_head = parallel_head
    base.embed_tokens = embedding
    for parts in layers:
        _replace(parts, group, architecture, rows)
    if rows is not None:
        base.norm = _norm(base.norm, group, rows)
        base.layers[0].register_forward_pre_hook(SplitRows(group, rows), with_kwargs=True)
        base.norm.register_forward_hook(GatherRows(group, rows))


def architecture_of(config: Any, what: str) -> Architecture:
    """Return the architecture of a ``config`` of transformers; ``what`` names its owner in
    messages.

    Raises:
        NotImplementedError: it is not supported.
    """
    model_type = getattr(config, "model_type", None)
    if model_type not in ARCHITECTURES:
        raise NotImplementedError(
            f"{what} (model_type {model_type!r}) is not supported without a plan; "
            f"these are: {', '.join(ARCHITECTURES)}; pass plan={{...}}"
        )
    return ARCHITECTURES[model_type]


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
    check.plain_parameter(norm.get_parameter("weight"), f"{prefix}{name}.weight")


def _parts(base: nn.Module, prefix: str, architecture: Architecture, world: int) -> Iterator[Parts]:
    layers = _module(base, "layers", prefix)
    for number, layer in layers.named_children():
        name = f"{prefix}layers.{number}."
        names = [f"self_attn.{each}" for each in (*QKV, "o_proj")]
        names += [f"mlp.{each}" for each in (*GATE_UP, "down_proj")]
        linears = {each: check.linear(_module(layer, each, name), name + each) for each in names}
        for each in (*LAYER_NORMS, *(f"self_attn.{norm}" for norm in architecture.head_norms)):
            _check_norm(layer, each, name)
        attention: Any = layer.get_submodule("self_attn")
        head_dim = attention.head_dim
        queries, keys = (linears[f"self_attn.{each}"].out_features for each in QKV[:2])
        try:
            heads = Heads(queries // head_dim, keys // head_dim, head_dim, world)
        except ValueError as error:
            raise ValueError(f"{name}self_attn: {error}") from None
        for each, expected in (("v_proj", keys), ("o_proj", queries)):
            linear = linears[f"self_attn.{each}"]
            width = linear.in_features if each == "o_proj" else linear.out_features
            if width != expected:
                raise ValueError(
                    f"{name}self_attn.{each} has {width} features, expected {expected}: q_proj has "
                    f"{queries} and k_proj {keys}"
                )
        if queries % head_dim or keys % head_dim:
            raise ValueError(
                f"{name}self_attn: q_proj has {queries} features and k_proj {keys}; both must be "
                f"multiples of head_dim, {head_dim}"
            )
        yield Parts(layer, heads)


def _norm(norm: Any, group: str, rows: Rows | None = None) -> RMSNorm:
    """Make the norm that each rank applies to its rows, or without ``rows`` to its heads."""
    size, eps = norm.weight.shape[0], norm.variance_epsilon
    if rows is None:
        parallel = RMSNorm(size, eps, group=group, device="meta")
    else:
        parallel = OwnRowsNorm(size, eps, group=group, device="meta")
        parallel.rows = rows
    parallel.weight = norm.weight
    return parallel.train(norm.training)


def _replace(parts: Parts, group: str, architecture: Architecture, rows: Rows | None) -> None:
    options = _options(rows)
    attention = parts.layer.get_submodule("self_attn")
    for name, (sizes, stand_in) in parts.heads.projections.items():
        linear = getattr(attention, name)
        layer = sharded_linear(
            SharedInputLinear, linear, group, out_sizes=sizes, stand_in=stand_in, **options
        )
        setattr(attention, name, layer)
    _replace_row_parallel(attention, "o_proj", group, rows, parts.heads.query_sizes)
    attention.register_forward_pre_hook(ShareInput(QKV, rows), with_kwargs=True)
    for name in architecture.head_norms:
        setattr(attention, name, _norm(getattr(attention, name), group))
    _replace_mlp(parts.layer.get_submodule("mlp"), group, rows)
    if rows is not None:
        for name in LAYER_NORMS:
            setattr(parts.layer, name, _norm(getattr(parts.layer, name), group, rows))


def _replace_mlp(mlp: nn.Module, group: str, rows: Rows | None) -> None:
    for name in GATE_UP:
        layer = sharded_linear(SharedInputLinear, getattr(mlp, name), group, **_options(rows))
        setattr(mlp, name, layer)
    _replace_row_parallel(mlp, "down_proj", group, rows, None)
    mlp.register_forward_pre_hook(ShareInput(GATE_UP, rows), with_kwargs=True)


def _replace_row_parallel(
    owner: nn.Module, name: str, group: str, rows: Rows | None, in_sizes: list[int] | None
) -> None:
    linear = getattr(owner, name)
    layer = sharded_linear(OwnRowsLinear, linear, group, in_sizes=in_sizes, **_options(rows))
    layer.rows = rows
    setattr(owner, name, layer)


def _options(rows: Rows | None) -> SequenceOptions:
    return {"sequence_parallel": rows is not None, "sequence_dim": SEQUENCE_DIM}
