"""The folder in which the package keeps what it would otherwise have to find out again."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/tpkernels``, by default ``~/.cache/tpkernels``. It need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tpkernels"


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file so that readers see all of it or what was there before, and makes its folder.

    Raises:
        OSError: it cannot be written; nothing is left behind then.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(unfinished, path)
    except BaseException:
        os.unlink(unfinished)
        raise
