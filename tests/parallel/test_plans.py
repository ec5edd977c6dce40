"""Models with a tensor-parallel plan in transformers. Each family works as documented in the table
of docs/models.md, and unsafe plans are refused."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor.parallel import ColwiseParallel

import tpkernels
from tests.support import hf_folders, hf_models
from tests.support.cases import RanksFixture
from tests.support.hf_models import attempt
from tests.support.paths import ROOT
from tests.support.ranked import find_unexpected_messages, on_ranks, record_calls
from tests.support.tiers import sweep
from tpkernels.parallel.plans import SplitInputLinear

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

#: Options of MoE models. A factor of 1, the usual default, would hide that the code ignores it.
LOCAL = dict(num_local_experts=5, num_experts_per_tok=3)
NARROW = dict(num_experts_per_tok=3, moe_intermediate_size=10)
ROUTED = NARROW | dict(n_routed_experts=5)
SHARED = dict(n_shared_experts=1, first_k_dense_replace=1)
LATENT = NARROW | SHARED | dict(num_key_value_heads=9, q_lora_rank=10, kv_lora_rank=6)
LATENT |= dict(qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
V2 = dict(
    q_lora_rank=None, n_group=1, topk_group=1, topk_method="greedy", routed_scaling_factor=2.0
)
GRANITE = dict(embedding_multiplier=2.0, residual_multiplier=0.5, logits_scaling=3.0)
GRANITE_MOE = LOCAL | dict(residual_multiplier=0.5, attention_multiplier=0.3)
GPT_OSS = LOCAL | dict(sliding_window=4, swiglu_limit=0.9, attention="eager")
ERNIE = dict(moe_num_experts=5, moe_k=3, moe_intermediate_size=10, moe_num_shared_experts=1)
#: Family name in docs/models.md -> model type and configuration options besides sizes.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Phi-3, Phi-4": ("phi3", {}),
    "Gemma 2": ("gemma2", {"attention": "eager"}),
    "Llama": ("llama", {}),
    "Mistral": ("mistral", {}),
    "Qwen2": ("qwen2", {}),
    "Qwen3": ("qwen3", {"tied": True}),
    "Gemma 3 (text)": ("gemma3_text", {}),
    "OLMo2": ("olmo2", {}),
    "SmolLM3": ("smollm3", {}),
    "Granite": ("granite", GRANITE),
    "Cohere": ("cohere", {}),
    "GLM-4": ("glm4", {}),
    "StarCoder2": ("starcoder2", {}),
    "GPT-NeoX": ("gpt_neox", {}),
    "Mixtral": ("mixtral", {"num_local_experts": 3}),
    "Qwen3-MoE": ("qwen3_moe", NARROW | {"num_experts": 5}),
    "gpt-oss": ("gpt_oss", GPT_OSS),
    "OLMoE": ("olmoe", dict(num_experts=4, num_experts_per_tok=2, num_key_value_heads=9)),
    "Qwen2-MoE": ("qwen2_moe", NARROW | dict(num_experts=5, shared_expert_intermediate_size=14)),
    "GLM-4.5": ("glm4_moe", ROUTED | {"first_k_dense_replace": 1}),
    "ERNIE 4.5 MoE": ("ernie4_5_moe", ERNIE),
    "dots.llm1": ("dots1", ROUTED | SHARED),
    "DeepSeek-V2": ("deepseek_v2", ROUTED | LATENT | V2),
    "DeepSeek-V3": ("deepseek_v3", LATENT | dict(n_routed_experts=6, n_group=3, topk_group=2)),
    "GLM-4.7-Flash": ("glm4_moe_lite", ROUTED | LATENT),
    "Granite-MoE": ("granitemoe", GRANITE_MOE),
    "Phi-3.5-MoE": ("phimoe", dict(num_local_experts=5, router_jitter_noise=0.0)),
    "MiniMax-M2": ("minimax_m2", LOCAL | {"rotary_dim": 4}),
}


def family_job(family: str, folder: str, save_folder: str) -> str:
    """Check a family against its row in the table. Return the entry for its attention."""
    model_type, options = FAMILIES[family]
    mesh = hf_models.make_world_mesh()
    model = hf_models.make(model_type, **options)
    model.config.output_router_logits = True  # adds the router loss if the model has one
    is_moe = any("experts" in name for name, _ in model.named_parameters())
    for sequence, experts in product((False, True), (False, True) if is_moe else (False,)):
        wrong = hf_models.find_differences(model, sequence, mesh, expert_parallel=experts)
        assert not wrong, f"{sequence=} {experts=}: {wrong}"
    unsharded = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation=options.get("attention", "sdpa")
    )
    unsharded.config._experts_implementation = "eager"
    loaded = tpkernels.from_pretrained(folder, mesh, sequence_parallel=True)
    ids = hf_models.batch()["input_ids"]
    with record_calls() as calls, torch.no_grad():
        logits = loaded(ids, use_cache=False).logits
    assert "matmul_reduce_scatter" in calls, "rows are not split"
    assert (error := hf_models.find_logit_error(logits, unsharded, ids)) is None, (
        f"from_pretrained: {error}"
    )
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    tokens, models = unsharded.generate(ids, **settings), [loaded]
    if is_moe:
        loaded_bf16 = tpkernels.from_pretrained(folder, mesh, dtype=torch.bfloat16).state_dict()
        unsharded_bf16 = type(unsharded).from_pretrained(folder, dtype=torch.bfloat16).state_dict()
        got, want = (
            {name: x.dtype for name, x in state.items()} for state in (loaded_bf16, unsharded_bf16)
        )
        assert got == want, "other dtypes"
        packed = dict(sequence_parallel=False, expert_parallel=True, pack=True)
        models.append(tpkernels.from_pretrained(folder, mesh, **packed))
    assert all(torch.equal(candidate.generate(ids, **settings), tokens) for candidate in models)
    if "kv_lora_rank" in options:  # transformers does not batch latent attention either
        with pytest.raises(NotImplementedError, match="does not support the keys and values of"):
            hf_models.generate_tokens(loaded)
    else:
        assert list(hf_models.generate_tokens(loaded).values()) == hf_models.expected_tokens(
            unsharded
        )
    loaded.save_pretrained(save_folder)
    saved = transformers.AutoModelForCausalLM.from_pretrained(save_folder).state_dict()
    assert all(torch.equal(saved[name], value) for name, value in unsharded.state_dict().items())
    has_full_heads = any(isinstance(module, SplitInputLinear) for module in loaded.modules())
    return "on each rank" if has_full_heads else "split"


def table_row(family: str) -> list[str]:
    """Return the row of a family in the table of docs/models.md. All families listed there work."""
    lines = (ROOT / "docs" / "models.md").read_text().splitlines()
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines]
    [cells] = [row for row in rows if row[:1] == [family]]
    return cells


@pytest.mark.parametrize("world", sweep([2, 4, 1]))
@pytest.mark.parametrize("family", sweep(FAMILIES, 2, num_thorough=len(FAMILIES) // 3))
def test_a_family(ranks: RanksFixture, tmp_path: Path, family: str, world: int) -> None:
    model_type, options = FAMILIES[family]
    folder = hf_folders.folder(tmp_path, model_type, **options)
    attention, *_ = ranks(world).run(
        family_job, family, str(folder), str(tmp_path / "again"), timeout=120
    )
    assert table_row(family) == [family, model_type, attention]


def _with_style(style: str, module: str = "mlp.down_proj") -> Any:
    """Return a model whose plan has ``style`` for ``module``."""
    model = hf_models.make("gemma2", attention="eager")
    model._tp_plan[f"model.layers.*.{module}"] = style
    return model


def _with_softmax_gates() -> Any:
    """Return an MoE model whose gate activations depend on each other."""
    model = hf_models.make("mixtral", num_local_experts=2)
    model.model.layers[0].mlp.experts.act_fn = torch.nn.Softmax(-1)
    return model


def _with_sinks(count: int) -> Any:
    model = hf_models.make("gpt_oss", num_local_experts=2, attention="eager")
    model.model.layers[0].self_attn.sinks = torch.nn.Parameter(torch.ones(count))
    return model


def _with_softmax_mlp() -> Any:
    """Return a model whose plan allows a split that its code does not support."""
    model = hf_models.make("glm4")
    model.model.layers[1].mlp.activation_fn = torch.nn.Softmax(-1)
    model._tp_plan["model.layers.*.mlp.gate_up_proj"] = "packed_colwise"
    model._tp_plan["model.layers.*.mlp.down_proj"] = "rowwise"
    return model


@on_ranks(2)
def test_a_plan_of_single_projections() -> list[str]:
    mesh, llama = hf_models.make_world_mesh(), hf_models.make("llama")
    styles = {"self_attn.o_proj": "rowwise_split_input", "mlp.up_proj": "colwise_gather_output"}
    return [
        failure
        for name, style in styles.items()
        for failure in hf_models.find_differences(
            llama, True, mesh, plan={f"model.layers.*.{name}": style}
        )
    ]


@on_ranks(2)
def test_moe_with_dependent_rows() -> list[str]:
    """The gates center their input over the rows. The layer is not split by rows, and results match
    the unsharded model."""

    def centre(module: torch.nn.Module, args: Any) -> Any:
        return args[0] - args[0].mean(0, keepdim=True)

    model = hf_models.make("mixtral", num_local_experts=3)
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_pre_hook(centre)
    return hf_models.find_differences(model, True, hf_models.make_world_mesh())


@on_ranks(2)
def test_unsafe_plans_are_refused() -> list[str]:
    """The error gives the module and its style, and is raised before communication."""
    mesh = hf_models.make_world_mesh()
    if mesh.get_rank():
        return []
    dropping = hf_models.make("starcoder2", residual_dropout=0.5)
    packed = {"model.layers.*.mlp.gate_up_proj": ColwiseParallel()}
    in_plan = "in the plan, but"
    attempts = {
        "gate_up_proj: ColwiseParallel would leave its output columns sharded, but the code": (
            attempt(hf_models.make("phi3"), mesh, plan=packed)
        ),
        f"mlp.gate_up_proj has the style 'packed_colwise' {in_plan} the code of Glm4MLP may mix": (
            attempt(_with_softmax_mlp(), mesh)
        ),
        "0.self_attn.q_norm.weight would have to be sharded as well; pass plan": attempt(
            hf_models.make("cohere", use_qk_norm=True), mesh
        ),
        f"0.mlp.experts has the style 'moe_tp_experts' {in_plan} MoE does not support": attempt(
            _with_softmax_gates(), mesh
        ),
        f"0.self_attn.sinks has the style 'colwise' {in_plan} it has 8 entries, not one for each "
        "of 9 heads": attempt(_with_sinks(8), mesh),
        f"0.mlp.down_proj has the style 'all_reduce' {in_plan} this style is": attempt(
            _with_style("all_reduce"), mesh
        ),
        f"0.mlp.gate_proj has the style 'colwise' {in_plan} sharding is supported only": attempt(
            _with_style("replicate"), mesh
        ),
        f"self_attn.o_proj.weight has the style 'rowwise' {in_plan} a parameter can": attempt(
            _with_style("rowwise", "self_attn.o_proj.weight"), mesh
        ),
        "self_attn.residual_dropout=0.5, and each rank would drop different values": partial(
            tpkernels.parallelize(dropping, mesh), **hf_models.batch()
        ),
    }
    twice = attempt(tpkernels.parallelize(hf_models.make("llama"), mesh), mesh)
    return [
        *find_unexpected_messages(attempts, NotImplementedError),
        *find_unexpected_messages(
            {"not an nn.Linear; the model is already sharded": twice}, TypeError
        ),
    ]
