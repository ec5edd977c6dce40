"""The cache folder, with trusted reads and atomic writes of files.

Cached files affect execution, and some contain GPU code. A file is used only if this user and root
are the only users who can have written it: see `read_trusted`.
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
    """Return ``$XDG_CACHE_HOME/tpkernels`` (default: ``~/.cache/tpkernels``). It may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tpkernels"


def make_folder(path: Path) -> None:
    """Create a folder with mode 0700 if it does not exist."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def read_trusted(path: Path, *, max_bytes: int) -> bytes:
    """Return the content of a file that only this user and root can write.

    The file must be a regular file of at most ``max_bytes`` bytes. Only this user and root may have
    write access to its folder. A symbolic link to the folder is followed, a symbolic link to the
    file is not. Both are opened first and checked through their descriptors, so the checked file is
    the file that is read.

    Raises:
        OSError: the file is missing or cannot be read.
        ValueError: a check failed.
    """
    with contextlib.ExitStack() as stack:
        folder = _open(stack, path.parent, os.O_PATH | os.O_DIRECTORY)
        try:
            # O_NONBLOCK: opening a pipe must not wait for a writer.
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
            content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it has more than {max_bytes} bytes")
    return content


def check_folder(path: Path) -> None:
    """Check that `read_trusted` accepts files in a folder.

    Raises:
        OSError: the folder is missing or cannot be opened.
        ValueError: other users can write to it.
    """
    with contextlib.ExitStack() as stack:
        _check_writers("it", os.fstat(_open(stack, path, os.O_PATH | os.O_DIRECTORY)))


@contextlib.contextmanager
def locked(path: Path, *, seconds: float) -> Iterator[None]:
    """Hold a lock file. It is created if missing and removed afterwards. At most one process holds
    the lock. If the process dies, the lock is released.

    Raises:
        OSError: the file cannot be created.
        TimeoutError: other processes held the lock for ``seconds``.
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
            path.unlink(missing_ok=True)  # before the lock is released, so no new owner exists yet


def replace_file(path: Path, content: bytes, *, private: bool = True) -> None:
    """Write a file atomically: readers see either the old or the new content.

    Args:
        private: use mode 0600, and create the folder if it is missing. Otherwise the umask sets the
            mode, and the folder must exist.

    Raises:
        OSError: the file cannot be written. The temporary file is removed.
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
    """Try to lock a file. Return whether that succeeded. ``stack`` releases the lock."""
    with contextlib.ExitStack() as attempt:
        handle = _open(attempt, path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        # The previous owner may have removed the file. The lock then protects a deleted file, and
        # the next process would create and lock a new file.
        try:
            ours = os.path.samestat(os.fstat(handle), os.lstat(path))
        except FileNotFoundError:
            ours = False
        if ours:
            stack.push(attempt.pop_all())
        return ours


def _check_writers(name: str, status: os.stat_result) -> None:
    """Raise ``ValueError`` if users other than this user and root can have written to a file."""
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
