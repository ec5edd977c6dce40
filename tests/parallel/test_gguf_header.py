"""The header of a GGUF file is read without its vocabulary, and says the same as all of it."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from tests.support import hf_folders

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

from tpkernels.parallel.checkpoints.gguf_file import GGUFCheckpoint  # noqa: E402
from tpkernels.parallel.checkpoints.gguf_header import Header  # noqa: E402

TOKENS = "tokenizer.ggml.tokens"
MANY = 1500  # more entries than are read


@pytest.mark.parametrize(("vocabulary", "names_size"), [(MANY, False), (47, True)])
def test_the_configuration_is_that_of_the_whole_file(
    tmp_path: Path, vocabulary: int, names_size: bool
) -> None:
    path = hf_folders.gguf_file(
        tmp_path / "model.gguf", "Q8_0", vocabulary=vocabulary, names_size=names_size
    )
    whole = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file=path.name)
    found = GGUFCheckpoint(path).config()
    assert found.to_dict() == whole.to_dict()
    assert found.vocab_size == vocabulary
    assert found.name_or_path == whole.name_or_path


def test_the_tensors_are_those_of_the_whole_file(tmp_path: Path) -> None:
    path = hf_folders.gguf_file(tmp_path / "model.gguf", "Q4_1", vocabulary=MANY)
    whole, header = gguf.GGUFReader(path), Header(path)
    for want, found in zip(whole.tensors, header.tensors, strict=True):
        assert (found.name, found.tensor_type) == (want.name, want.tensor_type)
        assert (found.data_offset, found.n_bytes) == (want.data_offset, want.n_bytes)
        assert (found.data == want.data).all()
    assert list(header.fields) == list(whole.fields)
    long = {name for name, field in header.fields.items() if not field.data}
    assert long == {TOKENS, "tokenizer.ggml.token_type"}
    with header.as_file() as small:
        assert small.stat().st_size < 4096
        names = [tensor.name for tensor in gguf.GGUFReader(small).tensors]
    assert names == [tensor.name for tensor in whole.tensors]
    assert not small.exists()


@pytest.mark.parametrize("count", [MANY + 1, 1 << 60])
def test_a_count_of_tokens_that_the_file_cannot_hold(tmp_path: Path, count: int) -> None:
    path = hf_folders.gguf_file(tmp_path / "model.gguf", "F16", vocabulary=MANY)
    field = gguf.GGUFReader(path).fields[TOKENS]
    data = bytearray(path.read_bytes())
    at = field.offset + sum(part.nbytes for part in field.parts[:4])
    assert struct.unpack_from("<Q", data, at) == (MANY,)
    struct.pack_into("<Q", data, at, count)
    path.write_bytes(data)
    with pytest.raises(ValueError, match="cannot be read as a GGUF model"):
        GGUFCheckpoint(path).config()


def test_what_is_not_supported(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with pytest.raises(NotImplementedError, match="has the other byte order"):
        GGUFCheckpoint(path).config()
    checkpoint = GGUFCheckpoint(hf_folders.gguf_file(path, "F16"))
    config = checkpoint.config()
    checkpoint._header.fields["general.architecture"].parts[-1] = np.frombuffer(b"gemma2", np.uint8)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(NotImplementedError, match="has architecture 'gemma2'; of GGUF files"):
        checkpoint.tensors(model)
