"""Sampling of each request in a batch: as transformers' own warpers do, with exactly greedy rows
among the others; and on several ranks, where all must draw the same tokens."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import hf_models
from tests.support.ranked import on_ranks

transformers = pytest.importorskip("transformers")
pytest.importorskip("fastapi")

from tpkernels.integrations.transformers.serving.batcher import Router  # noqa: E402
from tpkernels.integrations.transformers.serving.sampling import processors  # noqa: E402
from tpkernels.integrations.transformers.serving.server import make_manager  # noqa: E402

VOCAB = 50
REQUESTS: list[dict[str, float]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.5},
    {"temperature": 2.0, "top_k": 3},
    {"top_k": 1},
    {"top_p": 0.7},
    {"top_k": 1000, "top_p": 0.01},
    {"temperature": 0.3, "top_k": 20, "top_p": 0.9},
]


def processed(scores: torch.Tensor, requests: list[dict[str, float]]) -> torch.Tensor:
    """The scores of a batch, as the manager computes them."""
    given = processors()
    arguments = torch.empty(given.tensors_required, 64, dtype=torch.int32)
    given.fill_defaults(arguments)
    # A request that is still in its prompt has no row of scores.
    states = [
        SimpleNamespace(state=SimpleNamespace(logit_processor_kwargs=each), has_new_token=new)
        for request in requests
        for each, new in (({"temperature": 7.0}, False), (request, True))
    ]
    given.prepare_tensor_args(states, arguments)
    return given(None, scores, arguments)


def expected(row: torch.Tensor, request: dict[str, float]) -> torch.Tensor:
    """The probabilities by transformers' own warpers."""
    row = row[None]
    if request.get("temperature") == 0:
        return torch.nn.functional.one_hot(row.argmax(-1), VOCAB)[0].float()
    for name, warper in (
        ("temperature", transformers.TemperatureLogitsWarper),
        ("top_k", transformers.TopKLogitsWarper),
        ("top_p", transformers.TopPLogitsWarper),
    ):
        if name in request:
            row = warper(request[name])(None, row)
    return row.softmax(-1)[0]


def test_each_row_has_the_probabilities_of_its_request() -> None:
    torch.manual_seed(0)
    scores = torch.randn(len(REQUESTS), VOCAB) * 3
    got = processed(scores.clone(), REQUESTS).softmax(-1)
    for request, row, given in zip(REQUESTS, got, scores, strict=True):
        want = expected(given, request)
        assert torch.equal(row > 0, want > 0), request
        torch.testing.assert_close(row, want, msg=lambda text, of=request: f"{of}: {text}")


def test_rows_that_ask_for_nothing_are_left_alone() -> None:
    scores = torch.randn(3, VOCAB)
    assert processed(scores, [{}] * 3) is scores
    got = processed(scores, [{}, {"top_k": 2}, {}])
    assert torch.equal(got[::2], scores[::2]) and not torch.equal(got[1], scores[1])


def test_greedy_takes_the_first_of_equals() -> None:
    scores = torch.zeros(2, VOCAB)
    scores[:, [4, 9]] = 5.0
    probabilities = processed(scores, [{"temperature": 0.0}, {}]).softmax(-1)
    assert probabilities[0, 4] == 1 and probabilities[0].sum() == 1
    for _ in range(50):
        assert torch.multinomial(probabilities, 1)[0] == 4


def test_tiny_temperatures_give_probabilities() -> None:
    scores = torch.randn(1, VOCAB) * 30
    for temperature in (1e-45, 1e-30, 1e-300, 1e-3):
        probabilities = processed(scores, [{"temperature": temperature}]).softmax(-1)
        assert probabilities[0].argmax() == scores.argmax() and probabilities.sum() == 1


PROMPTS = [[3 + i, 4, 5 + i] for i in range(6)]
NEW = 12


@pytest.mark.thorough
@on_ranks(2)
def test_greedy_and_sampled_requests_share_a_batch() -> None:
    single = hf_models.make("llama").eval()
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": -1}
    greedy = [single.generate(torch.tensor([prompt]), **settings)[0, 3:] for prompt in PROMPTS]
    model = tpkernels.parallelize(single, hf_models.mesh_of_all())
    options: Any = SimpleNamespace(max_requests=8, cache_tokens=512)
    manager = make_manager(model, options)
    manager.start()
    got: dict[str, Any] = {}
    for i, prompt in enumerate(PROMPTS):  # on ranks other than 0 without effect
        sampling = {"temperature": 0.0} if i % 2 else {"temperature": 1.5, "top_p": 0.95}
        manager.add_request(prompt, request_id=str(i), max_new_tokens=NEW, **sampling)
    while len(got) < len(PROMPTS):
        output = manager.get_result(timeout=30)
        assert output is not None and output.error is None, output
        got[output.request_id] = output.generated_tokens
    dist.barrier()
    manager.stop(timeout=30)
    manager.destroy()
    ours = torch.tensor([got[str(i)] for i in range(len(PROMPTS))])
    theirs = torch.empty_like(ours) if dist.get_rank() else ours.clone()
    dist.broadcast(theirs, 0)
    assert torch.equal(ours, theirs), "the ranks have drawn different tokens"
    same = [torch.equal(row, want) for row, want in zip(ours, greedy, strict=True)]
    assert same == [False, True] * 3 and ours.shape == (6, NEW)


def test_nothing_is_kept_for_nobody() -> None:
    """What transformers' router does with outputs of which nobody knows."""

    async def deliver() -> list[Any]:
        received: list[Any] = []
        router = Router(received.extend)
        router.deliver_batch([SimpleNamespace(request_id="1")] * 3)
        router.deliver(SimpleNamespace(request_id="2"))
        await asyncio.sleep(0)
        assert router.output_queue.empty()
        return received

    assert len(asyncio.run(deliver())) == 4
