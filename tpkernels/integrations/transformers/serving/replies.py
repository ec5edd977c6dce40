"""What clients get, in OpenAI's format."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from tpkernels.text import short

DONE = "data: [DONE]\n\n"
_MOST_MESSAGE, _MOST_PARAM = 1000, 100  # characters; what clients sent may be quoted in them
_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An error for the client.

    Args:
        status: of HTTP.
        param: the field of the request that is wrong.
        code: a word for programs.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code = status, code
        self.message = _sendable(message, _MOST_MESSAGE)
        self.param = None if param is None else _sendable(param, _MOST_PARAM)

    def body(self) -> dict[str, Any]:
        """Return the JSON of the reply."""
        kind = _KINDS.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        content = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": content}


def _sendable(text: str, most: int) -> str:
    """Text of a request in UTF-8: JSON can have halves of characters."""
    return short(text, most).encode(errors="backslashreplace").decode()


@dataclass(frozen=True)
class Usage:
    """Numbers of tokens."""

    prompt: int
    generated: int

    def body(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt + self.generated,
        }


@dataclass(frozen=True)
class Replies:
    """The replies to one request."""

    chat: bool
    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, finish: str, usage: Usage) -> dict[str, Any]:
        """Return the reply that is not a stream."""
        if self.chat:
            message = {"role": "assistant", "content": text}
            choice = self._choice({"message": message}, finish)
            return self._body("chat.completion", [choice], usage)
        return self._body("text_completion", [self._choice({"text": text}, finish)], usage)

    def start(self) -> str:
        """Return the first event of a stream, which only chats have."""
        if not self.chat:
            return ""
        return self._chunk([self._choice({"delta": {"role": "assistant", "content": ""}}, None)])

    def piece(self, text: str, finish: str | None) -> str:
        """Return the event of a stream with more text, or with the reason of its end."""
        if self.chat:
            content: dict[str, Any] = {"delta": {"content": text} if text else {}}
        else:
            content = {"text": text}
        return self._chunk([self._choice(content, finish)])

    def usage(self, usage: Usage) -> str:
        """Return the event of a stream with the numbers of tokens."""
        return self._chunk([], usage)

    def _chunk(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> str:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return event(self._body(kind, choices, usage))

    def _choice(self, content: dict[str, Any], finish: str | None) -> dict[str, Any]:
        return {"index": 0, **content, "logprobs": None, "finish_reason": finish}

    def _body(
        self, kind: str, choices: list[dict[str, Any]], usage: Usage | None
    ) -> dict[str, Any]:
        prefix = "chatcmpl" if self.chat else "cmpl"
        body: dict[str, Any] = {
            "id": f"{prefix}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        return body if usage is None else {**body, "usage": usage.body()}


def event(body: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
