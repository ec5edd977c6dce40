"""Decoding of token streams: characters of several tokens, stop strings, and end tokens."""

from __future__ import annotations

from typing import Any

import pytest

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from transformers.convert_slow_tokenizer import bytes_to_unicode  # noqa: E402

from tpkernels.integrations.transformers.text_stream import TextStream  # noqa: E402

END = 256


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Return a tokenizer in which token i is byte i, and token 256 ends an answer."""
    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def feed_in_chunks(
    tokenizer: Any, tokens: list[int], *stop: str, size: int = 1, cut: bool = False
) -> tuple[list[str], bool]:
    """Feed ``size`` tokens at a time. Return the decoded chunks, and whether the stream stopped.

    With ``cut``, the last chunk is not marked as the end of the stream."""
    stream = TextStream(tokenizer, stop, {END})
    chunks = [tokens[i : i + size] for i in range(0, len(tokens), size)]
    decoded = [stream.feed(chunk, chunk is chunks[-1] and not cut) for chunk in chunks]
    return decoded, stream.stopped


TEXT = "naïve 東京 🙂 ends here"


def test_incomplete_characters_are_shown_at_the_end(tokenizer: Any) -> None:
    chunks, _ = feed_in_chunks(tokenizer, list("a🙂".encode())[:3])
    assert "".join(chunks) == "a\ufffd"
    chunks, _ = feed_in_chunks(tokenizer, list("a🙂".encode())[:3], cut=True)
    assert "".join(chunks) == "a"


def test_tokenizers_that_fall_back_to_bytes() -> None:
    """Tokenizers of Llama 2, Gemma and Phi-3 decode a run of bytes as invalid if any byte is
    invalid. Text that was already sent stays."""
    vocabulary = [f"<0x{byte:02X}>" for byte in range(256)] + ["</s>", "\u2581the", "sky"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {token: i for i, token in enumerate(vocabulary)}, [], byte_fallback=True
        )
    )
    decoders = tokenizers.decoders
    spaces, strip = decoders.Replace("\u2581", " "), decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), strip])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    line, broken, the, sky = 10, 0xF0, 257, 258
    for tokens, want in (
        ([the, *"\n東".encode(), the, sky], "the\n東 thesky"),
        ([the, line, broken, the, the], "the\n\ufffd the the"),
        ([the, line, broken], "the\n\ufffd"),
        ([broken, the, line, 0x80, sky, line], "\ufffd the\n\ufffdsky\n"),
    ):
        chunks, _ = feed_in_chunks(tokenizer, tokens)
        assert "".join(chunks) == want


@pytest.mark.parametrize("size", [1, 4, 100])
@pytest.mark.parametrize(
    ("stop", "want"),
    [
        (("ends",), "naïve 東京 🙂 "),
        (("京 🙂", "here"), "naïve 東"),
        (("here", "京"), "naïve 東"),
        (("naïve",), ""),
        (("endless", "京!"), TEXT),
        (("here!",), TEXT),
    ],
)
def test_text_ends_before_the_first_stop_string(
    tokenizer: Any, stop: tuple[str, ...], want: str, size: int
) -> None:
    chunks, stopped = feed_in_chunks(tokenizer, list(TEXT.encode()), *stop, size=size)
    assert "".join(chunks) == want
    assert stopped is (want != TEXT)


def test_the_beginning_of_a_stop_string_is_held_back(tokenizer: Any) -> None:
    chunks, _ = feed_in_chunks(tokenizer, list(b"xababac"), "abac")
    assert chunks == ["x", "", "", "", "ab", "", ""]


def test_a_token_that_ends_an_answer_has_no_text(tokenizer: Any) -> None:
    chunks, stopped = feed_in_chunks(tokenizer, [*b"ab", END, *b"cd"], "zz", size=4)
    assert "".join(chunks) == "ab" and stopped
