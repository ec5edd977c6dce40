"""Messages between one process and its ranks through shared memory: `csrc/host/mailbox.h`.

One ring carries messages from the driver to all ranks, one ring per rank carries its replies. A
message larger than a ring goes through it in parts. The memory is a memfd, which has no name and is
gone with the last process that maps it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from multiprocessing import reduction
from typing import Any

from tpkernels._C.host import Arena, Mailbox
from tpkernels.launch import messages
from tpkernels.launch.messages import Bytes, Message

RING_BYTES = 1 << 20
# Waking from sleep takes some 50 us, and a wait polls before it sleeps, but not where the polling
# would keep a core from the process that is waited for.
_SPIN_US, _CROWDED_SPIN_US = 50.0, 0.0
_DRIVER = 0  # the region that all ranks read; rank r writes into region r + 1
_REPLIES = 1  # the region with the bell that all ranks ring

Check = Callable[[], None]  # called between the slices of a wait; raises to end it


class SharedRings:
    """The memory, as the driver makes it and as a starting rank process receives it."""

    def __init__(self, world: int, fd: int, region_bytes: int) -> None:
        self.world, self.fd, self._region_bytes = world, fd, region_bytes

    @classmethod
    def create(cls, world: int) -> SharedRings:
        region_bytes = Mailbox.region_bytes(RING_BYTES, world)
        return cls(world, Arena.create(region_bytes, world + 1), region_bytes)

    def close(self) -> None:
        """Closes the descriptor. Mappings stay."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __reduce__(self) -> Any:  # multiprocessing hands the descriptor over
        inherited = reduction.DupFd(self.fd)
        return _inherit, (self.world, inherited, self._region_bytes)

    def map(self, commit: bool = False) -> Arena:
        arena = Arena(self.fd, self._region_bytes, self.world + 1)
        if commit:
            for region in range(self.world + 1):
                arena.commit(region, 0, self._region_bytes)
        return arena


def _inherit(world: int, inherited: Any, region_bytes: int) -> SharedRings:
    return SharedRings(world, inherited.detach(), region_bytes)


class DriverBox:
    """The driver's end."""

    def __init__(self, rings: SharedRings) -> None:
        arena, spin = rings.map(commit=True), _spin_us(rings.world)
        self._out = Mailbox(arena, _DRIVER, rings.world, _DRIVER, spin)
        self._in = [_replies(arena, rank, spin) for rank in range(rings.world)]

    def send(self, message: Message, check: Check, slice_s: float) -> None:
        """Sends to all ranks. Returns when everything is in the ring."""
        for part in message.parts:
            _transfer(self._out.write, part, check, slice_s)

    def wait(self, ranks: Sequence[int], seconds: float) -> int | None:
        """The first of ``ranks`` that has sent something, or None if none has in time."""
        found = Mailbox.wait_any([self._in[rank] for rank in ranks], seconds)
        return None if found < 0 else ranks[found]

    def receive(self, rank: int, check: Check, slice_s: float) -> Any:
        box = self._in[rank]
        return messages.receive(lambda out: _transfer(_reader(box, 0), out, check, slice_s))


class RankBox:
    """The end of one rank. Its waits last for as long as the driver lives: a rank dies with it."""

    _SLICE_S = 10.0

    def __init__(self, rings: SharedRings, rank: int) -> None:
        arena, spin = rings.map(), _spin_us(rings.world)
        self._rank = rank
        self._in = Mailbox(arena, _DRIVER, rings.world, _DRIVER, spin)
        self._out = _replies(arena, rank, spin)

    def send(self, message: Message) -> None:
        for part in message.parts:
            _transfer(self._out.write, part, _no_check, self._SLICE_S)

    def receive(self) -> Any:
        read = _reader(self._in, self._rank)
        return messages.receive(lambda out: _transfer(read, out, _no_check, self._SLICE_S))


def _replies(arena: Arena, rank: int, spin_us: float) -> Mailbox:
    return Mailbox(arena, rank + 1, 1, _REPLIES, spin_us)


def _spin_us(world: int) -> float:
    return _CROWDED_SPIN_US if world >= len(os.sched_getaffinity(0)) else _SPIN_US


def _no_check() -> None:
    pass


def _reader(box: Mailbox, reader: int) -> Callable[[Bytes, float], int]:
    return lambda out, seconds: box.read(reader, out, seconds)


def _transfer(
    move: Callable[[Bytes, float], int], data: Bytes, check: Check, slice_s: float
) -> None:
    done = move(data, slice_s)
    while done < len(data):
        check()
        done += move(memoryview(data)[done:], slice_s)
