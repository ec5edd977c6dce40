"""Sampling matches the processors of transformers, and greedy rows of a mixed batch stay exactly
greedy. In continuous batching, all ranks choose the same tokens."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import hf_models
from tests.support.ranked import on_ranks
from tpkernels.integrations.transformers import sampling
from tpkernels.integrations.transformers.sampling import Sampling, TokenSequence, choose

transformers = pytest.importorskip("transformers")
pytest.importorskip("fastapi")

from transformers.generation.continuous_batching.offloading_manager import (  # noqa: E402
    OffloadingManager,
)

from tpkernels.integrations.transformers.serving import server  # noqa: E402
from tpkernels.integrations.transformers.serving.batcher import Router  # noqa: E402

VOCAB = 50
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 2.0, "top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"top_k": 1000, "top_p": 0.01},
    {"temperature": 0.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
]


def make_sampling(settings: dict[str, Any], **overrides: Any) -> Sampling:
    return Sampling(**{"temperature": 1.0, **settings, **overrides})


def warped_probabilities(row: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    """Return the probabilities that the warpers of transformers give."""
    row = row[None]
    for name, warper in (
        ("temperature", transformers.TemperatureLogitsWarper),
        ("top_k", transformers.TopKLogitsWarper),
        ("top_p", transformers.TopPLogitsWarper),
        ("min_p", transformers.MinPLogitsWarper),
    ):
        if name in settings:
            row = warper(settings[name])(None, row)
    return row.softmax(-1)[0]


def test_each_row_has_the_probabilities_of_its_request() -> None:
    torch.manual_seed(0)
    scores = torch.randn(len(SETTINGS), VOCAB) * 3
    rows = sampling.probabilities(scores, [make_sampling(settings) for settings in SETTINGS])
    for settings, row, logits in zip(SETTINGS, rows, scores, strict=True):
        want = warped_probabilities(logits, settings)
        assert torch.equal(row > 0, want > 0), settings
        torch.testing.assert_close(
            row, want, msg=lambda message, case=settings: f"{case}: {message}"
        )


def test_penalties() -> None:
    torch.manual_seed(0)
    scores, prompt, generated = torch.randn(VOCAB), [3, 4], [4, 5, 5]
    sequence = TokenSequence(Sampling(repetition_penalty=1.7), prompt, generated)
    processor = transformers.RepetitionPenaltyLogitsProcessor(1.7)
    want = processor(torch.tensor([[*prompt, *generated]]), scores[None].clone())[0]
    assert torch.equal(sampling._apply_penalties(scores, sequence), want) and not want.equal(scores)
    sequence = sequence._replace(sampling=Sampling(presence_penalty=0.25, frequency_penalty=0.5))
    want = scores.clone()
    want[4] -= 0.75
    want[5] -= 1.25
    assert torch.equal(sampling._apply_penalties(scores, sequence), want)


def test_tokens_follow_their_probabilities_in_any_batch() -> None:
    torch.manual_seed(0)
    row, count = torch.randn(6), 4000
    sequences = [
        TokenSequence(make_sampling({"top_k": 4}, seed=seed), [1], []) for seed in range(count)
    ]
    tokens = choose(row.expand(count, -1), sequences)
    want = warped_probabilities(row, {"top_k": 4})
    shares = tokens.bincount(minlength=6) / count
    assert (shares - want).abs().max() < 4 * (0.25 / count) ** 0.5
    assert shares[want == 0].sum() == 0
    for size in (1, 7):  # batch sizes
        assert torch.equal(choose(row.expand(size, -1), sequences[:size]), tokens[:size])
    # Later tokens of a sequence use different random numbers.
    later = [sequence._replace(generated=[2]) for sequence in sequences]
    assert not torch.equal(choose(row.expand(count, -1), later), tokens)


def test_greedy_chooses_the_first_maximum() -> None:
    scores = torch.zeros(2, VOCAB)
    scores[:, [4, 9]] = 50.0
    drawn = set()
    for seed in range(30):
        greedy, other = choose(
            scores,
            [TokenSequence(make_sampling({}, temperature=t, seed=seed), [1], []) for t in (0, 1)],
        )
        assert greedy == 4
        drawn.add(int(other))
    assert drawn == {4, 9}


def test_tiny_temperatures_give_probabilities() -> None:
    scores = torch.randn(1, VOCAB) * 30
    for temperature in (1e-45, 1e-30, 1e-300, 1e-3):
        row = sampling.probabilities(scores, [Sampling(temperature=temperature)])[0]
        assert row.argmax() == scores.argmax() and row.sum() == 1


NEW = 12
LONG = [3 + i % 40 for i in range(140)]
DRAWN, PENALIZED = make_sampling({}, seed=9), Sampling(repetition_penalty=1.5, presence_penalty=0.5)
REQUESTS: list[dict[str, Any]] = [
    {"prompt": [3, 4, 5], "sampling": Sampling()},
    {"prompt": [4, 4, 5], "sampling": Sampling(temperature=1.5, top_p=0.95, seed=7)},
    {"prompt": [5, 4, 5], "sampling": Sampling(), "logprobs": 3},
    {"prompt": [6, 4, 5], "sampling": Sampling(temperature=1.0, seed=8), "logprobs": 0},
    # Prompts that need several steps. The second starts with tokens that the first left cached.
    {"prompt": LONG, "sampling": Sampling(), "logprobs": 2, "scored": True},
    {"prompt": [*LONG[:130], 5, 6], "sampling": Sampling(), "logprobs": 1, "scored": True},
    # Each of these requests ends on a second cache page. A small cache cannot hold both.
    {"prompt": LONG[5:65], "sampling": DRAWN, "logprobs": 1, "scored": True},
    {"prompt": LONG[6:66], "sampling": Sampling(), "logprobs": 1},
    {"prompt": [7, 4, 5], "sampling": PENALIZED, "logprobs": 1},
]


def serve(model: Any, cache_tokens: int) -> list[Any]:
    """Return the outputs of all requests. Some requests share a batch."""
    options: Any = SimpleNamespace(max_requests=8, cache_tokens=cache_tokens)
    with mock.patch.object(server, "_BATCH_TOKENS", 64):
        manager = server.make_manager(model, options)
        manager.start()
        got: dict[str, Any] = {}
        for wave in (range(5), range(5, len(REQUESTS))):
            for i in wave:  # has no effect on ranks other than 0
                fields = dict(REQUESTS[i])
                prompt = fields.pop("prompt")
                manager.add_request(prompt, request_id=str(i), max_new_tokens=NEW, **fields)
            while not all(str(i) in got for i in wave):
                output = manager.get_result(timeout=30)
                assert output is not None and output.error is None, output
                got[output.request_id] = output
        if dist.is_initialized():
            dist.barrier()
        manager.stop(timeout=30)
        manager.destroy()
    return [got[str(i)] for i in range(len(REQUESTS))]


def make_model() -> Any:
    model = hf_models.make("llama").eval()
    model.config.max_position_embeddings = 256
    return model


@torch.no_grad()
def check(model: Any, outputs: list[Any]) -> None:
    """Compare tokens and log-probabilities with the plain model, without a cache and one sequence
    at a time."""
    for request, output in zip(REQUESTS, outputs, strict=True):
        prompt, num_logprobs, new = (
            request["prompt"],
            request.get("logprobs"),
            output.generated_tokens,
        )
        tokens = [*prompt, *new]
        logits = model(torch.tensor([tokens])).logits[0]
        sequences = [
            TokenSequence(request["sampling"], prompt, new[:count]) for count in range(NEW)
        ]
        assert choose(logits[len(prompt) - 1 : -1], sequences).tolist() == new
        if num_logprobs is None:
            assert output.logprobs == []
            continue
        want = logits.log_softmax(-1)
        first = 1 if request.get("scored") else len(prompt)
        assert [entry.token for entry in output.logprobs] == tokens[first:]
        for position, entry in enumerate(output.logprobs, first):
            row = want[position - 1]
            top = row.topk(num_logprobs)
            ids, values = zip(*entry.top, strict=True) if num_logprobs else ((), ())
            assert abs(entry.logprob - row[entry.token]) < 2e-5
            assert list(ids) == top.indices.tolist()
            torch.testing.assert_close(torch.tensor(values), top.values, atol=2e-5, rtol=0)


def test_tokens_and_log_probabilities_match_the_model() -> None:
    """The cache is so small that requests are restarted."""
    check(make_model(), serve(make_model(), cache_tokens=192))


def test_an_offloaded_request_restarts_after_a_cancellation() -> None:
    """The cache has three pages, and two requests need two pages each. One request is offloaded,
    the active request is cancelled, and the offloaded request completes."""
    options: Any = SimpleNamespace(max_requests=8, cache_tokens=192)
    manager, offload = (
        server.make_manager(make_model(), options),
        OffloadingManager.offload_requests,
    )
    cancelled: list[str] = []

    def offload_and_cancel(self: Any) -> Any:
        result = offload(self)
        if self.scheduler.block_new_requests and not cancelled:
            cancelled.extend(self.scheduler.active_requests)
            for name in cancelled:
                manager.cancel_request(name)
        return result

    with mock.patch.object(OffloadingManager, "offload_requests", offload_and_cancel):
        manager.start()
        for name, begin in (("0", 5), ("1", 6)):
            prompt = LONG[begin : begin + 60]
            manager.add_request(prompt, request_id=name, max_new_tokens=NEW, sampling=Sampling())
        output = manager.get_result(timeout=30)
        manager.stop(timeout=30, hard_stop=True)
        manager.destroy()
    assert len(cancelled) == 1 and output is not None
    assert output.error is None and output.request_id not in cancelled


@pytest.mark.thorough
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
@on_ranks()
def test_ranks_choose_the_tokens_of_one_process() -> None:
    single = make_model()
    for cache_tokens in (1024, 192):
        model = tpkernels.parallelize(make_model(), hf_models.make_world_mesh())
        check(single, serve(model, cache_tokens))


def test_outputs_of_unknown_requests_are_not_queued() -> None:
    """The router delivers outputs of unknown requests, and its queue stays empty."""

    async def deliver() -> list[Any]:
        received: list[Any] = []
        router = Router(received.extend)
        router.deliver_batch([SimpleNamespace(request_id="1")] * 3)
        router.deliver(SimpleNamespace(request_id="2"))
        await asyncio.sleep(0)
        assert router.output_queue.empty()
        return received

    assert len(asyncio.run(deliver())) == 4
