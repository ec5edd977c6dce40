"""The header of a GGUF file without its vocabulary.

Problem: gguf's reader makes several NumPy arrays of each token and each merge, and transformers
reads the file once more for the configuration. The reader took 2.9 s for SmolLM2's 49,152 tokens
(AMD EPYC, 2 cores, gguf 0.19, 2026-11-22), and 0.09 s without them. No weight needs them.

Algorithm: arrays longer than any configuration has are stepped over. transformers gets a small
file: the same header without those arrays, with all tensors cut to one value.

Interfaces: `GGUFReader` fills ``data``, ``fields`` and ``tensors``, which are public. It calls its
``_get_field_parts`` for each value: a version that does not reads more slowly and finds the same.
"""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType

_LONGEST = 1024  # entries of an array that is read: those of a configuration have one per layer
_TOKENS = "tokenizer.ggml.tokens"
_UINT64, _F32 = int(GGUFValueType.UINT64), int(GGMLQuantizationType.F32)


class Header(GGUFReader):
    """What a GGUF file says about its tensors and the model, but for long arrays: of these there is
    a field, without entries."""

    @property
    def data(self) -> np.ndarray[Any, Any]:
        """Return the file's bytes."""
        return self._bytes

    @data.setter
    def data(self, mapped: np.ndarray[Any, Any]) -> None:
        # Slices of a memmap are memmaps, with which the reader takes 2.9 s, and 1.2 s without.
        self._bytes = mapped.view(np.ndarray)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == GGUFValueType.ARRAY:
            kind, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            if count[0] > _LONGEST:
                size = 12 + self._entries_size(orig_offs + 12, int(kind[0]), int(count[0]))
                types = [GGUFValueType.ARRAY, GGUFValueType(int(kind[0]))]
                return size, [kind, count], [], types
        return super()._get_field_parts(orig_offs, raw_type)

    def _entries_size(self, begin: int, kind: int, count: int) -> int:
        """Count the bytes of the entries of an array."""
        if kind == GGUFValueType.ARRAY:
            raise ValueError(f"an array of {count} arrays")
        if kind != GGUFValueType.STRING:
            return count * int(super()._get_field_parts(begin, kind)[0])
        length, at = struct.Struct(f"{self._order}Q"), begin
        data: Any = self.data
        for _ in range(count):
            at += 8 + length.unpack_from(data, at)[0]
        return at - begin

    @property
    def _order(self) -> str:
        """Return the byte order, as `struct` names it."""
        return np.dtype(np.uint64).newbyteorder(self.byte_order).str[0]

    @property
    def architecture(self) -> str:
        """Return the architecture's name in GGUF, such as "llama"."""
        return self.fields["general.architecture"].parts[-1].tobytes().decode()

    @contextmanager
    def as_file(self) -> Iterator[Path]:
        """Write a small file with the same configuration and names of tensors."""
        fields = {name: field for name, field in self.fields.items() if name[:5] != "GGUF."}
        kept = [self._raw(field.parts) for field in fields.values() if field.data]
        size = f"{self.architecture}.vocab_size"
        tokens = fields.get(_TOKENS)
        if size not in fields and tokens is not None and not tokens.data:
            # transformers would count the tokens. Without them, the file names their number.
            count = int(tokens.parts[-1][0])
            kept.append(self._pack(f"Q{len(size)}sIQ", len(size), size.encode(), _UINT64, count))
        tensors = [
            self._raw(tensor.field.parts[:2]) + self._pack("IQIQ", 1, 1, _F32, 0)
            for tensor in self.tensors
        ]
        start = bytes(self.data[:8]) + self._pack("QQ", len(tensors), len(kept))
        with tempfile.TemporaryDirectory(prefix="tpkernels-") as folder:
            path = Path(folder) / "header.gguf"
            path.write_bytes(b"".join([start, *kept, *tensors]))
            # The one value begins at a multiple of the alignment.
            os.truncate(path, path.stat().st_size + int(self.alignment) + 4)
            yield path

    def _pack(self, layout: str, *values: Any) -> bytes:
        return struct.pack(self._order + layout, *values)

    @staticmethod
    def _raw(parts: list[np.ndarray[Any, Any]]) -> bytes:
        """Join parts of a field, as the file has them."""
        return b"".join(part.tobytes() for part in parts)
