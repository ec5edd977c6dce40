"""Continuous batching of transformers on a sharded model: rank 0 adds requests, and every rank has
the tokens of the unsharded model, however heads are split."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import hf_models
from tests.support.cases import RanksFixture
from tests.support.ranked import report
from tests.support.tiers import sweep

transformers = pytest.importorskip("transformers")

PROMPTS = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]


def tokens_of(model: Any) -> dict[str, list[int]]:
    """The tokens that follow each prompt. ``page_size`` is small enough for a second block."""
    outputs = model.generate_batch(
        PROMPTS,
        transformers.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1),
        transformers.ContinuousBatchingConfig(
            num_blocks=16, page_size=64, max_batch_tokens=32, disable_nccl_graph_mixing=False
        ),
    )
    errors = {name: output.error for name, output in outputs.items() if output.error}
    assert not errors, errors
    return {name: output.generated_tokens for name, output in outputs.items()}


def batching_job(options: dict[str, Any]) -> list[str]:
    single = hf_models.make("llama").eval()
    want = [
        single.generate(torch.tensor([p]), max_new_tokens=6, do_sample=False)[0, len(p) :].tolist()
        for p in PROMPTS
    ]
    mesh = hf_models.mesh_of_all()
    parallel = tpkernels.parallelize(copy.deepcopy(single), mesh, **options)
    config = parallel.config
    failures = []
    for which in (parallel, copy.deepcopy(parallel)):
        got = list(tokens_of(which).values())
        if got != want:
            failures.append(f"{options}: {got}, expected {want}")
    if parallel.config is not config or config.num_key_value_heads != 3:
        failures.append("the configuration has changed")
    return failures


@pytest.mark.thorough
@pytest.mark.parametrize("world", hf_models.SWEEP)
@pytest.mark.parametrize(
    "options", sweep([{"sequence_parallel": "prefill"}, {"ffn_only": True}, {}])
)
def test_continuous_batching_generates_the_same_tokens(
    ranks: RanksFixture, world: int, options: dict[str, Any]
) -> None:
    results = ranks(world).run(batching_job, options, timeout=120)
    report(failure for rank in results for failure in rank)


def requests_job() -> tuple[bool, list[int] | None]:
    """Only rank 0 adds a request, while the others serve until it stops."""
    model = tpkernels.parallelize(hf_models.make("llama").eval(), hf_models.mesh_of_all())
    manager = model.init_continuous_batching(
        transformers.GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1),
        transformers.ContinuousBatchingConfig(num_blocks=8, disable_nccl_graph_mixing=False),
    )
    manager.start()
    tokens = None
    if dist.get_rank() == 0:
        manager.add_request(PROMPTS[0])
        tokens = manager.get_result(timeout=30).generated_tokens
    manager.stop(block=True, timeout=30)
    stopped = not manager.is_running()
    manager.destroy()
    return stopped, tokens


@pytest.mark.thorough
def test_rank_0_adds_requests(ranks: RanksFixture) -> None:
    single = hf_models.make("llama").eval()
    want = single.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=4, do_sample=False)[0, 5:]
    assert ranks(2).run(requests_job, timeout=60) == [(True, want.tolist()), (True, None)]


def unknown_job() -> str:
    """A transformers whose manager is built in another way."""
    start = transformers.LlamaForCausalLM.init_continuous_batching
    transformers.LlamaForCausalLM.init_continuous_batching = lambda self: object()
    try:
        parallel = tpkernels.parallelize(hf_models.make("llama"), hf_models.mesh_of_all())
        parallel.init_continuous_batching()
    except NotImplementedError as error:
        return str(error)
    finally:
        transformers.LlamaForCausalLM.init_continuous_batching = start
    return "no error"


def test_an_unknown_version_is_refused(ranks: RanksFixture) -> None:
    for text in ranks(2).run(unknown_job, timeout=60):
        assert "use model.generate" in text
