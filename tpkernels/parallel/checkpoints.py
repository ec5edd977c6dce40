"""Checkpoints that each rank reads slice by slice: Hugging Face folders with ``config.json`` and
safetensors files, folders written by `tpkernels shard`, and GGUF files.

Files are memory-mapped, and slices are copied out of the mapping. A rank therefore holds only its
shard, plus the decoded rows of 1 MiB of a GGUF file. A safetensors file is mapped only while one
tensor is read, so its pages stop counting as memory of the process.

A folder holds either one file with all tensors, ``model.safetensors``, or several files and an
index, ``model.safetensors.index.json``. The index maps each tensor name to a file. In an index
written by `tpkernels shard`, the metadata contain the format name `FORMAT`. A tensor name maps to a
list of slices, each with its file and its offsets in the tensor. ``shapes`` holds the shapes of the
full tensors.

For GGUF files, transformers translates the metadata. The ``gguf`` package reads the layout,
translates the tensor names and dequantizes. llama.cpp stores the query and key weights of Llama and
Mistral with the two halves of each head interleaved, to suit its rotary embedding. Reading restores
the transformers order head by head. Some quantization types store integers times a scale per group.
`StoredTensor.read_integers` returns these integers and scales.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import combinations
from math import prod
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tpkernels.common.text import describe_error, safe_repr
from tpkernels.nn.sharding import Box

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor
    from numpy.typing import NDArray
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
    from transformers.core_model_loading import WeightConverter

FORMAT = "tpkernels-shards/1"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CHUNK = 1 << 20  #: bytes of a GGUF file that are decoded per step
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
# GGUF architectures whose tensors are stored unchanged. For the rest, llama.cpp transposes tensors
# or adds 1 to norm weights, for example.
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_INTERLEAVED = {"llama", "mistral"}  # model types with interleaved query and key weights
_MAX_ARRAY_LENGTH = 1024  # max array length copied from metadata; configs need one entry per layer
_ARCHITECTURE, _TOKENS = "general.architecture", "tokenizer.ggml.tokens"
_ROPE_FREQS = "rope_freqs.weight"  # divisors of the rotary frequencies in llama.cpp
# Configuration options, each with the tensor whose presence sets it.
_BIASES = {"attention_bias": "attn_output.bias", "mlp_bias": "ffn_down.bias"}
# Supported metadata keys, without the architecture prefix: the configuration includes them, or they
# do not affect logits.
_SUPPORTED_METADATA = {
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
    *("attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon"),
    *("attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scale_linear"),
    *("rope.scaling.finetuned", "pooling_type", "tensor_data_layout"),
}
# GGUF types that store int8 integers times a scale per group. Values: the bytes of a block with its
# fp16 scale and, for Q6_K, the bytes with the int8 scales of its groups.
_SCALE_BYTES: dict[str, tuple[slice, slice | None]] = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL"), (slice(0, 2), None)),
    "Q6_K": (slice(208, 210), slice(192, 208)),
}


@dataclass(frozen=True)
class FileSlice:
    """A slice of a tensor, stored in one file. ``copy(box, out)`` copies a box within the slice
    into a tensor of any dtype and device."""

    box: Box
    path: Path
    copy: Callable[[Box, torch.Tensor], None]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint. Its ``file_slices`` cover the full shape exactly once."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file_slices: tuple[FileSlice, ...]
    #: int8 integers and scales [N, K / group] of a matrix [N, K], if its GGUF type stores these.
    integers: tuple[StoredTensor, StoredTensor] | None = None

    @property
    def files(self) -> str:
        """Return the file names for error messages."""
        return ", ".join(sorted({str(file_slice.path) for file_slice in self.file_slices}))

    def read(self, box: Box, out: torch.Tensor) -> None:
        """Read ``box`` into ``out``, a tensor with the shape of the box and any dtype and
        device."""
        for file_slice in self.file_slices:
            common = file_slice.box.common(box)
            if common.size:
                file_slice.copy(
                    common.relative_to(file_slice.box), out[common.relative_to(box).slices]
                )

    def read_integers(self, box: Box) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Read ``box`` of a matrix [N, K] as quantized integers.

        Returns:
            int8 integers and float32 scales [N, K / group], or None if the tensor is not stored as
            integers or the box cuts a group.
        """
        if self.integers is None:
            return None
        integers, scales = self.integers
        group = integers.shape[1] // scales.shape[1]
        if box.offsets[1] % group or box.shape[1] % group:
            return None
        scale_box = Box(
            (box.offsets[0], box.offsets[1] // group), (box.shape[0], box.shape[1] // group)
        )
        result = torch.empty(box.shape, dtype=torch.int8), torch.empty(scale_box.shape)
        integers.read(box, result[0])
        scales.read(scale_box, result[1])
        return result


class SafetensorsCheckpoint:
    """A folder with ``config.json`` and safetensors files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def config(self) -> PretrainedConfig:
        """Return the transformers ``PretrainedConfig``."""
        if not (self.path / "config.json").is_file():
            raise FileNotFoundError(
                f"{self.path} has no config.json; pass a folder that was written by "
                "save_pretrained or huggingface_hub.snapshot_download"
            )
        return import_package("transformers").AutoConfig.from_pretrained(self.path)

    def generation_config(self) -> GenerationConfig | None:
        """Return the transformers ``GenerationConfig``, or None if the folder does not contain
        it."""
        if not (self.path / "generation_config.json").is_file():
            return None
        return import_package("transformers").GenerationConfig.from_pretrained(self.path)

    def dtype(self) -> torch.dtype:
        """Return the widest dtype of the weights, for a configuration that does not set a dtype."""
        return max((x.dtype for x in self._stored.values()), key=lambda dtype: dtype.itemsize)

    def tensors(self, model: PreTrainedModel) -> Mapping[str, StoredTensor]:
        """Return the tensors by parameter name of ``model``, an unsharded model on the meta
        device."""
        prefix = f"{getattr(model, 'base_model_prefix', '')}."
        names = set(model.state_dict())
        renamings, merges = ([], []) if names >= self._stored.keys() else _find_conversions(model)
        stored = {}
        for old, value in self._stored.items():
            name = old
            for renaming in renamings if old not in names else ():
                name, _ = renaming.rename_source_key(name)
            stored[name] = value
        for merge in merges:
            stored = _merge_experts(stored, merge, names)
        if names & stored.keys():
            return stored
        return {  # names of a checkpoint that was saved from the base model
            f"{prefix}{name}" if f"{prefix}{name}" in names else name: value
            for name, value in stored.items()
        }

    @cached_property
    def _stored(self) -> dict[str, StoredTensor]:
        if (self.path / SINGLE).is_file():  # preferred over an index, as in transformers
            stored = _tensors_in_file(self.path / SINGLE)
        elif (self.path / INDEX).is_file():
            stored = _read_index(self.path)
        else:
            raise FileNotFoundError(
                f"{self.path} has neither {SINGLE} nor {INDEX}; only safetensors files are "
                "supported: convert other weights with save_pretrained of transformers"
            )
        if not stored:
            raise ValueError(f"{self.path} contains no tensors; copy or download it again")
        return stored


def _find_conversions(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """Return the ``WeightRenaming`` objects for names of old checkpoints, and the
    ``WeightConverter`` objects that merge the matrices of single experts."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    conversions = get_model_conversion_mapping(model)
    merges = [
        conversion
        for conversion in conversions
        if isinstance(conversion, WeightConverter)
        and [
            (type(step).__name__, step.dim)
            for step in conversion.operations
            if hasattr(step, "dim")
        ]
        in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])
    ]
    return [
        conversion for conversion in conversions if isinstance(conversion, WeightRenaming)
    ], merges


def _merge_experts(
    stored: dict[str, StoredTensor], merge: WeightConverter, names: Container[str]
) -> dict[str, StoredTensor]:
    """Merge the matrices of single experts, such as gate and up, into [experts, N, K] tensors."""
    [target] = merge.target_patterns
    patterns = [
        re.compile(re.escape(source.rstrip("$")).replace(r"\*", r"(\d+)") + "$")
        for source in merge.source_patterns
    ]
    merged: dict[str, StoredTensor] = {}
    stacks: dict[str, dict[tuple[int, int], StoredTensor]] = {}
    for name, value in stored.items():
        matches = ((index, pattern.search(name)) for index, pattern in enumerate(patterns))
        first_match = next(((index, match) for index, match in matches if match), None)
        if name in names or first_match is None or len(value.shape) != 2:
            merged[name] = value
            continue
        index, match = first_match
        key = name[: match.start()] + target + name[match.end() :]
        stacks.setdefault(key, {})[int(match[1]), index] = value
    for name, matrices in stacks.items():
        first = next(iter(matrices.values()))
        experts = 1 + max(expert for expert, _ in matrices)
        rows, columns = first.shape
        complete = len(matrices) == experts * len(patterns)
        if not complete or any(value.shape != first.shape for value in matrices.values()):
            raise ValueError(
                f"{first.files}: {name} has {len(matrices)} matrices; expected {experts} experts x "
                f"{len(patterns)} matrices, all of one shape: copy or download the checkpoint again"
            )
        file_slices = [
            FileSlice(
                Box((expert, index * rows, 0), (1, rows, columns)),
                file_slice.path,
                partial(_copy_matrix, file_slice.copy),
            )
            for (expert, index), value in matrices.items()
            for file_slice in value.file_slices
        ]
        shape = (experts, rows * len(patterns), columns)
        merged[name] = StoredTensor(shape, first.dtype, tuple(file_slices))
    return merged


def _copy_matrix(copy: Callable[[Box, torch.Tensor], None], box: Box, out: torch.Tensor) -> None:
    """Copy a box that lies within one matrix of a stack."""
    copy(Box(box.offsets[1:], box.shape[1:]), out[0])


@contextmanager
def _open_safetensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file. The library checks that the header matches the file size."""
    safetensors = import_package("safetensors")
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is listed in the index but does not exist; copy or download it again"
        )
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            yield file
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{path} is damaged or truncated ({error}); copy or download it again"
        ) from None


def _tensors_in_file(path: Path, names: Container[str] | None = None) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file, all of them or those in ``names``."""
    stored = {}
    with _open_safetensors(path) as file:
        for name in file.keys():  # noqa: SIM118
            if names is not None and name not in names:
                continue
            tensor = file.get_slice(name)
            shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
            if dtype not in _DTYPES:
                raise NotImplementedError(
                    f"{path}: {name} has dtype {dtype}; supported: {', '.join(_DTYPES)}"
                )
            file_slice = FileSlice(Box.full(shape), path, partial(_copy_safetensors, path, name))
            stored[name] = StoredTensor(shape, _DTYPES[dtype], (file_slice,))
    return stored


def _copy_safetensors(path: Path, name: str, box: Box, out: torch.Tensor) -> None:
    with _open_safetensors(path) as file:
        out.copy_(file.get_slice(name)[box.slices])


def _read_index(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of an index, in the Hugging Face format or in `FORMAT`."""
    index = _load_index_json(folder / INDEX)
    files: dict[str, dict[str, StoredTensor]] = {}

    def tensor_in(file: object, name: str) -> StoredTensor:
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(
                f"{folder / INDEX} lists the file {safe_repr(file)}; expected a file name in the "
                "same folder, without a path"
            )
        if file not in files:
            files[file] = _tensors_in_file(folder / file, index["weight_map"])
        if name not in files[file]:
            raise ValueError(
                f"{folder / file} does not contain {name}, which the index lists there"
            )
        return files[file][name]

    metadata = index.get("metadata")
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        return {name: tensor_in(file, name) for name, file in index["weight_map"].items()}
    stored = {}
    for name, entry in index["weight_map"].items():
        label = f"{folder / INDEX}: {safe_repr(name)}"
        try:
            shape = tuple(map(int, index["shapes"][name]))
            locations = [(item["file"], tuple(map(int, item["offsets"]))) for item in entry]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f'{label} has a malformed entry; expected "shapes", and files with offsets'
            ) from error
        stored_slices = [(offsets, tensor_in(file, name)) for file, offsets in locations]
        stored[name] = _join_slices(label, shape, stored_slices)
    return stored


def _load_index_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); copy or download it again") from None
    if not isinstance(value, dict) or not isinstance(value.get("weight_map"), dict):
        raise ValueError(
            f"{path} is not an index of safetensors files: weight_map is missing or is not an "
            "object"
        )
    return value


def _join_slices(
    label: str,
    shape: tuple[int, ...],
    stored_slices: Sequence[tuple[tuple[int, ...], StoredTensor]],
) -> StoredTensor:
    """Join a tensor from (offsets, slice) pairs. The slices must cover the shape exactly once."""
    file_slices: list[FileSlice] = []
    for offsets, stored in stored_slices:
        box = Box(offsets, stored.shape)
        dims = {len(offsets), len(stored.shape), len(shape)}
        if len(dims) > 1 or box.common(Box.full(shape)) != box:
            raise ValueError(
                f"{label} has shape {list(stored.shape)} in {stored.files} at offsets "
                f"{list(offsets)}, which does not fit into {list(shape)}: the files belong to "
                "different checkpoints"
            )
        file_slices += [replace(file_slice, box=box) for file_slice in stored.file_slices]
    boxes = [file_slice.box for file_slice in file_slices]
    overlap = any(a.common(b).size for a, b in combinations(boxes, 2))
    if overlap or sum(box.size for box in boxes) != prod(shape):
        raise ValueError(
            f"{label}: the stored slices do not cover shape {list(shape)} exactly once"
        )
    return StoredTensor(shape, stored_slices[0][1].dtype, tuple(file_slices))


class GGUFCheckpoint:
    """A GGUF file, with the interface of `SafetensorsCheckpoint`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def config(self) -> PretrainedConfig:
        """Return the transformers ``PretrainedConfig``. Raise NotImplementedError if it cannot
        represent the metadata."""
        with _gguf_errors(self.path):
            if self._architecture not in _ARCHITECTURES:
                raise NotImplementedError(
                    f"{self.path} has architecture {safe_repr(self._architecture)}; supported in "
                    f"GGUF files: {', '.join(_ARCHITECTURES)}. Pass a folder of safetensors files"
                )
            with self._metadata_copy() as small:
                config = import_package("transformers").AutoConfig.from_pretrained(
                    small.parent, gguf_file=small.name
                )
            self._add_missing_options(config)
        config.name_or_path = str(self.path.parent)  # instead of the metadata copy
        return config

    def _add_missing_options(self, config: PretrainedConfig) -> None:
        """Set the options that transformers does not read from GGUF metadata, with their llama.cpp
        semantics."""
        prefix = f"{self._architecture}."
        metadata = {
            name.removeprefix(prefix): field.contents()
            for name, field in self._reader.fields.items()
            if name.startswith(prefix)
        }
        tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        for option, name in _BIASES.items():
            if hasattr(config, option):
                setattr(config, option, f"blk.0.{name}" in tensors)
        head_dim = metadata.get(
            "attention.key_length", config.hidden_size // config.num_attention_heads
        )
        config.head_dim = head_dim
        rope_type, context = (
            metadata.get("rope.scaling.type", "linear"),
            config.max_position_embeddings,
        )
        # llama.cpp applies the factor after rope_freqs, even if no scaling type is set.
        factor = metadata.get("rope.scaling.factor") or metadata.get("rope.scale_linear") or 1.0
        if rope_type == "yarn":
            config.rope_parameters |= {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": metadata.get(
                    "rope.scaling.original_context_length", context
                ),
                "beta_fast": metadata.get("rope.scaling.yarn_beta_fast", 32.0),
                "beta_slow": metadata.get("rope.scaling.yarn_beta_slow", 1.0),
            }
        elif _ROPE_FREQS in tensors:
            divisors = tensors[_ROPE_FREQS].data * (1.0 if rope_type == "none" else factor)
            if divisors.shape != (head_dim // 2,):
                raise ValueError(
                    f"{_ROPE_FREQS} has shape {divisors.shape}; expected {(head_dim // 2,)} for "
                    f"head_dim={head_dim}"
                )
            config.rope_parameters |= {
                "rope_type": "longrope",
                "factor": 1.0,
                "attention_factor": 1.0,
                "original_max_position_embeddings": context,
                "short_factor": divisors.tolist(),
                "long_factor": divisors.tolist(),
            }
        elif rope_type == "linear" and factor != 1:
            config.rope_parameters |= {"rope_type": "linear", "factor": factor}
        accepted = {
            "attention.value_length": [head_dim],
            "rope.dimension_count": [head_dim],
            "rope.scaling.type": ["none", "linear"] + ["yarn"] * (_ROPE_FREQS not in tensors),
        }
        unsupported = [
            f"{prefix}{name}={safe_repr(value)}"
            for name, value in metadata.items()
            if name not in _SUPPORTED_METADATA
            or isinstance(value, list)
            or value not in accepted.get(name, [value])
        ]
        if unsupported:
            raise NotImplementedError(
                f"{self.path} has {', '.join(unsupported)}, which is not supported and may change "
                "the logits; pass a folder of safetensors files"
            )

    def generation_config(self) -> GenerationConfig | None:
        """Return None: GGUF files contain no generation configuration."""
        return None

    def dtype(self) -> torch.dtype:
        """Return float32, the dtype of dequantized weights."""
        return torch.float32

    def tensors(self, model: PreTrainedModel) -> Mapping[str, StoredTensor]:
        """Return the tensors by parameter name of ``model``. Raise NotImplementedError if the model
        does not use some tensor."""
        names = self._tensor_names(model)
        unused = [
            tensor.name
            for tensor in self._reader.tensors
            if tensor.name not in names and tensor.name != _ROPE_FREQS
        ]
        if unused:
            raise NotImplementedError(
                f"{self.path} has {len(unused)} tensors that {type(model).__name__} does not use: "
                f"{', '.join(unused[:5])}; pass a folder of safetensors files"
            )
        config = model.config
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        stored = {}
        for tensor in self._reader.tensors:
            if tensor.name == _ROPE_FREQS:
                continue
            projection = tensor.name.split(".")[-2]
            shape = tuple(map(int, reversed(tensor.shape)))
            interleaved = config.model_type in _INTERLEAVED and projection in heads
            rows_per_head = shape[0] // heads[projection] if interleaved else 1
            stored[names[tensor.name]] = self._make_stored_tensor(tensor, shape, rows_per_head)
        return stored

    def _make_stored_tensor(
        self, tensor: ReaderTensor, shape: tuple[int, ...], rows_per_head: int
    ) -> StoredTensor:
        gguf, qtype = import_package("gguf"), tensor.tensor_type
        rows = tensor.data.reshape(shape[0], -1)

        def make_tensor(
            shape: tuple[int, ...], dtype: torch.dtype, decode: Callable[[Any], Any]
        ) -> StoredTensor:
            file_slice = FileSlice(
                Box.full(shape), self.path, partial(_copy_gguf, rows, decode, rows_per_head)
            )
            return StoredTensor(shape, dtype, (file_slice,))

        values = make_tensor(shape, self.dtype(), partial(gguf.dequantize, qtype=qtype))
        if qtype.name not in _SCALE_BYTES or len(shape) != 2:
            return values
        integers = make_tensor(shape, torch.int8, partial(_integers, qtype=qtype))
        groups = _scales(rows[:1], qtype).shape[1]
        scales = make_tensor((shape[0], groups), torch.float32, partial(_scales, qtype=qtype))
        return replace(values, integers=(integers, scales))

    @cached_property
    def _reader(self) -> GGUFReader:
        import numpy as np

        class Reader(import_package("gguf").GGUFReader):  # type: ignore[misc]
            """A reader that holds the file as a plain array. Slices of a memmap are memmaps, so
            reading 49,152 tokens would take 3.7 s instead of 0.9 s (AMD EPYC, 2 cores, gguf 0.19,
            2026-11-24)."""

            @property
            def data(self) -> NDArray[np.uint8]:
                return self._bytes

            @data.setter
            def data(self, mapped: np.memmap) -> None:
                self._bytes = mapped.view(np.ndarray)

        with _gguf_errors(self.path):
            reader = Reader(self.path)
        if reader.byte_order != "I":
            raise NotImplementedError(
                f"{self.path} has the byte order of other machines; convert it with "
                "gguf-convert-endian"
            )
        count = reader.fields.get("split.count")
        if count is not None and count.contents() > 1:
            raise NotImplementedError(
                f"{self.path} belongs to a GGUF model that is split into {count.contents()} files; "
                "merge them with `llama-gguf-split --merge FIRST_FILE OUTPUT` (llama.cpp), and "
                "pass OUTPUT"
            )
        return reader

    def check_not_split(self) -> None:
        """Raise NotImplementedError if the model is split over several GGUF files."""
        self._reader  # noqa: B018

    @property
    def _architecture(self) -> str:
        """Return the GGUF name of the architecture, such as "llama"."""
        name: bytes = self._reader.fields[_ARCHITECTURE].parts[-1].tobytes()
        return name.decode()

    @contextmanager
    def _metadata_copy(self) -> Iterator[Path]:
        """Write a small GGUF file with the same configuration and tensor names, without long arrays
        and tensor values. transformers would spend 5 s on 49,152 tokens, although a configuration
        contains no tokens. The file is in memory, so a killed process leaves no file."""
        import numpy as np

        gguf, fields = import_package("gguf"), self._reader.fields
        with open(os.memfd_create("tpkernels-gguf"), "rb") as file:
            path = Path(f"/proc/self/fd/{file.fileno()}")
            writer = gguf.GGUFWriter(path, self._architecture)
            for name, field in fields.items():
                # The writer sets the architecture and its own alignment.
                if name[:5] == "GGUF." or name in (_ARCHITECTURE, "general.alignment"):
                    continue
                if 0 < len(field.data) <= _MAX_ARRAY_LENGTH:  # the writer rejects empty arrays
                    value_type = field.types[0]
                    writer.add_key_value(
                        name, field.contents(), value_type, sub_type=field.types[-1]
                    )
            if f"{self._architecture}.vocab_size" not in fields and _TOKENS in fields:
                # transformers would otherwise count the tokens.
                writer.add_vocab_size(len(fields[_TOKENS].data))
            for tensor in self._reader.tensors:
                writer.add_tensor(tensor.name, np.zeros(1, np.float32))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            yield path

    def _tensor_names(self, model: PreTrainedModel) -> dict[str, str]:
        """Return the parameter names of the model by GGUF tensor name.

        `get_gguf_hf_weights_map` of transformers returns the same mapping, but rebuilds the gguf
        table for each module: 7.0 s for the 397 modules of SmolLM2 (AMD EPYC, 2 cores, gguf 0.19,
        transformers 5.23, 2026-11-22).
        """
        gguf = import_package("gguf")
        config = model.config
        architectures = gguf.MODEL_ARCH_NAMES.items()
        [architecture_id] = [key for key, name in architectures if name == self._architecture]
        table = gguf.get_tensor_name_map(architecture_id, config.num_hidden_layers)
        names = {}
        for name in model.state_dict():
            module, _, suffix = name.rpartition(".")
            if (stored_name := table.get_name(module)) is not None:
                names[f"{stored_name}.{suffix}"] = name
        return names


def _copy_gguf(
    rows: NDArray[Any],
    decode: Callable[[Any], Any],
    rows_per_head: int,
    box: Box,
    out: torch.Tensor,
) -> None:
    """Copy a box of a tensor into ``out``. ``decode`` dequantizes the raw ``rows`` of the file.
    ``rows_per_head`` is 1 unless the two halves of each head are interleaved."""
    import numpy as np

    first, last = box.offsets[0], box.offsets[0] + box.shape[0]
    step = max(1, CHUNK // (rows[0].nbytes * rows_per_head)) * rows_per_head
    for begin in range(first - first % rows_per_head, last, step):
        decoded = decode(rows[begin : begin + step])
        values = torch.from_numpy(np.require(decoded, requirements="W"))
        if rows_per_head > 1:
            halves = values.view(-1, rows_per_head // 2, 2, values.shape[-1])
            values = halves.transpose(1, 2).reshape(values.shape)
        if out.dim() == 1:
            values = values.view(-1)
        low, high = max(first, begin), min(last, begin + len(values))
        selected = values[(slice(low - begin, high - begin), *box.slices[1:])]
        out[low - first : high - first].copy_(selected)


def _scales(rows: NDArray[Any], qtype: GGMLQuantizationType) -> NDArray[Any]:
    """Return the scale of each group, for rows of a type in `_SCALE_BYTES`."""
    import numpy as np

    block_bytes, group_bytes = _SCALE_BYTES[qtype.name]
    blocks = _blocks(rows, qtype)
    scales = blocks[:, block_bytes].copy().view(np.float16).astype(np.float32)
    if group_bytes is not None:
        scales = scales * blocks[:, group_bytes].view(np.int8)
    return scales.reshape(len(rows), -1)


def _integers(rows: NDArray[Any], qtype: GGMLQuantizationType) -> NDArray[Any]:
    """Return the integers of rows of a type in `_SCALE_BYTES`, in floating point. Dequantizing with
    all scales set to 1 gives the integers."""
    import numpy as np

    block_bytes, group_bytes = _SCALE_BYTES[qtype.name]
    rows = rows.copy()
    blocks = _blocks(rows, qtype)
    blocks[:, block_bytes] = np.ones(1, np.float16).view(np.uint8)
    if group_bytes is not None:
        blocks[:, group_bytes] = 1
    return import_package("gguf").dequantize(rows, qtype)


def _blocks(rows: NDArray[Any], qtype: GGMLQuantizationType) -> NDArray[Any]:
    _, nbytes = import_package("gguf").GGML_QUANT_SIZES[qtype]
    return rows.reshape(-1, nbytes)


@contextmanager
def _gguf_errors(path: Path) -> Iterator[None]:
    """Convert errors from a damaged file into ValueErrors with the file name. gguf and transformers
    index into the file without bounds checks, so a damaged file may raise any exception."""
    try:
        yield
    except (OSError, ImportError, MemoryError, NotImplementedError):
        raise
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read as a GGUF model: {describe_error(error)}; if it is truncated, "
            "copy or download it again"
        ) from error


Checkpoint = SafetensorsCheckpoint | GGUFCheckpoint


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open the checkpoint that `locate` finds at ``path``. No weights are read."""
    location = locate(path)
    return SafetensorsCheckpoint(location) if location.is_dir() else GGUFCheckpoint(location)


def locate(path: str | os.PathLike[str]) -> Path:
    """Return the folder or the GGUF file of the checkpoint at ``path``.

    Raises:
        FileNotFoundError: ``path`` does not exist.
        ValueError: the format is unknown, or the folder contains several models.
        NotImplementedError: the file belongs to a GGUF model that is split into several files.
    """
    location = Path(path)
    if location.is_dir():
        files = sorted(location.glob("*.gguf"))
        if (location / "config.json").exists() or not files:
            return location
        if len(files) > 1 and not all(map(_is_named_as_split, files)):
            names = ", ".join(file.name for file in files)
            raise ValueError(
                f"{location} contains several GGUF files: {names}; pass the path of one file"
            )
        location = files[0]
    if not location.exists():
        raise FileNotFoundError(
            f"{location} does not exist; pass a local folder, such as "
            "huggingface_hub.snapshot_download returns, or a GGUF file"
        )
    if location.suffix != ".gguf":
        raise ValueError(
            f"{location} is not a GGUF file; pass the folder with config.json and *.safetensors"
        )
    if _is_named_as_split(location):
        GGUFCheckpoint(location).check_not_split()
    return location


def _is_named_as_split(path: Path) -> bool:
    """Return whether the file name marks one of the files of a split GGUF model."""
    return re.search(r"-\d{5}-of-\d{5}\.gguf$", path.name) is not None


def import_package(name: str) -> ModuleType:
    """Import an optional package. The ImportError names the extra to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"loading a model requires {name}, which cannot be imported ({error}); "
            "pip install 'tpkernels[models]'"
        ) from error
