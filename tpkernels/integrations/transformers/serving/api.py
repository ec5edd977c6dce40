"""OpenAI's HTTP interface: what clients send (`Request`), its tokens (`Prompts`), and what they get
(`Replies`, `ApiError`).

A field that would change the answer and is not supported is refused, unless it has the value that
changes nothing; fields that only label a request are ignored.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictInt, field_validator

from tpkernels.integrations.transformers.generator import Sampling
from tpkernels.text import short

DONE = "data: [DONE]\n\n"
_MOST_STOPS = 4
_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
_MOST_MESSAGE, _MOST_PARAM = 1000, 100  # characters; what clients sent may be quoted in them
_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An error for the client, with HTTP's ``status``, the field of the request that is wrong
    (``param``) and a word for programs (``code``)."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self._code = status, code
        self._message = _utf8(message, _MOST_MESSAGE)
        self._param = None if param is None else _utf8(param, _MOST_PARAM)

    def body(self) -> dict[str, Any]:
        """Return the JSON of the reply."""
        other = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _KINDS.get(self.status, other)
        content = {"message": self._message, "type": kind, "param": self._param, "code": self._code}
        return {"error": content}


def _utf8(text: str, most: int) -> str:
    """Shorten text of a request, and escape the halves of characters that JSON can have."""
    return short(text, most).encode(errors="backslashreplace").decode()


def _only(*neutral: Any) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if value is None or value in neutral:
            return value
        allowed = "".join(f", or pass {value!r}" for value in neutral)
        raise ValueError(f"not supported by this server; leave it out{allowed}")

    return check


def _whole_characters(text: str) -> str:
    """Refuse halves of characters, which JSON can have and tokenizers do not take."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("a character is incomplete: half of a surrogate pair") from error
    return text


_Text = Annotated[str, AfterValidator(_whole_characters)]
_Unsupported = Annotated[Any, AfterValidator(_only())]
_Zero = Annotated[Any, AfterValidator(_only(0))]
_One = Annotated[Any, AfterValidator(_only(1))]
_No = Annotated[Any, AfterValidator(_only(False))]
_Empty = Annotated[Any, AfterValidator(_only({}, []))]
_Stop = Annotated[_Text, Field(min_length=1, max_length=1024)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class StreamOptions(_Strict):
    """``include_usage`` asks for a last chunk with the numbers of tokens."""

    include_usage: bool = False
    include_obfuscation: _No = None


class Request(_Strict):
    """What both kinds of completions take."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1, lt=1 << 31)
    stop: _Stop | list[_Stop] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    seed: int | None = None
    n: _One = None
    presence_penalty: _Zero = None
    frequency_penalty: _Zero = None
    logit_bias: _Empty = None
    # These label a request, or say where it may be computed or kept.
    user: Any = None
    metadata: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    prompt_cache_key: Any = None

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, stop: Any) -> Any:
        if isinstance(stop, list) and len(stop) > _MOST_STOPS:
            raise ValueError(f"{len(stop)} strings; at most {_MOST_STOPS}")
        return stop

    def asked_tokens(self) -> int | None:
        """Return the most tokens that the client wants; None for as many as fit."""
        return self.max_tokens

    def sampling(self, room: int) -> Sampling:
        """Return how to generate after a prompt that leaves ``room`` tokens; raise ApiError
        if they do not fit, or options exclude each other."""
        asked = self.asked_tokens()
        if asked is not None and asked > room:
            raise ApiError(
                400,
                f"max_tokens is {asked}, but the prompt leaves room for {room} tokens",
                param="max_tokens",
                code="context_length_exceeded",
            )
        temperature = 1.0 if self.temperature is None else self.temperature
        if self.seed is not None and temperature > 0:
            raise ApiError(
                400,
                "seed is supported with temperature 0 only: requests that share a batch share its "
                "random numbers",
                param="seed",
            )
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream to be true", param="stream_options")
        return Sampling(
            max_new_tokens=room if asked is None else asked,
            temperature=temperature,
            top_k=max(self.top_k or 0, 0),
            top_p=1.0 if self.top_p is None else self.top_p,
        )

    @property
    def stops(self) -> list[str]:
        """Return the strings before which the answer ends."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def include_usage(self) -> bool:
        """Return whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(Request):
    """The body of ``POST /v1/completions``."""

    prompt: _Text | list[StrictInt]
    echo: _No = None
    best_of: _One = None
    logprobs: _Unsupported = None
    suffix: Annotated[Any, AfterValidator(_only(""))] = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_prompt(cls, prompt: Any) -> Any:
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return prompt
        if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
            return prompt
        raise ValueError("one prompt a request: a string, or a list of token ids")

    def asked_tokens(self) -> int | None:
        return _COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens


class TextPart(_Strict):
    """A piece of a message."""

    type: Literal["text"]
    text: _Text


class Message(_Strict):
    """One turn of a chat, as the model's template gets it."""

    role: _Text = Field(max_length=64)
    content: _Text | list[TextPart]
    name: _Text | None = None

    def for_template(self) -> dict[str, str]:
        """Return the message with its content as one text."""
        content = self.content
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": content, **named}


class ChatRequest(Request):
    """The body of ``POST /v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: _No = None
    top_logprobs: _Zero = None
    tools: _Empty = None
    tool_choice: Annotated[Any, AfterValidator(_only("none", "auto"))] = None
    parallel_tool_calls: Any = None  # says how tools are called, and there are none
    response_format: Annotated[Any, AfterValidator(_only({"type": "text"}))] = None
    modalities: Annotated[Any, AfterValidator(_only(["text"]))] = None

    def asked_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class Prompts:
    """Turns prompts into tokens, for a model with a ``vocabulary`` of tokens of which a prompt and
    its answer have at ``most`` so many. Raise ValueError if the tokenizer is not a fast one."""

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
        """Return the tokens of a text, or check those that the client sent. Raises ApiError."""
        if isinstance(prompt, str):
            return self._checked(await asyncio.to_thread(self._tokens, prompt))
        for token in prompt:
            if not 0 <= token < self._vocabulary:
                last = self._vocabulary - 1
                raise ApiError(400, f"{token} is no token; tokens are 0 to {last}", param="prompt")
        return self._checked(prompt)

    async def of_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a conversation, in the model's template. Raises ApiError."""
        if not getattr(self._tokenizer, "chat_template", None):
            raise ApiError(
                400, "this model has no chat template; use /v1/completions", param="messages"
            )
        turns = [message.for_template() for message in messages]
        return self._checked(await asyncio.to_thread(self._chat, turns), "messages")

    def room(self, prompt: Sequence[int]) -> int:
        """Return how many tokens fit after a prompt."""
        return self._most - len(prompt)

    def _tokens(self, text: str, special: bool = True) -> list[int]:
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


@dataclass(frozen=True)
class Piece:
    """More text of an answer, and the numbers of tokens so far."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    finish: str | None  #: why it has ended, "stop" or "length"


@dataclass(frozen=True)
class Replies:
    """The replies to one request, whole or as server-sent events."""

    chat: bool
    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, last: Piece) -> dict[str, Any]:
        """Return the reply that is not a stream."""
        message = {"role": "assistant", "content": text}
        content = {"message": message} if self.chat else {"text": text}
        return self._body("chat.completion", content, last.finish) | self._usage(last)

    def start(self) -> str:
        """Return the first event of a stream, which only chats have."""
        if not self.chat:
            return ""
        return self._chunk({"delta": {"role": "assistant", "content": ""}}, None)

    def piece(self, text: str, finish: str | None) -> str:
        """Return the event of a stream with more text, or with the reason of its end."""
        delta = {"content": text} if text else {}
        return self._chunk({"delta": delta} if self.chat else {"text": text}, finish)

    def usage(self, last: Piece) -> str:
        """Return the event of a stream with the numbers of tokens."""
        return event(self._body("chat.completion.chunk") | self._usage(last))

    def _chunk(self, content: dict[str, Any], finish: str | None) -> str:
        return event(self._body("chat.completion.chunk", content, finish))

    def _body(
        self, kind: str, content: dict[str, Any] | None = None, finish: str | None = None
    ) -> dict[str, Any]:
        choices = []
        if content is not None:
            choices = [{"index": 0, **content, "logprobs": None, "finish_reason": finish}]
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}",
            "object": kind if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _usage(self, last: Piece) -> dict[str, Any]:
        numbers = {"prompt_tokens": last.prompt_tokens, "completion_tokens": last.completion_tokens}
        return {"usage": {**numbers, "total_tokens": sum(numbers.values())}}


def event(body: dict[str, Any]) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
