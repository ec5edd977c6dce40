"""The folder in which the package keeps what it would otherwise have to find out again.

A file from there decides what runs (it may hold code for the GPU), so it counts only if nobody but
this user, or root, can have written it: see `read_trusted`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_LOCK_POLL_SECONDS = 0.01


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/tpkernels``, by default ``~/.cache/tpkernels``. It need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tpkernels"


def make_folder(path: Path) -> None:
    """Makes a folder, where it is missing, that is nobody else's business."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


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


@contextlib.contextmanager
def locked(path: Path, *, seconds: float) -> Iterator[None]:
    """Holds a lock file, made for the purpose and removed afterwards. One process at a time has it,
    and loses it when it dies.

    Raises:
        OSError: the file cannot be made.
        TimeoutError: others held it for ``seconds``.
    """
    deadline = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        while not _lock(stack, path):
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"another process has held {path} for {seconds:g} s; let it finish, or end it"
                )
            time.sleep(_LOCK_POLL_SECONDS)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # before it is given back, so that it is still ours


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file so that readers see all of it or what was there before, and makes its folder.

    Raises:
        OSError: it cannot be written; nothing is left behind then.
    """
    make_folder(path.parent)
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
    handle = os.open(path, flags | os.O_CLOEXEC, mode=0o600, dir_fd=folder)
    stack.callback(os.close, handle)
    return handle


def _lock(stack: contextlib.ExitStack, path: Path) -> bool:
    """Tries to take a lock file, which ``stack`` gives back."""
    with contextlib.ExitStack() as attempt:
        handle = _open(attempt, path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        # Whoever had it may have removed it in between: then the next one locks another file.
        try:
            ours = os.path.samestat(os.fstat(handle), os.lstat(path))
        except FileNotFoundError:
            ours = False
        if ours:
            stack.push(attempt.pop_all())
        return ours


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
