"""Tensors in files, of which any slice can be read without holding the rest.

Problem: a rank needs its rows or columns of a weight, and must not hold more than its shard plus a
small buffer. Memory-mapped files would count every page that a slice touches, and a file that is
cut off while it is mapped kills the process.

Algorithm: whole rows are read straight into the parameter. Columns are cut out of chunks of whole
rows, and rows that have to be converted go through such chunks, too. Reading the slice of each row
by itself took four times as long: 15.7 ms instead of 3.5 for 1408 of 5632 columns of 2048 rows in
bf16, from the page cache (AMD EPYC, 2 cores, 2026-11-22).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import nn

CHUNK = 1 << 20  #: bytes of whole rows that are read at once if they are cut or converted


@dataclass(frozen=True)
class Box:
    """A part of a tensor: entries ``offsets[d]`` to ``offsets[d] + shape[d]`` of each dim d."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return all of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def size(self) -> int:
        """Return the number of entries."""
        return prod(self.shape)

    def within(self, other: Box) -> bool:
        """Return whether all of this box is in ``other``."""
        return len(self.shape) == len(other.shape) and self.common(other) == self

    def common(self, other: Box) -> Box:
        """Return the intersection, whose size may be 0."""
        begins = [max(pair) for pair in zip(self.offsets, other.offsets, strict=True)]
        ends = [min(pair) for pair in zip(self._ends, other._ends, strict=True)]
        return Box(
            tuple(begins),
            tuple(max(0, end - begin) for begin, end in zip(begins, ends, strict=True)),
        )

    def relative_to(self, other: Box) -> Box:
        """Return this box with the first entry of ``other`` as the origin."""
        pairs = zip(self.offsets, other.offsets, strict=True)
        return Box(tuple(offset - origin for offset, origin in pairs), self.shape)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this part of ``tensor``, as a view."""
        for dim, (begin, size) in enumerate(zip(self.offsets, self.shape, strict=True)):
            tensor = tensor.narrow(dim, begin, size)
        return tensor

    @property
    def _ends(self) -> list[int]:
        return [begin + size for begin, size in zip(self.offsets, self.shape, strict=True)]


@dataclass(frozen=True)
class Rows:
    """A tensor that lies in a file row by row, without gaps.

    Args:
        path: the file.
        begin: the tensor's first byte in it.
        shape: of the tensor; a row is all that one entry of dim 0 holds.
        dtype: of the values, once decoded.
        row_bytes: of one row in the file.
        decode: makes values [rows, ...] of bytes [rows, row_bytes]; None: they are the values.
        block: rows that ``decode`` needs together, from a multiple of it on.
    """

    path: Path
    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    row_bytes: int
    decode: Callable[[torch.Tensor], torch.Tensor] | None = None
    block: int = 1

    def read(self, box: Box, out: torch.Tensor) -> None:
        """Read a part of the tensor into ``out``, of the part's shape.

        Raises:
            ValueError: the file ends before.
            OSError: it cannot be read.
        """
        if box.size == 0:
            return
        first, count = box.offsets[0], box.shape[0]
        straight = self.decode is None and out.dtype == self.dtype and out.device.type == "cpu"
        columns = Box(box.offsets[1:], box.shape[1:])
        whole_rows = columns == Box.whole(self.shape[1:])
        with _opened(self.path) as file:
            if straight and whole_rows and out.is_contiguous():
                self._read_rows(file, first, out)
            else:
                for at, values in self._chunks(file, first, first + count):
                    part = Box((0, *columns.offsets), (len(values), *columns.shape)).of(values)
                    out.narrow(0, at - first, len(values)).copy_(part)

    def _chunks(self, file: int, begin: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first row, values of whole rows) of rows [begin, end), in bounded chunks. Values
        are valid until the next chunk."""
        step = max(1, CHUNK // (self.row_bytes * self.block)) * self.block
        at = begin - begin % self.block
        buffer = torch.empty(min(step, self.shape[0] - at), self.row_bytes, dtype=torch.uint8)
        while at < end:
            count = min(step, self.shape[0] - at)
            raw = buffer[:count]
            self._read_rows(file, at, raw)
            if self.decode is None:
                values = raw.view(self.dtype).view(count, *self.shape[1:])
            else:
                values = self.decode(raw).view(count, *self.shape[1:])
            low, high = max(begin, at), min(end, at + count)
            yield low, values[low - at : high - at]
            at += count

    def _read_rows(self, file: int, first: int, out: torch.Tensor) -> None:
        """Read rows from ``first`` on, as many bytes as the contiguous ``out`` has."""
        values: Any = out.detach().view(-1).view(torch.uint8).numpy()
        data, begin, done = memoryview(values), self.begin + first * self.row_bytes, 0
        while done < len(data):
            count = os.preadv(file, [data[done:]], begin + done)
            if count == 0:
                raise ValueError(
                    f"{self.path} ends before byte {begin + len(data)}: it is truncated; copy or "
                    "download it again"
                )
            done += count


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint, in one piece or several.

    Args:
        shape: of the whole tensor.
        dtype: of its values.
        pieces: parts of it, and where each of them lies; together they are all of it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[tuple[Box, Rows], ...]

    @classmethod
    def in_one(cls, rows: Rows) -> Stored:
        """Return a tensor that lies in one place."""
        return cls(rows.shape, rows.dtype, ((Box.whole(rows.shape), rows),))

    @property
    def files(self) -> str:
        """Name the files, for messages."""
        return ", ".join(sorted({str(rows.path) for _, rows in self.pieces}))

    def read(self, box: Box, out: torch.Tensor) -> None:
        """Read the part ``box`` into ``out``, of the part's shape and any dtype and device."""
        for piece, rows in self.pieces:
            common = piece.common(box)
            if common.size:
                rows.read(common.relative_to(piece), common.relative_to(box).of(out))


class Checkpoint(Protocol):
    """A model's configuration and weights in files, whatever their format."""

    path: Path  #: of the file or folder

    def config(self) -> Any:
        """Return the ``PretrainedConfig`` of transformers."""

    def generation_config(self) -> Any:
        """Return the ``GenerationConfig`` of transformers, or None if the files have none."""

    def dtype(self) -> torch.dtype:
        """Return the dtype of the weights, for a config that names none."""

    def tensors(self, model: nn.Module) -> Mapping[str, Stored]:
        """Return the tensors by the names that ``model`` has for them.

        Args:
            model: the unsharded model, on the meta device.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file is damaged or truncated.
            NotImplementedError: a dtype is not supported.
        """


def package(name: str) -> ModuleType:
    """Import an optional package.

    Raises:
        ImportError: it is not installed; the message has the remedy.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"loading a model needs {name}, which cannot be imported ({error}); "
            "pip install 'tpkernels[models]'"
        ) from error


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)
