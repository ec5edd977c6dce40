"""Finds NCCL: the one that this process has already loaded (torch's), else torch's own copy, else
that of an ``nvidia-nccl`` wheel, else the system's."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tpkernels import _C

SONAME = "libnccl.so.2"


def _loaded() -> Iterator[Path]:
    """The copies of NCCL that this process has mapped, in the order of their addresses."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = dict.fromkeys(line.split(maxsplit=5)[5] for line in lines if "libnccl.so" in line)
    return map(Path, files)


def _wheels() -> Iterator[Path]:
    """The copies in installed wheels; the one for torch's version of CUDA comes first."""
    names = ["nvidia-nccl-cu13", "nvidia-nccl-cu12"]
    if (torch.version.cuda or "").startswith("12."):
        names.reverse()
    for name in names:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        yield Path(str(distribution.locate_file(f"nvidia/nccl/lib/{SONAME}")))


def _candidates() -> Iterator[tuple[str, Path]]:
    """(origin, file) of each candidate, the best first; the files may be missing."""
    yield from (("loaded in this process", path) for path in _loaded())
    yield "part of torch", Path(torch.__file__).parent / "lib" / SONAME
    yield from (("from a wheel", path) for path in _wheels())


def _find() -> tuple[str, _C.nccl.Library]:
    """The best NCCL and its origin.

    Raises:
        NotImplementedError: there is none that is new enough.
    """
    refused = []
    for origin, path in _candidates():
        if path.is_file():
            try:
                return origin, _C.nccl.Library(str(path))
            except NotImplementedError as error:
                refused.append(str(error))
    try:
        return "the system's", _C.nccl.Library(SONAME)
    except NotImplementedError as error:
        refused.append(str(error))
    raise NotImplementedError(
        f"no NCCL: {'; '.join(refused)}. Install one with `pip install nvidia-nccl-cu13` (-cu12 "
        "for CUDA 12), or name the file"
    )


def load(library: str | None = None) -> _C.nccl.Library:
    """Loads NCCL.

    Args:
        library: path of the file; by default the process's own copy of NCCL, torch's, that of an
            ``nvidia-nccl`` wheel or the system's is loaded, in this order.

    Raises:
        NotImplementedError: there is none, or it is older than 2.14.
    """
    return _find()[1] if library is None else _C.nccl.Library(library)


def version(library: str | None = None) -> str:
    """The version of NCCL, such as ``2.28.9``; ``library`` and errors as for `load`."""
    return load(library).version


def unique_id(library: str | None = None) -> bytes:
    """The 128 bytes that identify a new communicator, to create one without a process group;
    ``library`` and errors as for `load`."""
    return load(library).unique_id()


def facts() -> dict[str, Any]:
    """The NCCL that `load` would load.

    Returns:
        ``path``, ``version``, ``origin``, and ``features``: which optional functions it has. If
        there is no NCCL, only ``unsupported``: the reason.
    """
    try:
        origin, library = _find()
    except NotImplementedError as error:
        return {"unsupported": str(error)}
    return {
        "path": library.path,
        "version": library.version,
        "origin": origin,
        "features": library.features,
    }
