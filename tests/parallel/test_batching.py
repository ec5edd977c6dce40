"""Continuous batching of transformers on a sharded model: rank 0 adds requests, and every rank has
the tokens of the unsharded model, however heads are split."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import hf_models
from tests.support.ranked import on_ranks
from tests.support.tiers import sweep

transformers = pytest.importorskip("transformers")


@pytest.mark.thorough
@pytest.mark.parametrize("world", hf_models.SWEEP)
@pytest.mark.parametrize(
    "options", sweep([{"sequence_parallel": "prefill"}, {"ffn_only": True}, {}])
)
@on_ranks()
def test_continuous_batching_generates_the_same_tokens(options: dict[str, Any]) -> None:
    single = hf_models.make("llama").eval()
    want = hf_models.expected_tokens(single)
    mesh = hf_models.mesh_of_all()
    parallel = tpkernels.parallelize(copy.deepcopy(single), mesh, **options)
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
