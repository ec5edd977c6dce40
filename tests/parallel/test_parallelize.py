"""``tpkernels.parallelize`` on models of transformers: logits and gradients are those of the
unsharded model for any number of ranks, with 9 heads in 3 groups. Generation, copies, activation
checkpointing, torch.compile, state dicts and gradient clipping work."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

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
def test_weights_of_8_bits_are_the_same_on_any_number_of_ranks() -> list[str]:
    """So are their scales: each weight is the rank's part of the whole one in 8 bits."""
    failures, mesh = [], hf_models.mesh_of_all()
    for model_type, options in CUT_GROUPS:
        whole = hf_models.make(model_type, **options).eval()
        model = tpkernels.parallelize(
            copy.deepcopy(whole), mesh, sequence_parallel=False, pack="int8"
        )
        weights = whole.state_dict()
        for name, layer in model.named_modules():
            packed = getattr(layer, "_packed", None)
            of_layer = packed if isinstance(packed, dict) else {"weight": packed}
            for key, got in of_layer.items():
                if got is None or got.dtype != torch.int8:
                    continue
                w = weights[f"{name}.{key}"].mT
                want = layer.splits[key].shard(tpkernels.unpack(tpkernels.pack(w, torch.int8)).mT)
                if not torch.equal(tpkernels.unpack(got).mT, want):
                    failures.append(f"{model_type} {options} {name}.{key}: {list(got.shape)}")
        ids = hf_models.batch()["input_ids"]
        with torch.no_grad():
            want, got = whole(ids).logits, model(ids).logits
        if not (got - want).norm() < 0.1 * want.norm():
            failures.append(f"{model_type} {options}: logits are off by {(got - want).norm()}")
    return failures


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


def _centre(module: torch.nn.Module, args: Any, output: Any) -> Any:
    """Forward hook that needs all rows."""
    if isinstance(output, tuple):
        return (_centre(module, args, output[0]), *output[1:])
    return output - output.mean(1, keepdim=True)


def _doubled(self: Any, *args: Any, **options: Any) -> Any:
    return type(self).forward(self, *args, **options) * 2


def _weights_shared(model: Any) -> None:
    for name in ("mlp.down_proj", "self_attn.q_proj"):
        weight = model.get_submodule(f"model.layers.0.{name}").weight
        model.get_submodule(f"model.layers.1.{name}").weight = weight


def _modules_shared(model: Any) -> None:
    first, second = model.model.layers
    first.self_attn.v_proj = first.self_attn.k_proj
    second.mlp.up_proj, second.input_layernorm = first.mlp.up_proj, model.model.norm


def _hooked(model: Any) -> None:
    first, second = model.model.layers
    first.mlp.register_forward_hook(_centre)
    second.register_forward_hook(_centre)
    second.mlp.register_full_backward_hook(lambda module, before, after: (before[0] * 2,))
    first.self_attn.register_forward_pre_hook(
        lambda module, args, options: (
            args,
            options | {"hidden_states": options["hidden_states"] * 2},
        ),
        with_kwargs=True,
    )
    for norm in (first.input_layernorm, model.model.norm):
        norm.forward = types.MethodType(_doubled, norm)


def _listed(order: tuple[int, ...]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.model.layers = torch.nn.ModuleList([model.model.layers[i] for i in order])

    return change


CHANGES = {
    "weights shared": _weights_shared,
    "modules shared": _modules_shared,
    "hooks": _hooked,
    "a layer twice": _listed((0, 1, 0)),
    "a layer twice at first": _listed((0, 0, 1)),
}


@pytest.mark.parametrize("change", sweep(CHANGES, 4, later=1))
@on_ranks(2)
def test_what_is_shared_or_hooked_stays_so(change: str) -> list[str]:
    """Logits and gradients of a model that was changed before, and how many parameters it has."""
    model, mesh = hf_models.make("llama"), hf_models.mesh_of_all()
    CHANGES[change](model)
    return [
        f"{sequence=}: {failure}"
        for sequence in (True, False)
        for failure in hf_models.differences(model, sequence, mesh)
    ]


@on_ranks(2)
def test_gradients_are_split_as_well() -> list[str]:
    """Those that a model has when it is split; a norm of them is that of the unsharded ones."""
    model = hf_models.make("llama")
    hf_models.run(model)
    grads = {name: p.grad for name, p in model.named_parameters()}
    want = torch.nn.utils.get_total_norm(list(grads.values()))
    parallel = tpkernels.parallelize(model, hf_models.mesh_of_all())
    got = torch.nn.utils.get_total_norm([p.grad for p in parallel.parameters()])
    failures = [] if abs(got - want) < 1e-5 * want else [f"the norm is {got}, not {want}"]
    for name, p in parallel.named_parameters():
        if not torch.equal(p.grad, shard(parallel, name, grads[name])):
            failures.append(f"{name} has another gradient")
    return failures


@on_ranks(2)
def test_dropout_is_refused_in_training() -> list[str]:
    """Before anything is sent: of heads and of what all ranks share, whichever module is called and
    whenever the probability is set."""
    mesh = hf_models.mesh_of_all()
    if mesh.get_rank():
        return []
    batch, failures = hf_models.batch(), []
    for model_type, change, call, name in (
        ("llama", lambda m: None, lambda m: m, "layers.0.self_attn.attention_dropout=0.5"),
        ("llama", lambda m: m.eval().model.train(), lambda m: m.model, "attention_dropout=0.5"),
        ("phi3", lambda m: None, lambda m: m.model, "resid_attn_dropout.p=0.5"),
        (
            "mixtral",
            lambda m: m.eval().model.layers[1].train(),
            lambda m: m,
            "1.mlp.jitter_noise=0.5",
        ),
    ):
        model = hf_models.make(model_type)
        parallel = tpkernels.parallelize(model, mesh, sequence_parallel=False)
        for module in parallel.modules():
            key = name.partition("=")[0].rpartition(".")[2]
            if hasattr(module, key):
                setattr(module, key, 0.5)
        change(parallel)
        ids = batch["input_ids"]
        failures += unlike({name: lambda: call(parallel)(ids)}, NotImplementedError)  # noqa: B023
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
