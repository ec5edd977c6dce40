"""``tpkernels.parallelize`` on transformers models: logits and gradients match the unsharded model
for any number of ranks, with 9 heads in 3 groups. Also generation, continuous batching, copies,
activation checkpointing, torch.compile, state dicts and recorded outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import hf_models
from tests.support.nn_reference import find_mismatch, shard
from tests.support.ranked import find_unexpected_messages, on_ranks, record_calls
from tests.support.tiers import sweep, thorough
from tpkernels import nn as tnn
from tpkernels.parallel import decoder

transformers = pytest.importorskip("transformers")


def differences_by_sequence_mode(model: Any) -> list[str]:
    """Compare parallel copies with the unsharded model, with and without sequence parallelism."""
    return [
        f"{sequence=}: {failure}"
        for sequence in (True, False)
        for failure in hf_models.find_differences(model, sequence, hf_models.make_world_mesh())
    ]


@pytest.mark.parametrize("world", sweep([2, 4], num_thorough=1))
@on_ranks()
def test_ranks_that_share_a_key_value_head() -> list[str]:
    """All ranks share one key-value head, with biases. Logits, gradients and the gradient norm
    match the unsharded model."""
    mesh = hf_models.make_world_mesh()
    model = hf_models.make("qwen2", num_key_value_heads=1, num_attention_heads=6)
    failures = differences_by_sequence_mode(model)
    norms = []
    for candidate in (copy.deepcopy(model), tpkernels.parallelize(copy.deepcopy(model), mesh)):
        hf_models.run(candidate)
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in candidate.parameters()]))
    norms.append(tnn.clip_grad_norm_(candidate, 1.0))
    assert max(norms) <= (1 + 1e-5) * min(norms), norms
    assert {layer.self_attn.k_proj.weight.shape[0] for layer in candidate.model.layers} == {4}
    return failures


def find_called_ops(model: Any, tokens: int = hf_models.TOKENS) -> list[str]:
    """Return the ops that a forward calls."""
    with record_calls() as calls, torch.no_grad():
        model(input_ids=hf_models.batch(tokens)["input_ids"], use_cache=False)
    return calls


@pytest.mark.parametrize("world", hf_models.SWEEP)
@on_ranks()
def test_only_long_sequences_are_split() -> list[str]:
    """Run sequences of the minimum length for a split, and sequences one token shorter. Only the
    longer ones use sequence parallelism."""
    model, mesh = hf_models.make("qwen3"), hf_models.make_world_mesh()
    failures: list[str] = []
    with mock.patch.object(decoder, "PROMPT_ROWS", hf_models.TOKENS):
        parallel = tpkernels.parallelize(copy.deepcopy(model), mesh, sequence_parallel="prefill")
        for longer, ops in (
            (0, {"matmul_all_reduce"}),
            (1, {"all_gather_matmul", "matmul_reduce_scatter"}),
        ):
            tokens = hf_models.TOKENS * mesh.size() - 1 + longer
            failures += hf_models.find_differences(model, "prefill", mesh, tokens=tokens)
            assert {*find_called_ops(parallel, tokens)} - {"all_gather", "all_reduce"} == ops
    return failures


@on_ranks(2)
def test_ffn_only() -> list[str]:
    """Only the MLP projections are replaced. Logits and gradients match the unsharded model."""
    mesh = hf_models.make_world_mesh()
    model = tpkernels.parallelize(hf_models.make("llama"), mesh, ffn_only=True)
    sharded = {name.split(".")[-1] for name, m in model.named_modules() if hasattr(m, "shardings")}
    assert sharded == {"gate_proj", "up_proj", "down_proj"}
    return hf_models.find_differences(
        hf_models.make("qwen2", tied=True), False, mesh, ffn_only=True
    )


@on_ranks(2)
def test_projections_of_one_input_share_a_gather() -> None:
    layers = ["all_gather_matmul", "matmul_reduce_scatter"] * 4
    for sequence, ops in (
        (True, ["all_gather", "all_reduce", *layers, "all_gather", "all_gather"]),
        (False, ["all_gather", "all_reduce", *["matmul_all_reduce"] * 4, "all_gather"]),
    ):
        model, mesh = hf_models.make("llama"), hf_models.make_world_mesh()
        assert (
            find_called_ops(tpkernels.parallelize(model, mesh, sequence_parallel=sequence)) == ops
        )


@pytest.mark.parametrize("world", hf_models.SWEEP)
@on_ranks()
def test_generate() -> None:
    """Generate with a cache from two prompts, one of them padded. The tokens match the unsharded
    model."""
    prompt = {name: hf_models.batch()[name] for name in ("input_ids", "attention_mask")}
    settings, mesh = {"max_new_tokens": 5, "do_sample": False}, hf_models.make_world_mesh()
    for model_type in ("llama", "qwen3"):
        single = hf_models.make(model_type).eval()
        want = single.generate(**prompt, **settings)
        for sequence, pack in ((True, False), (False, True), ("prefill", False)):
            parallel = copy.deepcopy(single)
            tpkernels.parallelize(parallel, mesh, sequence_parallel=sequence, pack=pack)
            got = parallel.generate(**prompt, **settings)
            assert torch.equal(want, got), (model_type, sequence, pack)
            assert not pack or parallel.model.layers[1].mlp.down_proj._packed


#: Models whose balanced shards would split int8 groups of 16 or 8 elements of K: in heads, in one
#: shared key head, in an MLP, in experts, and in a gathered input.
CUT_GROUPS = [
    ("llama", {"num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 24}),
    ("llama", {"num_attention_heads": 12, "num_key_value_heads": 1}),
    ("mixtral", {"num_local_experts": 2, "intermediate_size": 24}),
    ("phi3", {}),
]


@pytest.mark.parametrize("world", sweep([2, 3, 1, 4], num_thorough=1))
@on_ranks()
def test_int8_weights_do_not_depend_on_the_number_of_ranks() -> None:
    """Each packed int8 shard, with its scales, equals the shard of the full int8 weight."""
    ids, mesh = hf_models.batch()["input_ids"], hf_models.make_world_mesh()
    for model_type, options in CUT_GROUPS:
        unsharded = hf_models.make(model_type, **options).eval()
        model = copy.deepcopy(unsharded)
        tpkernels.parallelize(model, mesh, sequence_parallel=False, pack="int8")
        weights = unsharded.state_dict()
        for name, layer in model.named_modules():
            for key, got in getattr(layer, "_packed", {}).items():
                w = weights[f"{name}.{key}"].mT
                if got.dtype == torch.int8:
                    want = tpkernels.unpack(tpkernels.pack(w, torch.int8)).mT
                    want = layer.shardings[key].shard(want)
                    assert torch.equal(tpkernels.unpack(got).mT, want), (model_type, name, key)
        with torch.no_grad():
            want, got = unsharded(ids).logits, model(ids).logits
        assert (got - want).norm() < 0.1 * want.norm(), (model_type, options)


@pytest.mark.parametrize("ffn_only", [False, True])
@on_ranks(2)
def test_different_sampled_tokens_are_refused(ffn_only: bool) -> list[str]:
    mesh = hf_models.make_world_mesh()
    model = tpkernels.parallelize(hf_models.make("llama").eval(), mesh, ffn_only=ffn_only)
    ids = hf_models.batch()["input_ids"]
    torch.manual_seed(mesh.get_rank())
    message = (
        "the ids of ranks [1] of the group differ from those of rank 0; pass the same ids on all"
    )
    with torch.no_grad():
        return find_unexpected_messages(
            {
                message: lambda: model.generate(ids, do_sample=True, max_new_tokens=16),
                f"ValueError: {message}": lambda: model(ids + mesh.get_rank()),
            }
        )


@pytest.mark.parametrize(
    "usage", ["checkpointing", thorough("copied"), pytest.param("compiled", marks=pytest.mark.slow)]
)
@on_ranks(2, timeout=180)
def test_checkpointing_copies_and_compile(usage: str) -> None:
    """Gradients match the unsharded model with activation checkpointing, after a copy, and under
    torch.compile."""
    torch._dynamo.reset()
    for sequence in (True, False):
        single = hf_models.make("qwen3")
        parallel = copy.deepcopy(single)
        tpkernels.parallelize(parallel, hf_models.make_world_mesh(), sequence_parallel=sequence)
        call, lengths = None, (hf_models.TOKENS,)
        if usage == "copied":
            parallel = copy.deepcopy(parallel)
        if usage == "checkpointing":  # two forwards of different lengths before the recomputation
            parallel.gradient_checkpointing_enable({"use_reentrant": False})
            lengths = (hf_models.TOKENS, hf_models.TOKENS + 3)
        if usage == "compiled":
            call = torch.compile(parallel, backend="aot_eager", fullgraph=True)
        logits, _, grads = hf_models.run(single, *lengths)
        got_logits, _, got = hf_models.run(parallel, *lengths, call=call)
        pairs = {"logits": (got_logits, logits)}
        pairs |= {name: (got[name], shard(parallel, name, grads[name])) for name in got}
        for name, (actual, expected) in pairs.items():
            assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-5), (sequence, name)
        stored = [module.stored for module in parallel.modules() if hasattr(module, "stored")]
        assert stored and all(entry.output is None for entry in stored), "an output is kept"


@on_ranks(2)
def test_existing_gradients_are_sharded() -> None:
    """Parallelize a model that already holds gradients. They become shards, and their norm equals
    the norm of the unsharded gradients."""
    model = hf_models.make("llama")
    hf_models.run(model)
    grads = {name: p.grad for name, p in model.named_parameters()}
    want = torch.nn.utils.get_total_norm(list(grads.values()))
    parallel = tpkernels.parallelize(model, hf_models.make_world_mesh())
    got = torch.nn.utils.get_total_norm([p.grad for p in parallel.parameters()])
    assert abs(got - want) < 1e-5 * want
    for name, p in parallel.named_parameters():
        assert torch.equal(p.grad, shard(parallel, name, grads[name])), name


@on_ranks(2)
def test_dropout_is_refused_in_training() -> list[str]:
    """Set a dropout probability on a parallel model, in heads or in replicated modules, and call
    the model or a submodule in training mode. The call is refused before communication."""
    mesh, failures = hf_models.make_world_mesh(), []
    cases: list[tuple[str, str, Callable[[Any], Any], Callable[[Any], Any]]] = [
        ("llama", "layers.0.self_attn.attention_dropout", lambda m: m, lambda m: m),
        ("llama", "attention_dropout", lambda m: m.eval().model.train(), lambda m: m.model),
        ("phi3", "resid_attn_dropout.p", lambda m: m, lambda m: m.model),
        ("mixtral", "1.mlp.jitter_noise", lambda m: m.eval().model.layers[1].train(), lambda m: m),
    ]
    for model_type, name, set_mode, select_module in cases if mesh.get_rank() == 0 else ():
        model = hf_models.make(model_type)
        parallel = tpkernels.parallelize(model, mesh, sequence_parallel=False)
        key = name.rpartition(".")[2]
        for module in parallel.modules():
            if hasattr(module, key):
                setattr(module, key, 0.5)
        set_mode(parallel)
        call = partial(select_module(parallel), hf_models.batch()["input_ids"])
        failures += find_unexpected_messages({f"{name}=0.5": call}, NotImplementedError)
    return failures


@on_ranks(2)
def test_state_dicts_match_the_unsharded_model() -> None:
    """A model created on the meta device loads the unsharded state dict."""
    single, mesh = hf_models.make("llama", tied=True), hf_models.make_world_mesh()
    parallel = tpkernels.parallelize(copy.deepcopy(single), mesh)
    want, got = single.state_dict(), tnn.full_state_dict(parallel)
    rank_0_state = tnn.full_state_dict(parallel, rank0_only=True)
    for state in (got, *([rank_0_state] if dist.get_rank() == 0 else [])):
        assert set(state) == set(want)
        assert all(torch.equal(state[name], want[name]) for name in want)
    assert dist.get_rank() == 0 or not rank_0_state
    with torch.device("meta"):
        empty = tpkernels.parallelize(hf_models.make("llama", tied=True), mesh)
    empty.to_empty(device="cpu").load_state_dict(want)
    empty.tie_weights()
    empty.model.rotary_emb = copy.deepcopy(single.model.rotary_emb)
    ids = torch.arange(9).view(1, 9)
    with torch.no_grad():
        assert torch.equal(empty(ids).logits, parallel(ids).logits)
    for model in (parallel, empty):
        assert model.lm_head.weight is model.model.embed_tokens.weight


@on_ranks(2)
def test_moe_on_the_meta_device() -> None:
    """Create and parallelize an MoE model with "meta" as the default device. Parameter shapes match
    a model on the CPU."""
    mesh, shapes = hf_models.make_world_mesh(), []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = hf_models.make("qwen2_moe", num_experts=3, moe_intermediate_size=10)
            tpkernels.parallelize(model, mesh)
        assert {p.device.type for p in model.parameters()} == {device}
        shapes.append({name: p.shape for name, p in model.named_parameters()})
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("world", hf_models.SWEEP)
@on_ranks()
def test_hidden_states_and_attentions_are_unsharded() -> list[str]:
    """Request the hidden states of all layers or of one layer, as an output object and as a tuple.
    Values and gradients match the unsharded model."""
    failures: dict[str, str | None] = {}
    single = hf_models.make(
        "qwen2_moe",
        attention="eager",
        num_experts=4,
        moe_intermediate_size=10,
        mlp_only_layers=[1],
        qkv_bias=False,
    )
    names, ids = ("router_logits", "hidden_states", "attentions"), hf_models.batch()
    del ids["labels"]
    for sequence in (True, False):
        parallel = tpkernels.parallelize(
            copy.deepcopy(single), hf_models.make_world_mesh(), sequence_parallel=sequence
        )
        for selection in (True, [1]):
            options = {f"output_{name}": True for name in names} | {"use_cache": False}
            options["output_hidden_states"] = selection
            want, got = (model(**ids, **options) for model in (single, parallel))
            as_tuple = parallel.model(**ids, **options, return_dict=False)[1:]
            for name, values in zip(names, as_tuple, strict=True):
                for i, expected in enumerate(want[name]):
                    for form, actual in (("object", got[name][i]), ("tuple", values[i])):
                        if expected is not None:
                            difference = find_mismatch(actual, expected, 1e-4)
                            failures[f"{sequence=} {selection=} {form} {name} {i}"] = difference
        grads = []
        for model in (single, parallel):
            model.zero_grad()
            states = model(**ids, output_hidden_states=True).hidden_states
            sum(state.square().mean() for state in states).backward()
            grads.append(model.model.layers[0].input_layernorm.weight.grad)
        failures[f"{sequence=} gradient"] = find_mismatch(grads[1], grads[0], 1e-4)
    return [f"{name}: {failure}" for name, failure in failures.items() if failure is not None]


# Continuous batching in transformers.


@pytest.mark.thorough
@pytest.mark.parametrize("world", hf_models.SWEEP)
@pytest.mark.parametrize(
    "options", sweep([{"sequence_parallel": "prefill"}, {"ffn_only": True}, {}])
)
@on_ranks()
def test_continuous_batching(options: dict[str, Any]) -> None:
    single = hf_models.make("llama").eval()
    want = hf_models.expected_tokens(single)
    parallel = tpkernels.parallelize(copy.deepcopy(single), hf_models.make_world_mesh(), **options)
    config = parallel.config
    for candidate in (parallel, copy.deepcopy(parallel)):
        assert list(hf_models.generate_tokens(candidate).values()) == want
    assert parallel.config is config and config.num_key_value_heads == 3


@pytest.mark.thorough
@on_ranks(2)
def test_rank_0_adds_requests() -> None:
    """Only rank 0 adds a request. The remaining ranks serve until rank 0 stops the manager."""
    single, prompts = hf_models.make("llama").eval(), hf_models.PROMPTS[:1]
    want = single.generate(torch.tensor(prompts), max_new_tokens=4, do_sample=False)[0, 5:]
    model = tpkernels.parallelize(single, hf_models.make_world_mesh())
    manager = model.init_continuous_batching(
        transformers.GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1),
        transformers.ContinuousBatchingConfig(num_blocks=8, disable_nccl_graph_mixing=False),
    )
    manager.start()
    if dist.get_rank() == 0:
        manager.add_request(prompts[0])
        assert manager.get_result(timeout=30).generated_tokens == want.tolist()
    manager.stop(block=True, timeout=30)
    assert not manager.is_running()
    manager.destroy()


@on_ranks(2)
def test_an_unknown_batching_manager_is_refused() -> None:
    """``init_continuous_batching`` returns an unknown manager, as in an untested transformers
    version."""
    kind = transformers.LlamaForCausalLM
    with mock.patch.object(kind, "init_continuous_batching", lambda self: object()):
        parallel = tpkernels.parallelize(hf_models.make("llama"), hf_models.make_world_mesh())
        with pytest.raises(NotImplementedError, match=r"use model\.generate"):
            parallel.init_continuous_batching()
