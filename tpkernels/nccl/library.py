"""Finds NCCL: the one that this process has already loaded (torch's), else torch's own copy, else
that of an ``nvidia-nccl`` wheel, else the system's."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tpkernels import _C

SONAME = "libnccl.so.2"


def _loaded() -> Iterator[Path]:
    """Yield the copies of NCCL that this process has mapped, in the order of their addresses."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = dict.fromkeys(line.split(maxsplit=5)[5] for line in lines if "libnccl.so" in line)
    return map(Path, files)


def _wheels() -> Iterator[Path]:
    """Yield the copies in installed wheels; the one for torch's version of CUDA comes first."""
    names = ["nvidia-nccl-cu13", "nvidia-nccl-cu12"]
    if (torch.version.cuda or "").startswith("12."):
        names.reverse()
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            distribution = importlib.metadata.distribution(name)
            yield Path(str(distribution.locate_file(f"nvidia/nccl/lib/{SONAME}")))


def _find() -> tuple[str, _C.nccl.Library]:
    """Load the best NCCL; return where it is from, and the library.

    Raises:
        NotImplementedError: there is none that is new enough.
    """
    candidates = [("loaded in this process", path) for path in _loaded()]
    candidates += [("part of torch", Path(torch.__file__).parent / "lib" / SONAME)]
    candidates += [("from a wheel", path) for path in _wheels()]
    names = [(origin, str(path)) for origin, path in candidates if path.is_file()]
    refusals = []
    for origin, name in [*names, ("the system's", SONAME)]:
        try:
            return origin, _C.nccl.Library(name)
        except NotImplementedError as error:
            refusals.append(str(error))
    raise NotImplementedError(
        f"no NCCL: {'; '.join(refusals)}. Install one with `pip install nvidia-nccl-cu13` (-cu12 "
        "for CUDA 12), or name the file"
    )


def load(library: str | None = None) -> _C.nccl.Library:
    """Load NCCL from a file, or the process's own copy, torch's, that of an ``nvidia-nccl`` wheel
    or the system's, in this order. The result has its ``path``, ``version`` and ``features``.

    Raises:
        NotImplementedError: there is none, or it is older than 2.14.
    """
    return _find()[1] if library is None else _C.nccl.Library(library)


def facts() -> dict[str, Any]:
    """Describe the NCCL that `load` would load: its ``path``, ``version``, ``origin``, and the
    ``features`` (optional functions) that it has. Without NCCL, only ``unsupported``: the reason.
    """
    try:
        origin, library = _find()
    except NotImplementedError as error:
        return {"unsupported": str(error)}
    facts = {"path": library.path, "version": library.version, "origin": origin}
    return {**facts, "features": library.features}
