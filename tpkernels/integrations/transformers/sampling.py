"""Sampling of the next token (`Sampling`, `choose`), and log-probabilities.

transformers warpers restrict the tokens, but only in rows that request it: two sorts of 32 rows of
49152 logits take longer than a step of a small model.

Each token is sampled with one random number, derived from the request seed and the token position.
The logits are bitwise identical on all ranks, so all ranks sample the same token. A seed gives the
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
    """Sampling parameters, with the ranges of ``GenerationConfig`` of transformers."""

    max_new_tokens: int = 128
    temperature: float = 0.0  #: 0: greedy
    top_k: int = 0  #: 0: all tokens
    top_p: float = 1.0
    min_p: float = 0.0  #: minimum probability, as a fraction of the highest probability
    #: For tokens in the prompt or the generated text; 1: no penalty.
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0  #: subtracted from the logits of generated tokens
    frequency_penalty: float = 0.0  #: subtracted per occurrence of a generated token
    seed: int = 0  #: seed of the random numbers

    @property
    def penalizes(self) -> bool:
        """Return whether tokens of the prompt or of the generated text are penalized."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def check(self) -> None:
        """Raise ValueError if a value is out of range."""
        for name, is_valid, allowed in (
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
            if not is_valid:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {allowed}")


class TokenSequence(NamedTuple):
    """A request whose next token is to be sampled."""

    sampling: Sampling
    prompt: Sequence[int]
    generated: Sequence[int]


class Logprob(NamedTuple):
    """Log-probability of a token by the raw logits, before penalties and temperature."""

    token: int
    logprob: float | None  #: None for the first token of a prompt
    top: list[tuple[int, float]]  #: most likely tokens, in decreasing order


def choose(logits: torch.Tensor, sequences: Sequence[TokenSequence]) -> torch.Tensor:
    """Return the next token of each sequence. ``logits``: float32, one row per sequence."""
    penalized = [row for row, sequence in enumerate(sequences) if sequence.sampling.penalizes]
    scores = logits.clone() if penalized else logits
    for row in penalized:
        scores[row] = _apply_penalties(logits[row], sequences[row])
    tokens = scores.argmax(1)
    sampled = [row for row, sequence in enumerate(sequences) if sequence.sampling.temperature > 0]
    if sampled:
        tokens[sampled] = _sample(scores[sampled], [sequences[row] for row in sampled])
    return tokens


def logprobs(logits: torch.Tensor, tokens: Sequence[int], num_top: int) -> list[Logprob]:
    """Return the log-probability of each token and of the ``num_top`` most likely tokens, by its
    row of logits."""
    logits = logits.float()
    total = logits.logsumexp(1, keepdim=True)
    token_logprobs = (
        logits.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1)) - total
    )
    best, ids = logits.topk(min(num_top, logits.size(1)), dim=1)
    tops = zip(ids.tolist(), (best - total).tolist(), strict=True)
    rows = zip(tokens, token_logprobs.squeeze(1).tolist(), tops, strict=True)
    return [Logprob(token, value, list(zip(*top, strict=True))) for token, value, top in rows]


def _apply_penalties(scores: torch.Tensor, sequence: TokenSequence) -> torch.Tensor:
    """Return a row of scores, reduced by the penalties of a request."""
    from transformers import RepetitionPenaltyLogitsProcessor

    sampling = sequence.sampling
    presence, frequency = sampling.presence_penalty, sampling.frequency_penalty
    if sampling.repetition_penalty != 1:
        processor = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
        seen = torch.tensor([[*sequence.prompt, *sequence.generated]], device=scores.device)
        scores = processor(seen, scores[None])[0]
    if sequence.generated and (presence or frequency):
        tokens = torch.tensor(sequence.generated, device=scores.device)
        seen, counts = tokens.unique(return_counts=True)
        scores = scores.index_add(0, seen, -(presence + frequency * counts).to(scores.dtype))
    return scores


def _sample(scores: torch.Tensor, sequences: Sequence[TokenSequence]) -> torch.Tensor:
    cumulative = (
        probabilities(scores, [sequence.sampling for sequence in sequences]).double().cumsum(1)
    )
    # Python seeds its generator from a string by SHA-512, identically on every machine.
    numbers = [random.Random(f"{s.seed}/{len(new)}").random() for s, _, new in sequences]
    thresholds = torch.tensor(numbers, dtype=torch.float64, device=scores.device).unsqueeze(1)
    drawn = torch.searchsorted(cumulative, thresholds * cumulative[:, -1:], right=True)
    return drawn.squeeze(1).clamp(max=scores.size(1) - 1)  # out of range if the logits are NaN


def probabilities(scores: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Return the probabilities of all tokens, one row per entry of ``samplings``. Temperatures must
    be above 0."""

    temperatures = torch.tensor([[s.temperature] for s in samplings], device=scores.device)
    # Scores are now at most 0: a tiny temperature may turn them into -inf, but not into NaN.
    scores = scores - scores.amax(1, keepdim=True)
    scores = scores / temperatures.clamp(min=torch.finfo(torch.float32).tiny)
    for row, sampling in enumerate(samplings):
        for warper in _warpers(sampling):
            scores[row] = warper(None, scores[row : row + 1])[0]
    return scores.softmax(1)


def _warpers(sampling: Sampling) -> Iterator[Any]:
    """Yield the transformers warpers of a request."""
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    if sampling.top_k:
        yield TopKLogitsWarper(sampling.top_k)
    if sampling.top_p < 1:
        yield TopPLogitsWarper(sampling.top_p)
    if sampling.min_p:
        yield MinPLogitsWarper(sampling.min_p)
