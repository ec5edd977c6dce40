"""Streaming conversion of tokens to text. A possible beginning of a stop string is held back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any


class Decoder:
    """Incremental decoder for a fast transformers tokenizer.

    Tokenizers with byte fallback decode an incomplete byte sequence as U+FFFD, including bytes that
    were valid text before the last byte. ``DecodeStream`` then raises. This class keeps the text
    that was already returned.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._start()
        self._pending: list[int] = []  # tokens that are not decoded yet

    def _start(self) -> None:
        from tokenizers.decoders import DecodeStream

        self._stream = DecodeStream(skip_special_tokens=True)

    def step(self, token: int) -> str:
        """Return the text that is final after this token."""
        self._pending.append(token)
        backend = self._tokenizer.backend_tokenizer
        try:
            decoded: str = self._stream.step(backend, token) or ""
        except Exception:  # tokenizers raises no specific exception
            decoded = self.pending_text()
            self._start()
            self._stream.step(backend, token)  # otherwise the next token loses its leading space
        if decoded:
            self._pending.clear()
        return decoded

    def pending_text(self) -> str:
        """Return the text of the pending tokens: bytes that do not form a complete character."""
        return self._tokenizer.decode(self._pending, skip_special_tokens=True)


class TextStream:
    """Text of one answer, decoded by a fast transformers tokenizer. It ends before a stop string,
    or at a token in ``end_tokens``, which is not decoded."""

    def __init__(self, tokenizer: Any, stop: Sequence[str], end_tokens: Collection[int]) -> None:
        self._stop, self._end_tokens = stop, end_tokens
        self._decoder = Decoder(tokenizer)
        self._decoded = ""  # text of all tokens
        self._sent = 0  # number of returned characters
        self.stopped = False  #: set after a stop string or an end token

    def feed(self, tokens: Sequence[int], last: bool) -> str:
        """Return the text that is final after these tokens. ``last``: no more tokens follow."""
        if self.stopped:
            return ""
        searched = len(self._decoded)
        for token in tokens:
            if token in self._end_tokens:
                self.stopped = True
                break
            self._decoded += self._decoder.step(token)
        last = last or self.stopped
        if last:
            self._decoded += self._decoder.pending_text()
        end = self._find_stop(searched)
        if end is None:
            end = len(self._decoded) - (0 if last else self._stop_prefix_length())
        delta = self._decoded[self._sent : end]
        self._sent = max(self._sent, end)
        return delta

    def _find_stop(self, searched: int) -> int | None:
        """Return the start of the first stop string. The text before ``searched`` does not contain
        any."""
        positions = [
            self._decoded.find(stop, max(0, searched - len(stop) + 1)) for stop in self._stop
        ]
        matches = [position for position in positions if position >= 0]
        if not matches:
            return None
        self.stopped = True
        return min(matches)

    def _stop_prefix_length(self) -> int:
        """Return the length of the longest suffix of the text that a stop string begins with."""
        longest = max(map(len, self._stop), default=0)
        for length in range(min(longest - 1, len(self._decoded) - self._sent), 0, -1):
            if any(stop.startswith(self._decoded[-length:]) for stop in self._stop):
                return length
        return 0
