"""Folders with ``config.json`` and safetensors files, as Hugging Face has them, or as
`tpkernels shard` writes them.

An index, ``model.safetensors.index.json``, names the file of each tensor. In the index of
`tpkernels shard` the place of a tensor is a list of pieces instead, each a file and the offsets of
the piece in the whole tensor, and ``shapes`` has the whole shapes. Its metadata have the format's
name, `FORMAT`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tpkernels.parallel.checkpoints.stored import Box, Rows, Stored, package
from tpkernels.text import shown

FORMAT = "tpkernels-shards/1"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MOST_JSON = 1 << 28  # bytes of an index or a header
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class SafetensorsCheckpoint:
    """See `tpkernels.parallel.checkpoints.Checkpoint`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def config(self) -> Any:
        if not (self.path / "config.json").is_file():
            raise FileNotFoundError(
                f"{self.path} has no config.json; pass a folder that save_pretrained or "
                "huggingface_hub.snapshot_download has written"
            )
        return package("transformers").AutoConfig.from_pretrained(self.path)

    def generation_config(self) -> Any:
        if not (self.path / "generation_config.json").is_file():
            return None
        return package("transformers").GenerationConfig.from_pretrained(self.path)

    def dtype(self) -> torch.dtype:
        return next(iter(self._stored.values())).dtype

    def tensors(self, model: nn.Module) -> Mapping[str, Stored]:
        stored = self._stored
        prefix = f"{getattr(model, 'base_model_prefix', '')}."
        names = set(model.state_dict())
        if not names & stored.keys():  # saved from the base model alone
            return {
                f"{prefix}{name}" if f"{prefix}{name}" in names else name: value
                for name, value in stored.items()
            }
        return stored

    @cached_property
    def _stored(self) -> dict[str, Stored]:
        index = self.path / INDEX
        if index.is_file():
            stored = _indexed(self.path, _json_of(index))
        elif (self.path / SINGLE).is_file():
            header = _Header(self.path / SINGLE)
            stored = {name: Stored.in_one(header.rows(name)) for name in header.names}
        else:
            raise FileNotFoundError(
                f"{self.path} has neither {SINGLE} nor {INDEX}; only safetensors files are read: "
                "save other weights with save_pretrained of transformers"
            )
        if not stored:
            raise ValueError(f"{self.path} has no tensors")
        return stored


def _json_of(path: Path) -> dict[str, Any]:
    if path.stat().st_size > _MOST_JSON:
        raise ValueError(f"{path} has more than {_MOST_JSON} bytes; it is no index")
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); copy or download it again") from None
    if not isinstance(value, dict) or not isinstance(value.get("weight_map"), dict):
        raise ValueError(f"{path} is not an index of safetensors files: it has no weight_map")
    return value


def _indexed(folder: Path, index: Mapping[str, Any]) -> dict[str, Stored]:
    """Return the tensors of an index of either kind."""
    weights, shapes = index["weight_map"], index.get("shapes", {})
    sharded = _format_of(index) == FORMAT
    headers: dict[str, _Header] = {}
    stored = {}
    for name, place in weights.items():
        if not sharded:
            stored[name] = Stored.in_one(_header(headers, folder, place).rows(name))
            continue
        try:
            whole = tuple(map(int, shapes[name]))
            pieces = [(piece["file"], tuple(map(int, piece["offsets"]))) for piece in place]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{folder / INDEX}: {shown(name)} has a malformed entry") from error
        stored[name] = _joined(folder, name, whole, pieces, headers)
    return stored


def _format_of(index: Mapping[str, Any]) -> str | None:
    metadata = index.get("metadata")
    return metadata.get("format") if isinstance(metadata, dict) else None


def _joined(
    folder: Path,
    name: str,
    whole: tuple[int, ...],
    pieces: list[tuple[str, tuple[int, ...]]],
    headers: dict[str, _Header],
) -> Stored:
    """Join a tensor from its pieces, which must fill it."""
    parts = []
    for file, offsets in pieces:
        rows = _header(headers, folder, file).rows(name)
        box = Box(offsets, rows.shape)
        if len(offsets) != len(rows.shape) or not box.within(Box.whole(whole)):
            raise ValueError(
                f"{folder / file}: {name} has shape {list(rows.shape)} at {list(offsets)}, which "
                f"is not within {list(whole)}; the files are of different checkpoints"
            )
        parts.append((box, rows))
    overlap = any(a.common(b).size for i, (a, _) in enumerate(parts) for b, _ in parts[:i])
    if overlap or sum(box.size for box, _ in parts) != Box.whole(whole).size:
        raise ValueError(f"{folder / INDEX}: the pieces of {name} do not fill {list(whole)}")
    return Stored(whole, parts[0][1].dtype, tuple(parts))


def _header(headers: dict[str, _Header], folder: Path, file: Any) -> _Header:
    if not isinstance(file, str) or Path(file).name != file:
        raise ValueError(f"{folder / INDEX} names the file {shown(file)}, not one in its folder")
    if file not in headers:
        headers[file] = _Header(folder / file)
    return headers[file]


class _Header:
    """The header of a safetensors file: where each tensor lies."""

    def __init__(self, path: Path) -> None:
        safetensors = package("safetensors")
        self.path = path
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing, and the index names it; copy or download it again"
            )
        try:  # The library checks that header and file fit together.
            with safetensors.safe_open(path, framework="pt"):
                pass
        except safetensors.SafetensorError as error:
            raise ValueError(
                f"{path} is damaged or truncated ({error}); copy or download it again"
            ) from None
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            self._entries = json.loads(file.read(length))
        self._entries.pop("__metadata__", None)
        self._data = 8 + length

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def rows(self, name: str) -> Rows:
        """Return where a tensor lies."""
        if name not in self._entries:
            raise ValueError(f"{self.path} has no {name}, which the index says it has")
        entry = self._entries[name]
        if entry["dtype"] not in _DTYPES:
            raise NotImplementedError(
                f"{self.path}: {name} has dtype {entry['dtype']}; supported: {', '.join(_DTYPES)}"
            )
        dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        row_bytes = (end - begin) // shape[0] if shape and shape[0] else 0
        return Rows(self.path, self._data + begin, shape, dtype, row_bytes)
