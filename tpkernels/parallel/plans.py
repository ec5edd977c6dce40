"""The TP plan of a transformers model: ``base_model_tp_plan`` of its configuration, with a style
for each projection.

Problem: the styles describe how weights are split, in chunks of equal size. They do not describe
how the code between two projections uses the columns. They therefore allow neither uneven shards
nor numbers of heads that are not divisible by the number of ranks. If the code cuts its input into
two halves (``gate_up_proj`` of Phi-3), the plan gathers all columns on all ranks.

Algorithm: the projections of one parent module form a `Block`. A probe runs the block with a few
columns, with stubs for the projections. If each output column depends only on its input column, any
split is correct; a packed projection is split within each half. Otherwise an attention is split by
key-value heads. Any remaining block needs a plan that gathers the columns, which is correct for all
code, or is rejected.

    colwise, packed_colwise        column-parallel; each rank uses its heads' entries of a vector
    colwise_gather_output (_rep)   column-parallel; gathered unless the probe allows a split
    mla_kv_a_proj                  like colwise_gather_output; the latents of DeepSeek attention
    rowwise                        row-parallel, split like the columns of the block
    rowwise_split_input (_rep)     row-parallel; selects its columns of a replicated input
    replicated_with_grad_allreduce the gradient is reduced over the heads of the ranks
    moe_tp_experts                 each expert's width is split, or experts are assigned to ranks
    embedding_rowwise, _colwise    token embeddings are always split by vocabulary
    replicate, local_params        replicated
"""

from __future__ import annotations

import copy
import difflib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
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
from tpkernels.nn.moe import infer_moe_args
from tpkernels.nn.sharding import (
    ShardedModule,
    Sharding,
    check_parameter,
    check_plain,
    find_customizations,
    rank_and_world,
)
from tpkernels.nn.vocabulary import check_embedding, check_ids
from tpkernels.parallel import attention, decoder, invariant
from tpkernels.parallel.decoder import (
    GATE_UP,
    ResidualRows,
    SharedInputLinear,
    SplitRowsLinear,
    SplitRowsMoE,
)
from tpkernels.parallel.options import ModelOptions
from tpkernels.torch_private import direct_children, direct_parameters, make_probe, state_names

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle
    from transformers import PretrainedConfig, PreTrainedModel

GATHERED = {"colwise_gather_output", "colwise_rep", "mla_kv_a_proj"}
SPLIT_INPUT = {"rowwise_split_input", "rowwise_rep"}
COLUMNS = {"colwise", "packed_colwise", *GATHERED}
ROWS = {"rowwise", *SPLIT_INPUT}
GRAD_ALLREDUCE = "replicated_with_grad_allreduce"
UNSPLIT = {"replicate", "embedding_rowwise", "embedding_colwise", "local_params"}
EXPERTS = "moe_tp_experts"
_ATTENTION = {
    **{f"layers.*.self_attn.{name}": "colwise" for name in QKV},
    "layers.*.self_attn.o_proj": "rowwise",
}
#: Projections to the latents of DeepSeek attention, which all heads share, and the projections from
#: these latents.
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
#: Styles that base model plans omit, by model type.
PLAN_ADDITIONS = {
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
UNSUPPORTED_EXPERTS = re.compile(r"moe_|ep_|grouped_gemm|packed_rowwise")


@dataclass
class Block:
    """A module with projections that are split."""

    name: str
    module: nn.Module
    styles: Mapping[str, str]  #: plan styles of the children
    #: Column-parallel children and their options.
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)
    row: str | None = None  #: row-parallel child
    row_options: dict[str, Any] = field(default_factory=dict)
    heads: Heads | None = None  #: set for an attention that is split
    #: Norms that each rank applies to its heads, by name.
    head_norms: dict[str, nn.Module] = field(default_factory=dict)
    #: Parameters with one entry per query head.
    head_parameters: list[str] = field(default_factory=list)

    def path(self, child: str) -> str:
        """Return the name of a child in the model."""
        return f"{self.name}.{child}" if self.name else child

    @property
    def projections(self) -> set[str | None]:
        """Return the names of the projections."""
        return {*self.columns, self.row}

    def refuse(self, child: str, reason: str) -> NotImplementedError:
        return _refuse(self.path(child), self.styles[child], reason)

    @property
    def input_projections(self) -> dict[str, dict[str, Any]]:
        """Return the `columns` whose input is the input of the block.

        The result is empty if this cannot be determined: a hook or a method of the block may change
        its input, and a module used for two projections would need two stored outputs.
        """
        latent_outputs = [second for first, second in LATENTS.items() if first in self.columns]
        names = self.columns.keys() - latent_outputs
        shares_input = len(names) == 1 or names <= {*QKV, *LATENTS} or names <= {*GATE_UP}
        distinct = len({getattr(self.module, name) for name in names}) == len(names)
        shares_input = shares_input and distinct and not find_customizations(self.module)
        return {name: self.columns[name] for name in self.columns if shares_input and name in names}


@dataclass
class Stack:
    """The decoder layers."""

    base: nn.Module  #: parent module
    layers: list[nn.Module]
    #: Query heads per rank, for each layer; None if its attention is not split.
    heads: list[list[int] | None] = field(default_factory=list)
    norms: list[nn.Module] = field(default_factory=list)  #: norms of the layers
    #: Whether layers consist only of blocks, norms and MoE modules, each used once.
    row_independent: bool = True
    #: Modules with experts, and their submodules with replicated weights.
    moe_modules: list[tuple[nn.Module, list[nn.Module]]] = field(default_factory=list)


class SplitInputLinear(SplitRowsLinear):
    """A row-parallel projection with a replicated input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(split_over_ranks(x, self.group, x.dim() - 1, self.in_sizes))


def check_has_plan(config: PretrainedConfig | None, owner: str) -> None:
    """Raise NotImplementedError if a transformers ``config`` contains no TP plan. The message
    starts with ``owner``."""
    configs = [config, *map(partial(getattr, config), getattr(config, "sub_configs", ()))]
    plans = [getattr(sub_config, "base_model_tp_plan", None) for sub_config in configs]
    model_type = getattr(config, "model_type", None)
    if not any(plans) and model_type not in PLAN_ADDITIONS:
        raise NotImplementedError(
            f"{owner} (model_type {model_type!r}) is not supported without a plan: its "
            "configuration has no base_model_tp_plan; pass plan={...}, or --plan FILE"
        )


def check_style(model: PreTrainedModel, name: str, module: nn.Module, style: ParallelStyle) -> None:
    """Raise NotImplementedError if a torch style leaves columns sharded although the TP plan of a
    transformers model gathers them."""
    planned_style = (getattr(model, "_tp_plan", None) or {}).get(_wildcard(name))
    [layout, *_] = getattr(style, "output_layouts", None) or (None,)
    is_head = planned_style is not None and module is model.get_output_embeddings()
    split = layout is not None and layout.is_shard()
    if planned_style in {"packed_colwise", *GATHERED} and split and not is_head:
        raise NotImplementedError(
            f"{name}: {type(style).__name__} would leave its output columns sharded, but the "
            f"code of {type(model).__name__} needs all columns, and its plan has "
            f"{planned_style!r}; pass output_layouts=Replicate(), or no plan"
        )


def apply(model: PreTrainedModel, group: str, options: ModelOptions, device: str = "cpu") -> None:
    """Split a model as `tpkernels.parallelize` does without torch styles. All modules are checked
    before the first is replaced. ``group`` is a group name, possibly of a
    `tpkernels.nn.sharding.placeholder_group`, and ``device`` the device type of its ranks."""
    if options.is_invariant and device != "cpu":
        raise NotImplementedError(f'numerics="invariant" supports CPUs only, not {device}')
    plan = options.plan
    if plan is None:
        check_has_plan(getattr(model, "config", None), type(model).__name__)
        plan = _model_plan(model)
    else:
        _check_styles(model, plan)
    experts = _find_experts(model, plan)
    if options.expert_parallel and not experts:
        raise ValueError(
            "expert_parallel=True (--expert-parallel) needs experts in the plan, and the plan of "
            f"{type(model).__name__} does not contain any; leave it out"
        )
    blocks = _find_blocks(model, plan, group, options, experts)
    stack = None if options.ffn_only else _find_stack(model, blocks, experts)
    rows = None
    sequence_parallel = options.effective_sequence_parallel
    # Models with invariant numerics use it for `decoder.join_norms`.
    if stack is not None and (sequence_parallel or options.is_invariant) and stack.row_independent:
        rows = ResidualRows.for_group(group, sequence_parallel)
    layers: dict[nn.Module, nn.Module] = {}  # on the meta device, by replaced module
    for block in blocks:
        _create_projections(layers, block, group, rows)
    for module in experts.values():
        moe_args: Any = infer_moe_args(module)
        layer = SplitRowsMoE(
            **moe_args,
            group=group,
            expert_parallel=options.expert_parallel or options.is_invariant,
            width_sizes=_split_k(moe_args["intermediate_size"], group, options),
            device="meta",
            dtype=module.get_parameter("down_proj").dtype,
        )
        layer.rows, layers[module] = rows, layer
    if not options.ffn_only:
        _create_vocabulary_layers(layers, model, group)
    norms: dict[nn.Module, ResidualRows | None] = {}
    for block in blocks:
        norms |= dict.fromkeys(block.head_norms.values())
    if stack is not None and rows is not None:
        norms |= dict.fromkeys(stack.norms, rows)
    for norm, norm_rows in norms.items():
        if decoder.is_rms_norm(norm):
            layers[norm] = decoder.make_parallel_norm(norm, group, norm_rows)
    _check_shared(model, layers, blocks)
    pack = options.packs and not options.defer_weights
    if pack:
        decoder.check_packing(model, experts, options.packed_dtype)
    if options.is_invariant:
        for block in blocks:
            head_unit = block.row_options["k_unit"] if block.heads else None
            invariant.check_block(block.name, block.module, block.projections, head_unit)
        replaced = [*layers, *(block.module for block in blocks)]
        invariant.check(model, replaced, [*experts.values()])

    # The model is unchanged up to this line, and no later line raises.
    for norm, norm_rows in norms.items():
        if norm not in layers:
            decoder.reduce_weight_gradients(norm, [norm], group, norm_rows)
    _replace_modules(model, layers)
    embedding = model.get_input_embeddings()
    if isinstance(embedding, nn.Embedding):  # replicated
        embedding.register_forward_pre_hook(partial(_check_ids, group))
    for block in blocks:
        _attach_hooks(block, group, rows)
    if options.is_invariant:
        for block in blocks:
            if not _is_attention(block.module):
                invariant.pad_activations(block.module, block.projections)
        for name in experts:
            invariant.make_router_invariant(model.get_submodule(name.rpartition(".")[0]))
    if device == "cpu":
        attention.use(model, invariant=options.is_invariant)
    if stack is not None:
        if rows is not None:
            for moe_module, weight_owners in stack.moe_modules:
                decoder.reduce_weight_gradients(moe_module, weight_owners, group, rows)
            stack.layers[0].register_forward_pre_hook(partial(decoder.split_rows, group, rows))
            stack.layers[-1].register_forward_hook(partial(decoder.gather_rows, group, rows))
        gather = partial(decoder.gather_recorded_outputs, group, rows, stack.heads)
        stack.base.register_forward_hook(gather)
    if rank_and_world(group)[1] > 1:
        _refuse_dropout(model)
    if pack:
        pack_(model, dtype=options.packed_dtype)


def _check_ids(group: str, embedding: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    """Forward pre-hook of a replicated embedding."""
    check_ids(args[0], group)


def _model_plan(model: PreTrainedModel) -> dict[str, str]:
    """Return the TP plan of a model, extended by `PLAN_ADDITIONS`."""
    base = model.base_model_prefix
    prefix = f"{base}." if hasattr(model, base) else ""
    additions = PLAN_ADDITIONS.get(model.config.model_type, {})
    return (model._tp_plan or {}) | {f"{prefix}{name}": style for name, style in additions.items()}


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
    styles = sorted(COLUMNS | ROWS | UNSPLIT | {GRAD_ALLREDUCE, EXPERTS})
    names = {_wildcard(name) for name, _ in model.named_modules() if name}
    for name, style in plan.items():
        if style not in styles:
            raise ValueError(f"plan[{name!r}] is {style!r}; expected one of {', '.join(styles)}")
        if name not in names:
            raise no_module(model, name, names)


def no_module(model: nn.Module, name: str, names: Iterable[str]) -> ValueError:
    """Return the error for a name in a plan that is not in ``names``."""
    close = difflib.get_close_matches(name, sorted(names), 3, 0.4)
    hint = f"; did you mean {', '.join(close)}?" if close else ""
    return ValueError(f"plan names {name!r}, which is not a module of {type(model).__name__}{hint}")


def _find_experts(model: nn.Module, plan: Mapping[str, str]) -> dict[str, nn.Module]:
    """Return the experts in the plan, or raise if `MoE` cannot replace them."""
    experts = {}
    for name, module in model.named_modules():
        if plan.get(_wildcard(name)) == EXPERTS:
            if infer_moe_args(module) is None:
                type_name = type(module).__name__
                raise _refuse(
                    name, EXPERTS, f"MoE does not support the weights or the gate of {type_name}"
                )
            for key, parameter in module.named_parameters():
                check_parameter(parameter, f"{name}.{key}")
            check_plain(module, name, state_names(module))
            experts[name] = module
    return experts


def _find_blocks(
    model: PreTrainedModel,
    plan: Mapping[str, str],
    group: str,
    options: ModelOptions,
    experts: Mapping[str, nn.Module],
) -> list[Block]:
    """Return the blocks in the plan with their splits, or raise."""
    vocabulary_layers = (model.get_input_embeddings(), model.get_output_embeddings())
    named = [
        *model.named_modules(remove_duplicate=False),
        *model.named_parameters(remove_duplicate=False),
    ]
    first_names = {module: name for name, module in model.named_modules()}
    expert_modules = {*experts.values()}
    styles: dict[str, dict[str, str]] = {}
    for name, value in named:
        style = plan.get(_wildcard(name))
        if style is None or style in UNSPLIT or any(value is layer for layer in vocabulary_layers):
            continue
        parent, _, child = name.rpartition(".")
        owner = model.get_submodule(parent)
        if value in expert_modules or owner in expert_modules:
            continue
        if UNSUPPORTED_EXPERTS.match(style):
            raise _refuse(name, style, "this kind of experts is not supported")
        in_attention = _is_attention(owner)
        if not isinstance(value, nn.Module):
            if style != "colwise" or value.dim() != 1 or not in_attention:
                raise _refuse(name, style, "a parameter cannot be sharded without its module")
        elif style not in COLUMNS | ROWS | {GRAD_ALLREDUCE}:
            raise _refuse(name, style, "this style is not supported")
        if not options.ffn_only or not in_attention:
            styles.setdefault(first_names[owner], {})[child] = style
    split = any(set(children.values()) & (COLUMNS | ROWS) for children in styles.values())
    if not split and not experts:
        raise NotImplementedError(
            f"the plan of {type(model).__name__} does not shard any module; pass plan={{...}}"
        )
    return [_plan_block(model, name, children, group, options) for name, children in styles.items()]


def _split_k(k: int, group: str, options: ModelOptions) -> list[int]:
    """Return the size of K on each rank."""
    unit, world = options.k_unit(k) or options.feature_multiple(k), rank_and_world(group)[1]
    ends = [min(k, unit * end) for end in accumulate(shard_sizes(-(-k // unit), world))]
    return [end - begin for begin, end in pairwise([0, *ends])]


def _plan_block(
    model: PreTrainedModel, name: str, styles: Mapping[str, str], group: str, options: ModelOptions
) -> Block:
    """Check the projections of a parent module, and plan their split."""
    block = Block(name, model.get_submodule(name), styles)
    columns: dict[str, nn.Linear] = {}
    rows: dict[str, nn.Linear] = {}
    for child, style in styles.items():
        module = getattr(block.module, child)
        if isinstance(module, nn.Parameter):
            block.head_parameters.append(child)
        elif style in COLUMNS | ROWS:
            projections = columns if style in COLUMNS else rows
            projections[child] = check_linear(module, block.path(child))
        else:
            block.head_norms[block.path(child)] = module
    standalone = {child for child, style in styles.items() if style in GATHERED | SPLIT_INPUT}
    if len(rows) == 1 and columns:
        [(block.row, row)] = rows.items()
        inner = row.in_features
        if _is_elementwise(block.module, columns, block.row, inner):
            sizes = _split_k(inner, group, options)
            block.columns = {
                child: {"out_sizes": Sharding.packed(0, [sizes] * (linear.out_features // inner))}
                for child, linear in columns.items()
            }
            block.row_options = {"in_sizes": sizes, "k_unit": options.k_unit(inner)}
            return block
        if standalone <= LATENTS.keys():
            _split_heads(block, model, columns, row, group, options)
            return block
    unpaired = (columns.keys() | rows.keys()) - standalone
    if unpaired:
        raise block.refuse(
            min(unpaired),
            "sharding is supported only for column-parallel projections followed by one "
            f"row-parallel projection, and {name or type(model).__name__} has {dict(styles)}",
        )
    block.columns = {child: {"gather_output": True} for child in columns}
    for block.row, row in rows.items():  # at most one
        if len(rows) > 1:
            raise block.refuse(block.row, "its parent module has a second projection of this kind")
        block.row_options = {
            "replicated_input": True,
            "in_sizes": _split_k(row.in_features, group, options),
            "k_unit": options.k_unit(row.in_features),
        }
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
    """Split a block by key-value heads, or raise if it is not a supported attention."""
    attention = block.module
    first = next(iter(columns))
    if not _is_attention(attention) or "packed_colwise" in block.styles.values():
        type_name = type(attention).__name__
        raise block.refuse(
            first, f"the code of {type_name} may mix columns, so a shard could be wrong"
        )
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
    multiple = options.feature_multiple(row.in_features)
    block.heads = Heads(
        heads, kv_heads, row.in_features // heads, rank_and_world(group)[1], multiple
    )
    for child, width in widths.items():
        count = kv_heads if child in keys else heads
        block.columns[child] = block.heads.plan_split(child, width // count)
    block.row_options = {
        "in_sizes": block.heads.plan_split(str(block.row))["out_sizes"],
        "k_unit": options.k_unit(row.in_features, block.heads.head_dim),
    }
    for name, parameter in attention.named_parameters():
        child = name.partition(".")[0]
        if child in block.head_parameters and len(parameter) != heads:
            raise block.refuse(
                child, f"it has {len(parameter)} entries, not one for each of {heads} heads"
            )
        if child in (*block.styles, *_LATENT_NORMS) or block.path(child) in block.head_norms:
            continue
        is_head_norm = parameter.dim() == 1 and parameter.shape[0] * heads == row.in_features
        if not is_head_norm or child == name:
            raise block.refuse(first, f"{block.path(name)} would have to be sharded as well")
        block.head_norms[block.path(child)] = getattr(attention, child)


def _find_stack(
    model: PreTrainedModel, blocks: list[Block], experts: Mapping[str, nn.Module]
) -> Stack | None:
    """Return the decoder layers that contain the blocks, or None if they are not in one list."""
    matches = [re.fullmatch(r"(.+?)\.(\d+)\..+", block.name) for block in blocks]
    names = {match[1] if match else "" for match in matches}
    name = names.pop() if len(names) == 1 else ""
    layers = model.get_submodule(name)
    if not isinstance(layers, nn.ModuleList):
        return None
    stack = Stack(model.get_submodule(name.rpartition(".")[0]), list(layers))
    uses = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    split = [*(block.module for block in blocks), *experts.values()]
    split_modules = {submodule for module in split for submodule in module.modules()}
    expert_modules, width = {*experts.values()}, model.config.get_text_config().hidden_size
    for layer in stack.layers:
        inner = [*layer.modules()]
        layer_blocks = [block for block in blocks if block.module in inner]
        heads = [block.heads.query_heads for block in layer_blocks if block.heads]
        stack.heads.append(heads[0] if heads else None)
        row_independent = not direct_parameters(layer) and all(
            block.input_projections for block in layer_blocks
        )
        row_independent = row_independent and not any(
            uses[module] > 1 or find_customizations(module) for module in inner
        )
        for child in layer.children():
            if child in split_modules or next(child.parameters(), None) is None:
                continue
            if "Norm" in type(child).__name__:
                stack.norms.append(child)
            elif (
                row_independent
                and expert_modules & {*child.modules()}
                and _is_row_independent(child, split, width)
            ):
                weight_owners = [
                    owner
                    for owner in child.modules()
                    if direct_parameters(owner) and owner not in split_modules
                ]
                stack.moe_modules.append((child, weight_owners))
            else:
                row_independent = False
        stack.row_independent = stack.row_independent and row_independent
    return stack


def _is_row_independent(module: nn.Module, split: list[nn.Module], width: int) -> bool:
    """Return whether a module with experts maps each input row independently. A probe runs its code
    with random weights, and with stubs for the modules in ``split``."""
    probe = copy.deepcopy(module, {id(replaced): _RowIndependentStub() for replaced in split})
    probe.to_empty(device="cpu").double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in (*probe.parameters(), *probe.buffers()):
            value.copy_(torch.randn(value.shape, generator=generator))
        x = torch.randn((2, 3, width), generator=generator).double()
        try:
            results = [probe(rows.contiguous()) for rows in (x, x[:, :1], x[:, 1:])]
        except Exception:  # its forward needs more arguments
            return False
    full, *row_results = (y[0] if isinstance(y, tuple) else y for y in results)
    return full.shape == x.shape and torch.allclose(torch.cat(row_results, 1), full, 1e-4)


class _RowIndependentStub(nn.Module):
    """A stub for experts or for a different module. With experts, the output depends on each
    argument."""

    def forward(
        self, x: torch.Tensor, ids: torch.Tensor | None = None, weights: Any = None
    ) -> torch.Tensor:
        return x if ids is None else x * ((1 + ids) * weights).sum(-1, keepdim=True)


def _refuse_dropout(model: PreTrainedModel) -> None:
    """Register hooks, on the model and on each module with dropout, that reject training with a
    dropout probability above 0 before any data is sent. Ranks would draw different masks for
    replicated activations, and a different number of random values for different numbers of heads,
    so their random states would diverge."""
    dropouts = [
        (name, module, key)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if "drop" in key or "jitter" in key or (key == "p" and isinstance(module, _DROPOUTS))
        if type(value) in (int, float)
    ]
    for root in {model, model.base_model}:
        root.register_forward_pre_hook(partial(_check_dropout, dropouts), prepend=True)
    for name, module, key in dropouts:
        hook = partial(_check_dropout, [(name, module, key)])
        module.register_forward_pre_hook(hook, prepend=True)


def _check_dropout(
    dropouts: list[tuple[str, nn.Module, str]], module: object, args: object
) -> None:
    for name, owner, key in dropouts:
        if owner.training and getattr(owner, key) > 0:
            raise NotImplementedError(
                f"the model has {name}.{key}={getattr(owner, key)}, and each rank would drop "
                "different values; set it to 0, or call eval()"
            )


def _is_elementwise(
    parent: nn.Module, columns: Mapping[str, nn.Linear], row: str, inner: int
) -> bool:
    """Return whether the code between the projections treats each column independently. For a
    packed projection, the same column of both halves counts as one."""
    width, narrow_width, generator = 4, 2, torch.Generator().manual_seed(0)
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
        for name, module in direct_children(parent).items():
            if name in outputs:
                children[name] = _Constant(outputs[name][..., :width].flatten(2))
            else:
                children[name] = nn.Identity() if name == row else copy.deepcopy(module)
        probe = make_probe(parent, modules=children)
        probe.training = False
        for module in children.values():
            if module is not None:
                module.eval()
        return probe.forward(torch.zeros(1, 3, 1, device="cpu"))

    other_parameters = [
        name for name, _ in parent.named_parameters() if name.split(".")[0] not in columns
    ]
    if any(not name.startswith(f"{row}.") for name in other_parameters):
        return False
    try:
        full, narrow = run(width), run(narrow_width)
        return full.shape[-1] == width and torch.allclose(
            full[..., :narrow_width], narrow, 1e-12, 0
        )
    except Exception:  # several inputs or outputs, as for an attention
        return False


class _Constant(nn.Module):
    """A stub for a projection."""

    def __init__(self, output: torch.Tensor) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output


def _create_projections(
    layers: dict[nn.Module, nn.Module], block: Block, group: str, rows: ResidualRows | None
) -> None:
    """Create the parallel projections of a block on the meta device, or raise."""
    sequence_options = {"sequence_parallel": rows is not None, "sequence_dim": -2}
    inputs = block.input_projections
    specs: dict[str, tuple[type[ParallelLinear], dict[str, Any]]] = {
        name: (SharedInputLinear, options | sequence_options)
        if name in inputs
        else (ColumnParallelLinear, options)
        for name, options in block.columns.items()
    }
    if block.row is not None:
        options = block.row_options | sequence_options
        replicated_input = options.pop("replicated_input", False)
        specs[block.row] = (SplitInputLinear if replicated_input else SplitRowsLinear, options)
    for child, (layer_type, options) in specs.items():
        old = getattr(block.module, child)
        new = layer_type.like(old, group, **options)
        if isinstance(new, SplitRowsLinear):
            new.rows = rows
        existing = layers.setdefault(old, new)
        if (type(existing), vars(existing)["shardings"], repr(existing)) != (
            layer_type,
            new.shardings,
            repr(new),
        ):
            raise NotImplementedError(
                f"{block.name}.{child} is used in several places that need different shards, "
                f"{existing!r} and {new!r}; use a separate module in each place"
            )
    for name, norm in block.head_norms.items():
        check_plain(norm, name, state_names(norm))


def _create_vocabulary_layers(
    layers: dict[nn.Module, nn.Module], model: PreTrainedModel, group: str
) -> None:
    """Create the embedding and the LM head, split by vocabulary, on the meta device, or raise. An
    embedding that does more than look up vectors is replicated, and so is a head tied to it."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    factor = _embedding_scale(embedding)
    if factor is not None:
        check_parameter(embedding.weight, "the weight of the embedding")
        buffers = dict(embedding.named_buffers(recurse=False))
        scale_buffers = [key for key in buffers if hasattr(embedding, f"scalar_{key}")]
        check_plain(embedding, "the embedding", ["weight", *scale_buffers])
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
    """Raise NotImplementedError if a projection is also used outside the blocks, or if modules that
    share a parameter need different shards of it."""
    uses = {
        (block.module, child)
        for block in blocks
        for child in (
            *block.columns,
            block.row,
            *(name.split(".")[-1] for name in block.head_norms),
        )
    }
    projections = {direct_children(parent).get(str(child)) for parent, child in uses} - {None}
    first_seen: dict[nn.Parameter, tuple[str, object]] = {}
    for name, parent in model.named_modules():
        for child, module in direct_children(parent).items():
            if module in projections and (parent, child) not in uses:
                raise NotImplementedError(
                    f"{name}.{child} is also used in a place where it is sharded, and cannot be "
                    "sharded here; use a separate module in each place"
                )
        layer = layers.get(parent)
        for key, parameter in direct_parameters(parent).items():
            sharding = (
                layer.shardings.get(key, "copied") if isinstance(layer, ShardedModule) else "kept"
            )
            if parameter is None:
                continue
            other, other_sharding = first_seen.setdefault(parameter, (f"{name}.{key}", sharding))
            if other_sharding != sharding:
                raise NotImplementedError(
                    f"{other} and {name}.{key} are one parameter, but the sharded model needs two "
                    "different shards of it; untie them"
                )


def _replace_modules(model: nn.Module, layers: dict[nn.Module, nn.Module]) -> None:
    """Replace modules by their parallel layers, which adopt the local shards of the weights."""
    use_counts = Counter(value for module in layers for value in direct_parameters(module).values())
    shared_shards: dict[nn.Parameter, nn.Parameter | None]
    shared_shards = {
        value: None for value, count in use_counts.items() if value is not None and count > 1
    }
    use_counts.clear()
    occurrences: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for child, module in direct_children(parent).items():
            if module in layers:
                occurrences.setdefault(module, []).append((parent, child))
    while occurrences:  # popitem frees the memory of each replaced module
        module, users = occurrences.popitem()
        layer = layers.pop(module)
        if isinstance(layer, ShardedModule):
            layer.adopt(module, shared_shards)
        for parent, child in users:
            setattr(parent, child, layer)


def _attach_hooks(block: Block, group: str, rows: ResidualRows | None) -> None:
    """Adapt a block to its parallel projections."""
    parent = block.module
    inputs = [
        child for child in block.columns if isinstance(getattr(parent, child), SharedInputLinear)
    ]
    if inputs:
        hook = partial(decoder.share_input, tuple(inputs), rows)
        parent.register_forward_pre_hook(hook, with_kwargs=True)
    if block.heads is not None:
        decoder.set_queries_per_key_head(parent, block.heads, group)
        decoder.use_local_head_parameters(parent, block.heads, block.head_parameters, group)
        decoder.reduce_rotary_key_gradient(parent, group)


def _embedding_scale(embedding: nn.Module) -> float | None:
    """Return the scale factor of an embedding, or None if it is not a scaled lookup."""
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
    probe = make_probe(embedding, buffers=buffers, parameters={"weight": vectors})
    probe.padding_idx = None
    try:
        result = probe.forward(torch.zeros(1, dtype=torch.long, device="cpu"))
        factor = float(result[0, 1])
        return factor if torch.equal(result, vectors * factor) else None
    except Exception:  # its forward needs more arguments
        return None


def _scale(factor: float, module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
    """Forward hook: scale the embedding output, rounded as in transformers."""
    return output * torch.tensor(factor).to(output.dtype)
