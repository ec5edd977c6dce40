"""What ``tpkernels.parallelize`` refuses, with errors that name the module and leave the model
unchanged; and plans of torch's styles for any model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import tpkernels
from tests.support import hf_models
from tests.support.cases import RanksFixture
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


def _inventory(model: nn.Module) -> list[object]:
    """The identities of all modules and parameters, and the number of hooks of each module."""
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    return [*map(id, model.modules()), *map(id, model.parameters()), *hooks]


def _attempt(messages: list[str], model: nn.Module, do: Callable[[], Any]) -> None:
    before = _inventory(model)
    try:
        do()
        message = "nothing"
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    messages.append(message if _inventory(model) == before else f"changed the model: {message}")


def _changed(name: str, change: Callable[[nn.Module], nn.Module]) -> Any:
    model = hf_models.make("llama")
    owner, _, last = name.rpartition(".")
    parent = model.get_submodule(owner)
    setattr(parent, last, change(getattr(parent, last)))
    return model


def _quantised(linear: nn.Module) -> nn.Module:
    assert isinstance(linear, nn.Linear)
    weight = linear.weight.detach().to(torch.int8)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def refusals_job() -> list[str]:
    import transformers

    mesh = hf_models.mesh_of_all()
    square = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    if mesh.get_rank():  # each rank refuses on its own, without communication
        return []
    messages: list[str] = []
    llama = hf_models.make("llama")
    gpt = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=8)
    )
    down = _changed("model.layers.1.mlp.down_proj", _quantised)
    adapted = _changed("model.layers.0.self_attn.k_proj", nn.Sequential)
    norm = _changed("model.layers.1.input_layernorm", lambda _: nn.LayerNorm(36))
    twice = tpkernels.parallelize(hf_models.make("llama"), mesh)
    mlp, style = MLP(), ColwiseParallel()
    fused = FusedColwiseParallel(input_layouts=(Shard(0), Shard(1)))
    wide = _changed("model.layers.1.self_attn.v_proj", lambda _: nn.Linear(36, 16, bias=False))
    attempts: list[tuple[nn.Module, Any, dict[str, Any]]] = [
        (llama, square, {}),
        (llama, "tp", {}),
        (gpt, mesh, {}),
        (mlp, mesh, {}),
        (down, mesh, {}),
        (adapted, mesh, {}),
        (norm, mesh, {}),
        (twice, mesh, {}),
        (mlp, mesh, {"plan": {"blocks.*.upp": style}}),
        (mlp, mesh, {"plan": {"blocks.*.up": "colwise"}}),
        (mlp, mesh, {"plan": {"blocks.*.up": style, "blocks": style}}),
        (mlp, mesh, {"plan": {}}),
        (mlp, mesh, {"plan": {"blocks.*.up": style, "blocks.1.down": fused}}),
        (wide, mesh, {}),
        (down, mesh, {"plan": {"model.layers.*.mlp.down_proj": RowwiseParallel()}}),
        (mlp, mesh, {"plan": {"blocks.*.up": style}, "pack": True}),
        (hf_models.make("llama").double(), mesh, {"pack": True}),
    ]
    for model, on, options in attempts:
        _attempt(messages, model, lambda m=model, o=on, k=options: tpkernels.parallelize(m, o, **k))
    return messages


def test_refusals_name_the_module(ranks: RanksFixture) -> None:
    quantised = "model.layers.1.mlp.down_proj.weight is a Tensor of int8; a quantised"
    expected = [
        "ValueError: mesh has 2 dims ('dp', 'tp'); parallelize takes one: pass mesh[\"tp\"]",
        "TypeError: mesh must be a DeviceMesh, not str",
        "NotImplementedError: GPT2LMHeadModel (model_type 'gpt2') is not supported without a plan; "
        "these are: llama, mistral, qwen2, qwen3; pass plan=",
        "NotImplementedError: MLP (model_type None) is not supported without a plan",
        f"NotImplementedError: {quantised}",
        "TypeError: model.layers.0.self_attn.k_proj is a torch.nn.modules.container.Sequential",
        "TypeError: model.layers.1.input_layernorm is a LayerNorm",
        "TypeError: model.embed_tokens is a tpkernels.nn.vocabulary.VocabParallelEmbedding",
        "ValueError: plan names 'blocks.*.upp', which is not a module of MLP; did you mean blocks",
        "TypeError: plan['blocks.*.up'] is a str, not a torch.distributed.tensor.parallel.Parall",
        "TypeError: blocks is a ModuleList; ColwiseParallel takes an nn.Linear or an nn.Embedding",
        "ValueError: plan is empty",
        "TypeError: blocks.1.down: FusedColwiseParallel of Linear(",
        "ValueError: model.layers.1.self_attn.v_proj has 16 features, expected ",
        f"NotImplementedError: {quantised}",
        "NotImplementedError: pack=True packs the layers of tpkernels.nn, and a plan makes none",
        "NotImplementedError: model.layers.0.self_attn.q_proj.weight is float64, which oneDNN does",
    ]
    messages, _ = ranks(2).run(refusals_job)
    for message, start in zip(messages, expected, strict=True):
        assert message.startswith(start), message


def outside_job() -> str:
    """A projection called without its parent has no output."""
    model = tpkernels.parallelize(hf_models.make("llama"), hf_models.mesh_of_all())
    try:
        model.model.layers[0].mlp.up_proj(torch.zeros(1, 2, 36))
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_a_projection_by_itself(ranks: RanksFixture) -> None:
    for message in ranks(2).run(outside_job):
        assert "is computed when its parent module is called" in message


def plan_job() -> float:
    torch.manual_seed(3)
    model, x = MLP(), torch.randn(3, 4)
    want = model(x)
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    returned = tpkernels.parallelize(model, hf_models.mesh_of_all(), plan=plan)
    assert returned is model
    assert model.blocks[1]["up"].weight.to_local().shape == (4, 4)
    return float((model(x) - want).abs().max())


def test_a_plan_of_torchs_styles(ranks: RanksFixture) -> None:
    assert max(ranks(2).run(plan_job)) < 1e-6
