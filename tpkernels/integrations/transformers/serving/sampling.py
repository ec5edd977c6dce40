"""Temperature, top-k and top-p of each request in a batch.

transformers has processors of this kind, but they sort the whole vocabulary for every row, and none
of them is greedy. These leave alone the rows that do not ask for them: two sorts of 32 rows of
49152 logits take longer than a step of a small model.

All ranks draw the same tokens: they have the same logits, to the bit, and the generator that
transformers seeds alike on all ranks and nothing else in these processes uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.logits_process import LogitsProcessorList

_Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class _OfRequest(ContinuousBatchingLogitsProcessor):
    """Changes the rows whose request has another value than the neutral one."""

    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self, name: str, neutral: float, change: _Change) -> None:
        self.supported_kwargs = {name: type(neutral)}
        self._name, self._neutral, self._change = name, neutral, change
        self._dtype = torch.int32 if isinstance(neutral, int) else torch.float32

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        neutral = torch.full_like(int32_tensor, self._neutral, dtype=self._dtype)
        int32_tensor.copy_(neutral.view(torch.int32))

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        values = [
            request.state.logit_processor_kwargs.get(self._name, self._neutral)
            for request in requests_with_new_token
        ]
        return torch.tensor(values, dtype=self._dtype).view(torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        values = tensor_arg[: scores.size(0)].view(self._dtype)
        rows = (values != self._neutral).nonzero().squeeze(1)
        if not len(rows):
            return scores
        changed = self._change(scores[rows], values[rows].unsqueeze(1))
        return scores.index_copy(0, rows, changed)


def _with_temperature(scores: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """At temperature 0, all probability goes to the first of the largest, as in ``argmax``."""
    first = scores.argmax(dim=1, keepdim=True)
    # Scores of at most 0 may overflow to -inf at a tiny temperature, but not to nan.
    scaled = (scores - scores.gather(1, first)) / temperature.where(temperature > 0, 1.0)
    greedy = torch.full_like(scores, -torch.inf).scatter(1, first, 0.0)
    return greedy.where(temperature == 0, scaled)


def _top_k(scores: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    kept = top_k.clamp(max=scores.size(1)).long()
    best = scores.topk(int(kept.max()), dim=1).values
    return scores.masked_fill(scores < best.gather(1, kept - 1), -torch.inf)


def _top_p(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep the most likely tokens up to the first at which their probability reaches ``top_p``."""
    ordered, order = scores.softmax(dim=1).sort(dim=1, descending=True)
    before = ordered.cumsum(dim=1) - ordered
    dropped = torch.zeros_like(scores, dtype=torch.bool).scatter(1, order, before >= top_p)
    dropped.scatter_(1, order[:, :1], False)
    return scores.masked_fill(dropped, -torch.inf)


def processors() -> Any:
    """Return what a manager of transformers takes as ``logit_processor``: ``temperature``,
    ``top_k`` and ``top_p``, in this order, as `generator.Sampling` has them."""
    ours = [
        _OfRequest("temperature", 1.0, _with_temperature),
        _OfRequest("top_k", 0, _top_k),
        _OfRequest("top_p", 1.0, _top_p),
    ]
    result = ContinuousBatchingLogitsProcessorList(LogitsProcessorList(ours))
    result.tensors_required = len(ours)  # it counts only those that it has converted
    return result
