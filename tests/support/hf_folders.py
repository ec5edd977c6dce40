"""Checkpoints of the models in `tests.support.hf_models`, as folders and as GGUF files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support import hf_models


def folder(base: Path, model_type: str = "llama", *, files: int = 1, **options: Any) -> Path:
    """Save a model to a folder, in one file or in at least ``files``."""
    path = base / f"{model_type}-{files}-{'-'.join(map(str, options.values()))}"
    model = hf_models.make(model_type, **options).eval()
    model.generation_config.bos_token_id = 5  # differs from the configuration
    nbytes = sum(p.numel() * p.dtype.itemsize for p in model.parameters())
    model.save_pretrained(path, max_shard_size=nbytes // files + 1 if files > 1 else "5GB")
    return path


def change_config(path: Path, **values: Any) -> None:
    """Change values in ``config.json``."""
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


#: Byte range of the fp16 scale in a block, for types that gguf decodes but cannot quantize to.
_FACTORS = {"IQ4_NL": slice(0, 2), "Q6_K": slice(208, 210)}


def _quantised(data: np.ndarray[Any, Any], kind: Any) -> np.ndarray[Any, Any]:
    import gguf

    if kind.name not in _FACTORS:
        raw: np.ndarray[Any, Any] = gguf.quantize(data, kind)
        return raw
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(data.size)
    blocks = random.integers(0, 256, (data.size // size, nbytes), dtype=np.uint8)
    factors = random.uniform(-1e-4, 1e-4, (len(blocks), 1)).astype(np.float16)
    blocks[:, _FACTORS[kind.name]] = factors.view(np.uint8)
    return blocks.reshape(len(data), -1)


def gguf_model(
    *, vocabulary: int = hf_models.VOCAB, width: int = 64, tied: bool = False, **options: Any
) -> Any:
    """Create the Llama that `gguf_file` writes."""
    import transformers

    torch.manual_seed(4)
    sizes = dict(
        hidden_size=width,
        intermediate_size=3 * width // 2,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=vocabulary,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | options)).eval()
    for name, value in model.named_parameters():
        value.data.mul_(3)
        if name.endswith("bias"):
            value.data.normal_()
    return model


def gguf_file(
    path: Path,
    kind: str,
    *,
    vocabulary: int = hf_models.VOCAB,
    write_vocab_size: bool = True,
    width: int | None = None,
    tied: bool = False,
    extra: Callable[[Any], None] = lambda writer: None,
    **options: Any,
) -> Path:
    """Write a Llama to a GGUF file.

    It has 2 layers, 8 heads in 4 key-value groups, and single letters as tokens. The widths suit
    quantized blocks.

    Args:
        kind: F32, or the quantization of the matrices. Blocks are random if gguf cannot quantize to
            it.
        vocabulary: number of tokens.
        write_vocab_size: write the number of tokens as a separate entry.
        width: of the layers. By default the minimum.
        tied: the head shares the weight of the embedding.
        extra: called with the gguf writer.
        **options: of the configuration.
    """
    import gguf

    if width is None:
        width = 512 if kind.endswith("_K") else 64
    model = gguf_model(vocabulary=vocabulary, width=width, tied=tied, **options)
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)  # 32 by default
    writer.add_name("tiny")
    for key, number in {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        "layer_norm_rms_eps": config.rms_norm_eps,
        "rope_dimension_count": config.head_dim,
    }.items():
        getattr(writer, f"add_{key}")(number)
    if write_vocab_size:
        writer.add_vocab_size(vocabulary)
    letters = [*"abcdefghijklmnopqrstuvwxyz\u0120", "th"]  # a space, and the result of a merge
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*letters, *(f"t{i}" for i in range(len(letters), vocabulary))])
    writer.add_token_merges(["t h"])
    writer.add_token_types([1] * vocabulary)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, value in model.state_dict().items():
        module, _, parameter = name.rpartition(".")
        if tied and module == "lm_head":
            continue
        data = value.numpy()
        if "q_proj" in name or "k_proj" in name:  # halves of heads are interleaved
            heads = 8 if "q_proj" in name else 4
            halves = data.reshape(heads, 2, data.shape[0] // heads // 2, -1)
            data = halves.swapaxes(1, 2).reshape(data.shape)
        quantised = getattr(gguf.GGMLQuantizationType, kind if data.ndim > 1 else "F32")
        raw = _quantised(np.ascontiguousarray(data), quantised)
        stored_name = f"{names.get_name(module)}.{parameter}"
        writer.add_tensor(stored_name, raw, raw_dtype=quantised)
    extra(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
