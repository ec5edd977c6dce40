"""GGUF files. transformers translates their metadata; the ``gguf`` package reads their layout,
translates names and dequantises.

Llama's and Mistral's query and key weights are stored with the two halves of each head interleaved,
as llama.cpp's rotary embedding wants them. Reading restores transformers' order head by head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tpkernels.parallel.checkpoints.stored import Rows, Stored, package
from tpkernels.text import of_error, shown

if TYPE_CHECKING:
    from tpkernels.parallel.checkpoints.gguf_header import Header

# Others store some tensors changed, such as transposed or with 1 added.
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_INTERLEAVED = {"llama", "mistral"}  # model types
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GGUFCheckpoint:
    """See `tpkernels.parallel.checkpoints.Checkpoint`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def config(self) -> Any:
        header = self._header
        with _errors_of(self.path), header.as_file() as small:
            config = package("transformers").AutoConfig.from_pretrained(
                small.parent, gguf_file=small.name
            )
        config.name_or_path = str(self.path.parent)  # not the temporary folder
        return config

    def generation_config(self) -> Any:
        return None

    def dtype(self) -> torch.dtype:
        """Return float32, to which quantised weights are decoded."""
        return torch.float32

    def tensors(self, model: nn.Module) -> Mapping[str, Stored]:
        gguf = package("gguf")
        names = self._names(model)
        config: Any = model.config
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        interleaved = config.model_type in _INTERLEAVED
        size = self.path.stat().st_size
        stored = {}
        for tensor in self._header.tensors:
            if tensor.name not in names:
                continue
            part = tensor.name.split(".")[-2]
            shape = tuple(map(int, reversed(tensor.shape)))
            block = shape[0] // heads[part] if interleaved and part in heads else 1
            rows = _rows(gguf, self.path, tensor, shape, block)
            if rows.begin + shape[0] * rows.row_bytes > size:
                raise ValueError(
                    f"{self.path} ends within {tensor.name}: it is truncated; copy or download it "
                    "again"
                )
            stored[names[tensor.name]] = Stored.in_one(rows)
        return stored

    @cached_property
    def _header(self) -> Header:
        package("gguf")
        from tpkernels.parallel.checkpoints.gguf_header import Header

        with _errors_of(self.path):
            header = Header(self.path)
        if header.byte_order != "I":
            raise NotImplementedError(
                f"{self.path} has the other byte order; convert it for this machine"
            )
        return header

    def _names(self, model: nn.Module) -> dict[str, str]:
        """Return the model's names of tensors, by those in the file.

        `get_gguf_hf_weights_map` of transformers gives the same, but makes gguf's table anew for
        each module: 7.0 s for SmolLM2's 397 (AMD EPYC, 2 cores, gguf 0.19, transformers 5.23,
        2026-11-22).
        """
        gguf = package("gguf")
        config: Any = model.config
        architecture = self._header.architecture
        if architecture not in _ARCHITECTURES:
            raise NotImplementedError(
                f"{self.path} has architecture {shown(architecture)}; of GGUF files, these are "
                f"supported: {', '.join(_ARCHITECTURES)}; pass a folder of safetensors files"
            )
        [number] = [key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
        table = gguf.get_tensor_name_map(number, config.num_hidden_layers)
        names = {}
        for name in model.state_dict():
            module, _, kind = name.rpartition(".")
            if (stored_name := table.get_name(module)) is not None:
                names[f"{stored_name}.{kind}"] = name
        return names


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Turn what reading a damaged file raises into ValueErrors that name it: gguf and transformers
    index into the file without checks, so that may be any kind of error."""
    try:
        yield
    except (OSError, ImportError, MemoryError):
        raise
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read as a GGUF model of transformers: {of_error(error)}"
        ) from error


def _rows(gguf: Any, path: Path, tensor: Any, shape: tuple[int, ...], block: int) -> Rows:
    kind = tensor.tensor_type
    dtype = _PLAIN.get(kind.name)
    row_bytes = int(tensor.n_bytes) // shape[0]
    decode: Callable[[torch.Tensor], torch.Tensor] | None = None
    if dtype is None:
        dtype = torch.float32

        def decode(raw: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(gguf.dequantize(raw.numpy(), kind))

    if block > 1:
        decode = _Uninterleave(dtype, decode, block)
    return Rows(path, int(tensor.data_offset), shape, dtype, row_bytes, decode, block)


class _Uninterleave:
    """Decode rows, and put the two halves of each head of ``block`` rows one after the other."""

    def __init__(
        self,
        dtype: torch.dtype,
        decode: Callable[[torch.Tensor], torch.Tensor] | None,
        block: int,
    ) -> None:
        self._dtype, self._decode, self._block = dtype, decode, block

    def __call__(self, raw: torch.Tensor) -> torch.Tensor:
        values = raw.view(self._dtype) if self._decode is None else self._decode(raw)
        heads = values.view(-1, self._block // 2, 2, values.shape[-1])
        return heads.transpose(1, 2).reshape(values.shape)
