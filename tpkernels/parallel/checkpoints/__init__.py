"""Checkpoints of which each rank reads only its slices: folders of safetensors files, folders that
`tpkernels shard` has written, and GGUF files."""

from __future__ import annotations

import os
from pathlib import Path

from tpkernels.parallel.checkpoints.gguf_file import GGUFCheckpoint
from tpkernels.parallel.checkpoints.safetensors_folder import SafetensorsCheckpoint
from tpkernels.parallel.checkpoints.stored import Checkpoint

__all__ = ["Checkpoint", "locate", "open_checkpoint"]


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open the checkpoint at ``path``: a folder, or a GGUF file. Reads no weights.

    Raises:
        FileNotFoundError, ValueError: as `locate`; or there is nothing to load in a folder.
        ImportError: a package that the format needs is not installed.
    """
    place = locate(path)
    return SafetensorsCheckpoint(place) if place.is_dir() else GGUFCheckpoint(place)


def locate(path: str | os.PathLike[str]) -> Path:
    """Return the folder or the GGUF file of the checkpoint at ``path``.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: the file is of no known format, or a folder has several that could be meant.
    """
    place = Path(path)
    if place.is_dir():
        files = sorted(place.glob("*.gguf"))
        if (place / "config.json").exists() or not files:
            return place
        if len(files) > 1:
            names = ", ".join(file.name for file in files)
            raise ValueError(f"{place} has several GGUF files: {names}; pass the path of one")
        place = files[0]
    if not place.exists():
        raise FileNotFoundError(
            f"there is no {place}; pass a local folder or GGUF file, such as "
            "huggingface_hub.snapshot_download returns"
        )
    if place.suffix != ".gguf":
        raise ValueError(
            f"{place} is not a GGUF file; pass the folder with config.json and *.safetensors"
        )
    return place
