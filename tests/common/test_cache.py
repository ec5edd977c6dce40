"""The cache folder: files that other users may have written are not read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tpkernels.common import cache


def store_file(folder: Path, content: bytes = b"content") -> Path:
    cache.replace_file(folder / "file", content)
    return folder / "file"


def test_a_stored_file_is_read(tmp_path: Path) -> None:
    file = store_file(tmp_path / "cache")
    assert cache.read_trusted(file, max_bytes=7) == b"content"
    assert cache.read_trusted(store_file(tmp_path / "cache", b""), max_bytes=7) == b""
    with pytest.raises(ValueError, match="it has more than 6 bytes"):
        cache.read_trusted(store_file(tmp_path / "cache"), max_bytes=6)
    with pytest.raises(FileNotFoundError):
        cache.read_trusted(tmp_path / "cache" / "other", max_bytes=7)
    with pytest.raises(FileNotFoundError):
        cache.read_trusted(tmp_path / "nowhere" / "file", max_bytes=7)


@pytest.mark.parametrize(("private", "mode"), [(True, 0o600), (False, 0o644)])
def test_a_file_is_replaced_atomically(tmp_path: Path, private: bool, mode: int) -> None:
    """Private files ignore the umask. Both kinds replace the old content and leave no temporary
    file."""
    file, umask = tmp_path / "file", os.umask(0o022)
    try:
        for content in (b"a longer content", b"short"):
            cache.replace_file(file, content, private=private)
            assert file.read_bytes() == content
    finally:
        os.umask(umask)
    assert file.stat().st_mode & 0o777 == mode
    assert list(tmp_path.iterdir()) == [file]


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(IsADirectoryError):
        cache.replace_file(tmp_path / "file", b"content")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
    with pytest.raises(FileNotFoundError):  # only folders of the cache are created
        cache.replace_file(tmp_path / "missing" / "file", b"content", private=False)


def test_a_linked_folder_is_checked_at_its_target(tmp_path: Path) -> None:
    file = store_file(tmp_path / "disk")
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    assert cache.read_trusted(tmp_path / "link" / "file", max_bytes=7) == b"content"
    file.parent.chmod(0o777)
    with pytest.raises(ValueError, match="its folder has mode 777"):
        cache.read_trusted(tmp_path / "link" / "file", max_bytes=7)


@pytest.mark.parametrize("target", ["file", "folder"])
@pytest.mark.parametrize("mode", [0o020, 0o002, 0o1002])
def test_files_that_others_can_write_are_not_read(tmp_path: Path, target: str, mode: int) -> None:
    file = store_file(tmp_path / "cache")
    path = file if target == "file" else file.parent
    path.chmod(0o700 | mode)
    name = "it" if target == "file" else "its folder"
    message = f"{name} has mode {0o700 | mode:o}, so other users can write to it: run chmod go-w"
    with pytest.raises(ValueError, match=message):
        cache.read_trusted(file, max_bytes=7)
    path.chmod(0o755)  # other users may read it
    assert cache.read_trusted(file, max_bytes=7) == b"content"


@pytest.mark.parametrize("target", ["file", "folder"])
def test_files_of_another_user_are_not_read(
    tmp_path: Path, change_owner: Callable[[Path], None], target: str
) -> None:
    file = store_file(tmp_path / "cache")
    change_owner(file if target == "file" else file.parent)
    with pytest.raises(ValueError, match=r"belongs to user \d+, not to \d+ or root: remove it"):
        cache.read_trusted(file, max_bytes=7)


def test_files_of_root_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    file = store_file(tmp_path / "cache")
    monkeypatch.setattr(os, "geteuid", lambda: 1001)
    assert cache.read_trusted(file, max_bytes=7) == b"content"
    os.chown(file, 1001, -1)
    assert cache.read_trusted(file, max_bytes=7) == b"content"
    os.chown(file, 1002, -1)
    with pytest.raises(ValueError, match="belongs to user 1002, not to 1001 or root"):
        cache.read_trusted(file, max_bytes=7)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "not a regular file"),
        (os.mkdir, "not a regular file"),
        (lambda path: path.symlink_to(store_file(path.parent / "other")), "is a symbolic link"),
        (lambda path: path.symlink_to(path), "is a symbolic link"),
    ],
    ids=["a pipe", "a folder", "a link", "a link to itself"],
)
def test_only_regular_files_are_read(
    tmp_path: Path, make: Callable[[Path], None], message: str
) -> None:
    make(tmp_path / "file")
    tmp_path.chmod(0o700)
    with pytest.raises(ValueError, match=message):
        cache.read_trusted(tmp_path / "file", max_bytes=7)


def test_files_are_closed_after_reading(tmp_path: Path) -> None:
    file, before = store_file(tmp_path / "cache"), os.listdir("/proc/self/fd")
    cache.read_trusted(file, max_bytes=7)
    file.chmod(0o602)
    for path in (file, tmp_path / "cache" / "other"):
        with pytest.raises((ValueError, FileNotFoundError)):
            cache.read_trusted(path, max_bytes=7)
    assert os.listdir("/proc/self/fd") == before
