"""OpenAI's HTTP interface: what clients send (`Request`), its tokens (`Prompts`), the answers that
it asks for (`Wanted`), and what clients get (`Replies`, `ApiError`).

A field that would change the answer and is not supported is refused, unless it has the value that
changes nothing; fields that only label a request are ignored.
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

from tpkernels.common.text import short
from tpkernels.integrations.transformers.sampling import Logprob, Sampling
from tpkernels.integrations.transformers.text_stream import Decoder

DONE = "data: [DONE]\n\n"
_MOST_STOPS, _MOST_STOP = 16, 1024  # stop strings, and characters of one
_MOST_PROMPTS = _MOST_ANSWERS = 128  # of a request; and answers to a prompt
_MOST_LOGPROBS = 20  # of the likeliest tokens
_LEAST_TOP_P = 1e-6  # keeps the likeliest token alone
_LEAST_LOGPROB = -9999.0  # JSON has no infinity
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


def _only(*neutral: object) -> Callable[[object], object]:
    def check(value: object) -> object:
        if value in neutral:
            return value
        allowed = "".join(f", or pass {value!r}" for value in neutral)
        raise ValueError(f"not supported by this server; leave it out{allowed}")

    return check


def _whole_characters(text: str) -> str:
    """Refuse halves of characters, which JSON can have and tokenizers do not take."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("the text has an unpaired surrogate; send valid Unicode") from error
    return text


_Text = Annotated[str, AfterValidator(_whole_characters)]
_One = Annotated[Any, AfterValidator(_only(1))]
_No = Annotated[Any, AfterValidator(_only(False))]
_Empty = Annotated[Any, AfterValidator(_only({}, []))]
_Stop = Annotated[_Text, Field(max_length=_MOST_STOP)]
_Number = Annotated[float, Field(allow_inf_nan=False)]
_Penalty = Annotated[_Number, Field(ge=-2, le=2)]
_Logprobs = Annotated[StrictInt, Field(ge=0, le=_MOST_LOGPROBS)]


class Prompt(NamedTuple):
    """Tokens, and their text if the answer is to begin with it."""

    tokens: list[int]
    echo: str | None = None


@dataclass(frozen=True)
class Wanted:
    """One answer that a request asks for."""

    prompt: Prompt
    sampling: Sampling
    stop: Sequence[str] = ()
    logprobs: int | None = None  #: number of likeliest tokens whose log-probabilities it has

    @property
    def scored(self) -> bool:
        """Return whether it has log-probabilities of the prompt too."""
        return self.prompt.echo is not None and self.logprobs is not None

    def kept(self, logprobs: list[Logprob]) -> list[Logprob]:
        """Return those of the answer, of all that were computed."""
        tokens, most = self.prompt.tokens, self.sampling.max_new_tokens
        if not self.scored:
            return logprobs[:most]
        return [Logprob(tokens[0], None, []), *logprobs][: len(tokens) + most]


class _Strict(BaseModel):
    """A field that is null counts as left out, also one that this server lacks."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: object) -> object:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}


class StreamOptions(_Strict):
    """``include_usage`` asks for a last chunk with the numbers of tokens."""

    include_usage: bool = False
    include_obfuscation: _No = None


class Request(_Strict):
    """What both kinds of completions take."""

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
    n: int = Field(1, ge=1, le=_MOST_ANSWERS)
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    repetition_penalty: _Number = Field(1.0, gt=0, le=100)
    logit_bias: _Empty = None
    # These label a request, or say where it may be computed or kept.
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
        if len(stops) > _MOST_STOPS:
            raise ValueError(f"got {len(stops)} stop strings; at most {_MOST_STOPS} are accepted")
        if "" in stops:
            raise ValueError(
                f"stop string {stops.index('')} is empty; expected up to {_MOST_STOPS} strings of "
                f"1 to {_MOST_STOP} characters"
            )
        return stop

    def asked_tokens(self) -> int | None:
        """Return the most tokens that the client wants; None for as many as fit."""
        return self.max_tokens

    def asked_logprobs(self) -> int | None:
        """Return of how many likeliest tokens the client wants log-probabilities; None: of none."""
        raise NotImplementedError

    def wanted(self, prompts: Sequence[Prompt], most: int) -> list[Wanted]:
        """Return the answers to prompts that have ``most`` tokens with their answers. Raise
        ApiError if they do not fit, or options exclude each other."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream to be true", param="stream_options")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        asked, logprobs = self.asked_tokens(), self.asked_logprobs()
        seed = secrets.randbits(63) if self.seed is None else self.seed
        answers = []
        for i, prompt in enumerate(prompt for prompt in prompts for _ in range(self.n)):
            room = most - len(prompt.tokens)
            if asked is not None and asked > room:
                name = "max_completion_tokens"
                if getattr(self, name, None) is None:
                    name = "max_tokens"
                raise ApiError(
                    400,
                    f"{name} is {asked}, but the prompt leaves room for {room} tokens",
                    param=name,
                    code="context_length_exceeded",
                )
            sampling = Sampling(
                max_new_tokens=room if asked is None else asked,
                temperature=self.temperature,
                top_k=max(self.top_k, 0),
                top_p=max(self.top_p, _LEAST_TOP_P),
                min_p=self.min_p,
                repetition_penalty=self.repetition_penalty,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                seed=seed + i,
            )
            answers.append(Wanted(prompt, sampling, stops, logprobs))
        return answers

    @property
    def include_usage(self) -> bool:
        """Return whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(Request):
    """The body of ``POST /v1/completions``."""

    prompt: list[_Text | list[StrictInt]] = Field(max_length=_MOST_PROMPTS)
    max_tokens: int | None = Field(_COMPLETION_TOKENS, ge=0)
    echo: bool = False
    best_of: _One = None
    logprobs: _Logprobs | None = None
    suffix: Annotated[Any, AfterValidator(_only(""))] = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompts(cls, given: object) -> list[object]:
        items = given if isinstance(given, list) else []
        prompts = items if items and all(isinstance(one, (str, list)) for one in items) else [given]
        for prompt in prompts:
            tokens = isinstance(prompt, list) and all(type(token) is int for token in prompt)
            if not (isinstance(prompt, str) or (prompt and tokens)):
                raise ValueError(
                    "expected a string, a list of token ids that is not empty, or a list of these"
                )
        return prompts

    def asked_tokens(self) -> int | None:
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens is 0, which needs echo to be true", param="max_tokens")
        return self.max_tokens

    def asked_logprobs(self) -> int | None:
        return self.logprobs


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
    logprobs: bool = False
    top_logprobs: _Logprobs = 0
    tools: _Empty = None
    tool_choice: Annotated[Any, AfterValidator(_only("none", "auto"))] = None
    parallel_tool_calls: object = None  # says how tools are called, and there are none
    response_format: Annotated[Any, AfterValidator(_only({"type": "text"}))] = None
    modalities: Annotated[Any, AfterValidator(_only(["text"]))] = None

    def asked_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def asked_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        return self.top_logprobs if self.logprobs else None


def _bytes_of(name: str) -> list[int] | None:
    """Return the bytes of a token by its name: "<0xE2>", or a character of GPT-2's for each."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    if re.fullmatch("<0x[0-9A-F]{2}>", name):
        return [int(name[3:5], 16)]
    bytes_of = {character: byte for byte, character in bytes_to_unicode().items()}
    found = [bytes_of.get(character, -1) for character in name]
    return None if -1 in found else found


class Prompts:
    """Turns prompts into tokens, for a model with a ``vocabulary`` of tokens of which a prompt and
    its answer have at ``most`` so many. Raise ValueError if the tokenizer is not a fast one."""

    def __init__(self, tokenizer: Any, *, vocabulary: int, most: int) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                f"{type(tokenizer).__name__} is not a fast tokenizer; copy a tokenizer.json to the "
                "model folder"
            )
        self.tokenizer, self._vocabulary, self.most = tokenizer, vocabulary, most
        self.special = frozenset(tokenizer.all_special_ids)
        self._texts: dict[int, tuple[str, list[int] | None]] = {}
        # A first call may change settings of the tokenizer, which threads must not do at once.
        self._before = self._tokens("a", special=False)

    async def of_completion(self, prompt: str | list[int], echo: bool) -> Prompt:
        """Return the tokens of a text, or check those that the client sent. Raises ApiError."""
        if isinstance(prompt, str):
            tokens = await asyncio.to_thread(self._tokens, prompt)
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
        text = self.tokenizer.decode(prompt, skip_special_tokens=True) if echo else None
        return Prompt(self._checked(prompt), text)

    async def of_chat(self, messages: Sequence[Message]) -> Prompt:
        """Return the tokens of a conversation, in the model's template. Raises ApiError."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise ApiError(
                400, "this model has no chat template; use /v1/completions", param="messages"
            )
        turns = [message.for_template() for message in messages]
        return Prompt(self._checked(await asyncio.to_thread(self._chat, turns), "messages"))

    def text_of(self, token: int) -> tuple[str, list[int] | None]:
        """Return the text of a token and its bytes; of a part of a character, the token's name in
        the vocabulary, and None if that tells no bytes."""
        if token not in self._texts:
            # A token at the beginning of a text would lose its space.
            begin, whole = map(self.tokenizer.decode, (self._before, [*self._before, token]))
            text = whole[len(begin) :]
            self._texts[token] = text, list(text.encode())
            if "\ufffd" in text:
                name = self.tokenizer.convert_ids_to_tokens(token)
                self._texts[token] = name, _bytes_of(name)
        return self._texts[token]

    def _tokens(self, text: str, special: bool = True) -> list[int]:
        return self.tokenizer(text, add_special_tokens=special)["input_ids"]

    def _chat(self, turns: list[dict[str, str]]) -> list[int]:
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, tokenize=False
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise ApiError(
                400, f"the chat template rejects the messages: {error}", param="messages"
            ) from error
        return self._tokens(text, special=False)

    def _checked(self, tokens: list[int], param: str = "prompt") -> list[int]:
        if not tokens:
            raise ApiError(400, "the prompt has no tokens", param=param)
        if len(tokens) >= self.most:
            raise ApiError(
                400,
                f"the prompt has {len(tokens)} tokens; prompt and answer together may have "
                f"{self.most}",
                param=param,
                code="context_length_exceeded",
            )
        return tokens


@dataclass(frozen=True)
class TextPiece:
    """More text of an answer, which has ``tokens`` tokens so far."""

    index: int  #: of the answer
    text: str
    tokens: int
    finish: str | None  #: why it has ended, "stop" or "length"
    logprobs: list[Logprob]  #: of its new tokens, if they are wanted


class Replies:
    """The replies to one request, whole or as server-sent events."""

    def __init__(self, body: Request, prompts: Prompts, sent: Sequence[Prompt]) -> None:
        self._chat, self._model = isinstance(body, ChatRequest), body.model
        self._prompts, self._prompt_tokens = prompts, sum(len(one.tokens) for one in sent)
        self._echoes = [one.echo or "" for one in sent for _ in range(body.n)]
        self._id, self._created = uuid.uuid4().hex, int(time.time())
        self._tokens: dict[int, int] = {}  # of each answer
        self._places: dict[int, tuple[Decoder, int]] = {}  # where its next token begins in its text

    def whole(self, pieces: Sequence[TextPiece]) -> dict[str, Any]:
        """Return the reply that is not a stream."""
        choices, answers = [], defaultdict[int, list[TextPiece]](list)
        for piece in pieces:
            answers[piece.index].append(piece)
        for _, own in sorted(answers.items()):
            text = "".join(piece.text for piece in own)
            content = {"message": {"role": "assistant", "content": text}}
            last = replace(own[-1], logprobs=[each for piece in own for each in piece.logprobs])
            choices.append(self._choice(last, content if self._chat else {"text": text}))
        return self._body("chat.completion", choices) | self._usage()

    def start(self, answers: int) -> Iterator[str]:
        """Yield the first events of a stream, which only chats have."""
        for index in range(answers if self._chat else 0):
            piece = TextPiece(index, "", 0, None, [])
            yield self._chunk(piece, {"delta": {"role": "assistant", "content": ""}})

    def piece(self, piece: TextPiece) -> Iterator[str]:
        """Yield the events of a stream with more text, and with the reason of its end."""
        if piece.text or piece.logprobs:
            text = {"delta": {"content": piece.text}} if self._chat else {"text": piece.text}
            yield self._chunk(replace(piece, finish=None), text)
        if piece.finish:
            end: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
            yield self._chunk(replace(piece, logprobs=[]), end)

    def usage(self) -> str:
        """Return the event of a stream with the numbers of tokens."""
        return event(self._body("chat.completion.chunk", []) | self._usage())

    def _chunk(self, piece: TextPiece, content: dict[str, Any]) -> str:
        return event(self._body("chat.completion.chunk", [self._choice(piece, content)]))

    def _choice(self, piece: TextPiece, content: dict[str, Any]) -> dict[str, Any]:
        self._tokens[piece.index] = piece.tokens
        logprobs = self._logprobs(piece) if piece.logprobs else None
        reason = {"logprobs": logprobs, "finish_reason": piece.finish}
        return {"index": piece.index, **content, **reason}

    def _logprobs(self, piece: TextPiece) -> dict[str, Any]:
        if self._chat:
            content = [
                {**self._entry(token, value), "top_logprobs": [self._entry(*each) for each in top]}
                for token, value, top in piece.logprobs
            ]
            return {"content": content, "refusal": None}
        columns: dict[str, list[Any]] = {
            name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        for token, value, top in piece.logprobs:
            named: dict[str, float] = {}
            own = self._entry(token, value)
            for entry in [*(self._entry(*each) for each in top), own]:
                named.setdefault(entry["token"], entry["logprob"])  # the likeliest of a name
            columns["tokens"].append(own["token"])
            columns["token_logprobs"].append(own["logprob"])
            columns["top_logprobs"].append(None if value is None else named)
            columns["text_offset"].append(self._place(piece.index, token))
        return columns

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        text, data = self._prompts.text_of(token)
        shown = None if logprob is None else max(logprob, _LEAST_LOGPROB)
        return {"token": text, "logprob": shown, "bytes": data}

    def _place(self, index: int, token: int) -> int:
        """Return where a token begins in the text of its answer."""
        if index not in self._places:
            self._places[index] = Decoder(self._prompts.tokenizer), 0
        decoder, begin = self._places[index]
        text = decoder.step(token)
        if not text and token in self._prompts.special:  # which a prompt may have as text
            special, _ = self._prompts.text_of(token)
            text = special if self._echoes[index].startswith(special, begin) else ""
        self._places[index] = decoder, begin + len(text)
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
