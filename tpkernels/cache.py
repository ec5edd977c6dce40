"""The folder in which the package keeps what it would otherwise have to find out again.

A file from there decides what runs (it may hold code for the GPU), so it counts only if nobody but
this user, or root, can have written it: see `read_trusted`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/tpkernels``, by default ``~/.cache/tpkernels``. It need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tpkernels"


def read_trusted(path: Path, *, most: int) -> bytes:
    """The content of a regular file of at most ``most`` bytes. The file and its folder belong to
    this user or to root, and nobody else can write to them. A link to the folder is followed, one
    to the file is not.

    Both are opened first and checked through their descriptors, so what is checked is what is read.

    Raises:
        OSError: the file is missing or cannot be read.
        ValueError: it is not such a file.
    """
    with contextlib.ExitStack() as stack:
        folder = _open(stack, path.parent, os.O_PATH | os.O_DIRECTORY)
        try:
            # A pipe opens without waiting for its other end.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            handle = _open(stack, Path(path.name), flags, folder)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise ValueError("it is a symbolic link, which is not followed") from error
            raise
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        _check_writers("it", status)
        _check_writers("its folder", os.fstat(folder))
        with open(handle, "rb", closefd=False) as file:
            content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most} bytes")
    return content


def check_folder(path: Path) -> None:
    """Whether `read_trusted` would read files from a folder.

    Raises:
        OSError: the folder is missing or cannot be opened.
        ValueError: somebody else can write to it.
    """
    with contextlib.ExitStack() as stack:
        _check_writers("it", os.fstat(_open(stack, path, os.O_PATH | os.O_DIRECTORY)))


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


def _open(stack: contextlib.ExitStack, path: Path, flags: int, folder: int | None = None) -> int:
    """A descriptor that ``stack`` closes; a relative ``path`` starts in ``folder``."""
    handle = os.open(path, flags | os.O_CLOEXEC, dir_fd=folder)
    stack.callback(os.close, handle)
    return handle


def _check_writers(name: str, status: os.stat_result) -> None:
    """``ValueError`` if anybody but this user or root can have written to a file."""
    user = os.geteuid()
    if status.st_uid not in (user, 0):
        raise ValueError(
            f"{name} belongs to user {status.st_uid}, not to {user} or root: remove it"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(status.st_mode)
        raise ValueError(f"{name} has mode {mode:o}, so that others can write to it: chmod go-w")
