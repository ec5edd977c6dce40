"""What ``tpkernels.parallelize`` refuses, with errors that name the module and leave the model
unchanged; and plans of torch's styles for any model."""

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
from tests.support.ranked import on_ranks, unlike
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


def _changed(name: str, change: Callable[[nn.Module], nn.Module]) -> Any:
    model = hf_models.make("llama")
    owner, _, last = name.rpartition(".")
    parent = model.get_submodule(owner)
    setattr(parent, last, change(getattr(parent, last)))
    return model


def _quantised(linear: nn.Module) -> nn.Module:
    weight = linear.get_parameter("weight").detach().to(torch.int8)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def _hooked(kind: str) -> Callable[[nn.Module], nn.Module]:
    """Add something to a module that a parallel layer would not have."""

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


def _shared(name: str, other: str) -> Any:
    """A model with one module or weight in two places."""
    model = hf_models.make("llama", num_key_value_heads=9, intermediate_size=36)
    parent, _, last = other.rpartition(".")
    owner, _, key = name.rpartition(".")
    setattr(model.get_submodule(parent), last, getattr(model.get_submodule(owner), key))
    return model


@on_ranks(2)
def test_what_would_be_lost_is_refused() -> list[str]:
    """And leaves the model unchanged, although it is in the last of the modules."""
    mesh, plan = hf_models.mesh_of_all(), {"model.layers.*.mlp.up_proj": ColwiseParallel()}
    if mesh.get_rank():
        return []
    lost = "is replaced by a parallel layer, and would lose its"
    down, q = "model.layers.1.mlp.down_proj", "model.layers.0.self_attn.q_proj"
    two = "are one parameter, but the sharded model needs two different"
    fused = {"model.layers.*.mlp.up_proj": FusedColwiseParallel(input_layouts=Shard(1))}
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
    of_plan = {
        "up_proj.weight has hooks, which its shard would": (plan, "hooks of the weight"),
        "Linear(in_features=36, out_features=22, bias=False): its weight has h": (
            fused,
            "hooks of the weight",
        ),
        "its forward is overridden, which the style does not support": (fused, "forward"),
    }
    up = "model.layers.1.mlp.up_proj"
    shared = {
        f"{q}.weight and model.layers.0.self_attn.o_proj.weight {two}": _shared(
            f"{q}.weight", "model.layers.0.self_attn.o_proj.weight"
        ),
        ".extra is also used in a place where it is sharded": _shared(down, "extra"),
        "model.layers.0.self_attn.o_proj is used in several places that need different": _shared(
            q, "model.layers.0.self_attn.o_proj"
        ),
    }
    heads = hf_models.make("qwen3")
    heads.model.layers[1].self_attn.k_norm.register_forward_hook(print)
    mixture, wide = (hf_models.make("mixtral", num_local_experts=2) for _ in range(2))
    wide.model.layers[0].mlp.experts.double()
    mixture.model.layers[1].mlp.experts.register_forward_pre_hook(print)
    return unlike(
        {
            text: attempt(_changed(name, _hooked(kind)), mesh)
            for text, (name, kind) in attempts.items()
        }
        | {
            text: attempt(_changed(up, _hooked(kind)), mesh, plan=styles)
            for text, (styles, kind) in of_plan.items()
        }
        | {text: attempt(model, mesh) for text, model in shared.items()}
        | {
            f"model.layers.1.self_attn.k_norm {lost} forward_hooks": attempt(heads, mesh),
            f"model.layers.1.mlp.experts {lost} forward_pre_hooks": attempt(mixture, mesh),
            "layers.0.mlp.experts.gate_up_proj is float64, which": attempt(wide, mesh, pack=True),
        },
        NotImplementedError,
    )


@on_ranks(2)
def test_refusals_name_the_module() -> list[str]:
    import transformers

    mesh = hf_models.mesh_of_all()
    square = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    if mesh.get_rank():  # each rank refuses on its own, without communication
        return []
    llama, style, mlp = hf_models.make("llama"), ColwiseParallel(), MLP()
    twice = tpkernels.parallelize(hf_models.make("llama"), mesh)
    up, plan = {"blocks.*.up": style}, {"model.layers.*.mlp.down_proj": RowwiseParallel()}
    gpt = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=8)
    down = _changed("model.layers.1.mlp.down_proj", _quantised)
    adapted = _changed("model.layers.0.self_attn.k_proj", nn.Sequential)
    wide = _changed("model.layers.1.self_attn.v_proj", lambda _: nn.Linear(36, 16, bias=False))
    fused = FusedColwiseParallel(input_layouts=(Shard(0), Shard(1)))
    nan = hf_models.make("llama")
    nan.lm_head.weight.data[1, 2] = torch.nan
    quantised = "NotImplementedError: model.layers.1.mlp.down_proj.weight is a Tensor of int8; a qu"
    return unlike(
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
                wide, mesh
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
    """However the model was split: ranks would draw their own values for new rows."""
    mesh = hf_models.mesh_of_all()
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
def test_a_plan_of_torchs_styles() -> None:
    torch.manual_seed(3)
    model, x = MLP(), torch.randn(3, 4)
    want = model(x)
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    returned = tpkernels.parallelize(model, hf_models.mesh_of_all(), plan=plan)
    assert returned is model
    assert model.blocks[1]["up"].weight.to_local().shape == (4, 4)
    torch.testing.assert_close(model(x), want, rtol=0, atol=1e-6)
