"""Tokens to text, as they arrive. What a stop string may begin with is held back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any


class Decoder:
    """Decodes the tokens of one text one by one, by a fast tokenizer of transformers.

    Tokenizers that fall back to bytes show a run of bytes that is no text as U+FFFD, also what was
    text before the last byte came, and then ``DecodeStream`` raises. Here that stays as it was.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._start()
        self._pending: list[int] = []  # tokens without text so far

    def _start(self) -> None:
        from tokenizers.decoders import DecodeStream

        self._stream = DecodeStream(skip_special_tokens=True)

    def step(self, token: int) -> str:
        """Return the text that this token makes certain."""
        self._pending.append(token)
        backend = self._tokenizer.backend_tokenizer
        try:
            text: str = self._stream.step(backend, token) or ""
        except Exception:  # tokenizers has no kinds of errors
            text = self.rest()
            self._start()
            self._stream.step(backend, token)  # or the next one would lose its space
        if text:
            self._pending.clear()
        return text

    def rest(self) -> str:
        """Return what is held back: bytes that are no whole character."""
        return self._tokenizer.decode(self._pending, skip_special_tokens=True)


class TextStream:
    """The text of one answer, by a fast tokenizer of transformers. It ends before a string of
    ``stop``, or at a token of ``end_tokens``, which has no text."""

    def __init__(self, tokenizer: Any, stop: Sequence[str], end_tokens: Collection[int]) -> None:
        self._stop, self._end_tokens = stop, end_tokens
        self._decoder = Decoder(tokenizer)
        self._text = ""  # of the tokens so far
        self._sent = 0  # characters of it
        self.stopped = False  #: a stop string was found, or a token that ends the answer

    def feed(self, tokens: Sequence[int], last: bool) -> str:
        """Return the text that these tokens make certain. ``last``: no more will follow."""
        if self.stopped:
            return ""
        searched = len(self._text)
        for token in tokens:
            if token in self._end_tokens:
                self.stopped = True
                break
            self._text += self._decoder.step(token)
        last = last or self.stopped
        if last:
            self._text += self._decoder.rest()
        end = self._find_stop(searched)
        if end is None:
            end = len(self._text) - (0 if last else self._held())
        piece = self._text[self._sent : end]
        self._sent = max(self._sent, end)
        return piece

    def _find_stop(self, searched: int) -> int | None:
        """Return where the first stop string begins; the text before ``searched`` contains none."""
        places = [self._text.find(stop, max(0, searched - len(stop) + 1)) for stop in self._stop]
        found = [place for place in places if place >= 0]
        if not found:
            return None
        self.stopped = True
        return min(found)

    def _held(self) -> int:
        """Count characters at the end of the text with which a stop string begins."""
        longest = max(map(len, self._stop), default=0)
        for length in range(min(longest - 1, len(self._text) - self._sent), 0, -1):
            if any(stop.startswith(self._text[-length:]) for stop in self._stop):
                return length
        return 0
