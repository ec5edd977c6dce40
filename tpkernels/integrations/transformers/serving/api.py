"""The OpenAI HTTP API: requests (`Request`), their tokens (`Prompts`), the requested answers
(`AnswerSpec`), and replies (`Replies`, `ApiError`).

An unsupported field that would change the answer is rejected, unless it has its neutral value.
Fields that only label a request are ignored.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictInt,
    field_validator,
    model_validator,
)

from tpkernels.common.text import shorten
from tpkernels.integrations.transformers.sampling import Logprob, Sampling
from tpkernels.integrations.transformers.text_stream import Decoder

DONE = "data: [DONE]\n\n"
# Stop strings per request, and characters per stop string.
_MAX_STOPS, _MAX_STOP_CHARS = 16, 1024
_MAX_PROMPTS = _MAX_ANSWERS = 128  # per request, and per prompt
_MAX_LOGPROBS = 20  # top log-probabilities
_MIN_TOP_P = 1e-6  # keeps only the most likely token
_MIN_LOGPROB = -9999.0  # instead of -inf, which JSON does not support
_COMPLETION_TOKENS = 16  # OpenAI default for /v1/completions
# Limits of error fields, which may quote strings from a request.
_MAX_MESSAGE_CHARS, _MAX_PARAM_CHARS = 1000, 100
_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An error reply with HTTP ``status``, the name of the invalid request field (``param``), and
    an error ``code`` for programs."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self._code = status, code
        self._message = _utf8(message, _MAX_MESSAGE_CHARS)
        self._param = None if param is None else _utf8(param, _MAX_PARAM_CHARS)

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the reply."""
        default_type = "invalid_request_error" if self.status < 500 else "server_error"
        error_type = _ERROR_TYPES.get(self.status, default_type)
        content = {
            "message": self._message,
            "type": error_type,
            "param": self._param,
            "code": self._code,
        }
        return {"error": content}


def _utf8(value: str, max_chars: int) -> str:
    """Shorten a string from a request, and escape unpaired surrogates, which JSON allows."""
    return shorten(value, max_chars).encode(errors="backslashreplace").decode()


def _only(*neutral: object) -> Callable[[object], object]:
    def check(value: object) -> object:
        if value in neutral:
            return value
        allowed = "".join(f", or pass {value!r}" for value in neutral)
        raise ValueError(f"not supported by this server; leave it out{allowed}")

    return check


def _check_unicode(value: str) -> str:
    """Reject unpaired surrogates. JSON allows them, tokenizers do not."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError("the text has an unpaired surrogate; send valid Unicode") from error
    return value


_UnicodeStr = Annotated[str, AfterValidator(_check_unicode)]
_OnlyOne = Annotated[Any, AfterValidator(_only(1))]
_OnlyFalse = Annotated[Any, AfterValidator(_only(False))]
_OnlyEmpty = Annotated[Any, AfterValidator(_only({}, []))]
_Stop = Annotated[_UnicodeStr, Field(max_length=_MAX_STOP_CHARS)]
_Number = Annotated[float, Field(allow_inf_nan=False)]
_Penalty = Annotated[_Number, Field(ge=-2, le=2)]
_Logprobs = Annotated[StrictInt, Field(ge=0, le=_MAX_LOGPROBS)]


class Prompt(NamedTuple):
    """Tokens of a prompt, and its text if the answer must begin with it."""

    tokens: list[int]
    echo: str | None = None


@dataclass(frozen=True)
class AnswerSpec:
    """One answer that a request asks for."""

    prompt: Prompt
    sampling: Sampling
    stop: Sequence[str] = ()
    #: Number of top log-probabilities, or None without log-probabilities.
    logprobs: int | None = None

    @property
    def scored(self) -> bool:
        """Return whether the log-probabilities of the prompt are also requested."""
        return self.prompt.echo is not None and self.logprobs is not None

    def select_logprobs(self, logprobs: list[Logprob]) -> list[Logprob]:
        """Return the log-probabilities that belong to the answer."""
        tokens, max_tokens = self.prompt.tokens, self.sampling.max_new_tokens
        if not self.scored:
            return logprobs[:max_tokens]
        return [Logprob(tokens[0], None, []), *logprobs][: len(tokens) + max_tokens]


class _Strict(BaseModel):
    """Base class of request bodies. Null fields are ignored, even if they are not supported."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}


class StreamOptions(_Strict):
    """``include_usage`` requests a last chunk with the token counts."""

    include_usage: bool = False
    include_obfuscation: _OnlyFalse = None


class Request(_Strict):
    """Fields of both kinds of completion requests."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: _Number = Field(1.0, ge=0, le=2)
    top_p: _Number = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=-1, lt=1 << 31)
    min_p: _Number = Field(0.0, ge=0, le=1)
    stop: _Stop | list[_Stop] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    n: int = Field(1, ge=1, le=_MAX_ANSWERS)
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    repetition_penalty: _Number = Field(1.0, gt=0, le=100)
    logit_bias: _OnlyEmpty = None
    # Labels and storage options: they do not change the answer.
    user: object = None
    metadata: object = None
    safety_identifier: object = None
    service_tier: object = None
    store: object = None
    prompt_cache_key: object = None

    @field_validator("stop", mode="before")
    @classmethod
    def _stops(cls, stop: object) -> object:
        stops = stop if isinstance(stop, list) else [stop]
        if len(stops) > _MAX_STOPS:
            raise ValueError(f"got {len(stops)} stop strings; at most {_MAX_STOPS} are accepted")
        if "" in stops:
            raise ValueError(
                f"stop string {stops.index('')} is empty; expected up to {_MAX_STOPS} strings of "
                f"1 to {_MAX_STOP_CHARS} characters"
            )
        return stop

    def requested_tokens(self) -> int | None:
        """Return the requested maximum number of tokens, or None for no limit but the context
        length."""
        return self.max_tokens

    def requested_logprobs(self) -> int | None:
        """Return the requested number of top log-probabilities, or None without
        log-probabilities."""
        raise NotImplementedError

    def answer_specs(self, prompts: Sequence[Prompt], max_length: int) -> list[AnswerSpec]:
        """Return the requested answers.

        Args:
            max_length: maximum number of tokens of a prompt and its answer.

        Raises:
            ApiError: a prompt and its answer are too long, or options exclude each other.
        """
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream to be true", param="stream_options")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        requested, logprobs = self.requested_tokens(), self.requested_logprobs()
        seed = secrets.randbits(63) if self.seed is None else self.seed
        specs = []
        for i, prompt in enumerate(prompt for prompt in prompts for _ in range(self.n)):
            available = max_length - len(prompt.tokens)
            if requested is not None and requested > available:
                name = "max_completion_tokens"
                if getattr(self, name, None) is None:
                    name = "max_tokens"
                raise ApiError(
                    400,
                    f"{name} is {requested}, but the prompt leaves room for {available} tokens",
                    param=name,
                    code="context_length_exceeded",
                )
            sampling = Sampling(
                max_new_tokens=available if requested is None else requested,
                temperature=self.temperature,
                top_k=max(self.top_k, 0),
                top_p=max(self.top_p, _MIN_TOP_P),
                min_p=self.min_p,
                repetition_penalty=self.repetition_penalty,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                seed=seed + i,
            )
            specs.append(AnswerSpec(prompt, sampling, stops, logprobs))
        return specs

    @property
    def include_usage(self) -> bool:
        """Return whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(Request):
    """The body of ``POST /v1/completions``."""

    prompt: list[_UnicodeStr | list[StrictInt]] = Field(max_length=_MAX_PROMPTS)
    max_tokens: int | None = Field(_COMPLETION_TOKENS, ge=0)
    echo: bool = False
    best_of: _OnlyOne = None
    logprobs: _Logprobs | None = None
    suffix: Annotated[Any, AfterValidator(_only(""))] = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompts(cls, value: object) -> list[object]:
        items = value if isinstance(value, list) else []
        prompts = (
            items if items and all(isinstance(item, (str, list)) for item in items) else [value]
        )
        for prompt in prompts:
            tokens = isinstance(prompt, list) and all(type(token) is int for token in prompt)
            if not (isinstance(prompt, str) or (prompt and tokens)):
                raise ValueError(
                    "expected a string, a list of token ids that is not empty, or a list of these"
                )
        return prompts

    def requested_tokens(self) -> int | None:
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens is 0, which needs echo to be true", param="max_tokens")
        return self.max_tokens

    def requested_logprobs(self) -> int | None:
        return self.logprobs


class TextPart(_Strict):
    """A text part of a message."""

    type: Literal["text"]
    text: _UnicodeStr


class Message(_Strict):
    """One message of a chat, as the chat template receives it."""

    role: _UnicodeStr = Field(max_length=64)
    content: _UnicodeStr | list[TextPart]
    name: _UnicodeStr | None = None

    def for_template(self) -> dict[str, str]:
        """Return the message with its content as one string."""
        content = self.content
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": content, **named}


class ChatRequest(Request):
    """The body of ``POST /v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: _Logprobs = 0
    tools: _OnlyEmpty = None
    tool_choice: Annotated[Any, AfterValidator(_only("none", "auto"))] = None
    parallel_tool_calls: object = None  # irrelevant, because tools are not supported
    response_format: Annotated[Any, AfterValidator(_only({"type": "text"}))] = None
    modalities: Annotated[Any, AfterValidator(_only(["text"]))] = None

    def requested_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def requested_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        return self.top_logprobs if self.logprobs else None


def _token_bytes(name: str) -> list[int] | None:
    """Return the bytes of a token from its vocabulary name: "<0xE2>", or one GPT-2 character per
    byte. None if the name has neither form."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    if re.fullmatch("<0x[0-9A-F]{2}>", name):
        return [int(name[3:5], 16)]
    byte_values = {character: byte for byte, character in bytes_to_unicode().items()}
    values = [byte_values.get(character, -1) for character in name]
    return None if -1 in values else values


class Prompts:
    """Tokenizer of prompts for a model with ``vocabulary`` tokens. A prompt and its answer have at
    most ``max_length`` tokens. Raise ValueError if the tokenizer is not a fast tokenizer."""

    def __init__(self, tokenizer: Any, *, vocabulary: int, max_length: int) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                f"{type(tokenizer).__name__} is not a fast tokenizer; copy a tokenizer.json to the "
                "model folder"
            )
        self.tokenizer, self._vocabulary, self.max_length = tokenizer, vocabulary, max_length
        self.special = frozenset(tokenizer.all_special_ids)
        self._decoded: dict[int, tuple[str, list[int] | None]] = {}
        # The first call may change settings of the tokenizer. That is not thread-safe, so it is
        # made before threads use the tokenizer.
        self._context = self._tokenize("a", special=False)

    async def encode_completion(self, prompt: str | list[int], echo: bool) -> Prompt:
        """Tokenize a prompt, or check the token ids of a client. Raises ApiError."""
        if isinstance(prompt, str):
            tokens = await asyncio.to_thread(self._tokenize, prompt)
            return Prompt(self._checked(tokens), prompt if echo else None)
        size = self._vocabulary
        for position, token in enumerate(prompt):
            if not 0 <= token < size:
                raise ApiError(
                    400,
                    f"token id {token} at position {position} is out of range; expected 0 to "
                    f"{size - 1} (vocabulary size {size})",
                    param="prompt",
                )
        echoed = self.tokenizer.decode(prompt, skip_special_tokens=True) if echo else None
        return Prompt(self._checked(prompt), echoed)

    async def encode_chat(self, messages: Sequence[Message]) -> Prompt:
        """Return the tokens of a chat, formatted by the chat template. Raises ApiError."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise ApiError(
                400, "this model has no chat template; use /v1/completions", param="messages"
            )
        turns = [message.for_template() for message in messages]
        return Prompt(self._checked(await asyncio.to_thread(self._chat, turns), "messages"))

    def decode_token(self, token: int) -> tuple[str, list[int] | None]:
        """Return the text and the bytes of a token. For an incomplete character, return the
        vocabulary name of the token as its text, and None as its bytes if the name does not
        determine them."""
        if token not in self._decoded:
            # A token at the beginning of a text would lose its leading space.
            prefix, full = map(self.tokenizer.decode, (self._context, [*self._context, token]))
            decoded = full[len(prefix) :]
            self._decoded[token] = decoded, list(decoded.encode())
            if "\ufffd" in decoded:
                name = self.tokenizer.convert_ids_to_tokens(token)
                self._decoded[token] = name, _token_bytes(name)
        return self._decoded[token]

    def _tokenize(self, prompt: str, special: bool = True) -> list[int]:
        return self.tokenizer(prompt, add_special_tokens=special)["input_ids"]

    def _chat(self, turns: list[dict[str, str]]) -> list[int]:
        from jinja2 import TemplateError

        try:
            prompt = self.tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, tokenize=False
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise ApiError(
                400, f"the chat template rejects the messages: {error}", param="messages"
            ) from error
        return self._tokenize(prompt, special=False)

    def _checked(self, tokens: list[int], param: str = "prompt") -> list[int]:
        if not tokens:
            raise ApiError(400, "the prompt has no tokens", param=param)
        if len(tokens) >= self.max_length:
            raise ApiError(
                400,
                f"the prompt has {len(tokens)} tokens; prompt and answer together may have "
                f"{self.max_length}",
                param=param,
                code="context_length_exceeded",
            )
        return tokens


@dataclass(frozen=True)
class AnswerDelta:
    """New text of an answer. ``num_tokens`` counts the tokens of the answer so far."""

    index: int  #: index of the answer
    content: str
    num_tokens: int
    finish_reason: str | None  #: "stop" or "length" in the last delta, otherwise None
    logprobs: list[Logprob]  #: log-probabilities of the new tokens, if requested


class Replies:
    """Builds the reply to one request, as one body or as server-sent events."""

    def __init__(self, body: Request, prompts: Prompts, sent: Sequence[Prompt]) -> None:
        self._chat, self._model = isinstance(body, ChatRequest), body.model
        self._prompts, self._prompt_tokens = prompts, sum(len(prompt.tokens) for prompt in sent)
        self._echoes = [prompt.echo or "" for prompt in sent for _ in range(body.n)]
        self._id, self._created = uuid.uuid4().hex, int(time.time())
        self._tokens: dict[int, int] = {}  # number of tokens per answer
        # By answer: its decoder, and the offset of its next token in the text.
        self._offsets: dict[int, tuple[Decoder, int]] = {}

    def full_reply(self, deltas: Sequence[AnswerDelta]) -> dict[str, Any]:
        """Return the body of a reply without streaming."""
        choices, answers = [], defaultdict[int, list[AnswerDelta]](list)
        for delta in deltas:
            answers[delta.index].append(delta)
        for _, answer_deltas in sorted(answers.items()):
            answer = "".join(delta.content for delta in answer_deltas)
            content = {"message": {"role": "assistant", "content": answer}}
            last = replace(
                answer_deltas[-1],
                logprobs=[entry for delta in answer_deltas for entry in delta.logprobs],
            )
            choices.append(self._choice(last, content if self._chat else {"text": answer}))
        return self._body("chat.completion", choices) | self._usage()

    def start_events(self, answers: int) -> Iterator[str]:
        """Yield the first events of a stream. Only chats have them."""
        for index in range(answers if self._chat else 0):
            delta = AnswerDelta(index, "", 0, None, [])
            yield self._chunk(delta, {"delta": {"role": "assistant", "content": ""}})

    def delta_events(self, delta: AnswerDelta) -> Iterator[str]:
        """Yield the events for a delta: its text, and the finish reason."""
        if delta.content or delta.logprobs:
            content = (
                {"delta": {"content": delta.content}} if self._chat else {"text": delta.content}
            )
            yield self._chunk(replace(delta, finish_reason=None), content)
        if delta.finish_reason:
            ending: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
            yield self._chunk(replace(delta, logprobs=[]), ending)

    def usage_event(self) -> str:
        """Return the event with the token counts."""
        return event(self._body("chat.completion.chunk", []) | self._usage())

    def _chunk(self, delta: AnswerDelta, content: dict[str, Any]) -> str:
        return event(self._body("chat.completion.chunk", [self._choice(delta, content)]))

    def _choice(self, delta: AnswerDelta, content: dict[str, Any]) -> dict[str, Any]:
        self._tokens[delta.index] = delta.num_tokens
        logprobs = self._logprobs(delta) if delta.logprobs else None
        reason = {"logprobs": logprobs, "finish_reason": delta.finish_reason}
        return {"index": delta.index, **content, **reason}

    def _logprobs(self, delta: AnswerDelta) -> dict[str, Any]:
        if self._chat:
            content = [
                {
                    **self._entry(token, value),
                    "top_logprobs": [self._entry(*candidate) for candidate in top],
                }
                for token, value, top in delta.logprobs
            ]
            return {"content": content, "refusal": None}
        columns: dict[str, list[Any]] = {
            name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        for token, value, top in delta.logprobs:
            by_name: dict[str, float] = {}
            chosen = self._entry(token, value)
            for entry in [*(self._entry(*candidate) for candidate in top), chosen]:
                # Tokens may share a name; the most likely token is first.
                by_name.setdefault(entry["token"], entry["logprob"])
            columns["tokens"].append(chosen["token"])
            columns["token_logprobs"].append(chosen["logprob"])
            columns["top_logprobs"].append(None if value is None else by_name)
            columns["text_offset"].append(self._text_offset(delta.index, token))
        return columns

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        name, data = self._prompts.decode_token(token)
        value = None if logprob is None else max(logprob, _MIN_LOGPROB)
        return {"token": name, "logprob": value, "bytes": data}

    def _text_offset(self, index: int, token: int) -> int:
        """Return the offset of a token in the text of its answer."""
        if index not in self._offsets:
            self._offsets[index] = Decoder(self._prompts.tokenizer), 0
        decoder, begin = self._offsets[index]
        decoded = decoder.step(token)
        # An echoed prompt may contain a special token as text.
        if not decoded and token in self._prompts.special:
            special, _ = self._prompts.decode_token(token)
            decoded = special if self._echoes[index].startswith(special, begin) else ""
        self._offsets[index] = decoder, begin + len(decoded)
        return begin

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{self._id}",
            "object": kind if self._chat else "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _usage(self) -> dict[str, Any]:
        prompt, new = self._prompt_tokens, sum(self._tokens.values())
        numbers = {"prompt_tokens": prompt, "completion_tokens": new}
        return {"usage": {**numbers, "total_tokens": prompt + new}}


def event(body: dict[str, Any]) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
