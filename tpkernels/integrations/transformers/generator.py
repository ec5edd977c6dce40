"""The ranks' side of generation: transformers' ``generate``, one token at a time.

Problem: an executor steps a generator on all ranks alike, and may end it after any step. But
``generate`` runs to its end, and calls a streamer with each token on the way.

Algorithm: ``generate`` runs in a thread. Its streamer hands over a token and waits for the next
step, so a rank is never ahead of what it was allowed. If the generator is closed instead, the
streamer raises, and ``generate`` ends before the next forward, on all ranks after the same token.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tpkernels.integrations.transformers.loading import end_tokens, load_model
from tpkernels.launch.messages import DTYPES


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Ranges are those of transformers' ``GenerationConfig``."""

    max_new_tokens: int = 128
    temperature: float = 0.0  #: 0: always the likeliest token
    top_k: int = 0  #: 0: all tokens
    top_p: float = 1.0
    seed: int = 0  #: of the sampled tokens of one call

    def check(self) -> None:
        """Raise ValueError if a value is out of range."""
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; it must be 0 or more")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; it must be from 0 to 2**63 - 1")

    def to_message(self) -> dict[str, Any]:
        return asdict(self)


class Generator:
    """What every rank holds. All ranks call each method, with the same arguments.

    Args:
        path: a model's folder or GGUF file.
        device: the type of device that the ranks compute on.
        dtype: torch's name of a dtype; None: the checkpoint's.
        ffn_only: as `tpkernels.from_pretrained` takes it.

    Raises:
        As `tpkernels.from_pretrained`.
    """

    def __init__(
        self, path: str, device: str = "cpu", dtype: str | None = None, ffn_only: bool = False
    ) -> None:
        wanted = None if dtype is None else DTYPES[dtype]
        self._model = load_model(path, device=device, dtype=wanted, ffn_only=ffn_only)

    def describe(self) -> dict[str, Any]:
        """Facts about the model: the most tokens it takes, its vocabulary's size, the tokens that
        end a text, and its dtype."""
        config = self._model.config
        return {
            "positions": config.max_position_embeddings,
            "vocabulary": config.vocab_size,
            "ends": end_tokens(self._model),
            "dtype": str(self._model.dtype).removeprefix("torch."),
        }

    def generate(self, prompts: list[list[int]], sampling: dict[str, Any]) -> Iterator[list[int]]:
        """Yield the next token of each prompt, until all have ended or have ``max_new_tokens``.
        A prompt that has ended goes on with tokens that mean nothing.

        Args:
            prompts: token ids; at least one each. They may differ in length.
            sampling: `Sampling.to_message`.
        """
        from transformers import GenerationConfig

        chosen = Sampling(**sampling)
        model, longest = self._model, max(map(len, prompts))
        config = GenerationConfig.from_dict(model.generation_config.to_dict())
        ends, sampled = end_tokens(model), chosen.temperature > 0
        config.update(
            max_new_tokens=chosen.max_new_tokens,
            max_length=None,
            do_sample=sampled,
            temperature=chosen.temperature if sampled else None,
            top_k=chosen.top_k if sampled else None,
            top_p=chosen.top_p if sampled else None,
            pad_token_id=ends[0] if ends else 0,
        )
        # Padded on the left: new tokens follow those of the prompt.
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        steps = _Steps()

        def run() -> None:
            torch.manual_seed(chosen.seed)
            model.generate(
                ids.to(model.device),
                attention_mask=mask.to(model.device),
                generation_config=config,
                streamer=steps,
            )

        yield from steps.of(run)


class _Closed(BaseException):
    """The consumer has closed the generator."""


class _Steps:
    """A streamer of transformers that waits after each token until the next is wanted."""

    def __init__(self) -> None:
        self._tokens: queue.SimpleQueue[list[int] | BaseException | None] = queue.SimpleQueue()
        self._wanted = threading.Semaphore(0)
        self._closed = False
        self._prompt_seen = False

    def put(self, tokens: torch.Tensor) -> None:
        """Called by ``generate``, first with the prompt, then with the next token of each row."""
        if self._prompt_seen:
            self._tokens.put(tokens.tolist())
            self._wanted.acquire()
        self._prompt_seen = True
        if self._closed:
            raise _Closed

    def end(self) -> None:
        """Called by ``generate`` at its end."""

    def of(self, run: Callable[[], None]) -> Iterator[list[int]]:
        """Yield the tokens of ``run``, which calls ``generate``."""

        def guarded() -> None:
            try:
                run()
                self._tokens.put(None)
            except BaseException as error:
                self._tokens.put(error)

        thread = threading.Thread(target=guarded, name="tpkernels-generate", daemon=True)
        thread.start()
        try:
            # Not bounded here: each wait in a forward is, and the thread always puts an end.
            while (tokens := self._tokens.get()) is not None:
                if isinstance(tokens, BaseException):
                    raise tokens
                yield tokens
                self._wanted.release()
        finally:
            self._closed = True
            self._wanted.release()
            thread.join()
