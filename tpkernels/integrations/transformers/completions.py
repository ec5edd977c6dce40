"""The driver's side of generation: prompts to tokens, tokens to text."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tpkernels.integrations.transformers.generator import Sampling
from tpkernels.integrations.transformers.text import TextStream
from tpkernels.launch import Executor


@dataclass
class Times:
    """In seconds from the beginning: the first token, and the end. ``steps``: forwards made."""

    first: float = 0.0
    end: float = 0.0
    steps: int = 0

    @property
    def rate(self) -> float | None:
        """Tokens per second of each prompt after the first; None: there are none."""
        return (self.steps - 1) / (self.end - self.first) if self.steps > 1 else None


def prompt_tokens(tokenizer: Any, text: str, *, chat: bool) -> list[int]:
    """Return the tokens of a text; with ``chat``, of a user's message in the chat template.

    Raises:
        ValueError: the tokenizer has no chat template.
    """
    if not chat:
        return list(tokenizer(text)["input_ids"])
    if not tokenizer.chat_template:
        raise ValueError("the model's tokenizer has no chat template; pass a chat model")
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
        """Take the next token, and return the text that is certain now. After the end it does
        nothing."""
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
    """The completions of one call.

    Args:
        tokenizer: of transformers.
        prompts: token ids.
        facts: `generator.Generator.describe`.
        stop: strings that end a text.
    """

    tokenizer: Any
    prompts: list[list[int]]
    facts: dict[str, Any]
    sampling: Sampling
    stop: Sequence[str] = ()
    times: Times = field(default_factory=Times)
    texts: list[Completion] = field(init=False)

    def __post_init__(self) -> None:
        self.sampling.check()
        if "" in self.stop:
            raise ValueError("a stop string is empty; leave it out")
        for number, prompt in enumerate(self.prompts):
            self._check(prompt, f"prompt {number}" if len(self.prompts) > 1 else "the prompt")
        ends, most = self.facts["ends"], self.sampling.max_new_tokens
        self.texts = [
            Completion(TextStream(self.tokenizer, self.stop, ends), most) for _ in self.prompts
        ]

    def _check(self, prompt: list[int], what: str) -> None:
        most, new = self.facts["positions"], self.sampling.max_new_tokens
        if not prompt:
            raise ValueError(f"{what} has no tokens; pass some text")
        if len(prompt) + new > most:
            raise ValueError(
                f"{what} has {len(prompt)} tokens, and {new} new ones are wanted; the model takes "
                f"{most} in all: shorten the prompt, or ask for fewer"
            )
        if max(prompt) >= self.facts["vocabulary"]:
            raise ValueError(
                f"{what} has the token {max(prompt)}, but the model's vocabulary has "
                f"{self.facts['vocabulary']}: the tokenizer is of another model"
            )

    def run(self, driver: Executor) -> Generator[list[str], None, None]:
        """Generates, and yields the new text of each prompt, token by token. Closing the iterator
        ends generation.

        Args:
            driver: an executor whose ranks hold a `generator.Generator`.

        Raises:
            RankError: it failed on a rank.
        """
        begin = time.perf_counter()
        steps = driver.stream("generate", self.prompts, self.sampling.to_message())
        try:
            for tokens in steps:
                self.times.steps += 1
                self.times.end = time.perf_counter() - begin
                self.times.first = self.times.first or self.times.end
                yield [each.push(token) for each, token in zip(self.texts, tokens, strict=True)]
                if all(each.reason is not None for each in self.texts):
                    break
        finally:
            steps.close()  # type: ignore[attr-defined]
