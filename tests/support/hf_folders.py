"""Checkpoints of the models in `tests.support.hf_models`, in folders and in GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support import hf_models

#: llama.cpp's names of the parameters of a layer.
_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_OTHERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def folder(base: Path, model_type: str = "llama", *, files: int = 1, **options: Any) -> Path:
    """A folder with a model, in one file or in at least ``files``."""
    path = base / f"{model_type}-{files}-{'-'.join(map(str, options.values()))}"
    model = hf_models.make(model_type, **options).eval()
    model.generation_config.bos_token_id = 5  # not that of the configuration
    nbytes = sum(p.numel() * p.dtype.itemsize for p in model.parameters())
    model.save_pretrained(path, max_shard_size=nbytes // files + 1 if files > 1 else "5GB")
    return path


def change_config(path: Path, **values: Any) -> None:
    """Changes values in ``config.json``."""
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def gguf_file(
    path: Path, kind: str, *, vocabulary: int = hf_models.VOCAB, names_size: bool = True
) -> Path:
    """A Llama in a GGUF file, of the widths that quantised blocks need: 2 layers, 8 heads in 4
    key-value groups.

    Args:
        kind: F32, or a quantisation of the matrices.
        vocabulary: number of tokens.
        names_size: their number has an entry of its own.
    """
    import gguf
    import transformers

    torch.manual_seed(4)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=vocabulary,
        max_position_embeddings=64,
    )
    model = transformers.LlamaForCausalLM(config)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(8)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(8)
    if names_size:
        writer.add_vocab_size(vocabulary)
    writer.add_token_list([f"t{i}" for i in range(vocabulary)])
    writer.add_token_types([1] * vocabulary)
    for name, value in model.state_dict().items():
        data = value.mul(3).numpy()
        own = _own_name(name)
        if ".attn_q." in own or ".attn_k." in own:
            heads = 8 if ".attn_q." in own else 4
            halves = data.reshape(heads, 2, data.shape[0] // heads // 2, -1)
            data = halves.swapaxes(1, 2).reshape(data.shape)
        quantised = getattr(gguf.GGMLQuantizationType, kind if data.ndim > 1 else "F32")
        raw = gguf.quantize(np.ascontiguousarray(data), quantised)
        writer.add_tensor(own, raw, raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _own_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in _OTHERS:
        return f"{_OTHERS[module]}.{kind}"
    _, _, number, *rest = module.split(".")
    return f"blk.{number}.{_LAYER['.'.join(rest)]}.{kind}"
