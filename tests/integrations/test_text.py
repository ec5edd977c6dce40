"""Text from tokens: whole characters, stop strings that are never shown in part, ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tpkernels.integrations.transformers.text import TextStream

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Token n is byte n, as byte-level tokenizers write it."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    names, others = {}, 256
    for byte in range(256):
        names[chr(byte) if byte in printable else chr(others)] = byte
        others += byte not in printable
    assert set(names) == set(alphabet)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=names, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return SimpleNamespace(_tokenizer=backend)


def pieces(stream: TextStream, text: str) -> list[str]:
    return [stream.push(byte) for byte in text.encode()]


def test_characters_are_given_out_whole(tokenizer: Any) -> None:
    stream = TextStream(tokenizer, [0], [], 100)
    assert pieces(stream, "aé😀") == ["a", "", "é", "", "", "", "😀"]
    assert (stream.text, stream.reason) == ("aé😀", None)


def test_an_end_token_is_not_part_of_the_text(tokenizer: Any) -> None:
    stream = TextStream(tokenizer, [0], [], 100)
    pieces(stream, "ab")
    assert stream.push(0) == ""
    assert (stream.text, stream.reason, stream.tokens) == ("ab", "stop", [97, 98])
    assert stream.push(99) == "" and stream.tokens == [97, 98]


def test_the_length_ends_a_text(tokenizer: Any) -> None:
    stream = TextStream(tokenizer, [], ["cd"], 3)
    assert pieces(stream, "abcd") == ["a", "b", "c", ""]
    assert (stream.text, stream.reason) == ("abc", "length")


@pytest.mark.parametrize(
    ("stop", "text", "shown"),
    [
        (["\n\n"], "a\nb\n\nc", "a\nb"),
        (["END", "STOP"], "xENSTOPy", "xEN"),
        (["aab"], "aaabz", "a"),
        (["é"], "aéb", "a"),
        (["bc", "abcd"], "xabcd", "xa"),
    ],
)
def test_a_stop_string_is_never_shown(
    tokenizer: Any, stop: list[str], text: str, shown: str
) -> None:
    stream = TextStream(tokenizer, [], stop, 100)
    assert "".join(pieces(stream, text)) == stream.text == shown
    assert stream.reason == "stop"


def test_text_held_back_is_given_out_at_the_end(tokenizer: Any) -> None:
    stream = TextStream(tokenizer, [0], ["STOP"], 100)
    assert pieces(stream, "aST") == ["a", "", ""]
    assert stream.push(0) == "ST"
