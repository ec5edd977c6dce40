"""transformers' ``LlamaForCausalLM`` under torch's own sequence-parallel plan: every gather before
a matmul and every scatter after one is fused, in forward and backward."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import tpkernels
from tests.support.cases import RanksFixture
from tests.support.compiled import graph_runner
from tests.support.ranked import report

pytest.importorskip("transformers")

LAYERS, VOCAB, BATCH, TOKENS, WIDTH, HIDDEN = 1, 64, 2, 16, 32, 48
LONGEST = max(VOCAB, BATCH * TOKENS, WIDTH, HIDDEN)  # longest sum in a matmul or a gradient

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

# A gather before q, k, v and one before gate, up; a scatter after o and one after down. The
# backward has the opposite of each. lm_head has a gather, whose backward is a scatter.
PAIRS = LAYERS * 2 * 2 + 1


def _model(world: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            intermediate_size=HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=max(2, world),
            max_position_embeddings=TOKENS,
            initializer_range=0.2,  # so that attention is not uniform
            use_cache=False,
        )
    )


def _step(model: Any, run: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits and gradients, whole."""
    model.zero_grad()
    logits = run(input_ids=tokens).logits
    (logits**2).sum().backward()
    results = {"logits": logits.detach()} | {n: p.grad for n, p in model.named_parameters()}
    whole = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in results.items()}
    return {name: tensor.double() for name, tensor in whole.items()}


def _too_far(got: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> str | None:
    """The bound of the reference results: the error of the model without the pass, plus sqrt(K)
    roundings of the largest element."""
    scale = float(exact.abs().max())
    error = float((plain - exact).abs().max())
    off = float((got - exact).abs().max())
    eps = torch.finfo(torch.float32).eps
    if error < 1e-4 * scale and off <= error + LONGEST**0.5 * eps * scale:
        return None
    return f"off by {off:.2e}, without the pass by {error:.2e}, of {scale:.2e}"


def _compiled(
    model: Any, tokens: torch.Tensor, backend: Any
) -> tuple[dict[str, torch.Tensor], list[Counter[str]]]:
    """One step of the compiled model, and the ops in its graphs."""
    torch._dynamo.reset()
    seen: list[Counter[str]] = []
    run = torch.compile(model, fullgraph=True, backend=backend or graph_runner(seen))
    return _step(model, run, tokens), seen


def llama_job(backend: str | None, twice: bool) -> list[str]:
    """Without ``backend``, inductor's graphs run without code generation. The result is compared
    with the eager model; with ``twice``, with the model compiled without the pass."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    whole, model = _model(world).double(), _model(world)
    parallelize_module(model, mesh, PLAN)
    tokens = torch.randint(0, VOCAB, (BATCH, TOKENS))  # seeded by _model, the same on all ranks
    exact = _step(whole, whole, tokens)
    failures = []
    with fresh_cache():
        if twice:
            plain, ops = _compiled(model, tokens, backend)
            collectives = sum(n for graph in ops for name, n in graph.items() if "_c10d" in name)
            ours = [name for graph in ops for name in graph if "tpkernels" in name]
            if backend is None and (ours or collectives != 2 * (2 * PAIRS + 3)):  # each with a wait
                failures.append(f"without the pass: {collectives} of c10d, {ours}")
        else:
            plain = _step(model, model, tokens)
        with tpkernels.compile.fuse_collectives(mesh) as pass_report:
            fused, _ = _compiled(model, tokens, backend)
    for name, got in fused.items():
        wrong = _too_far(got, plain[name], exact[name])
        failures += [f"{name}: {wrong}"] if wrong else []
    # The embedding's reduction, its backward's gather and the logits' gather have no matmul.
    left = [each.site.module for each in pass_report.left_alone]
    if pass_report.counts != {
        "all_gather_matmul": PAIRS,
        "matmul_reduce_scatter": PAIRS,
    } or left != [
        "model.embed_tokens",
        "lm_head",
        "model.embed_tokens",
    ]:
        failures.append(str(pass_report))
    return failures


@pytest.mark.thorough
def test_every_pair_is_fused(ranks: RanksFixture) -> None:
    report(f for rank in ranks(2).run(llama_job, None, False, timeout=280) for f in rank)


@pytest.mark.slow
def test_inductor(ranks: RanksFixture) -> None:
    report(f for rank in ranks(2).run(llama_job, "inductor", True, timeout=280) for f in rank)
