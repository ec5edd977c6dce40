"""Prompts of requests to tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from tpkernels.integrations.transformers.serving.replies import ApiError
from tpkernels.integrations.transformers.serving.requests import Message


class Prompts:
    """Makes tokens of prompts.

    Args:
        tokenizer: a fast one of transformers.
        vocabulary: number of tokens that the model knows.
        most: tokens of a prompt and its answer.

    Raises:
        ValueError: the tokenizer is not a fast one.
    """

    def __init__(self, tokenizer: Any, *, vocabulary: int, most: int) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                f"{type(tokenizer).__name__} is not a fast tokenizer; copy a tokenizer.json to the "
                "model's folder"
            )
        self._tokenizer, self._vocabulary, self._most = tokenizer, vocabulary, most
        # A first call may change settings of the tokenizer, which threads must not do at once.
        tokenizer("a")

    async def of_completion(self, prompt: str | list[int]) -> list[int]:
        """Return the tokens of a text, or the tokens given.

        Raises:
            ApiError: they cannot be a prompt.
        """
        if isinstance(prompt, str):
            return self._checked(await asyncio.to_thread(self._tokens, prompt, special=True))
        wrong = [token for token in prompt if not 0 <= token < self._vocabulary]
        if wrong:
            raise ApiError(
                400,
                f"{wrong[0]} is no token; tokens are 0 to {self._vocabulary - 1}",
                param="prompt",
            )
        return self._checked(prompt, "prompt")

    async def of_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a conversation, in the model's template.

        Raises:
            ApiError: there is no template, or it does not take these messages.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            raise ApiError(
                400, "this model has no chat template; use /v1/completions", param="messages"
            )
        turns = [message.for_template() for message in messages]
        return self._checked(await asyncio.to_thread(self._chat, turns), "messages")

    def room(self, prompt: Sequence[int]) -> int:
        """Tokens that fit after a prompt."""
        return self._most - len(prompt)

    def _tokens(self, text: str, *, special: bool) -> list[int]:
        tokens: list[int] = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        return tokens

    def _chat(self, turns: list[dict[str, str]]) -> list[int]:
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, tokenize=False
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise ApiError(
                400, f"the model's chat template refuses this: {error}", param="messages"
            ) from error
        return self._tokens(text, special=False)

    def _checked(self, tokens: list[int], param: str = "prompt") -> list[int]:
        if not tokens:
            raise ApiError(400, "the prompt is empty", param=param)
        if len(tokens) >= self._most:
            raise ApiError(
                400,
                f"the prompt has {len(tokens)} tokens; with the answer there may be {self._most}",
                param=param,
                code="context_length_exceeded",
            )
        return tokens
