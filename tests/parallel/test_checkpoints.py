"""Slices read from checkpoint files are bitwise identical to slices of the full tensor. The
configuration of a GGUF file matches transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.support import hf_folders
from tpkernels.integrations.transformers.loading import load_tokenizer
from tpkernels.launch.terminal import UsageError
from tpkernels.nn.sharding import Box
from tpkernels.parallel import checkpoints
from tpkernels.parallel.checkpoints import (
    GGUFCheckpoint,
    SafetensorsCheckpoint,
    StoredTensor,
    open_checkpoint,
)
from tpkernels.parallel.shard_files import plan_shards

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

MANY = 1500  # vocabulary size above the array length that is copied from GGUF metadata


def test_a_file_truncated_after_opening(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    safetensors.save_file({"w": torch.ones(4, 4)}, path)
    stored = checkpoints._tensors_in_file(path)["w"]
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 4)
    with pytest.raises(ValueError, match=r"w.safetensors is damaged or truncated"):
        stored.read(Box.full((4, 4)), torch.empty(4, 4))


def iterate_tensors(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors of a GGUF file, read in chunks that end within a head, then unchunked."""
    checkpoint = open_checkpoint(path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(checkpoint.config())
    for chunk in (1000, checkpoints.CHUNK):
        with mock.patch.object(checkpoints, "CHUNK", chunk):
            yield from checkpoint.tensors(model).items()


@pytest.mark.parametrize("kind", ["F16", "Q4_1"])
def test_gguf_values_match_transformers(tmp_path: Path, kind: str) -> None:
    path = hf_folders.gguf_file(tmp_path / "model.gguf", kind)
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name)
    weights, read = expected.state_dict(), set()
    for name, tensor in iterate_tensors(tmp_path):
        box = Box(tuple(n // 3 for n in tensor.shape), tuple(n // 2 for n in tensor.shape))
        out = torch.empty(box.shape)
        tensor.read(box, out)
        assert torch.equal(out, weights[name][box.slices]), name
        read.add(name)
    assert read == set(weights)


@pytest.mark.parametrize(
    ("kind", "group"),
    [("Q8_0", 32), ("Q5_0", 32), ("Q4_0", 32), ("IQ4_NL", 32), ("Q6_K", 16), ("Q4_1", 0)],
)
def test_gguf_integers_times_scales(tmp_path: Path, kind: str, group: int) -> None:
    """Integers times scales equal the decoded values, also for heads with interleaved halves. Only
    boxes of complete groups return integers."""
    for name, tensor in iterate_tensors(hf_folders.gguf_file(tmp_path / "model.gguf", kind)):
        if len(tensor.shape) != 2:
            assert tensor.integers is None, name
            continue
        rows, columns = tensor.shape
        box = Box((rows // 3, 32), (rows // 2, columns - 32))
        result = tensor.read_integers(box)
        if group == 0:
            assert result is None
            continue
        assert result is not None
        integers, scales = result
        assert integers.dtype == torch.int8 and scales.dtype == torch.float32
        assert scales.shape == (rows // 2, (columns - 32) // group)
        values = torch.empty(box.shape)
        tensor.read(box, values)
        got = integers.unflatten(1, (-1, group)) * scales.unsqueeze(2)
        assert torch.equal(got.flatten(1), values), name
        for begin, count in ((32, columns - 36), (4, group)):
            assert tensor.read_integers(Box((0, begin), (rows, count))) is None


@pytest.mark.parametrize(("vocabulary", "write_vocab_size"), [(MANY, False), (47, True)])
def test_the_configuration_of_a_gguf_file_is_read_without_its_vocabulary(
    tmp_path: Path, vocabulary: int, write_vocab_size: bool
) -> None:
    path = hf_folders.gguf_file(
        tmp_path / "model.gguf", "Q8_0", vocabulary=vocabulary, write_vocab_size=write_vocab_size
    )
    expected = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file=path.name)
    checkpoint = GGUFCheckpoint(path)
    config = checkpoint.config()
    assert config.to_dict() == expected.to_dict()
    assert config.vocab_size == vocabulary
    assert config.name_or_path == expected.name_or_path
    with checkpoint._metadata_copy() as small:
        assert small.stat().st_size < 4096
        assert small.parent == Path("/proc/self/fd")  # a memfd, so a killed rank leaves no file
    assert not small.exists()


def test_tensors_listed_in_the_index_are_read(tmp_path: Path) -> None:
    """The widest dtype of the listed tensors is the model dtype. A single file has precedence over
    an index, as in transformers."""
    tensors = {"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.ones(2)}
    others = {"c": torch.ones(2, dtype=torch.complex64)}
    safetensors.save_file(tensors | others, tmp_path / "x.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "x.safetensors")}
    file = tmp_path / "model.safetensors.index.json"
    file.write_text(json.dumps(index))
    assert SafetensorsCheckpoint(tmp_path).dtype() == torch.float32
    index["weight_map"]["c"] = "x.safetensors"
    file.write_text(json.dumps(index))
    with pytest.raises(NotImplementedError, match="c has dtype"):
        SafetensorsCheckpoint(tmp_path).dtype()
    safetensors.save_file({"a": torch.full((2,), 2.0)}, tmp_path / "model.safetensors")
    out = torch.empty(2)
    SafetensorsCheckpoint(tmp_path)._stored["a"].read(Box.full((2,)), out)
    assert out.tolist() == [2, 2]


def test_unsupported_gguf_files(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with pytest.raises(
        NotImplementedError, match="has the byte order of other machines; convert it with"
    ):
        GGUFCheckpoint(path).config()
    checkpoint = GGUFCheckpoint(hf_folders.gguf_file(path, "F16"))
    checkpoint._reader.fields["general.architecture"].parts[-1] = np.frombuffer(b"gemma2", np.uint8)
    with pytest.raises(
        NotImplementedError, match="has architecture 'gemma2'; supported in GGUF files: "
    ):
        checkpoint.config()


@pytest.mark.parametrize("small_first", [False, True])
def test_split_gguf_files(tmp_path: Path, small_first: bool) -> None:
    """Write files like `llama-gguf-split`: only the first contains the metadata of the model. Each
    file, also after a rename, is refused with the merge command in the message. So is a read of the
    tokenizer."""
    writer = partial(gguf.GGUFWriter, split_max_tensors=8, small_first_shard=small_first)
    with mock.patch.object(gguf, "GGUFWriter", writer):
        hf_folders.gguf_file(tmp_path / "model.gguf", "F16")
    count = 4 if small_first else 3
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [
        f"model-{i + 1:05}-of-{count:05}.gguf" for i in range(count)
    ]
    (tmp_path / "other").mkdir()
    renamed = [shutil.copy(file, tmp_path / "other" / f"{i}.gguf") for i, file in enumerate(files)]
    for source in (*files, *renamed, tmp_path):
        message = (
            f"{files[0] if source == tmp_path else source} belongs to a GGUF model that is split "
            f"into {count} files; merge them with `llama-gguf-split --merge FIRST_FILE OUTPUT` "
            "(llama.cpp), and pass OUTPUT"
        )
        with pytest.raises(NotImplementedError) as refusal:
            open_checkpoint(source).config()
        assert str(refusal.value) == message
        if source != renamed[0]:  # the renamed first file still contains the tokenizer
            with pytest.raises(UsageError) as usage_error:
                load_tokenizer(source)
            assert str(usage_error.value) == message


def test_a_merged_gguf_file_named_like_a_split_file(tmp_path: Path) -> None:
    """The metadata decides whether a file is split, not its name."""
    path = hf_folders.gguf_file(tmp_path / "model-00001-of-00002.gguf", "F16")
    assert open_checkpoint(path).config().model_type == "llama"


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
SCALING = gguf.RopeScalingType


def add_scaling(kind: Any, writer: Any) -> None:
    writer.add_rope_scaling_type(kind)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(16)


def add_betas(writer: Any) -> None:
    add_scaling(SCALING.YARN, writer)
    writer.add_rope_scaling_yarn_beta_fast(4.0)
    writer.add_rope_scaling_yarn_beta_slow(0.5)


def add_rope_freqs(linear: bool, writer: Any) -> None:
    plain, scaled = (
        hf_folders.gguf_model(**options).model.rotary_emb.inv_freq
        for options in ({}, {"rope_parameters": LLAMA3 | {"rope_theta": 10000.0}})
    )
    writer.add_tensor("rope_freqs.weight", (plain / scaled / (4 if linear else 1)).numpy())
    if linear:
        writer.add_float32("llama.rope.scale_linear", 4.0)


@pytest.mark.parametrize(
    ("options", "extra"),
    [
        ({"rope_parameters": LLAMA3}, partial(add_rope_freqs, False)),
        ({"rope_parameters": LLAMA3}, partial(add_rope_freqs, True)),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0}},
            partial(add_scaling, SCALING.LINEAR),
        ),
        ({}, partial(add_scaling, SCALING.NONE)),
        ({"rope_parameters": YARN}, partial(add_scaling, SCALING.YARN)),
        ({"rope_parameters": YARN | {"beta_fast": 4.0, "beta_slow": 0.5}}, add_betas),
        ({"attention_bias": True, "mlp_bias": True}, lambda writer: None),
        ({"head_dim": 6}, lambda writer: writer.add_key_length(6)),
    ],
)
def test_gguf_settings_that_transformers_ignores(
    tmp_path: Path, options: dict[str, Any], extra: Any
) -> None:
    if "rope_parameters" in options:
        options = {"rope_parameters": options["rope_parameters"] | {"rope_theta": 10000.0}}
    path = hf_folders.gguf_file(tmp_path / "m.gguf", "F32", extra=extra, **options)
    checkpoint = GGUFCheckpoint(path)
    model = transformers.AutoModelForCausalLM.from_config(checkpoint.config()).eval()
    stored, state = checkpoint.tensors(model), model.state_dict()
    assert stored.keys() == state.keys()
    for name, value in state.items():
        stored[name].read(Box.full(value.shape), value)
    ids = torch.arange(64).view(1, 64) % 47
    with torch.no_grad():
        want, got = hf_folders.gguf_model(**options)(ids).logits, model(ids).logits
    assert (got - want).abs().max() < 1e-5 * want.abs().max()


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        (partial(add_scaling, SCALING.LONGROPE), r"llama.rope.scaling.type='longrope'"),
        (lambda writer: writer.add_rope_scaling_yarn_ext_factor(0.5), "yarn_ext_factor=0.5"),
        (lambda writer: writer.add_causal_attention(False), "llama.attention.causal=False"),
        (lambda writer: writer.add_sliding_window(16), "llama.attention.sliding_window=16"),
        (lambda writer: writer.add_value_length(4), "llama.attention.value_length=4"),
        (
            lambda writer: (add_rope_freqs(False, writer), add_scaling(SCALING.YARN, writer)),
            "llama.rope.scaling.type='yarn'",
        ),
        (lambda writer: add_vectors(writer, "blk.0.attn_q.bias"), "blk.0.attn_q.bias"),
        (lambda writer: add_vectors(writer, "blk.1.attn_q_norm.weight"), "blk.1.attn_q_norm"),
        (
            lambda writer: add_vectors(writer, "blk.0.post_ffw_norm.weight", "blk.2.ffn_up.weight"),
            "2 tensors that LlamaForCausalLM does not use: blk.0.post_ffw_norm.weight, blk.2",
        ),
    ],
)
def test_unsupported_gguf_settings_are_refused(tmp_path: Path, extra: Any, pattern: str) -> None:
    path = hf_folders.gguf_file(tmp_path / "m.gguf", "F32", extra=extra)
    with pytest.raises(NotImplementedError, match=pattern):
        plan_shards(path, 2)


def add_vectors(writer: Any, *names: str) -> None:
    for name in names:
        writer.add_tensor(name, np.ones(8, np.float32))
