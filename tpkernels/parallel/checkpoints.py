"""Checkpoints of which each rank reads only its slices: folders with ``config.json`` and
safetensors files, as Hugging Face has them or `tpkernels shard` writes them, and GGUF files.

Files are mapped, and a slice is copied out of them: a rank holds its shard, and for quantised or
interleaved rows a buffer of a megabyte. A safetensors file is mapped while one tensor is read, so
that its pages do not count for longer.

Without a file of all tensors, ``model.safetensors``, an index, ``model.safetensors.index.json``,
names the file of each. In the index of
`tpkernels shard` the place of a tensor is a list of pieces instead, each a file and the offsets of
the piece in the tensor, and ``shapes`` has the tensors' shapes. Its metadata have the format's
name, `FORMAT`.

transformers translates the metadata of GGUF files; the ``gguf`` package reads their layout,
translates names and dequantises. Llama's and Mistral's query and key weights are stored with the
two halves of each head interleaved, as llama.cpp's rotary embedding wants them. Reading restores
transformers' order head by head. Kinds of quantisation whose elements are integers times a scale
per group can also be read as these (`StoredTensor.read_integers`).
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

from tpkernels.common.text import of_error, shown
from tpkernels.nn.sharding import Box

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor
    from numpy.typing import NDArray
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
    from transformers.core_model_loading import WeightConverter

FORMAT = "tpkernels-shards/1"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CHUNK = 1 << 20  #: bytes of a GGUF file that are decoded at once
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
# Of GGUF files. Others store some tensors changed, such as transposed or with 1 added.
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_INTERLEAVED = {"llama", "mistral"}  # model types
_LONGEST = 1024  # entries of an array in a configuration, which has one per layer
_ARCHITECTURE, _TOKENS = "general.architecture", "tokenizer.ggml.tokens"
_ROPE_FREQS = "rope_freqs.weight"  # llama.cpp divides the rotary frequencies by it
_BIASES = {"attention_bias": "attn_output.bias", "mlp_bias": "ffn_down.bias"}  # by the option
# Metadata, after the architecture's name, that are in the configuration or change no logits.
_KNOWN = {
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
    *("attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon"),
    *("attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scale_linear"),
    *("rope.scaling.finetuned", "pooling_type", "tensor_data_layout"),
}
# Kinds of GGUF whose elements are integers of 8 bits times a scale per group, and the bytes of a
# block that hold its factor of fp16 and, of Q6_K, those of its groups of int8.
_FACTORS: dict[str, tuple[slice, slice | None]] = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL"), (slice(0, 2), None)),
    "Q6_K": (slice(208, 210), slice(192, 208)),
}


@dataclass(frozen=True)
class Piece:
    """A part of a tensor, in one file. ``copy`` copies a part of the piece into a tensor of any
    dtype and device."""

    box: Box
    path: Path
    copy: Callable[[Box, torch.Tensor], None]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint, whose pieces together are all of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    #: of int8, and their scales [N, K / group]; None unless a quantised matrix [N, K] is made so
    integers: tuple[StoredTensor, StoredTensor] | None = None

    @property
    def files(self) -> str:
        """Name the files, for messages."""
        return ", ".join(sorted({str(piece.path) for piece in self.pieces}))

    def read(self, box: Box, out: torch.Tensor) -> None:
        """Read the part ``box`` into ``out``, of the part's shape and any dtype and device."""
        for piece in self.pieces:
            common = piece.box.common(box)
            if common.size:
                piece.copy(common.relative_to(piece.box), out[common.relative_to(box).slices])

    def read_integers(self, box: Box) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Read the part ``box`` of a matrix [N, K] as integers of int8 and their scales [N, K /
        group] in float32, or return None if it is not made of whole groups of such."""
        if self.integers is None:
            return None
        integers, scales = self.integers
        group = integers.shape[1] // scales.shape[1]
        if box.offsets[1] % group or box.shape[1] % group:
            return None
        of_scales = Box(
            (box.offsets[0], box.offsets[1] // group), (box.shape[0], box.shape[1] // group)
        )
        parts = torch.empty(box.shape, dtype=torch.int8), torch.empty(of_scales.shape)
        integers.read(box, parts[0])
        scales.read(of_scales, parts[1])
        return parts


class SafetensorsCheckpoint:
    """A folder with ``config.json`` and safetensors files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def config(self) -> PretrainedConfig:
        """Return the ``PretrainedConfig`` of transformers."""
        if not (self.path / "config.json").is_file():
            raise FileNotFoundError(
                f"{self.path} has no config.json; pass a folder that was written by "
                "save_pretrained or huggingface_hub.snapshot_download"
            )
        return package("transformers").AutoConfig.from_pretrained(self.path)

    def generation_config(self) -> GenerationConfig | None:
        """Return the ``GenerationConfig`` of transformers, or None if the files have none."""
        if not (self.path / "generation_config.json").is_file():
            return None
        return package("transformers").GenerationConfig.from_pretrained(self.path)

    def dtype(self) -> torch.dtype:
        """Return the dtype of the weights, the widest of several, for a config that names none."""
        return max((x.dtype for x in self._stored.values()), key=lambda dtype: dtype.itemsize)

    def tensors(self, model: PreTrainedModel) -> Mapping[str, StoredTensor]:
        """Return the tensors by the names that ``model``, unsharded and on the meta device, has."""
        prefix = f"{getattr(model, 'base_model_prefix', '')}."
        names = set(model.state_dict())
        changes, merges = ([], []) if names >= self._stored.keys() else _conversions(model)
        stored = {}
        for old, value in self._stored.items():
            name = old
            for change in changes if old not in names else ():
                name, _ = change.rename_source_key(name)
            stored[name] = value
        for merge in merges:
            stored = _merged(stored, merge, names)
        if names & stored.keys():
            return stored
        return {  # saved from the base model alone
            f"{prefix}{name}" if f"{prefix}{name}" in names else name: value
            for name, value in stored.items()
        }

    @cached_property
    def _stored(self) -> dict[str, StoredTensor]:
        if (self.path / SINGLE).is_file():  # as in transformers, also beside an index
            stored = _tensors_of(self.path / SINGLE)
        elif (self.path / INDEX).is_file():
            stored = _indexed(self.path)
        else:
            raise FileNotFoundError(
                f"{self.path} has neither {SINGLE} nor {INDEX}; only safetensors files are "
                "supported: convert other weights with save_pretrained of transformers"
            )
        if not stored:
            raise ValueError(f"{self.path} contains no tensors; copy or download it again")
        return stored


def _conversions(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """Return how the names of checkpoints of a model differ from its own today, and which of its
    tensors are those of single experts there."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    changes = get_model_conversion_mapping(model)
    merges = [
        change
        for change in changes
        if isinstance(change, WeightConverter)
        and [(type(step).__name__, step.dim) for step in change.operations if hasattr(step, "dim")]
        in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])
    ]
    return [change for change in changes if isinstance(change, WeightRenaming)], merges


def _merged(
    stored: dict[str, StoredTensor], merge: WeightConverter, names: Container[str]
) -> dict[str, StoredTensor]:
    """Join the matrices of single experts, such as gate and up, to one tensor [experts, N, K]."""
    [target] = merge.target_patterns
    patterns = [
        re.compile(re.escape(source.rstrip("$")).replace(r"\*", r"(\d+)") + "$")
        for source in merge.source_patterns
    ]
    kept: dict[str, StoredTensor] = {}
    parts: dict[str, dict[tuple[int, int], StoredTensor]] = {}
    for name, value in stored.items():
        matches = ((place, pattern.search(name)) for place, pattern in enumerate(patterns))
        found = next(((place, match) for place, match in matches if match), None)
        if name in names or found is None or len(value.shape) != 2:
            kept[name] = value
            continue
        place, match = found
        key = name[: match.start()] + target + name[match.end() :]
        parts.setdefault(key, {})[int(match[1]), place] = value
    for name, matrices in parts.items():
        one = next(iter(matrices.values()))
        experts = 1 + max(expert for expert, _ in matrices)
        rows, columns = one.shape
        whole = len(matrices) == experts * len(patterns)
        if not whole or any(value.shape != one.shape for value in matrices.values()):
            raise ValueError(
                f"{one.files}: {name} has {len(matrices)} matrices; expected {experts} experts x "
                f"{len(patterns)} matrices, all of one shape: copy or download the checkpoint again"
            )
        pieces = [
            Piece(
                Box((expert, place * rows, 0), (1, rows, columns)),
                piece.path,
                partial(_copy_matrix, piece.copy),
            )
            for (expert, place), value in matrices.items()
            for piece in value.pieces
        ]
        shape = (experts, rows * len(patterns), columns)
        kept[name] = StoredTensor(shape, one.dtype, tuple(pieces))
    return kept


def _copy_matrix(copy: Callable[[Box, torch.Tensor], None], box: Box, out: torch.Tensor) -> None:
    """Copy a part of the only matrix of a stack."""
    copy(Box(box.offsets[1:], box.shape[1:]), out[0])


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file; the library checks that header and file fit together."""
    safetensors = package("safetensors")
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


def _tensors_of(path: Path, names: Container[str] | None = None) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file, all or those of these names."""
    stored = {}
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118
            if names is not None and name not in names:
                continue
            tensor = file.get_slice(name)
            shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
            if dtype not in _DTYPES:
                raise NotImplementedError(
                    f"{path}: {name} has dtype {dtype}; supported: {', '.join(_DTYPES)}"
                )
            piece = Piece(Box.full(shape), path, partial(_copy_safetensors, path, name))
            stored[name] = StoredTensor(shape, _DTYPES[dtype], (piece,))
    return stored


def _copy_safetensors(path: Path, name: str, box: Box, out: torch.Tensor) -> None:
    with _opened(path) as file:
        out.copy_(file.get_slice(name)[box.slices])


def _indexed(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of an index of either kind."""
    index = _json_of(folder / INDEX)
    files: dict[str, dict[str, StoredTensor]] = {}

    def tensor_in(file: object, name: str) -> StoredTensor:
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(
                f"{folder / INDEX} lists the file {shown(file)}; expected a file name in the same "
                "folder, without a path"
            )
        if file not in files:
            files[file] = _tensors_of(folder / file, index["weight_map"])
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
        what = f"{folder / INDEX}: {shown(name)}"
        try:
            shape = tuple(map(int, index["shapes"][name]))
            places = [(piece["file"], tuple(map(int, piece["offsets"]))) for piece in entry]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f'{what} has a malformed entry; expected "shapes", and files with offsets'
            ) from error
        parts = [(offsets, tensor_in(file, name)) for file, offsets in places]
        stored[name] = _joined(what, shape, parts)
    return stored


def _json_of(path: Path) -> dict[str, Any]:
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


def _joined(
    what: str, shape: tuple[int, ...], parts: Sequence[tuple[tuple[int, ...], StoredTensor]]
) -> StoredTensor:
    """Join a tensor from its parts, each with its offsets; they must fill it."""
    pieces: list[Piece] = []
    for offsets, stored in parts:
        box = Box(offsets, stored.shape)
        dims = {len(offsets), len(stored.shape), len(shape)}
        if len(dims) > 1 or box.common(Box.full(shape)) != box:
            raise ValueError(
                f"{what} has shape {list(stored.shape)} in {stored.files} at offsets "
                f"{list(offsets)}, which does not fit into {list(shape)}: the files belong to "
                "different checkpoints"
            )
        pieces += [replace(piece, box=box) for piece in stored.pieces]
    boxes = [piece.box for piece in pieces]
    overlap = any(a.common(b).size for a, b in combinations(boxes, 2))
    if overlap or sum(box.size for box in boxes) != prod(shape):
        raise ValueError(f"{what}: the stored slices do not cover shape {list(shape)} exactly once")
    return StoredTensor(shape, parts[0][1].dtype, tuple(pieces))


class GGUFCheckpoint:
    """A GGUF file; the methods are those of `SafetensorsCheckpoint`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def config(self) -> PretrainedConfig:
        """Return the ``PretrainedConfig`` of transformers. Raise NotImplementedError if it cannot
        hold what the metadata say."""
        with _gguf_errors(self.path):
            if self._architecture not in _ARCHITECTURES:
                raise NotImplementedError(
                    f"{self.path} has architecture {shown(self._architecture)}; supported in GGUF "
                    f"files: {', '.join(_ARCHITECTURES)}. Pass a folder of safetensors files"
                )
            with self._without_vocabulary() as small:
                config = package("transformers").AutoConfig.from_pretrained(
                    small.parent, gguf_file=small.name
                )
            self._complete(config)
        config.name_or_path = str(self.path.parent)  # not the small file
        return config

    def _complete(self, config: PretrainedConfig) -> None:
        """Add what transformers does not read, with the meaning that it has for llama.cpp."""
        prefix = f"{self._architecture}."
        given = {
            name.removeprefix(prefix): field.contents()
            for name, field in self._reader.fields.items()
            if name.startswith(prefix)
        }
        tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        for option, name in _BIASES.items():
            if hasattr(config, option):
                setattr(config, option, f"blk.0.{name}" in tensors)
        head = given.get("attention.key_length", config.hidden_size // config.num_attention_heads)
        config.head_dim = head
        kind, context = given.get("rope.scaling.type", "linear"), config.max_position_embeddings
        # Of the frequencies that rope_freqs leaves, without a type also.
        factor = given.get("rope.scaling.factor") or given.get("rope.scale_linear") or 1.0
        if kind == "yarn":
            config.rope_parameters |= {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": given.get(
                    "rope.scaling.original_context_length", context
                ),
                "beta_fast": given.get("rope.scaling.yarn_beta_fast", 32.0),
                "beta_slow": given.get("rope.scaling.yarn_beta_slow", 1.0),
            }
        elif _ROPE_FREQS in tensors:
            divisors = tensors[_ROPE_FREQS].data * (1.0 if kind == "none" else factor)
            if divisors.shape != (head // 2,):
                raise ValueError(
                    f"{_ROPE_FREQS} has shape {divisors.shape}; expected {(head // 2,)} for "
                    f"head_dim={head}"
                )
            config.rope_parameters |= {
                "rope_type": "longrope",
                "factor": 1.0,
                "attention_factor": 1.0,
                "original_max_position_embeddings": context,
                "short_factor": divisors.tolist(),
                "long_factor": divisors.tolist(),
            }
        elif kind == "linear" and factor != 1:
            config.rope_parameters |= {"rope_type": "linear", "factor": factor}
        accepted = {
            "attention.value_length": [head],
            "rope.dimension_count": [head],
            "rope.scaling.type": ["none", "linear"] + ["yarn"] * (_ROPE_FREQS not in tensors),
        }
        wrong = [
            f"{prefix}{name}={shown(value)}"
            for name, value in given.items()
            if name not in _KNOWN
            or isinstance(value, list)
            or value not in accepted.get(name, [value])
        ]
        if wrong:
            raise NotImplementedError(
                f"{self.path} has {', '.join(wrong)}, which is not supported and may change the "
                "logits; pass a folder of safetensors files"
            )

    def generation_config(self) -> GenerationConfig | None:
        """Return None: these files have none."""
        return None

    def dtype(self) -> torch.dtype:
        """Return float32, to which weights are decoded."""
        return torch.float32

    def tensors(self, model: PreTrainedModel) -> Mapping[str, StoredTensor]:
        """Return the tensors by the names that ``model`` has for them. Raise NotImplementedError if
        it has no use for one."""
        names = self._names(model)
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
            part = tensor.name.split(".")[-2]
            shape = tuple(map(int, reversed(tensor.shape)))
            interleaved = config.model_type in _INTERLEAVED and part in heads
            head = shape[0] // heads[part] if interleaved else 1
            stored[names[tensor.name]] = self._stored(tensor, shape, head)
        return stored

    def _stored(self, tensor: ReaderTensor, shape: tuple[int, ...], head: int) -> StoredTensor:
        gguf, kind = package("gguf"), tensor.tensor_type
        rows = tensor.data.reshape(shape[0], -1)

        def decoded(
            shape: tuple[int, ...], dtype: torch.dtype, decode: Callable[[Any], Any]
        ) -> StoredTensor:
            piece = Piece(Box.full(shape), self.path, partial(_copy_gguf, rows, decode, head))
            return StoredTensor(shape, dtype, (piece,))

        values = decoded(shape, self.dtype(), partial(gguf.dequantize, qtype=kind))
        if kind.name not in _FACTORS or len(shape) != 2:
            return values
        integers = decoded(shape, torch.int8, partial(_integers, kind=kind))
        groups = _scales(rows[:1], kind).shape[1]
        scales = decoded((shape[0], groups), torch.float32, partial(_scales, kind=kind))
        return replace(values, integers=(integers, scales))

    @cached_property
    def _reader(self) -> GGUFReader:
        import numpy as np

        class Reader(package("gguf").GGUFReader):  # type: ignore[misc]
            """Keeps the file as a plain array: slices of a memmap are memmaps, with which reading
            49,152 tokens takes 3.7 s instead of 0.9 (AMD EPYC, 2 cores, gguf 0.19, 2026-11-24)."""

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
        """Raise NotImplementedError if the file is one of several that form a model."""
        self._reader  # noqa: B018

    @property
    def _architecture(self) -> str:
        """Return the architecture's name in GGUF, such as "llama"."""
        name: bytes = self._reader.fields[_ARCHITECTURE].parts[-1].tobytes()
        return name.decode()

    @contextmanager
    def _without_vocabulary(self) -> Iterator[Path]:
        """Write a small file with the same configuration and names of tensors, without long arrays
        and values: transformers would spend 5 s on 49,152 tokens, which no configuration needs. It
        is in memory, so nothing is left of a process that is killed."""
        import numpy as np

        gguf, fields = package("gguf"), self._reader.fields
        with open(os.memfd_create("tpkernels-gguf"), "rb") as file:
            path = Path(f"/proc/self/fd/{file.fileno()}")
            writer = gguf.GGUFWriter(path, self._architecture)
            for name, field in fields.items():
                # The small file has an alignment of its own.
                if name[:5] == "GGUF." or name in (_ARCHITECTURE, "general.alignment"):
                    continue
                if 0 < len(field.data) <= _LONGEST:  # the writer takes no empty array
                    kind = field.types[0]
                    writer.add_key_value(name, field.contents(), kind, sub_type=field.types[-1])
            if f"{self._architecture}.vocab_size" not in fields and _TOKENS in fields:
                writer.add_vocab_size(len(fields[_TOKENS].data))  # transformers would count them
            for tensor in self._reader.tensors:
                writer.add_tensor(tensor.name, np.zeros(1, np.float32))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            yield path

    def _names(self, model: PreTrainedModel) -> dict[str, str]:
        """Return the model's names of tensors, by those in the file.

        `get_gguf_hf_weights_map` of transformers gives the same, but makes gguf's table anew for
        each module: 7.0 s for SmolLM2's 397 (AMD EPYC, 2 cores, gguf 0.19, transformers 5.23,
        2026-11-22).
        """
        gguf = package("gguf")
        config = model.config
        known = gguf.MODEL_ARCH_NAMES.items()
        [number] = [key for key, name in known if name == self._architecture]
        table = gguf.get_tensor_name_map(number, config.num_hidden_layers)
        names = {}
        for name in model.state_dict():
            module, _, kind = name.rpartition(".")
            if (stored_name := table.get_name(module)) is not None:
                names[f"{stored_name}.{kind}"] = name
        return names


def _copy_gguf(
    rows: NDArray[Any], decode: Callable[[Any], Any], head: int, box: Box, out: torch.Tensor
) -> None:
    """Copy a part of a tensor into ``out``. ``decode`` makes its rows from some of ``rows``, which
    lie in the file; ``head`` is the rows of a head whose two halves are interleaved, 1 if none
    are."""
    import numpy as np

    first, last = box.offsets[0], box.offsets[0] + box.shape[0]
    step = max(1, CHUNK // (rows[0].nbytes * head)) * head
    for begin in range(first - first % head, last, step):
        decoded = decode(rows[begin : begin + step])
        values = torch.from_numpy(np.require(decoded, requirements="W"))
        if head > 1:
            halves = values.view(-1, head // 2, 2, values.shape[-1])
            values = halves.transpose(1, 2).reshape(values.shape)
        if out.dim() == 1:
            values = values.view(-1)
        low, high = max(first, begin), min(last, begin + len(values))
        part = values[(slice(low - begin, high - begin), *box.slices[1:])]
        out[low - first : high - first].copy_(part)


def _scales(rows: NDArray[Any], kind: GGMLQuantizationType) -> NDArray[Any]:
    """Return the scales of rows of one of `_FACTORS`, of each group of elements."""
    import numpy as np

    of_block, of_groups = _FACTORS[kind.name]
    blocks = _blocks(rows, kind)
    scales = blocks[:, of_block].copy().view(np.float16).astype(np.float32)
    if of_groups is not None:
        scales = scales * blocks[:, of_groups].view(np.int8)
    return scales.reshape(len(rows), -1)


def _integers(rows: NDArray[Any], kind: GGMLQuantizationType) -> NDArray[Any]:
    """Return the integers of rows of one of `_FACTORS`, in floating point: what is decoded with
    ones for factors."""
    import numpy as np

    of_block, of_groups = _FACTORS[kind.name]
    rows = rows.copy()
    blocks = _blocks(rows, kind)
    blocks[:, of_block] = np.ones(1, np.float16).view(np.uint8)
    if of_groups is not None:
        blocks[:, of_groups] = 1
    return package("gguf").dequantize(rows, kind)


def _blocks(rows: NDArray[Any], kind: GGMLQuantizationType) -> NDArray[Any]:
    _, nbytes = package("gguf").GGML_QUANT_SIZES[kind]
    return rows.reshape(-1, nbytes)


@contextmanager
def _gguf_errors(path: Path) -> Iterator[None]:
    """Turn what reading a damaged file raises into ValueErrors that name it: gguf and transformers
    index into the file without checks, so that may be any kind of error."""
    try:
        yield
    except (OSError, ImportError, MemoryError, NotImplementedError):
        raise
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read as a GGUF model: {of_error(error)}; if it is truncated, copy "
            "or download it again"
        ) from error


Checkpoint = SafetensorsCheckpoint | GGUFCheckpoint


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open the checkpoint at ``path``, as `locate` finds it. Reads no weights."""
    place = locate(path)
    return SafetensorsCheckpoint(place) if place.is_dir() else GGUFCheckpoint(place)


def locate(path: str | os.PathLike[str]) -> Path:
    """Return the folder or the GGUF file of the checkpoint at ``path``. Raise FileNotFoundError if
    there is none, ValueError if it has no known format or several files could be meant,
    NotImplementedError if it is one of the files of a split GGUF model."""
    place = Path(path)
    if place.is_dir():
        files = sorted(place.glob("*.gguf"))
        if (place / "config.json").exists() or not files:
            return place
        if len(files) > 1 and not all(map(_is_named_as_split, files)):
            names = ", ".join(file.name for file in files)
            raise ValueError(
                f"{place} contains several GGUF files: {names}; pass the path of one file"
            )
        place = files[0]
    if not place.exists():
        raise FileNotFoundError(
            f"{place} does not exist; pass a local folder, such as "
            "huggingface_hub.snapshot_download returns, or a GGUF file"
        )
    if place.suffix != ".gguf":
        raise ValueError(
            f"{place} is not a GGUF file; pass the folder with config.json and *.safetensors"
        )
    if _is_named_as_split(place):
        GGUFCheckpoint(place).check_not_split()
    return place


def _is_named_as_split(path: Path) -> bool:
    """Return whether a file has the name of one of several that form a GGUF model."""
    return re.search(r"-\d{5}-of-\d{5}\.gguf$", path.name) is not None


def package(name: str) -> ModuleType:
    """Import an optional package, or say what to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"loading a model requires {name}, which cannot be imported ({error}); "
            "pip install 'tpkernels[models]'"
        ) from error
