"""How the next token of a text is chosen (`Sampling`, `choose`), and its log-probability.

transformers' warpers limit the tokens, but only in the rows that ask for it: two sorts of 32 rows
of 49152 logits take longer than a step of a small model.

A token is drawn with one random number, which its text's seed and its place in the text determine.
So all ranks draw the same token, as their logits are the same to the bit, and a seed gives the
same text in any batch and on any number of ranks, up to rounding.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Ranges are those of transformers' ``GenerationConfig``."""

    max_new_tokens: int = 128
    temperature: float = 0.0  #: 0: always the likeliest token
    top_k: int = 0  #: 0: all tokens
    top_p: float = 1.0
    min_p: float = 0.0  #: least probability, as a share of the likeliest token's
    repetition_penalty: float = 1.0  #: of tokens in the prompt or the text; 1: none
    presence_penalty: float = 0.0  #: taken off the logits of tokens that the text has
    frequency_penalty: float = 0.0  #: the same, for each time that it has them
    seed: int = 0  #: of the sampled tokens

    @property
    def penalizes(self) -> bool:
        """Return whether tokens of the prompt or the text are less likely to come again."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def check(self) -> None:
        """Raise ValueError if a value is out of range."""
        for name, right, allowed in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < float("inf"), "0 or more"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < float("inf"), "above 0"),
            ("presence_penalty", abs(self.presence_penalty) < float("inf"), "a finite number"),
            ("frequency_penalty", abs(self.frequency_penalty) < float("inf"), "a finite number"),
            ("seed", 0 <= self.seed < 2**63, "from 0 to 2**63 - 1"),
        ):
            if not right:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {allowed}")


class Text(NamedTuple):
    """A text whose next token is to be chosen."""

    sampling: Sampling
    prompt: Sequence[int]
    generated: Sequence[int]


class Logprob(NamedTuple):
    """How likely a token was: by the model's logits, before penalties and temperature."""

    token: int
    logprob: float | None  #: None: of the first token of a prompt
    top: list[tuple[int, float]]  #: the likeliest tokens, likeliest first


def choose(logits: torch.Tensor, texts: Sequence[Text]) -> torch.Tensor:
    """Return the next token of each text, whose logits are a row of ``logits``, float32."""
    penalized = [row for row, text in enumerate(texts) if text.sampling.penalizes]
    scores = logits.clone() if penalized else logits
    for row in penalized:
        scores[row] = _penalized(logits[row], texts[row])
    tokens = scores.argmax(1)
    sampled = [row for row, text in enumerate(texts) if text.sampling.temperature > 0]
    if sampled:
        tokens[sampled] = _draw(scores[sampled], [texts[row] for row in sampled])
    return tokens


def logprobs(logits: torch.Tensor, tokens: Sequence[int], most: int) -> list[Logprob]:
    """Return how likely each token was by its row of logits, with the ``most`` likeliest ones."""
    logits = logits.float()
    total = logits.logsumexp(1, keepdim=True)
    own = logits.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1)) - total
    best, ids = logits.topk(min(most, logits.size(1)), dim=1)
    tops = zip(ids.tolist(), (best - total).tolist(), strict=True)
    rows = zip(tokens, own.squeeze(1).tolist(), tops, strict=True)
    return [Logprob(token, value, list(zip(*top, strict=True))) for token, value, top in rows]


def _penalized(scores: torch.Tensor, text: Text) -> torch.Tensor:
    """Return one row of scores, less those of tokens that the text has."""
    from transformers import RepetitionPenaltyLogitsProcessor

    sampling = text.sampling
    presence, frequency = sampling.presence_penalty, sampling.frequency_penalty
    if sampling.repetition_penalty != 1:
        processor = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
        seen = torch.tensor([[*text.prompt, *text.generated]], device=scores.device)
        scores = processor(seen, scores[None])[0]
    if text.generated and (presence or frequency):
        tokens = torch.tensor(text.generated, device=scores.device)
        seen, counts = tokens.unique(return_counts=True)
        scores = scores.index_add(0, seen, -(presence + frequency * counts).to(scores.dtype))
    return scores


def _draw(scores: torch.Tensor, texts: Sequence[Text]) -> torch.Tensor:
    cumulative = probabilities(scores, [text.sampling for text in texts]).double().cumsum(1)
    # Python's generator takes a seed of text, by SHA-512, and is the same on every machine.
    numbers = [random.Random(f"{s.seed}/{len(new)}").random() for s, _, new in texts]
    places = torch.tensor(numbers, dtype=torch.float64, device=scores.device).unsqueeze(1)
    drawn = torch.searchsorted(cumulative, places * cumulative[:, -1:], right=True)
    return drawn.squeeze(1).clamp(max=scores.size(1) - 1)  # beyond it if logits were nan


def probabilities(scores: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Return the probabilities of all tokens, a row for each of ``samplings``, none of which has
    temperature 0."""

    temperatures = torch.tensor([[s.temperature] for s in samplings], device=scores.device)
    # Scores of at most 0 may overflow to -inf at a tiny temperature, but not to nan.
    scores = scores - scores.amax(1, keepdim=True)
    scores = scores / temperatures.clamp(min=torch.finfo(torch.float32).tiny)
    for row, sampling in enumerate(samplings):
        for warper in _warpers(sampling):
            scores[row] = warper(None, scores[row : row + 1])[0]
    return scores.softmax(1)


def _warpers(sampling: Sampling) -> Iterator[Any]:
    """Yield what limits the tokens of a text."""
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    if sampling.top_k:
        yield TopKLogitsWarper(sampling.top_k)
    if sampling.top_p < 1:
        yield TopPLogitsWarper(sampling.top_p)
    if sampling.min_p:
        yield MinPLogitsWarper(sampling.min_p)
