"""``tpkernels.parallelize`` on models of transformers: logits and gradients are transformers' own
for any number of ranks, with 9 heads in 3 groups; what uses them works as before."""

from __future__ import annotations

import copy

import hf_models
import pytest
import torch
from cases import WORLDS, RanksFixture
from ranked import report
from test_autograd_use import _record, _stop_recording

import tpkernels
from tpkernels import nn as tnn

pytest.importorskip("transformers")


def logits_job(model_type: str, sequence: bool, tied: bool) -> list[str]:
    model = hf_models.make(model_type, tied=tied)
    found = hf_models.differences(model, sequence, hf_models.mesh_of_all())
    return [f"{model_type}, {sequence=}: {said}" for said in found]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("sequence", [True, False], ids=["sequence", "replicated"])
def test_logits_and_gradients(
    ranks: RanksFixture, world: int, model_type: str, sequence: bool
) -> None:
    told = ranks(world).run(logits_job, model_type, sequence, model_type == "qwen3", timeout=120)
    report(failure for rank in told for failure in rank)


@pytest.mark.parametrize("model_type", ["mistral", "qwen2"])
def test_the_rest_of_the_family(ranks: RanksFixture, model_type: str) -> None:
    report(f for rank in ranks(2).run(logits_job, model_type, True, False) for f in rank)


def calls_job() -> tuple[list[str], list[str]]:
    """The calls of a forward with and without sequence parallelism, by op."""
    made = []
    for sequence in (True, False):
        model = hf_models.make("llama")
        tpkernels.parallelize(model, hf_models.mesh_of_all(), sequence_parallel=sequence)
        calls = _record()
        try:
            with torch.no_grad():
                model(input_ids=hf_models.batch()["input_ids"], use_cache=False)
        finally:
            _stop_recording()
        made.append(calls)
    return made[0], made[1]


def test_projections_of_one_input_share_a_gather(ranks: RanksFixture) -> None:
    layer = ["all_gather_matmul", "matmul_reduce_scatter"] * 2
    for sequence, replicated in ranks(2).run(calls_job):
        assert sequence == ["all_reduce", *layer * 2, "all_gather", "all_gather"]
        assert replicated == ["all_reduce", *["matmul_all_reduce"] * 4, "all_gather"]


def use_job(how: str, sequence: bool) -> list[str]:
    torch._dynamo.reset()
    single, told = hf_models.make("qwen3"), []
    parallel = copy.deepcopy(single)
    tpkernels.parallelize(parallel, hf_models.mesh_of_all(), sequence_parallel=sequence)
    ids = hf_models.batch()["input_ids"]
    if how == "generate":
        options = {"max_new_tokens": 5, "do_sample": False}
        want, got = (m.eval().generate(ids, **options) for m in (single, parallel))
        return [] if torch.equal(want, got) else [f"generated {got}, expected {want}"]
    if how == "copied":
        parallel = copy.deepcopy(parallel)
    if how == "checkpointing":
        parallel.gradient_checkpointing_enable({"use_reentrant": False})
    logits, _, grads = hf_models.run(single)
    if how == "compile":
        call = torch.compile(parallel, backend="aot_eager", fullgraph=True)
        out = call(**hf_models.batch(), use_cache=False)
        out.loss.backward()
        got_logits = out.logits.detach()
        got = {name: p.grad for name, p in parallel.named_parameters()}
    else:
        got_logits, _, got = hf_models.run(parallel)
    pairs = {"logits": (got_logits, logits)}
    from nn_reference import share

    pairs |= {name: (got[name], share(parallel, name, grads[name])) for name in got}
    for name, (one, other) in pairs.items():
        if other.numel() and not torch.allclose(one, other, rtol=1e-4, atol=1e-5):
            told.append(f"{name} is off by {(one - other).abs().max():.3g}")
    left = [name for name, m in parallel.named_modules() if getattr(m, "given", None) is not None]
    return told + [f"{name} keeps what it was given" for name in left]


@pytest.mark.parametrize("sequence", [True, False], ids=["sequence", "replicated"])
@pytest.mark.parametrize("how", ["generate", "copied", "checkpointing", "compile"])
def test_it_is_used_as_before(ranks: RanksFixture, how: str, sequence: bool) -> None:
    told = ranks(2).run(use_job, how, sequence, timeout=180)
    report(f"{how}: {failure}" for rank in told for failure in rank)


def state_job() -> list[str]:
    """The state dict is the unsharded model's; one that starts on the meta device loads it."""
    single, told = hf_models.make("llama", tied=True), []
    mesh = hf_models.mesh_of_all()
    parallel = tpkernels.parallelize(copy.deepcopy(single), mesh)
    want, got = single.state_dict(), tnn.full_state_dict(parallel)
    if set(want) != set(got) or not all(torch.equal(got[name], want[name]) for name in want):
        told.append("the state dicts differ")
    if parallel.lm_head.weight is not parallel.model.embed_tokens.weight:
        told.append("the embeddings are not tied any more")
    empty = tpkernels.parallelize(copy.deepcopy(single).to("meta"), mesh)
    empty.load_state_dict(want, assign=True)
    found = tnn.full_state_dict(empty)
    told += [f"{name} was not loaded" for name in want if not torch.equal(found[name], want[name])]
    return told


def test_state_dicts_are_the_unsharded_models(ranks: RanksFixture) -> None:
    report(failure for rank in ranks(3).run(state_job) for failure in rank)
