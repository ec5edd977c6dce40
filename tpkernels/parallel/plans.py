"""The plan that a model of transformers brings: ``base_model_tp_plan`` of its configuration, which
names a style for each projection.

Problem: the styles say how a weight is split, in chunks of equal size. They do not say what the
code between two projections does with its columns, so they allow neither uneven shards nor heads
that do not divide by the ranks, and where the code cuts its input in two (Phi-3's
``gate_up_proj``), they gather all columns on all ranks.

Algorithm: the projections of one parent module are a `Block`. Its code is run on a few columns,
with stand-ins for the projections. If each column of the result depends on its own column alone,
any split is right, and so is one of each half of a packed weight. Otherwise the block must be an
attention, which is split by key-value heads; or the plan gathers the columns, which is right for
all code. Anything else is refused.

    colwise, packed_colwise        column-parallel; each rank uses its heads' entries of a vector
    colwise_gather_output (_rep)   column-parallel; gathered unless the code allows a split
    mla_kv_a_proj                  the same; the latents of DeepSeek's attention
    rowwise                        row-parallel, split like the block's columns
    rowwise_split_input (_rep)     row-parallel; takes its columns of a whole input
    replicated_with_grad_allreduce the gradient is summed over the ranks' heads
    moe_tp_experts                 each expert's width is split, or experts go to ranks whole
    embedding_rowwise, _colwise    any embedding of tokens is split by vocabulary
    replicate, local_params        on all ranks
"""

from __future__ import annotations

import copy
import difflib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tpkernels.common.shards import shard_sizes
from tpkernels.nn import (
    ColumnParallelLinear,
    ParallelLMHead,
    VocabParallelEmbedding,
    pack_,
    split_over_ranks,
)
from tpkernels.nn.linear import QKV, Heads, ParallelLinear, check_linear
from tpkernels.nn.moe import form_of
from tpkernels.nn.sharding import (
    ShardedModule,
    Sharding,
    additions,
    check_parameter,
    check_plain,
    position,
)
from tpkernels.nn.vocabulary import check_embedding, check_ids
from tpkernels.parallel import decoder
from tpkernels.parallel.decoder import (
    GATE_UP,
    ResidualRows,
    SharedInputLinear,
    SplitRowsLinear,
    SplitRowsMoE,
)
from tpkernels.parallel.options import ModelOptions
from tpkernels.torch_private import children_of, parameters_of, probe_of, state_of

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle
    from transformers import PretrainedConfig, PreTrainedModel

GATHERED = {"colwise_gather_output", "colwise_rep", "mla_kv_a_proj"}
SPLIT_INPUT = {"rowwise_split_input", "rowwise_rep"}
COLUMNS = {"colwise", "packed_colwise", *GATHERED}
ROWS = {"rowwise", *SPLIT_INPUT}
SHARED = "replicated_with_grad_allreduce"
UNSPLIT = {"replicate", "embedding_rowwise", "embedding_colwise", "local_params"}
EXPERTS = "moe_tp_experts"
_ATTENTION = {
    **{f"layers.*.self_attn.{name}": "colwise" for name in QKV},
    "layers.*.self_attn.o_proj": "rowwise",
}
#: The projections to the latents of DeepSeek's attention, which all heads share, and from these.
LATENTS = {"q_a_proj": "q_b_proj", "kv_a_proj_with_mqa": "kv_b_proj"}
_DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)
_LATENT_NORMS = ("q_a_layernorm", "kv_a_layernorm")
_LATENT_ATTENTION = _ATTENTION | {
    **{f"layers.*.self_attn.{name}": "colwise_gather_output" for name in LATENTS},
    **{f"layers.*.self_attn.{name}": "colwise" for name in LATENTS.values()},
}
_SHARED_EXPERT = {**dict.fromkeys(GATE_UP, "colwise"), "down_proj": "rowwise"}
#: What the plans of base models leave out, by model type.
PLANS = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _LATENT_ATTENTION),
    "glm4_moe_lite": _LATENT_ATTENTION
    | {f"layers.*.mlp.shared_experts.{name}": style for name, style in _SHARED_EXPERT.items()},
    "gpt_oss": {
        **_ATTENTION,
        "layers.*.self_attn.sinks": "colwise",
        "layers.*.mlp.experts": EXPERTS,
    },
    "granitemoe": _ATTENTION,
    "phimoe": _ATTENTION,
    "qwen2_moe": {
        f"layers.*.mlp.shared_expert.{name}": style for name, style in _SHARED_EXPERT.items()
    },
}
OTHER_EXPERTS = re.compile(r"moe_|ep_|grouped_gemm|packed_rowwise")


@dataclass
class Block:
    """A module whose projections are split."""

    name: str
    module: nn.Module
    styles: Mapping[str, str]  #: that the plan has for its children
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)  #: options by child
    row: str | None = None  #: the row-parallel child
    row_options: dict[str, Any] = field(default_factory=dict)
    heads: Heads | None = None  #: if it is an attention that is split
    #: norms by name; each rank applies them to its heads
    shared: dict[str, nn.Module] = field(default_factory=dict)
    by_head: list[str] = field(default_factory=list)  #: parameters with an entry per query head

    def path(self, child: str) -> str:
        """Return a child's name in the model."""
        return f"{self.name}.{child}" if self.name else child

    def refuse(self, child: str, reason: str) -> NotImplementedError:
        return _refuse(self.path(child), self.styles[child], reason)

    @property
    def inputs(self) -> dict[str, dict[str, Any]]:
        """Return those of `columns` that are projections of the block's own input, or an empty
        dict where that is not known. A hook or another method of the block may change its input,
        and a module that stands for two projections has one output stored."""
        of_latents = [second for first, second in LATENTS.items() if first in self.columns]
        names = self.columns.keys() - of_latents
        known = len(names) == 1 or names <= {*QKV, *LATENTS} or names <= {*GATE_UP}
        distinct = len({getattr(self.module, name) for name in names}) == len(names)
        known = known and distinct and not additions(self.module)
        return {name: self.columns[name] for name in self.columns if known and name in names}


@dataclass
class Stack:
    """The decoder layers."""

    base: nn.Module  #: which has them
    layers: list[nn.Module]
    heads: list[list[int] | None] = field(default_factory=list)  #: of each layer's attention
    norms: list[nn.Module] = field(default_factory=list)  #: of the layers
    #: no layer may do more with its rows than blocks, norms and mixtures do, or occur twice
    by_row: bool = True
    #: modules with experts, and those of their modules whose weights all ranks have
    mixtures: list[tuple[nn.Module, list[nn.Module]]] = field(default_factory=list)


class SplitInputLinear(SplitRowsLinear):
    """A row-parallel projection of an input that all ranks have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(split_over_ranks(x, self.group, x.dim() - 1, self.in_sizes))


def check_has_plan(config: PretrainedConfig | None, what: str) -> None:
    """Raise NotImplementedError if a ``config`` of transformers brings no plan; ``what`` names its
    owner."""
    configs = [config, *map(partial(getattr, config), getattr(config, "sub_configs", ()))]
    plans = [getattr(each, "base_model_tp_plan", None) for each in configs]
    model_type = getattr(config, "model_type", None)
    if not any(plans) and model_type not in PLANS:
        raise NotImplementedError(
            f"{what} (model_type {model_type!r}) is not supported without a plan: its "
            "configuration has no base_model_tp_plan; pass plan={...}, or --plan FILE"
        )


def check_style(model: PreTrainedModel, name: str, module: nn.Module, style: ParallelStyle) -> None:
    """Raise NotImplementedError if a style of torch leaves columns split that the code of a model
    of transformers needs together, as its own plan says."""
    own = (getattr(model, "_tp_plan", None) or {}).get(_wildcard(name))
    [layout, *_] = getattr(style, "output_layouts", None) or (None,)
    is_head = own is not None and module is model.get_output_embeddings()
    split = layout is not None and layout.is_shard()
    if own in {"packed_colwise", *GATHERED} and split and not is_head:
        raise NotImplementedError(
            f"{name}: {type(style).__name__} would leave its output columns sharded, but the "
            f"code of {type(model).__name__} needs all columns, and its plan has {own!r}; pass "
            "output_layouts=Replicate(), or no plan"
        )


def apply(model: PreTrainedModel, group: str, options: ModelOptions) -> None:
    """Apply `tpkernels.parallelize` without styles of torch. All modules are checked before the
    first is replaced. ``group`` is a group's name, which may be `tpkernels.nn.sharding.planned`."""
    plan = options.plan
    if plan is None:
        check_has_plan(getattr(model, "config", None), type(model).__name__)
        plan = _own_plan(model)
    else:
        _check_styles(model, plan)
    experts = _experts(model, plan)
    if options.expert_parallel and not experts:
        raise ValueError(
            "expert_parallel=True (--expert-parallel) needs experts in the plan, and the plan of "
            f"{type(model).__name__} does not contain any; leave it out"
        )
    blocks = _blocks(model, plan, group, options, experts)
    stack = None if options.ffn_only else _stack(model, blocks, experts)
    rows = None
    if stack is not None and options.rows_split and stack.by_row:
        rows = ResidualRows.of(group, options.rows_split)
    layers: dict[nn.Module, nn.Module] = {}  # by the module that each replaces, without memory
    for block in blocks:
        _draw(layers, block, group, rows)
    for module in experts.values():
        form: Any = form_of(module)
        layer = SplitRowsMoE(
            **form,
            group=group,
            expert_parallel=options.expert_parallel,
            width_sizes=_cut(form["intermediate_size"], group, options),
            device="meta",
            dtype=module.get_parameter("down_proj").dtype,
        )
        layer.rows, layers[module] = rows, layer
    if not options.ffn_only:
        _draw_ends(layers, model, group)
    norms: dict[nn.Module, ResidualRows | None] = {}
    for block in blocks:
        norms |= dict.fromkeys(block.shared.values())
    if stack is not None and rows is not None:
        norms |= dict.fromkeys(stack.norms, rows)
    for norm, of_rows in norms.items():
        if decoder.is_rms_norm(norm):
            layers[norm] = decoder.parallel_norm(norm, group, of_rows)
    _check_shared(model, layers, blocks)
    pack = options.pack and not options.read_later
    if pack:
        decoder.check_packing(model, experts, options.packed_dtype)

    # The model has not changed so far, and nothing raises from here on.
    for norm, of_rows in norms.items():
        if norm not in layers:
            decoder.share_weights(norm, [norm], group, of_rows)
    _put(model, layers)
    embedding = model.get_input_embeddings()
    if isinstance(embedding, nn.Embedding):  # all ranks have it whole
        embedding.register_forward_pre_hook(partial(_check_ids, group))
    for block in blocks:
        _connect(block, group, rows)
    if stack is not None:
        if rows is not None:
            for mixture, parts in stack.mixtures:
                decoder.share_weights(mixture, parts, group, rows)
            stack.layers[0].register_forward_pre_hook(partial(decoder.split_rows, group, rows))
            stack.layers[-1].register_forward_hook(partial(decoder.gather_rows, group, rows))
        gather = partial(decoder.gather_recorded, group, rows, stack.heads)
        stack.base.register_forward_hook(gather)
    if position(group)[1] > 1:
        _refuse_dropout(model)
    if pack:
        pack_(model, dtype=options.packed_dtype)


def _check_ids(group: str, embedding: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    """Forward pre-hook of an embedding that all ranks have whole."""
    check_ids(args[0], group)


def _own_plan(model: PreTrainedModel) -> dict[str, str]:
    """Return the plan that a model brings, with that of `PLANS`."""
    base = model.base_model_prefix
    prefix = f"{base}." if hasattr(model, base) else ""
    more = PLANS.get(model.config.model_type, {})
    return (model._tp_plan or {}) | {f"{prefix}{name}": style for name, style in more.items()}


def _wildcard(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _refuse(name: str, style: str, reason: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name} has the style {style!r} in the plan, but {reason}; pass plan={{...}} (--plan "
        "FILE) with only the modules to shard"
    )


def _check_styles(model: nn.Module, plan: Mapping[str, str]) -> None:
    if not hasattr(model, "get_input_embeddings"):
        raise TypeError(
            f"plan[{next(iter(plan))!r}] is a str, not a torch.distributed.tensor.parallel."
            f"ParallelStyle; names of styles need a transformers model, and this is a "
            f"{type(model).__name__}"
        )
    styles = sorted(COLUMNS | ROWS | UNSPLIT | {SHARED, EXPERTS})
    names = {_wildcard(name) for name, _ in model.named_modules() if name}
    for name, style in plan.items():
        if style not in styles:
            raise ValueError(f"plan[{name!r}] is {style!r}; expected one of {', '.join(styles)}")
        if name not in names:
            raise no_module(model, name, names)


def no_module(model: nn.Module, name: str, names: Iterable[str]) -> ValueError:
    """Return the error of a name in a plan that is not one of ``names``."""
    close = difflib.get_close_matches(name, sorted(names), 3, 0.4)
    hint = f"; did you mean {', '.join(close)}?" if close else ""
    return ValueError(f"plan names {name!r}, which is not a module of {type(model).__name__}{hint}")


def _experts(model: nn.Module, plan: Mapping[str, str]) -> dict[str, nn.Module]:
    """Find the experts of a model by its plan, or raise if `MoE` does not compute the same."""
    found = {}
    for name, module in model.named_modules():
        if plan.get(_wildcard(name)) == EXPERTS:
            if form_of(module) is None:
                kind = type(module).__name__
                raise _refuse(
                    name, EXPERTS, f"MoE does not support the weights or the gate of {kind}"
                )
            for key, parameter in module.named_parameters():
                check_parameter(parameter, f"{name}.{key}")
            check_plain(module, name, state_of(module))
            found[name] = module
    return found


def _blocks(
    model: PreTrainedModel,
    plan: Mapping[str, str],
    group: str,
    options: ModelOptions,
    experts: Mapping[str, nn.Module],
) -> list[Block]:
    """Find the blocks of a model by its plan, and how they are split, or raise."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    named = [
        *model.named_modules(remove_duplicate=False),
        *model.named_parameters(remove_duplicate=False),
    ]
    first_names = {module: name for name, module in model.named_modules()}
    whole = {*experts.values()}
    styles: dict[str, dict[str, str]] = {}
    for name, value in named:
        style = plan.get(_wildcard(name))
        if style is None or style in UNSPLIT or any(value is end for end in ends):
            continue
        parent, _, child = name.rpartition(".")
        owner = model.get_submodule(parent)
        if value in whole or owner in whole:
            continue
        if OTHER_EXPERTS.match(style):
            raise _refuse(name, style, "this kind of experts is not supported")
        of_attention = _is_attention(owner)
        if not isinstance(value, nn.Module):
            if style != "colwise" or value.dim() != 1 or not of_attention:
                raise _refuse(name, style, "a parameter cannot be sharded without its module")
        elif style not in COLUMNS | ROWS | {SHARED}:
            raise _refuse(name, style, "this style is not supported")
        if not options.ffn_only or not of_attention:
            styles.setdefault(first_names[owner], {})[child] = style
    split = any(set(children.values()) & (COLUMNS | ROWS) for children in styles.values())
    if not split and not experts:
        raise NotImplementedError(
            f"the plan of {type(model).__name__} does not shard any module; pass plan={{...}}"
        )
    return [_block(model, name, children, group, options) for name, children in styles.items()]


def _cut(k: int, group: str, options: ModelOptions) -> list[int]:
    """Split K of a weight over the ranks."""
    return shard_sizes(k, position(group)[1], options.unit(k))


def _block(
    model: PreTrainedModel, name: str, styles: Mapping[str, str], group: str, options: ModelOptions
) -> Block:
    """Check the projections of a parent module, and find how they are split."""
    block = Block(name, model.get_submodule(name), styles)
    columns: dict[str, nn.Linear] = {}
    rows: dict[str, nn.Linear] = {}
    for child, style in styles.items():
        module = getattr(block.module, child)
        if isinstance(module, nn.Parameter):
            block.by_head.append(child)
        elif style in COLUMNS | ROWS:
            kind = columns if style in COLUMNS else rows
            kind[child] = check_linear(module, block.path(child))
        else:
            block.shared[block.path(child)] = module
    whole = {child for child, style in styles.items() if style in GATHERED | SPLIT_INPUT}
    if len(rows) == 1 and columns:
        [(block.row, row)] = rows.items()
        inner = row.in_features
        if _is_elementwise(block.module, columns, block.row, inner):
            sizes = _cut(inner, group, options)
            block.columns = {
                child: {"out_sizes": Sharding.packed(0, [sizes] * (linear.out_features // inner))}
                for child, linear in columns.items()
            }
            block.row_options = {"in_sizes": sizes}
            return block
        if whole <= LATENTS.keys():
            _split_heads(block, model, columns, row, group, options)
            return block
    unpaired = (columns.keys() | rows.keys()) - whole
    if unpaired:
        raise block.refuse(
            min(unpaired),
            "sharding is supported only for column-parallel projections followed by one "
            f"row-parallel projection, and {name or type(model).__name__} has {dict(styles)}",
        )
    block.columns = {child: {"gather_output": True} for child in columns}
    for block.row, row in rows.items():  # one at most
        if len(rows) > 1:
            raise block.refuse(block.row, "its parent module has a second projection of this kind")
        block.row_options = {"whole_input": True, "in_sizes": _cut(row.in_features, group, options)}
    return block


def _is_attention(module: nn.Module) -> bool:
    return "Attention" in type(module).__name__


def _split_heads(
    block: Block,
    model: PreTrainedModel,
    columns: Mapping[str, nn.Linear],
    row: nn.Linear,
    group: str,
    options: ModelOptions,
) -> None:
    """Split a block by key-value heads, or raise if it is not an attention that allows that."""
    attention = block.module
    first = next(iter(columns))
    if not _is_attention(attention) or "packed_colwise" in block.styles.values():
        kind = type(attention).__name__
        raise block.refuse(first, f"the code of {kind} may mix columns, so a shard could be wrong")
    config = getattr(attention, "config", model.config.get_text_config())
    heads = kv_heads = config.num_attention_heads
    if "k_proj" in columns:
        head_dim = getattr(attention, "head_dim", None) or row.in_features // heads
        heads = row.in_features // head_dim
        kv_heads = columns["k_proj"].out_features // head_dim
    keys = {"k_proj", "v_proj"}
    block.columns = {child: {"gather_output": True} for child in columns if child in LATENTS}
    widths = {
        child: linear.out_features for child, linear in columns.items() if child not in LATENTS
    }
    for child, width in (widths | {str(block.row): row.in_features}).items():
        count = kv_heads if child in keys else heads
        if width % count or heads % kv_heads:
            raise ValueError(
                f"{block.path(child)} has {width} features, which does not fit {heads} attention "
                f"heads and {kv_heads} key-value heads"
            )
    unit = options.unit(row.in_features)
    block.heads = Heads(heads, kv_heads, row.in_features // heads, position(group)[1], unit)
    for child, width in widths.items():
        count = kv_heads if child in keys else heads
        block.columns[child] = block.heads.split_of(child, width // count)
    block.row_options = {"in_sizes": block.heads.split_of(str(block.row))["out_sizes"]}
    for name, parameter in attention.named_parameters():
        child = name.partition(".")[0]
        if child in block.by_head and len(parameter) != heads:
            raise block.refuse(
                child, f"it has {len(parameter)} entries, not one for each of {heads} heads"
            )
        if child in (*block.styles, *_LATENT_NORMS) or block.path(child) in block.shared:
            continue
        of_head = parameter.dim() == 1 and parameter.shape[0] * heads == row.in_features
        if not of_head or child == name:
            raise block.refuse(first, f"{block.path(name)} would have to be sharded as well")
        block.shared[block.path(child)] = getattr(attention, child)


def _stack(
    model: PreTrainedModel, blocks: list[Block], experts: Mapping[str, nn.Module]
) -> Stack | None:
    """Return the layers that the blocks are in, if these are of one list."""
    places = [re.fullmatch(r"(.+?)\.(\d+)\..+", block.name) for block in blocks]
    names = {place[1] if place else "" for place in places}
    name = names.pop() if len(names) == 1 else ""
    layers = model.get_submodule(name)
    if not isinstance(layers, nn.ModuleList):
        return None
    stack = Stack(model.get_submodule(name.rpartition(".")[0]), list(layers))
    uses = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    split = [*(block.module for block in blocks), *experts.values()]
    inside = {part for module in split for part in module.modules()}
    mixed, width = {*experts.values()}, model.config.get_text_config().hidden_size
    for layer in stack.layers:
        inner = [*layer.modules()]
        own = [block for block in blocks if block.module in inner]
        heads = [block.heads.query_heads for block in own if block.heads]
        stack.heads.append(heads[0] if heads else None)
        by_row = not parameters_of(layer) and all(block.inputs for block in own)
        by_row = by_row and not any(uses[module] > 1 or additions(module) for module in inner)
        for child in layer.children():
            if child in inside or next(child.parameters(), None) is None:
                continue
            if "Norm" in type(child).__name__:
                stack.norms.append(child)
            elif by_row and mixed & {*child.modules()} and _is_by_row(child, split, width):
                parts = [p for p in child.modules() if parameters_of(p) and p not in inside]
                stack.mixtures.append((child, parts))
            else:
                by_row = False
        stack.by_row = stack.by_row and by_row
    return stack


def _is_by_row(module: nn.Module, split: list[nn.Module], width: int) -> bool:
    """Return whether a module with experts maps each row of its input by itself. Its code is run
    with random weights, and stand-ins for what is ``split``."""
    probe = copy.deepcopy(module, {id(part): _RowByRow() for part in split})
    probe.to_empty(device="cpu").double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in (*probe.parameters(), *probe.buffers()):
            value.copy_(torch.randn(value.shape, generator=generator))
        x = torch.randn((2, 3, width), generator=generator).double()
        try:
            results = [probe(part.contiguous()) for part in (x, x[:, :1], x[:, 1:])]
        except Exception:  # it takes more than one input
            return False
    whole, *parts = (y[0] if isinstance(y, tuple) else y for y in results)
    return whole.shape == x.shape and torch.allclose(torch.cat(parts, 1), whole, 1e-4)


class _RowByRow(nn.Module):
    """A stand-in for experts, whose result tells their arguments apart, or for another module."""

    def forward(
        self, x: torch.Tensor, ids: torch.Tensor | None = None, weights: Any = None
    ) -> torch.Tensor:
        return x if ids is None else x * ((1 + ids) * weights).sum(-1, keepdim=True)


def _refuse_dropout(model: PreTrainedModel) -> None:
    """Let a model refuse to train with a probability of dropout above 0, before anything is sent,
    and so each module that has one. Ranks would draw other values of what all share, and for other
    numbers of heads, after which their random states differ."""
    found = [
        (name, module, key)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if "drop" in key or "jitter" in key or (key == "p" and isinstance(module, _DROPOUTS))
        if type(value) in (int, float)
    ]
    for whole in {model, model.base_model}:
        whole.register_forward_pre_hook(partial(_check_dropout, found), prepend=True)
    for name, module, key in found:
        hook = partial(_check_dropout, [(name, module, key)])
        module.register_forward_pre_hook(hook, prepend=True)


def _check_dropout(found: list[tuple[str, nn.Module, str]], module: object, args: object) -> None:
    for name, owner, key in found:
        if owner.training and getattr(owner, key) > 0:
            raise NotImplementedError(
                f"the model has {name}.{key}={getattr(owner, key)}, and each rank would drop "
                "different values; set it to 0, or call eval()"
            )


def _is_elementwise(
    parent: nn.Module, columns: Mapping[str, nn.Linear], row: str, inner: int
) -> bool:
    """Return whether what a module computes between its projections treats each column, or the two
    columns of the two halves of a packed projection, independently of the others."""
    width, few, generator = 4, 2, torch.Generator().manual_seed(0)
    if any(linear.out_features not in (inner, 2 * inner) for linear in columns.values()):
        return False
    outputs = {
        child: torch.randn(
            (1, 3, linear.out_features // inner, width),
            generator=generator,
            dtype=torch.float64,
            device="cpu",
        )
        for child, linear in columns.items()
    }

    def run(width: int) -> torch.Tensor:
        children: dict[str, nn.Module | None] = {}
        for name, module in children_of(parent).items():
            if name in outputs:
                children[name] = _Constant(outputs[name][..., :width].flatten(2))
            else:
                children[name] = nn.Identity() if name == row else copy.deepcopy(module)
        probe = probe_of(parent, modules=children)
        probe.training = False
        for module in children.values():
            if module is not None:
                module.eval()
        return probe.forward(torch.zeros(1, 3, 1, device="cpu"))

    others = [name for name, _ in parent.named_parameters() if name.split(".")[0] not in columns]
    if any(not name.startswith(f"{row}.") for name in others):
        return False
    try:
        whole, part = run(width), run(few)
        return whole.shape[-1] == width and torch.allclose(whole[..., :few], part, 1e-12, 0)
    except Exception:  # it takes more than one input, as attentions do, or returns more
        return False


class _Constant(nn.Module):
    """A stand-in for a projection."""

    def __init__(self, output: torch.Tensor) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output


def _draw(
    layers: dict[nn.Module, nn.Module], block: Block, group: str, rows: ResidualRows | None
) -> None:
    """Make the parallel projections of a block, on the meta device, or raise."""
    by_rows = {"sequence_parallel": rows is not None, "sequence_dim": -2}
    inputs = block.inputs
    drawn: dict[str, tuple[type[ParallelLinear], dict[str, Any]]] = {
        name: (SharedInputLinear, options | by_rows)
        if name in inputs
        else (ColumnParallelLinear, options)
        for name, options in block.columns.items()
    }
    if block.row is not None:
        options = block.row_options | by_rows
        whole_input = options.pop("whole_input", False)
        drawn[block.row] = (SplitInputLinear if whole_input else SplitRowsLinear, options)
    for child, (kind, options) in drawn.items():
        old = getattr(block.module, child)
        new = kind.like(old, group, **options)
        if isinstance(new, SplitRowsLinear):
            new.rows = rows
        other = layers.setdefault(old, new)
        if (type(other), vars(other)["splits"], repr(other)) != (kind, new.splits, repr(new)):
            raise NotImplementedError(
                f"{block.name}.{child} is used in several places that need different shards, "
                f"{other!r} and {new!r}; use a separate module in each place"
            )
    for name, norm in block.shared.items():
        check_plain(norm, name, state_of(norm))


def _draw_ends(layers: dict[nn.Module, nn.Module], model: PreTrainedModel, group: str) -> None:
    """Make embedding and head split by vocabulary, on the meta device, or raise. An embedding that
    does more than to look up vectors stays whole, and so does a head that is tied to it."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    factor = _factor(embedding)
    if factor is not None:
        check_parameter(embedding.weight, "the weight of the embedding")
        own = dict(embedding.named_buffers(recurse=False))
        known = [key for key in own if hasattr(embedding, f"scalar_{key}")]
        check_plain(embedding, "the embedding", ["weight", *known])
        parallel = layers[embedding] = VocabParallelEmbedding.like(embedding, group)
        if factor != 1:
            parallel.register_forward_hook(partial(_scale, factor))
    elif head is not None and head.weight is getattr(embedding, "weight", None):
        return
    if head is not None:
        check_linear(head, "lm_head")
        layers[head] = ParallelLMHead.like(head, group, gather_output=True)


def _check_shared(
    model: nn.Module, layers: Mapping[nn.Module, nn.Module], blocks: list[Block]
) -> None:
    """Raise NotImplementedError if a projection of a block is also used outside of blocks, or if a
    parameter that several modules share would not be the same in all of them."""
    places = {
        (block.module, child)
        for block in blocks
        for child in (*block.columns, block.row, *(name.split(".")[-1] for name in block.shared))
    }
    inside = {children_of(parent).get(str(child)) for parent, child in places} - {None}
    first: dict[nn.Parameter, tuple[str, object]] = {}
    for name, parent in model.named_modules():
        for child, module in children_of(parent).items():
            if module in inside and (parent, child) not in places:
                raise NotImplementedError(
                    f"{name}.{child} is also used in a place where it is sharded, and cannot be "
                    "sharded here; use a separate module in each place"
                )
        layer = layers.get(parent)
        for key, parameter in parameters_of(parent).items():
            how = layer.splits.get(key, "copied") if isinstance(layer, ShardedModule) else "kept"
            if parameter is None:
                continue
            other, theirs = first.setdefault(parameter, (f"{name}.{key}", how))
            if theirs != how:
                raise NotImplementedError(
                    f"{other} and {name}.{key} are one parameter, but the sharded model needs two "
                    "different shards of it; untie them"
                )


def _put(model: nn.Module, layers: dict[nn.Module, nn.Module]) -> None:
    """Put parallel layers in the place of the modules that they replace, with their weights."""
    uses = Counter(value for module in layers for value in parameters_of(module).values())
    made: dict[nn.Parameter, nn.Parameter | None]
    made = {value: None for value, count in uses.items() if value is not None and count > 1}
    uses.clear()
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for child, module in children_of(parent).items():
            if module in layers:
                places.setdefault(module, []).append((parent, child))
    while places:  # a module that is replaced holds memory no more
        module, where = places.popitem()
        layer = layers.pop(module)
        if isinstance(layer, ShardedModule):
            layer.adopt(module, made)
        for parent, child in where:
            setattr(parent, child, layer)


def _connect(block: Block, group: str, rows: ResidualRows | None) -> None:
    """Adapt a block to its parallel projections."""
    parent = block.module
    inputs = [
        child for child in block.columns if isinstance(getattr(parent, child), SharedInputLinear)
    ]
    if inputs:
        hook = partial(decoder.share_input, tuple(inputs), rows)
        parent.register_forward_pre_hook(hook, with_kwargs=True)
    if block.heads is not None:
        decoder.set_groups(parent, block.heads, group)
        decoder.share_heads(parent, block.heads, block.by_head, group)
        decoder.share_rotary_key(parent, group)


def _factor(embedding: nn.Module) -> float | None:
    """Return the factor by which an embedding multiplies its vectors, or None if it does anything
    else."""
    if type(embedding) is nn.Embedding:
        check_embedding(embedding, "the embedding")
        return 1.0
    if not isinstance(embedding, nn.Embedding):
        return None
    buffers = {
        name: torch.tensor(getattr(embedding, f"scalar_{name}", torch.nan), device="cpu")
        for name, _ in embedding.named_buffers(recurse=False)
    }
    vectors = torch.tensor([[0.0, 1.0, 3.0]], device="cpu")
    probe = probe_of(embedding, buffers=buffers, parameters={"weight": vectors})
    probe.padding_idx = None
    try:
        result = probe.forward(torch.zeros(1, dtype=torch.long, device="cpu"))
        factor = float(result[0, 1])
        return factor if torch.equal(result, vectors * factor) else None
    except Exception:  # it takes more than ids
        return None


def _scale(factor: float, module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
    """Forward hook: multiply an embedding's vectors, with the rounding of transformers."""
    return output * torch.tensor(factor).to(output.dtype)
