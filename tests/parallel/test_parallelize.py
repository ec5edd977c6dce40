"""``tpkernels.parallelize`` on models of transformers: logits and gradients are those of the
unsharded model for any number of ranks, with 9 heads in 3 groups. Generation, copies, activation
checkpointing, torch.compile, state dicts and gradient clipping work."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import hf_models
from tests.support.nn_reference import shard
from tests.support.ranked import on_ranks, recorded_calls, unlike
from tests.support.tiers import sweep, thorough
from tpkernels import nn as tnn
from tpkernels.parallel import decoder

pytest.importorskip("transformers")


@pytest.mark.parametrize("world", hf_models.SWEEP)
@pytest.mark.parametrize("model_type", sweep(["llama", "mistral", "qwen2", "qwen3"]))
@on_ranks()
def test_logits_and_gradients(model_type: str) -> list[str]:
    model, mesh = hf_models.make(model_type, tied=model_type == "qwen3"), hf_models.mesh_of_all()
    return [
        f"{sequence=}: {failure}"
        for sequence in (True, False)
        for failure in hf_models.differences(model, sequence, mesh)
    ]


@pytest.mark.parametrize("world", sweep([2, 4], later=1))
@on_ranks()
def test_ranks_that_share_a_key_value_head() -> list[str]:
    """One head for all ranks, with biases: logits, gradients and their norm."""
    mesh = hf_models.mesh_of_all()
    model = hf_models.make("qwen2", num_key_value_heads=1, num_attention_heads=6)
    failures = [
        f"{sequence=}: {failure}"
        for sequence in (True, False)
        for failure in hf_models.differences(model, sequence, mesh)
    ]
    norms = []
    for each in (copy.deepcopy(model), tpkernels.parallelize(copy.deepcopy(model), mesh)):
        hf_models.run(each)
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in each.parameters()]))
    norms.append(tnn.clip_grad_norm_(each, 1.0))
    if max(norms) > (1 + 1e-5) * min(norms):
        failures.append(f"norms of the gradients: {norms}")
    if {layer.self_attn.k_proj.weight.shape[0] for layer in each.model.layers} != {4}:
        failures.append("a rank has no key head")
    return failures


@pytest.mark.parametrize("world", hf_models.SWEEP)
@on_ranks()
def test_only_long_sequences_are_split() -> list[str]:
    """Sequences that are just long enough to be split, and sequences one token shorter."""
    model, mesh = hf_models.make("qwen3"), hf_models.mesh_of_all()
    failures, made = [], []
    for longer in (0, 1):
        decoder.PROMPT_ROWS, before = hf_models.TOKENS, decoder.PROMPT_ROWS
        tokens = hf_models.TOKENS * mesh.size() - 1 + longer
        try:
            failures += hf_models.differences(model, "prefill", mesh, tokens=tokens)
            parallel = tpkernels.parallelize(
                copy.deepcopy(model), mesh, sequence_parallel="prefill"
            )
        finally:
            decoder.PROMPT_ROWS = before
        with recorded_calls() as calls, torch.no_grad():
            parallel(input_ids=hf_models.batch(tokens)["input_ids"], use_cache=False)
        made.append(set(calls) - {"all_gather", "all_reduce"})
    if made != [{"matmul_all_reduce"}, {"all_gather_matmul", "matmul_reduce_scatter"}]:
        failures.append(f"ops of sequences that are not and are split: {made}")
    return failures


@on_ranks(2)
def test_feed_forward_layers_alone() -> list[str]:
    """Logits and gradients, and which modules are replaced."""
    mesh = hf_models.mesh_of_all()
    failures = hf_models.differences(hf_models.make("qwen2", tied=True), False, mesh, ffn_only=True)
    model = tpkernels.parallelize(hf_models.make("llama"), mesh, ffn_only=True)
    sharded = {name.split(".")[-1] for name, m in model.named_modules() if hasattr(m, "splits")}
    if sharded != {"gate_proj", "up_proj", "down_proj"}:
        failures.append(f"{sharded} are split")
    return failures


@on_ranks(2)
def test_projections_of_one_input_share_a_gather() -> None:
    """The ops called in a forward, with and without sequence parallelism."""
    layers = ["all_gather_matmul", "matmul_reduce_scatter"] * 4
    for sequence, ops in (
        (True, ["all_gather", "all_reduce", *layers, "all_gather", "all_gather"]),
        (False, ["all_gather", "all_reduce", *["matmul_all_reduce"] * 4, "all_gather"]),
    ):
        model = hf_models.make("llama")
        tpkernels.parallelize(model, hf_models.mesh_of_all(), sequence_parallel=sequence)
        with recorded_calls() as calls, torch.no_grad():
            model(input_ids=hf_models.batch()["input_ids"], use_cache=False)
        assert calls == ops


@pytest.mark.parametrize("world", hf_models.SWEEP)
@on_ranks()
def test_it_generates_the_same_tokens() -> None:
    """With a cache, from two prompts, one of them padded."""
    prompt = {name: hf_models.batch()[name] for name in ("input_ids", "attention_mask")}
    settings, mesh = {"max_new_tokens": 5, "do_sample": False}, hf_models.mesh_of_all()
    for model_type in ("llama", "qwen3"):
        single = hf_models.make(model_type).eval()
        want = single.generate(**prompt, **settings)
        for sequence, pack in ((True, False), (False, True), ("prefill", False)):
            parallel = copy.deepcopy(single)
            tpkernels.parallelize(parallel, mesh, sequence_parallel=sequence, pack=pack)
            got = parallel.generate(**prompt, **settings)
            assert torch.equal(want, got), (model_type, sequence, pack)
            assert not pack or parallel.model.layers[1].mlp.down_proj._packed is not None


@pytest.mark.parametrize("ffn_only", [False, True])
@on_ranks(2)
def test_ranks_that_sample_other_tokens_are_refused(ffn_only: bool) -> list[str]:
    mesh = hf_models.mesh_of_all()
    model = tpkernels.parallelize(hf_models.make("llama").eval(), mesh, ffn_only=ffn_only)
    ids = hf_models.batch()["input_ids"]
    torch.manual_seed(mesh.get_rank())
    other = "the ids of ranks [1] of the group are not those of rank 0; pass the same on all ranks"
    with torch.no_grad():
        return unlike(
            {
                other: lambda: model.generate(ids, do_sample=True, max_new_tokens=16),
                f"ValueError: {other}": lambda: model(ids + mesh.get_rank()),
            }
        )


@pytest.mark.parametrize(
    "how", ["checkpointing", thorough("copied"), pytest.param("compiled", marks=pytest.mark.slow)]
)
@on_ranks(2, timeout=180)
def test_it_can_be_used_as_before(how: str) -> list[str]:
    """Gradients of a parallel model that is used in one of several ways."""
    torch._dynamo.reset()
    failures = []
    for sequence in (True, False):
        single = hf_models.make("qwen3")
        parallel = copy.deepcopy(single)
        tpkernels.parallelize(parallel, hf_models.mesh_of_all(), sequence_parallel=sequence)
        call, lengths = None, (hf_models.TOKENS,)
        if how == "copied":
            parallel = copy.deepcopy(parallel)
        if how == "checkpointing":  # recomputed after a forward of another length
            parallel.gradient_checkpointing_enable({"use_reentrant": False})
            lengths = (hf_models.TOKENS, hf_models.TOKENS + 3)
        if how == "compiled":
            call = torch.compile(parallel, backend="aot_eager", fullgraph=True)
        logits, _, grads = hf_models.run(single, *lengths)
        got_logits, _, got = hf_models.run(parallel, *lengths, call=call)
        pairs = {"logits": (got_logits, logits)}
        pairs |= {name: (got[name], shard(parallel, name, grads[name])) for name in got}
        for name, (one, other) in pairs.items():
            if other.numel() and not torch.allclose(one, other, rtol=1e-4, atol=1e-5):
                failures.append(f"{sequence=}: {name} is off by {(one - other).abs().max():.3g}")
        for name, module in parallel.named_modules():
            if getattr(module, "output", None) is not None:
                failures.append(f"{sequence=}: {name} keeps its output")
    return failures


@on_ranks(2)
def test_state_dicts_are_the_unsharded_models() -> list[str]:
    """The state dict is that of the unsharded model; a model from the meta device loads it."""
    single, failures = hf_models.make("llama", tied=True), []
    mesh = hf_models.mesh_of_all()
    parallel = tpkernels.parallelize(copy.deepcopy(single), mesh)
    want, got = single.state_dict(), tnn.full_state_dict(parallel)
    if set(want) != set(got) or not all(torch.equal(got[name], want[name]) for name in want):
        failures.append("the state dicts differ")
    if parallel.lm_head.weight is not parallel.model.embed_tokens.weight:
        failures.append("the embeddings are not tied any more")
    if dist.get_rank() == 0:
        alone = tnn.full_state_dict(parallel, rank0_only=True)
        if not all(torch.equal(alone[name], want[name]) for name in want):
            failures.append("rank0_only=True gives another state dict")
    elif tnn.full_state_dict(parallel, rank0_only=True):
        failures.append("rank0_only=True gives a state dict on another rank")
    with torch.device("meta"):
        empty = tpkernels.parallelize(hf_models.make("llama", tied=True), mesh)
    empty.to_empty(device="cpu").load_state_dict(want)
    empty.tie_weights()
    empty.model.rotary_emb = copy.deepcopy(single.model.rotary_emb)
    ids = torch.arange(9).view(1, 9)
    with torch.no_grad():
        difference = (empty(ids).logits - parallel(ids).logits).abs().max()
    if difference != 0:
        failures.append(f"one from the meta device is off by {difference}")
    if empty.lm_head.weight is not empty.model.embed_tokens.weight:
        failures.append("one from the meta device is not tied")
    return failures


@pytest.mark.thorough
@on_ranks(3)
def test_clipping_is_that_of_the_unsharded_model() -> list[str]:
    """Clips a model with uneven shards, tied weights and replicated norms."""
    single, failures = hf_models.make("qwen3", tied=True), []
    parallel = tpkernels.parallelize(copy.deepcopy(single), hf_models.mesh_of_all())
    ids = torch.arange(14).view(1, 14)
    for model in (single, parallel):
        model(ids, labels=ids).loss.backward()
    for most in (1e9, 0.05):
        want = torch.nn.utils.clip_grad_norm_(single.parameters(), most)
        got = tnn.clip_grad_norm_(parallel, most)
        if abs(got - want) > 1e-5 * want:
            failures.append(f"the norm is {got}, that of the unsharded model {want}")
        theirs, ours = single.model.norm.weight.grad, parallel.model.norm.weight.grad
        if not torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7):
            failures.append(f"clipped to {most}, a gradient is {ours}, not {theirs}")
    parallel.model.norm.weight.grad.fill_(torch.inf)
    with pytest.raises(RuntimeError, match="norm of the gradients is inf"):
        tnn.clip_grad_norm_(parallel, 1.0, error_if_nonfinite=True)
    return failures
