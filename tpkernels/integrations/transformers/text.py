"""From the tokens of a completion to its text, piece by piece."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal

Reason = Literal["stop", "length"]


class TextStream:
    """The text of one completion while its tokens arrive.

    Text is given out once all bytes of its last character are there, and once it cannot be the
    beginning of a stop string.

    Args:
        tokenizer: of transformers, with a backend of the tokenizers library.
        ends: tokens that end the text and are not part of it.
        stop: strings that do, none of them empty.
        most: tokens after which the text ends.
    """

    def __init__(
        self, tokenizer: Any, ends: Collection[int], stop: Sequence[str], most: int
    ) -> None:
        from tokenizers.decoders import DecodeStream

        self._decoder, self._backend = DecodeStream(skip_special_tokens=True), tokenizer._tokenizer
        self._ends, self._stop, self._most = frozenset(ends), tuple(stop), most
        self._held = ""  # text that may begin a stop string
        self.tokens: list[int] = []  #: all tokens, without the one that ended the text
        self.text = ""  #: the text that was given out
        self.reason: Reason | None = None  #: why the text has ended; None: it has not

    def push(self, token: int) -> str:
        """Takes the next token, and returns the text that is complete now. After the end it does
        nothing."""
        if self.reason is not None:
            return ""
        if token in self._ends:
            return self._give("", "stop")
        self.tokens.append(token)
        text = self._decoder.step(self._backend, token) or ""
        return self._give(text, "length" if len(self.tokens) >= self._most else None)

    def _give(self, text: str, reason: Reason | None) -> str:
        """Adds ``text``, and returns what of it and of the text held back can be given out."""
        text, self._held = self._held + text, ""
        found = [place for each in self._stop if (place := text.find(each)) >= 0]
        if found:
            text, reason = text[: min(found)], "stop"
        elif reason is None:
            kept = len(text) - _overlap(text, self._stop)
            text, self._held = text[:kept], text[kept:]
        self.reason = reason
        self.text += text
        return text


def _overlap(text: str, stop: Sequence[str]) -> int:
    """The length of the longest end of ``text`` that begins a stop string."""
    longest = max(map(len, stop), default=0) - 1
    for length in range(min(len(text), longest), 0, -1):
        if any(each.startswith(text[-length:]) for each in stop):
            return length
    return 0
