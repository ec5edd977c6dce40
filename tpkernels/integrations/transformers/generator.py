"""Generation: prompts to text, by `Completions`, which drives a `Generator` on every rank.

Problem: an executor steps a generator on all ranks alike, and may end it after any step. But
``generate`` runs to its end, and calls a streamer with each token on the way.

Algorithm: ``generate`` runs in a thread. Its streamer hands over a token and waits for the next
step, so a rank is never ahead of what it was allowed. If the generator is closed instead, the
streamer raises, and ``generate`` ends before the next forward, on all ranks after the same token.
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
from tpkernels.integrations.transformers.sampling import Sampling, Text, choose
from tpkernels.integrations.transformers.text_stream import TextStream


class Generator:
    """What every rank holds. All ranks call each method, with the same arguments. Raises what
    `load_model` does."""

    def __init__(self, options: LoadOptions) -> None:
        self._model = load_model(options)

    def describe(self) -> dict[str, Any]:
        """Return facts about the model: the most tokens it takes, its vocabulary's size, the tokens
        that end a text, and its dtype."""
        config = self._model.config
        return {
            "positions": config.max_position_embeddings,
            "vocabulary": config.vocab_size,
            "ends": end_tokens(self._model),
            "dtype": str(self._model.dtype).removeprefix("torch."),
        }

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> Iterator[list[int]]:
        """Yield the next token of each prompt, until all have ended or have ``max_new_tokens``.
        A prompt that has ended goes on with tokens that mean nothing. The seed of ``sampling`` is
        that of the first prompt; each next one has the next."""
        from transformers import GenerationConfig, LogitsProcessorList

        model, longest = self._model, max(map(len, prompts))
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
            texts = [
                Text(replace(sampling, seed=sampling.seed + i), prompt, new)
                for i, (prompt, new) in enumerate(
                    zip(prompts, ids[:, longest:].tolist(), strict=True)
                )
            ]
            return scores.scatter(1, choose(scores, texts).unsqueeze(1), torch.inf)

        # Padded on the left: new tokens follow those of the prompt.
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        steps = _Steps()

        def run() -> None:
            model.generate(
                ids.to(model.device),
                attention_mask=mask.to(model.device),
                generation_config=config,
                logits_processor=LogitsProcessorList([chosen_tokens]),
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


class Driver(Protocol):
    """Calls a method of the object that every rank holds: `tpkernels.launch.Ranks`, for one."""

    def call(self, method: str, *, rank: int) -> Any: ...

    def stream(self, method: str, *args: Any) -> Iterator[Any]: ...


@dataclass
class Times:
    """In seconds from the beginning: the first token, and the end. ``steps``: forwards made."""

    first: float = 0.0
    end: float = 0.0
    steps: int = 0

    @property
    def rate(self) -> float | None:
        """Return tokens per second of each prompt after the first; None: there are none."""
        return (self.steps - 1) / (self.end - self.first) if self.steps > 1 else None


def prompt_tokens(tokenizer: Any, text: str, *, chat: bool) -> list[int]:
    """Return the tokens of a text; with ``chat``, of a user's message in the chat template, or
    raise ValueError if the tokenizer has none."""
    if not chat:
        return list(tokenizer(text)["input_ids"])
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer of the model has no chat template; pass a chat model")
    message = [{"role": "user", "content": text}]
    return list(
        tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    )


@dataclass
class Completion:
    """What follows one prompt."""

    stream: TextStream
    most: int  #: tokens after which it ends
    tokens: list[int] = field(default_factory=list)  #: with that which ended it
    text: str = ""
    reason: Literal["stop", "length"] | None = None  #: why it has ended; None: it has not

    def push(self, token: int) -> str:
        """Take the next token, unless it has ended; return the text that is certain now."""
        if self.reason is not None:
            return ""
        self.tokens.append(token)
        full = len(self.tokens) >= self.most
        piece = self.stream.feed([token], last=full)
        self.text += piece
        self.reason = "stop" if self.stream.stopped else "length" if full else None
        return piece


@dataclass
class Completions:
    """The completions of one call."""

    tokenizer: Any  #: of transformers
    prompts: list[list[int]]  #: token ids
    facts: dict[str, Any]  #: `Generator.describe`
    sampling: Sampling
    stop: Sequence[str] = ()  #: strings that end a text
    times: Times = field(default_factory=Times)
    texts: list[Completion] = field(init=False)

    def __post_init__(self) -> None:
        self.sampling.check()
        if "" in self.stop:
            index = list(self.stop).index("")
            raise ValueError(f"stop string {index} is empty; it needs at least one character")
        for number, prompt in enumerate(self.prompts):
            self._check(prompt, f"prompt {number}" if len(self.prompts) > 1 else "the prompt")
        ends, most = self.facts["ends"], self.sampling.max_new_tokens
        self.texts = [
            Completion(TextStream(self.tokenizer, self.stop, ends), most) for _ in self.prompts
        ]

    def _check(self, prompt: list[int], what: str) -> None:
        most, new = self.facts["positions"], self.sampling.max_new_tokens
        if not prompt:
            raise ValueError(f"{what} has no tokens; pass a text that is not empty")
        if len(prompt) + new > most:
            raise ValueError(
                f"{what} has {len(prompt)} tokens, and max_new_tokens is {new}; the model supports "
                f"{most} tokens in all: shorten the prompt, or lower max_new_tokens"
            )
        size = self.facts["vocabulary"]
        for position, token in enumerate(prompt):
            if not 0 <= token < size:
                raise ValueError(
                    f"token id {token} at position {position} of {what} is out of range; expected "
                    f"0 to {size - 1} (vocabulary size {size}): the tokenizer belongs to a "
                    "different model"
                )

    def run(self, driver: Driver) -> Stream[list[str], None, None]:
        """Generate on every rank's `Generator`, and yield the new text of each prompt, token by
        token. Closing the iterator ends generation. Raise RankError if it failed on a rank."""
        begin = time.perf_counter()
        steps = driver.stream("generate", self.prompts, self.sampling)
        try:
            for tokens in steps:
                self.times.steps += 1
                self.times.end = time.perf_counter() - begin
                self.times.first = self.times.first or self.times.end
                yield [text.push(token) for text, token in zip(self.texts, tokens, strict=True)]
                if all(text.reason is not None for text in self.texts):
                    break
        finally:
            steps.close()  # type: ignore[attr-defined]
