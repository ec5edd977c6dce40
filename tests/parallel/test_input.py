"""``tpkernels.parallelize`` refuses bad inputs: the error names the module, and the model stays
unchanged. Also plans of torch styles for arbitrary models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.utils import prune

import tpkernels
from tests.support import hf_models
from tests.support.hf_models import attempt
from tests.support.ranked import find_unexpected_messages, on_ranks
from tpkernels.parallel import FusedColwiseParallel

pytest.importorskip("transformers")


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)}) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block["down"](block["up"](x).relu())
        return x


def _make_changed_model(name: str, change: Callable[[nn.Module], nn.Module]) -> Any:
    model = hf_models.make("llama")
    owner, _, last = name.rpartition(".")
    parent = model.get_submodule(owner)
    setattr(parent, last, change(getattr(parent, last)))
    return model


def _quantise(linear: nn.Module) -> nn.Module:
    weight = linear.get_parameter("weight").detach().to(torch.int8)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def _make_property_change(kind: str) -> Callable[[nn.Module], nn.Module]:
    """Return a function that gives a module a property that its parallel replacement would lose."""

    def change(module: nn.Module) -> nn.Module:
        if kind == "pruned":
            prune.random_unstructured(module, "weight", 0.5)
        elif kind == "hooks of the weight":
            module.get_parameter("weight").register_hook(torch.neg)
        elif kind in ("forward", "lora"):
            setattr(module, kind, module.forward if kind == "forward" else nn.Linear(4, 4))
        elif kind == "buffer":
            module.register_buffer("mask", torch.ones(1))
        else:
            getattr(module, f"register_{kind}")(print)
        return module

    return change


def _share(name: str, second_name: str) -> Any:
    """Return a model that uses one module or weight under two names."""
    model = hf_models.make("llama", num_key_value_heads=9, intermediate_size=36)
    parent, _, last = second_name.rpartition(".")
    owner, _, key = name.rpartition(".")
    setattr(model.get_submodule(parent), last, getattr(model.get_submodule(owner), key))
    return model


@on_ranks(2)
def test_lossy_replacements_are_refused() -> list[str]:
    """Add hooks, buffers, overrides or shared modules, some of them in the last layer. The refusal
    leaves the model unchanged."""
    mesh, plan = hf_models.make_world_mesh(), {"model.layers.*.mlp.up_proj": ColwiseParallel()}
    if mesh.get_rank():
        return []
    lost = "is replaced by a parallel layer, and would lose its"
    down, q = "model.layers.1.mlp.down_proj", "model.layers.0.self_attn.q_proj"
    shared_weight = "are one parameter, but the sharded model needs two different"
    fused_plan = {"model.layers.*.mlp.up_proj": FusedColwiseParallel(input_layouts=Shard(1))}
    attempts = {
        f"{down} {lost} forward_pre_hooks, its weight_orig, its w": (down, "pruned"),
        f"{down} {lost} forward_hooks; remove": (down, "forward_hook"),
        f"{q} {lost} backward_hooks": (q, "full_backward_hook"),
        f"{q} {lost} state_dict_pre_hooks": (q, "state_dict_pre_hook"),
        f"{down} {lost} overridden forward": (down, "forward"),
        f"{down} {lost} lora": (down, "lora"),
        f"{down} {lost} mask": (down, "buffer"),
        f"{down}.weight has hooks, which its shard would": (down, "hooks of the weight"),
        f"lm_head {lost} overridden forward": ("lm_head", "forward"),
        f"the embedding {lost} forward_hooks": ("model.embed_tokens", "forward_hook"),
    }
    plan_attempts = {
        "up_proj.weight has hooks, which its shard would": (plan, "hooks of the weight"),
        "Linear(in_features=36, out_features=22, bias=False): its weight has h": (
            fused_plan,
            "hooks of the weight",
        ),
        "its forward is overridden, which the style does not support": (fused_plan, "forward"),
    }
    up = "model.layers.1.mlp.up_proj"
    shared = {
        f"{q}.weight and model.layers.0.self_attn.o_proj.weight {shared_weight}": _share(
            f"{q}.weight", "model.layers.0.self_attn.o_proj.weight"
        ),
        ".extra is also used in a place where it is sharded": _share(down, "extra"),
        "model.layers.0.self_attn.o_proj is used in several places that need different": _share(
            q, "model.layers.0.self_attn.o_proj"
        ),
    }
    heads = hf_models.make("qwen3")
    heads.model.layers[1].self_attn.k_norm.register_forward_hook(print)
    moe, float64_moe = (hf_models.make("mixtral", num_local_experts=2) for _ in range(2))
    float64_moe.model.layers[0].mlp.experts.double()
    moe.model.layers[1].mlp.experts.register_forward_pre_hook(print)
    return find_unexpected_messages(
        {
            message: attempt(_make_changed_model(name, _make_property_change(kind)), mesh)
            for message, (name, kind) in attempts.items()
        }
        | {
            message: attempt(
                _make_changed_model(up, _make_property_change(kind)), mesh, plan=styles
            )
            for message, (styles, kind) in plan_attempts.items()
        }
        | {message: attempt(model, mesh) for message, model in shared.items()}
        | {
            f"model.layers.1.self_attn.k_norm {lost} forward_hooks": attempt(heads, mesh),
            f"model.layers.1.mlp.experts {lost} forward_pre_hooks": attempt(moe, mesh),
            "layers.0.mlp.experts.gate_up_proj is float64, which": attempt(
                float64_moe, mesh, pack=True
            ),
        },
        NotImplementedError,
    )


@on_ranks(2)
def test_refusals_name_the_module() -> list[str]:
    import transformers

    mesh = hf_models.make_world_mesh()
    square = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    if mesh.get_rank():  # a refusal needs no communication, so rank 0 is enough
        return []
    llama, style, mlp = hf_models.make("llama"), ColwiseParallel(), MLP()
    twice = tpkernels.parallelize(hf_models.make("llama"), mesh)
    up, plan = {"blocks.*.up": style}, {"model.layers.*.mlp.down_proj": RowwiseParallel()}
    gpt = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=8)
    down = _make_changed_model("model.layers.1.mlp.down_proj", _quantise)
    adapted = _make_changed_model("model.layers.0.self_attn.k_proj", nn.Sequential)
    wrong_width = _make_changed_model(
        "model.layers.1.self_attn.v_proj", lambda _: nn.Linear(36, 16, bias=False)
    )
    fused = FusedColwiseParallel(input_layouts=(Shard(0), Shard(1)))
    nan = hf_models.make("llama")
    nan.lm_head.weight.data[1, 2] = torch.nan
    quantised = "NotImplementedError: model.layers.1.mlp.down_proj.weight is a Tensor of int8; a qu"
    return find_unexpected_messages(
        {
            "has 2 dims ('dp', 'tp'); parallelize needs a mesh of one dim: pass mesh[\"tp\"]": (
                attempt(llama, square)
            ),
            "TypeError: mesh must be a DeviceMesh, not str": attempt(llama, "tp"),
            "GPT2LMHeadModel (model_type 'gpt2') is not supported without a plan: its": (
                attempt(transformers.GPT2LMHeadModel(gpt), mesh)
            ),
            "MLP (model_type None) is not supported without a plan": attempt(mlp, mesh),
            quantised: attempt(down, mesh),
            quantised[:-1]: attempt(down, mesh, plan=plan),
            "layers.0.self_attn.k_proj is a torch.nn.modules.container.Seq": attempt(adapted, mesh),
            "layers.0.self_attn.q_proj is a tpkernels.parallel.decoder.Shared": attempt(
                twice, mesh
            ),
            "names 'blocks.*.upp', which is not a module of MLP; did you mean blocks": attempt(
                mlp, mesh, plan={"blocks.*.upp": style}
            ),
            "TypeError: plan['blocks.*.up'] is a str, not a torch.distributed.tensor": attempt(
                mlp, mesh, plan={"blocks.*.up": "colwise"}
            ),
            "TypeError: blocks is a ModuleList; ColwiseParallel supports nn.Linear and": attempt(
                mlp, mesh, plan=up | {"blocks": style}
            ),
            "ValueError: plan is empty": attempt(mlp, mesh, plan={}),
            "TypeError: blocks.1.down: FusedColwiseParallel of Linear(": attempt(
                mlp, mesh, plan=up | {"blocks.1.down": fused}
            ),
            "layers.1.self_attn.v_proj has 16 features, which does not fit 9 attention": attempt(
                wrong_width, mesh
            ),
            "pack is 'int4'; expected True, False or": attempt(mlp, mesh, pack="int4"),
            "pack=True packs the layers of tpkernels.nn, and a plan of torch styles": attempt(
                mlp, mesh, plan=up, pack=True
            ),
            "model.layers.0.self_attn.q_proj.weight is float64, which cannot be packed": attempt(
                hf_models.make("llama").double(), mesh, pack=True
            ),
            "ValueError: lm_head.weight has NaN or infinite elements": attempt(
                nan, mesh, pack="int8"
            ),
            "is computed when its parent module is called": (
                lambda: twice.model.layers[0].mlp.up_proj(torch.zeros(1, 2, 36))
            ),
        }
    )


@on_ranks(2)
def test_resizing_is_refused() -> None:
    """Resizing is refused with every kind of plan, because new rows would differ between ranks."""
    mesh = hf_models.make_world_mesh()
    plan = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate())}
    for options in ({}, {"ffn_only": True}, {"plan": plan}):
        model: Any = tpkernels.parallelize(hf_models.make("llama"), mesh, **options)
        for module in (model, model.model):
            with pytest.raises(NotImplementedError) as caught:
                module.resize_token_embeddings(50)
            assert str(caught.value) == (
                "resize_token_embeddings is not supported on a parallelized model; call it before "
                "tpkernels.parallelize"
            )


@on_ranks(2)
def test_a_plan_of_torch_styles() -> None:
    torch.manual_seed(3)
    model, x = MLP(), torch.randn(3, 4)
    want = model(x)
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    returned = tpkernels.parallelize(model, hf_models.make_world_mesh(), plan=plan)
    assert returned is model
    assert model.blocks[1]["up"].weight.to_local().shape == (4, 4)
    torch.testing.assert_close(model(x), want, rtol=0, atol=1e-6)
