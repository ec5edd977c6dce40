"""transformers' ``LlamaForCausalLM`` under torch's own sequence-parallel plan: every gather before
a matmul and every scatter behind one is fused, forward and backward."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import RanksFixture
from compiled import graph_runner
from ranked import report
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import tpkernels

pytest.importorskip("transformers")

LAYERS, VOCAB, BATCH, TOKENS = 2, 64, 2, 16

_SHARD, _WHOLE = Shard(1), Replicate()
_ROWS = RowwiseParallel(output_layouts=_SHARD, use_local_output=False)
_LAYER: dict[str, Any] = {
    "input_layernorm": SequenceParallel(),
    "self_attn": PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": _SHARD},
        desired_input_kwarg_layouts={"hidden_states": _WHOLE},
    ),
    **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "self_attn.o_proj": _ROWS,
    "post_attention_layernorm": SequenceParallel(),
    "mlp": PrepareModuleInput(input_layouts=(_SHARD,), desired_input_layouts=(_WHOLE,)),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": _ROWS,
}
PLAN = {
    "model.embed_tokens": RowwiseParallel(
        input_layouts=_WHOLE, output_layouts=_SHARD, use_local_output=False
    ),
    **{f"model.layers.*.{name}": style for name, style in _LAYER.items()},
    "model.norm": SequenceParallel(),
    "lm_head": ColwiseParallel(input_layouts=_SHARD, output_layouts=_WHOLE),
}

# A gather before q, k, v and one before gate, up; a scatter behind o and one behind down. The
# backward has the other of each; and lm_head a gather, whose backward is a scatter.
PAIRS = LAYERS * 2 * 2 + 1


def _model(world: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=max(2, world),
            max_position_embeddings=TOKENS,
            initializer_range=0.2,  # so that attention is not uniform
            use_cache=False,
        )
    )


def _differences(model: Any, compiled: Any, whole: Any, tokens: torch.Tensor) -> list[str]:
    model.zero_grad()
    logits = compiled(input_ids=tokens).logits
    (logits**2).sum().backward()
    expected = whole(input_ids=tokens).logits
    pairs = {"logits": (logits, expected)}
    for (name, p), (_, q) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        pairs[name] = (p.grad.full_tensor(), q.grad)
    return [
        f"{name} differs by {(got - want).abs().max()} of {want.abs().max()}"
        for name, (got, want) in pairs.items()
        if not torch.allclose(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
    ]


def llama_job(code: bool) -> list[str]:
    """With ``code``, inductor generates it; otherwise its graphs run as they are."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    whole, model = _model(world), _model(world)
    parallelize_module(model, mesh, PLAN)
    tokens = torch.randint(0, VOCAB, (BATCH, TOKENS))
    (whole(input_ids=tokens).logits ** 2).sum().backward()
    seen: list[Counter[str]] = []
    backend: Any = "inductor" if code else graph_runner(seen)
    failures = []

    torch._dynamo.reset()
    with fresh_cache(), tpkernels.compile.fuse_collectives(mesh) as told:
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        failures += _differences(model, compiled, whole, tokens)
    if told.counts != {"all_gather_matmul": PAIRS, "matmul_reduce_scatter": PAIRS}:
        failures.append(str(told))
    # The embedding's sum and its backward's gather, and the logits' gather, have no matmul.
    if [each.site.module for each in told.left_alone] != [
        "model.embed_tokens",
        "lm_head",
        "model.embed_tokens",
    ]:
        failures.append(str(told))
    if code:
        return failures

    torch._dynamo.reset()
    seen.clear()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    failures += _differences(model, compiled, whole, tokens)
    collectives = sum(n for graph in seen for name, n in graph.items() if "_c10d" in name)
    ours = [name for graph in seen for name in graph if "tpkernels" in name]
    if ours or collectives != 2 * (2 * PAIRS + 3):  # each with a wait
        failures.append(f"without the pass: {collectives} of c10d, {ours}")
    return failures


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_pair_is_fused(ranks: RanksFixture, world: int) -> None:
    report(f for rank in ranks(world).run(llama_job, False, timeout=280) for f in rank)


@pytest.mark.slow
def test_inductor(ranks: RanksFixture) -> None:
    report(f for rank in ranks(2).run(llama_job, True, timeout=280) for f in rank)
