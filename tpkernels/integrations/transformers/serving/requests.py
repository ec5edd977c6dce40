"""What clients send. A field that would change the answer and is not supported is refused, unless
it has the value that changes nothing; fields that only label a request are ignored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictInt, field_validator

from tpkernels.integrations.transformers.serving.replies import ApiError

MOST_STOPS = 4
_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one request are chosen, and when they end. Temperature 0 is greedy; top_k 0
    and top_p 1 leave all tokens."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()


def _only(*neutral: Any) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if value is None or value in neutral:
            return value
        allowed = "".join(f", or pass {each!r}" for each in neutral)
        raise ValueError(f"not supported by this server; leave it out{allowed}")

    return check


def _whole_characters(text: str) -> str:
    """JSON can have halves of characters, which tokenizers do not take. pydantic takes them where a
    text is one of several kinds of values."""
    if not text.isascii():
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
        if isinstance(stop, list) and len(stop) > MOST_STOPS:
            raise ValueError(f"{len(stop)} strings; at most {MOST_STOPS}")
        return stop

    def wanted_tokens(self) -> int | None:
        """Return the most tokens that the client wants; None for as many as fit."""
        return self.max_tokens

    def sampling(self, room: int) -> Sampling:
        """Return how to generate after a prompt that leaves room for ``room`` tokens.

        Raises:
            ApiError: the tokens do not fit, or options exclude each other.
        """
        wanted = self.wanted_tokens()
        if wanted is not None and wanted > room:
            raise ApiError(
                400,
                f"max_tokens is {wanted}, but the prompt leaves room for {room} tokens",
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
        stop = self.stop or ()
        return Sampling(
            max_tokens=room if wanted is None else wanted,
            temperature=temperature,
            top_k=max(self.top_k or 0, 0),
            top_p=1.0 if self.top_p is None else self.top_p,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
        )

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
        if isinstance(prompt, str):
            return prompt
        if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
            return prompt
        raise ValueError("one prompt a request: a string, or a list of token ids")

    def wanted_tokens(self) -> int | None:
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

    def wanted_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
