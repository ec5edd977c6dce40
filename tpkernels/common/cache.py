"""The cache folder, and files that are read safely and replaced atomically.

Cached files decide what runs (some hold GPU code), so a file is used only if nobody but this user
or root can have written it: see `read_trusted`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

_LOCK_POLL_SECONDS = 0.01


def cache_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/tpkernels`` (default: ``~/.cache/tpkernels``), perhaps missing."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tpkernels"


def make_folder(path: Path) -> None:
    """Create a folder if it is missing, accessible to its owner only."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def read_trusted(path: Path, *, most: int) -> bytes:
    """Return the content of a file, of at most ``most`` bytes, that only this user or root can
    write.

    It must be a regular file, and its folder must be as safe. A symbolic link to the folder is
    followed, one to the file is not. Both are opened first and checked through their descriptors,
    so the file that is checked is the file that is read.

    Raises:
        OSError: the file is missing or cannot be read.
        ValueError: it fails one of the checks.
    """
    with contextlib.ExitStack() as stack:
        folder = _open(stack, path.parent, os.O_PATH | os.O_DIRECTORY)
        try:
            # O_NONBLOCK: opening a pipe must not wait for its other end.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            handle = _open(stack, Path(path.name), flags, folder)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise ValueError("it is a symbolic link, which is not followed") from error
            raise
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        _check_writers("it", status)
        _check_writers("its folder", os.fstat(folder))
        with open(handle, "rb", closefd=False) as file:
            content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most} bytes")
    return content


def check_folder(path: Path) -> None:
    """Check that `read_trusted` would read files from a folder.

    Raises:
        OSError: the folder is missing or cannot be opened.
        ValueError: other users can write to it.
    """
    with contextlib.ExitStack() as stack:
        _check_writers("it", os.fstat(_open(stack, path, os.O_PATH | os.O_DIRECTORY)))


@contextlib.contextmanager
def locked(path: Path, *, seconds: float) -> Iterator[None]:
    """Hold a lock file, which is created if missing and removed afterwards. One process at a time
    holds it; the lock of a process that dies is released.

    Raises:
        OSError: the file cannot be created.
        TimeoutError: other processes held it for ``seconds``.
    """
    deadline = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        while not _lock(stack, path):
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"a different process has held the lock {path} for {seconds:g} s; wait for "
                    "that process, or end it"
                )
            time.sleep(_LOCK_POLL_SECONDS)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # before the lock is released, while the file is ours


def replace_file(path: Path, content: bytes, *, private: bool = True) -> None:
    """Write a file atomically: readers see the old content or the new, never a part.

    Args:
        private: mode 0600, in a folder that is created if missing. Otherwise the umask decides,
            and the folder must exist.

    Raises:
        OSError: the file cannot be written; nothing is left behind.
    """
    if private:
        make_folder(path.parent)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    handle = os.open(unfinished, flags, mode=0o600 if private else 0o666)
    try:
        with open(handle, "wb") as file:
            file.write(content)
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _open(stack: contextlib.ExitStack, path: Path, flags: int, folder: int | None = None) -> int:
    """Return a descriptor that ``stack`` closes. A relative ``path`` is relative to ``folder``."""
    handle = os.open(path, flags | os.O_CLOEXEC, mode=0o600, dir_fd=folder)
    stack.callback(os.close, handle)
    return handle


def _lock(stack: contextlib.ExitStack, path: Path) -> bool:
    """Try to take a lock file, which ``stack`` releases."""
    with contextlib.ExitStack() as attempt:
        handle = _open(attempt, path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        # The previous holder may have removed the file meanwhile: the next process locks a new one.
        try:
            ours = os.path.samestat(os.fstat(handle), os.lstat(path))
        except FileNotFoundError:
            ours = False
        if ours:
            stack.push(attempt.pop_all())
        return ours


def _check_writers(name: str, status: os.stat_result) -> None:
    """Raise ``ValueError`` if anyone but this user or root can have written to a file."""
    user = os.geteuid()
    if status.st_uid not in (user, 0):
        raise ValueError(
            f"{name} belongs to user {status.st_uid}, not to {user} or root: remove it"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(status.st_mode)
        raise ValueError(
            f"{name} has mode {mode:o}, so other users can write to it: run chmod go-w on it"
        )
