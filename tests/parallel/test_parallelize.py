"""``tpkernels.parallelize`` on models of transformers: logits and gradients are those of the
unsharded model for any number of ranks, with 9 heads in 3 groups. Generation, continuous batching,
copies, activation checkpointing, torch.compile, state dicts and recorded outputs work."""

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
from tests.support.nn_reference import far, shard
from tests.support.ranked import on_ranks, recorded_calls, unlike
from tests.support.tiers import sweep, thorough
from tpkernels import nn as tnn
from tpkernels.parallel import decoder

transformers = pytest.importorskip("transformers")


def both_ways(model: Any) -> list[str]:
    """What is wrong with parallel copies, with rows split and whole."""
    return [
        f"{sequence=}: {failure}"
        for sequence in (True, False)
        for failure in hf_models.differences(model, sequence, hf_models.mesh_of_all())
    ]


@pytest.mark.parametrize("world", sweep([2, 4], later=1))
@on_ranks()
def test_ranks_that_share_a_key_value_head() -> list[str]:
    """One head for all ranks, with biases: logits, gradients and their norm."""
    mesh = hf_models.mesh_of_all()
    model = hf_models.make("qwen2", num_key_value_heads=1, num_attention_heads=6)
    failures = both_ways(model)
    norms = []
    for each in (copy.deepcopy(model), tpkernels.parallelize(copy.deepcopy(model), mesh)):
        hf_models.run(each)
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in each.parameters()]))
    norms.append(tnn.clip_grad_norm_(each, 1.0))
    assert max(norms) <= (1 + 1e-5) * min(norms), norms
    assert {layer.self_attn.k_proj.weight.shape[0] for layer in each.model.layers} == {4}
    return failures


def ops_of(model: Any, tokens: int = hf_models.TOKENS) -> list[str]:
    """The ops called in a forward."""
    with recorded_calls() as calls, torch.no_grad():
        model(input_ids=hf_models.batch(tokens)["input_ids"], use_cache=False)
    return calls


@pytest.mark.parametrize("world", hf_models.SWEEP)
@on_ranks()
def test_only_long_sequences_are_split() -> list[str]:
    """Sequences that are just long enough to be split, and sequences one token shorter."""
    model, mesh = hf_models.make("qwen3"), hf_models.mesh_of_all()
    failures: list[str] = []
    with mock.patch.object(decoder, "PROMPT_ROWS", hf_models.TOKENS):
        parallel = tpkernels.parallelize(copy.deepcopy(model), mesh, sequence_parallel="prefill")
        for longer, ops in (
            (0, {"matmul_all_reduce"}),
            (1, {"all_gather_matmul", "matmul_reduce_scatter"}),
        ):
            tokens = hf_models.TOKENS * mesh.size() - 1 + longer
            failures += hf_models.differences(model, "prefill", mesh, tokens=tokens)
            assert {*ops_of(parallel, tokens)} - {"all_gather", "all_reduce"} == ops
    return failures


@on_ranks(2)
def test_feed_forward_layers_alone() -> list[str]:
    """Logits and gradients, and which modules are replaced."""
    mesh = hf_models.mesh_of_all()
    model = tpkernels.parallelize(hf_models.make("llama"), mesh, ffn_only=True)
    sharded = {name.split(".")[-1] for name, m in model.named_modules() if hasattr(m, "splits")}
    assert sharded == {"gate_proj", "up_proj", "down_proj"}
    return hf_models.differences(hf_models.make("qwen2", tied=True), False, mesh, ffn_only=True)


@on_ranks(2)
def test_projections_of_one_input_share_a_gather() -> None:
    layers = ["all_gather_matmul", "matmul_reduce_scatter"] * 4
    for sequence, ops in (
        (True, ["all_gather", "all_reduce", *layers, "all_gather", "all_gather"]),
        (False, ["all_gather", "all_reduce", *["matmul_all_reduce"] * 4, "all_gather"]),
    ):
        model, mesh = hf_models.make("llama"), hf_models.mesh_of_all()
        assert ops_of(tpkernels.parallelize(model, mesh, sequence_parallel=sequence)) == ops


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
            assert not pack or parallel.model.layers[1].mlp.down_proj._packed


#: Models whose balanced shares would cut groups of 16 and 8 of K: of heads, of one shared key head,
#: of an MLP, of experts, and of a gathered input.
CUT_GROUPS = [
    ("llama", {"num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 24}),
    ("llama", {"num_attention_heads": 12, "num_key_value_heads": 1}),
    ("mixtral", {"num_local_experts": 2, "intermediate_size": 24}),
    ("phi3", {}),
]


@pytest.mark.parametrize("world", sweep([2, 3, 1, 4], later=1))
@on_ranks()
def test_weights_of_8_bits_are_the_same_on_any_number_of_ranks() -> None:
    """So are their scales: each weight is the rank's part of the whole one in 8 bits."""
    ids, mesh = hf_models.batch()["input_ids"], hf_models.mesh_of_all()
    for model_type, options in CUT_GROUPS:
        whole = hf_models.make(model_type, **options).eval()
        model = copy.deepcopy(whole)
        tpkernels.parallelize(model, mesh, sequence_parallel=False, pack="int8")
        weights = whole.state_dict()
        for name, layer in model.named_modules():
            for key, got in getattr(layer, "_packed", {}).items():
                w = weights[f"{name}.{key}"].mT
                if got.dtype == torch.int8:
                    want = tpkernels.unpack(tpkernels.pack(w, torch.int8)).mT
                    want = layer.splits[key].shard(want)
                    assert torch.equal(tpkernels.unpack(got).mT, want), (model_type, name, key)
        with torch.no_grad():
            want, got = whole(ids).logits, model(ids).logits
        assert (got - want).norm() < 0.1 * want.norm(), (model_type, options)


@pytest.mark.parametrize("ffn_only", [False, True])
@on_ranks(2)
def test_ranks_that_sample_other_tokens_are_refused(ffn_only: bool) -> list[str]:
    mesh = hf_models.mesh_of_all()
    model = tpkernels.parallelize(hf_models.make("llama").eval(), mesh, ffn_only=ffn_only)
    ids = hf_models.batch()["input_ids"]
    torch.manual_seed(mesh.get_rank())
    other = (
        "the ids of ranks [1] of the group differ from those of rank 0; pass the same ids on all"
    )
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
def test_it_can_be_used_as_before(how: str) -> None:
    """Gradients of a parallel model that is used in one of several ways."""
    torch._dynamo.reset()
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
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-5), (sequence, name)
        stored = [module.stored for module in parallel.modules() if hasattr(module, "stored")]
        assert stored and all(each.output is None for each in stored), "an output is kept"


@on_ranks(2)
def test_gradients_are_split_as_well() -> None:
    """Those that a model has when it is split; a norm of them is that of the unsharded ones."""
    model = hf_models.make("llama")
    hf_models.run(model)
    grads = {name: p.grad for name, p in model.named_parameters()}
    want = torch.nn.utils.get_total_norm(list(grads.values()))
    parallel = tpkernels.parallelize(model, hf_models.mesh_of_all())
    got = torch.nn.utils.get_total_norm([p.grad for p in parallel.parameters()])
    assert abs(got - want) < 1e-5 * want
    for name, p in parallel.named_parameters():
        assert torch.equal(p.grad, shard(parallel, name, grads[name])), name


@on_ranks(2)
def test_dropout_is_refused_in_training() -> list[str]:
    """Before anything is sent: of heads and of what all ranks share, whichever module is called and
    whenever the probability is set."""
    mesh, failures = hf_models.mesh_of_all(), []
    cases: list[tuple[str, str, Callable[[Any], Any], Callable[[Any], Any]]] = [
        ("llama", "layers.0.self_attn.attention_dropout", lambda m: m, lambda m: m),
        ("llama", "attention_dropout", lambda m: m.eval().model.train(), lambda m: m.model),
        ("phi3", "resid_attn_dropout.p", lambda m: m, lambda m: m.model),
        ("mixtral", "1.mlp.jitter_noise", lambda m: m.eval().model.layers[1].train(), lambda m: m),
    ]
    for model_type, name, change, called in cases if mesh.get_rank() == 0 else ():
        model = hf_models.make(model_type)
        parallel = tpkernels.parallelize(model, mesh, sequence_parallel=False)
        key = name.rpartition(".")[2]
        for module in parallel.modules():
            if hasattr(module, key):
                setattr(module, key, 0.5)
        change(parallel)
        call = partial(called(parallel), hf_models.batch()["input_ids"])
        failures += unlike({f"{name}=0.5": call}, NotImplementedError)
    return failures


@on_ranks(2)
def test_state_dicts_are_the_unsharded_models() -> None:
    """A model from the meta device loads them."""
    single, mesh = hf_models.make("llama", tied=True), hf_models.mesh_of_all()
    parallel = tpkernels.parallelize(copy.deepcopy(single), mesh)
    want, got = single.state_dict(), tnn.full_state_dict(parallel)
    alone = tnn.full_state_dict(parallel, rank0_only=True)
    for state in (got, *([alone] if dist.get_rank() == 0 else [])):
        assert set(state) == set(want)
        assert all(torch.equal(state[name], want[name]) for name in want)
    assert dist.get_rank() == 0 or not alone
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
def test_a_mixture_on_the_meta_device() -> None:
    """With "meta" as the default device, also while it is split: shapes are those of one that is
    split in memory."""
    mesh, shapes = hf_models.mesh_of_all(), []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = hf_models.make("qwen2_moe", num_experts=3, moe_intermediate_size=10)
            tpkernels.parallelize(model, mesh)
        assert {p.device.type for p in model.parameters()} == {device}
        shapes.append({name: p.shape for name, p in model.named_parameters()})
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("world", hf_models.SWEEP)
@on_ranks()
def test_hidden_states_and_attentions_are_whole() -> list[str]:
    """All of them, and chosen ones; as an output object and as a tuple; and their gradients."""
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
            copy.deepcopy(single), hf_models.mesh_of_all(), sequence_parallel=sequence
        )
        for chosen in (True, [1]):
            options = {f"output_{name}": True for name in names} | {"use_cache": False}
            options["output_hidden_states"] = chosen
            want, got = (model(**ids, **options) for model in (single, parallel))
            as_tuple = parallel.model(**ids, **options, return_dict=False)[1:]
            for name, values in zip(names, as_tuple, strict=True):
                for i, theirs in enumerate(want[name]):
                    for how, mine in (("object", got[name][i]), ("tuple", values[i])):
                        if theirs is not None:
                            difference = far(mine, theirs, 1e-4)
                            failures[f"{sequence=} {chosen=} {how} {name} {i}"] = difference
        grads = []
        for model in (single, parallel):
            model.zero_grad()
            states = model(**ids, output_hidden_states=True).hidden_states
            sum(state.square().mean() for state in states).backward()
            grads.append(model.model.layers[0].input_layernorm.weight.grad)
        failures[f"{sequence=} gradient"] = far(grads[1], grads[0], 1e-4)
    return [f"{name}: {failure}" for name, failure in failures.items() if failure is not None]


# Continuous batching of transformers.


@pytest.mark.thorough
@pytest.mark.parametrize("world", hf_models.SWEEP)
@pytest.mark.parametrize(
    "options", sweep([{"sequence_parallel": "prefill"}, {"ffn_only": True}, {}])
)
@on_ranks()
def test_continuous_batching_generates_the_same_tokens(options: dict[str, Any]) -> None:
    single = hf_models.make("llama").eval()
    want = hf_models.expected_tokens(single)
    parallel = tpkernels.parallelize(copy.deepcopy(single), hf_models.mesh_of_all(), **options)
    config = parallel.config
    for which in (parallel, copy.deepcopy(parallel)):
        assert list(hf_models.tokens_of(which).values()) == want
    assert parallel.config is config and config.num_key_value_heads == 3


@pytest.mark.thorough
@on_ranks(2)
def test_rank_0_adds_requests() -> None:
    """Only rank 0 adds a request, while the others serve until it stops."""
    single, prompts = hf_models.make("llama").eval(), hf_models.PROMPTS[:1]
    want = single.generate(torch.tensor(prompts), max_new_tokens=4, do_sample=False)[0, 5:]
    model = tpkernels.parallelize(single, hf_models.mesh_of_all())
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
def test_an_unknown_version_is_refused() -> None:
    """A transformers whose manager is built in another way."""
    kind = transformers.LlamaForCausalLM
    with mock.patch.object(kind, "init_continuous_batching", lambda self: object()):
        parallel = tpkernels.parallelize(hf_models.make("llama"), hf_models.mesh_of_all())
        with pytest.raises(NotImplementedError, match=r"use model\.generate"):
            parallel.init_continuous_batching()
