"""Text generation from prompts: `Completions` drives a `Generator` on every rank.

Problem: the driver steps a generator on all ranks and may close it after any step. But ``generate``
of transformers runs to its end and passes each token to a streamer.

Algorithm: ``generate`` runs in a thread. Its streamer passes on a token and waits for the next
step, so a rank never runs ahead of the driver. If the generator is closed instead, the streamer
raises. ``generate`` then ends before the next forward, on all ranks after the same token.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Generator as Stream
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch

from tpkernels.integrations.transformers.loading import LoadOptions, end_tokens, load_model
from tpkernels.integrations.transformers.sampling import Sampling, TokenSequence, choose
from tpkernels.integrations.transformers.text_stream import TextStream


class Generator:
    """The model on one rank. All ranks call each method with the same arguments. Raises the errors
    of `load_model`."""

    def __init__(self, options: LoadOptions) -> None:
        self._model = load_model(options)

    def describe(self) -> dict[str, Any]:
        """Return facts about the model: maximum number of tokens, vocabulary size, end tokens and
        dtype."""
        config = self._model.config
        return {
            "positions": config.max_position_embeddings,
            "vocabulary": config.vocab_size,
            "ends": end_tokens(self._model),
            "dtype": str(self._model.dtype).removeprefix("torch."),
        }

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> Iterator[list[int]]:
        """Yield the next token of each prompt until all have ended or have ``max_new_tokens``.

        Tokens of a prompt that has ended are undefined. Prompt i (from 0) uses the seed of
        ``sampling`` plus i.
        """
        from transformers import GenerationConfig, LogitsProcessorList

        model, max_prompt_length = self._model, max(map(len, prompts))
        config = GenerationConfig.from_dict(model.generation_config.to_dict())
        ends = end_tokens(model)
        config.update(
            max_new_tokens=sampling.max_new_tokens,
            max_length=None,
            do_sample=False,
            temperature=None,
            top_k=None,
            top_p=None,
            pad_token_id=ends[0] if ends else 0,
        )

        def chosen_tokens(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            sequences = [
                TokenSequence(replace(sampling, seed=sampling.seed + i), prompt, new)
                for i, (prompt, new) in enumerate(
                    zip(prompts, ids[:, max_prompt_length:].tolist(), strict=True)
                )
            ]
            return scores.scatter(1, choose(scores, sequences).unsqueeze(1), torch.inf)

        # Padded on the left, so that new tokens follow the prompt.
        ids = torch.tensor([[0] * (max_prompt_length - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (max_prompt_length - len(p)) + [1] * len(p) for p in prompts])
        steps = _Steps()

        def run() -> None:
            model.generate(
                ids.to(model.device),
                attention_mask=mask.to(model.device),
                generation_config=config,
                logits_processor=LogitsProcessorList([chosen_tokens]),
                streamer=steps,
            )

        yield from steps.iterate(run)


class _Closed(BaseException):
    """The consumer has closed the generator."""


class _Steps:
    """A transformers streamer that waits after each token until the next token is requested."""

    def __init__(self) -> None:
        self._tokens: queue.SimpleQueue[list[int] | BaseException | None] = queue.SimpleQueue()
        self._requested = threading.Semaphore(0)
        self._closed = False
        self._prompt_seen = False

    def put(self, tokens: torch.Tensor) -> None:
        """Called by ``generate``, first with the prompt, then with the next token of each row."""
        if self._prompt_seen:
            self._tokens.put(tokens.tolist())
            self._requested.acquire()
        self._prompt_seen = True
        if self._closed:
            raise _Closed

    def end(self) -> None:
        """Called by ``generate`` at its end."""

    def iterate(self, run: Callable[[], None]) -> Iterator[list[int]]:
        """Yield the tokens of ``run``, a function that calls ``generate``."""

        def guarded() -> None:
            try:
                run()
                self._tokens.put(None)
            except BaseException as error:
                self._tokens.put(error)

        thread = threading.Thread(target=guarded, name="tpkernels-generate", daemon=True)
        thread.start()
        try:
            # No deadline: every wait in a forward has a deadline, and the thread always ends with
            # an item.
            while (tokens := self._tokens.get()) is not None:
                if isinstance(tokens, BaseException):
                    raise tokens
                yield tokens
                self._requested.release()
        finally:
            self._closed = True
            self._requested.release()
            thread.join()


class Driver(Protocol):
    """Calls a method of the object on every rank. `tpkernels.launch.Ranks` implements it."""

    def call(self, method: str, *, rank: int) -> Any: ...

    def stream(self, method: str, *args: Any) -> Iterator[Any]: ...


@dataclass
class Times:
    """Seconds until the first token and until the end, and the number of forwards (``steps``)."""

    first: float = 0.0
    end: float = 0.0
    steps: int = 0

    @property
    def rate(self) -> float | None:
        """Return tokens per second of each prompt after its first token, or None with fewer than
        two steps."""
        return (self.steps - 1) / (self.end - self.first) if self.steps > 1 else None


def prompt_tokens(tokenizer: Any, prompt: str, *, chat: bool) -> list[int]:
    """Return the tokens of a prompt. With ``chat``, the prompt becomes a user message in the chat
    template. Raise ValueError if the tokenizer does not define a template."""
    if not chat:
        return list(tokenizer(prompt)["input_ids"])
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer of the model has no chat template; pass a chat model")
    message = [{"role": "user", "content": prompt}]
    return list(
        tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    )


@dataclass
class Completion:
    """The completion of one prompt."""

    stream: TextStream
    max_tokens: int  #: max number of generated tokens
    tokens: list[int] = field(default_factory=list)  #: including the end token
    text: str = ""
    finish_reason: Literal["stop", "length"] | None = None  #: None until it has ended

    def push(self, token: int) -> str:
        """Append the next token unless the completion has ended. Return the new final text."""
        if self.finish_reason is not None:
            return ""
        self.tokens.append(token)
        full = len(self.tokens) >= self.max_tokens
        delta = self.stream.feed([token], last=full)
        self.text += delta
        self.finish_reason = "stop" if self.stream.stopped else "length" if full else None
        return delta


@dataclass
class Completions:
    """The completions of one call."""

    tokenizer: Any  #: transformers tokenizer
    prompts: list[list[int]]  #: token ids
    facts: dict[str, Any]  #: `Generator.describe`
    sampling: Sampling
    stop: Sequence[str] = ()  #: stop strings
    times: Times = field(default_factory=Times)
    completions: list[Completion] = field(init=False)

    def __post_init__(self) -> None:
        self.sampling.check()
        if "" in self.stop:
            index = list(self.stop).index("")
            raise ValueError(f"stop string {index} is empty; it needs at least one character")
        for number, prompt in enumerate(self.prompts):
            self._check(prompt, f"prompt {number}" if len(self.prompts) > 1 else "the prompt")
        ends, max_tokens = self.facts["ends"], self.sampling.max_new_tokens
        self.completions = [
            Completion(TextStream(self.tokenizer, self.stop, ends), max_tokens)
            for _ in self.prompts
        ]

    def _check(self, prompt: list[int], label: str) -> None:
        max_length, new = self.facts["positions"], self.sampling.max_new_tokens
        if not prompt:
            raise ValueError(f"{label} has no tokens; pass a text that is not empty")
        if len(prompt) + new > max_length:
            raise ValueError(
                f"{label} has {len(prompt)} tokens, and max_new_tokens is {new}; the model "
                f"supports {max_length} tokens in all: shorten the prompt, or lower max_new_tokens"
            )
        size = self.facts["vocabulary"]
        for position, token in enumerate(prompt):
            if not 0 <= token < size:
                raise ValueError(
                    f"token id {token} at position {position} of {label} is out of range; expected "
                    f"0 to {size - 1} (vocabulary size {size}): the tokenizer belongs to a "
                    "different model"
                )

    def run(self, driver: Driver) -> Stream[list[str], None, None]:
        """Generate on all ranks, and yield the new text of each prompt after every step. Closing
        the iterator ends generation. Raise RankError if a rank fails."""
        begin = time.perf_counter()
        steps = driver.stream("generate", self.prompts, self.sampling)
        try:
            for tokens in steps:
                self.times.steps += 1
                self.times.end = time.perf_counter() - begin
                self.times.first = self.times.first or self.times.end
                yield [
                    completion.push(token)
                    for completion, token in zip(self.completions, tokens, strict=True)
                ]
                if all(completion.finish_reason is not None for completion in self.completions):
                    break
        finally:
            steps.close()  # type: ignore[attr-defined]
