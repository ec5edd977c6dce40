"""The mailbox between processes. tests/native/test_mailbox.cpp has several readers, as threads, and
delays between all steps."""

from __future__ import annotations

import contextlib
import os
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tpkernels._C.host import Arena, Mailbox

SLICE_S = 5.0  # a lost wake-up costs this


def arena_of(capacity: int, readers: int = 1, regions: int = 1) -> Arena:
    nbytes = Mailbox.region_bytes(capacity, readers)
    fd = Arena.create(nbytes, regions)
    arena = Arena(fd, nbytes, regions)
    os.close(fd)
    for region in range(regions):
        arena.commit(region, 0, nbytes)
    return arena


def box_of(arena: Arena, region: int = 0, readers: int = 1, spin: float = 0.0) -> Mailbox:
    return Mailbox(arena, region, readers, 0, spin)


def in_child(work: Callable[..., object], *args: int) -> int:
    """The pid of a process that exits with 0 if ``work`` returns."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work(*args)
            code = 0
        finally:
            os._exit(code)
    return pid


def ended_well(pid: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def put(box: Mailbox, data: bytes) -> None:
    assert box.write(data, SLICE_S) == len(data)


def take(box: Mailbox, nbytes: int, reader: int = 0) -> bytes:
    out = bytearray(nbytes)
    assert box.read(reader, out, SLICE_S) == nbytes
    return bytes(out)


def test_a_shared_bell_announces_any_of_several_writers() -> None:
    """The rings hold few messages, and a lost wake-up would take the whole time."""
    writers, each, size = 3, 400, 900
    arena = arena_of(256, regions=writers)

    def write(region: int) -> None:
        box, source = box_of(arena, region), random.Random(region)
        for i in range(each):
            put(box, bytes([region, i % 256]) * (size // 2))
            if source.random() < 0.05:  # long enough for the reader to fall asleep
                time.sleep(source.random() * 2e-3)

    children = [in_child(write, region) for region in range(writers)]
    boxes = [box_of(arena, region) for region in range(writers)]
    counts, begin = [0] * writers, time.monotonic()
    for _ in range(writers * each):
        found = Mailbox.wait_any(boxes, SLICE_S)
        assert found >= 0
        assert take(boxes[found], size) == bytes([found, counts[found] % 256]) * (size // 2)
        counts[found] += 1
    assert counts == [each] * writers and all(map(ended_well, children))
    assert time.monotonic() - begin < SLICE_S
    assert Mailbox.wait_any(boxes, 0.01) == -1


def test_waits_end_when_time_is_up() -> None:
    arena = arena_of(100, readers=2)
    box = box_of(arena, readers=2)
    assert box.capacity >= 100
    begin = time.monotonic()
    assert box.read(0, bytearray(1), 0.1) == 0
    assert box.write(b"x" * (box.capacity + 5), 0.1) == box.capacity
    assert box.write(b"x", 0.0) == 0
    assert 0.2 <= time.monotonic() - begin < 2
    assert take(box, box.capacity, 0) == b"x" * box.capacity
    assert box.write(b"y", 0.0) == 0  # the other reader has read nothing
    assert take(box, 7, 1) == b"x" * 7
    assert box.write(b"y" * 9, 0.0) == 7
    assert box.read(0, bytearray(9), 0.0) == 7
    assert box.write(b"", 0.0) == 0 and box.read(0, bytearray(), 0.0) == 0


def test_a_fork_is_refused() -> None:
    box = box_of(arena_of(100))

    def use() -> None:
        for act in (
            lambda: box.write(b"x", 0),
            lambda: box.read(0, bytearray(1), 0),
            lambda: Mailbox.wait_any([box], 0),
        ):
            with pytest.raises(RuntimeError, match="a fork, and cannot use its parent's mailbox"):
                act()

    assert ended_well(in_child(use))
    put(box, b"x")


def test_damage_is_reported() -> None:
    arena = arena_of(100)
    reader, memory = box_of(arena), memoryview(arena.region(0))
    memory[64 * 2 : 64 * 2 + 8] = struct.pack("<Q", 1 << 30)
    with pytest.raises(RuntimeError, match=r"the mailbox is damaged: \d+ written, \d+ read"):
        reader.read(0, bytearray(1), 0.0)


def test_refusals() -> None:
    arena = arena_of(4000, readers=2, regions=2)
    for wrong in ((-1, 1, 0), (2, 1, 0), (0, 0, 0), (0, 1, 2), (0, 1, -1), (0, 1000, 0)):
        with pytest.raises(ValueError, match="no mailbox for"):
            Mailbox(arena, *wrong, 0.0)
    box = box_of(arena, readers=2)
    for reader in (-1, 2):
        with pytest.raises(ValueError, match="no reader"):
            box.read(reader, bytearray(1), 0.0)
    with pytest.raises(ValueError, match="vectors of bytes"):
        box.write(memoryview(bytes(16)).cast("i"), 0.0)
    with pytest.raises(ValueError, match="vectors of bytes"):
        box.write(memoryview(bytes(16))[::2], 0.0)
    with pytest.raises(BufferError):
        box.read(0, b"read only", 0.0)
    with pytest.raises(ValueError, match="needs a mailbox"):
        Mailbox.wait_any([], 0.0)
    with pytest.raises(ValueError, match="share a bell"):
        Mailbox.wait_any([box, Mailbox(arena, 1, 2, 1, 0.0)], 0.0)


def test_a_reader_that_was_killed_asleep_does_no_harm() -> None:
    """It stays counted as a sleeper."""
    arena = arena_of(64)
    child = in_child(lambda: take(box_of(arena), 1))
    deadline = time.monotonic() + 10
    with contextlib.suppress(OSError):  # a kernel may not tell what a process waits in
        while (waits_in := Path(f"/proc/{child}/wchan").read_text()) != "0":
            if "futex" in waits_in or time.monotonic() > deadline:
                break
            time.sleep(0.01)
    os.kill(child, 9)
    assert not ended_well(child)
    box = box_of(arena)
    for i in range(300):
        put(box, bytes([i % 256]))
        assert take(box, 1) == bytes([i % 256])
