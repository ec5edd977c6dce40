"""The last products of a rank on a mesh, by which ranks that wait find out that they are in
different ones.

Problem: ranks in different products that both know may communicate in different groups. Then each
waits in its own for ranks that are elsewhere, until a timeout that names neither product.

Algorithm: each rank numbers its products on a mesh that communicate. A rank that has waited for a
while within one, and again after each such while, writes the last few, as text, to the store of
each of its groups on the mesh, and reads what the others of these groups have written. Two products
with one number are the error. A rank waits for one of its own group that is elsewhere, so it need
not read further. A thread asks the stores: their server may hang, and waits are bounded.

Sync: a rank writes before it reads, so of two that wait, the later one finds out, and the other one
when it looks again. The key holds the address of the rank in its group, which is made anew with the
group (`Presence`): nothing stale is read.

On CUDA tensors only the host's waits look.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Sequence

import torch.distributed as dist

from tpkernels import groups
from tpkernels.errors import ProductMismatchError
from tpkernels.groups.group import Group

_PATIENCE = 0.3  # s of a wait between two looks
_MOST = 16  # products


class History:
    """The last products of this rank on one mesh, and its groups there."""

    def __init__(self, names: Sequence[str], mesh: str) -> None:
        self._names, self._mesh = names, mesh  # the mesh itself would keep its groups alive
        self._count = 0
        self._last: deque[str] = deque(maxlen=_MOST)
        self._thread: int | None = None  # that is within a product
        self._since: float | None = None  # the first look in it, or the last comparison
        self._asking: threading.Thread | None = None
        self._replies: list[tuple[Group, dict[int, dict[str, str]]]] = []  # to the last that asked
        self._attached = False

    def attach(self) -> None:
        """Make the waits of the groups, which are set up, look."""
        if not self._attached:
            for name in self._names:
                groups.get(name).look_in_waits(self._look)
            self._attached = True

    def begin(self, text: str) -> None:
        """Begin a product, within which the waits of its groups look; `end` follows."""
        self._count += 1
        self._last.append(text)
        self._since, self._thread = None, threading.get_ident()

    def end(self) -> None:
        self._thread = None

    def _look(self) -> None:
        if threading.get_ident() != self._thread:
            return
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if self._asking is None:
            if now - self._since >= _PATIENCE:
                arguments = [groups.get(name) for name in self._names], self._numbered()
                self._asking = threading.Thread(target=self._ask, args=arguments, daemon=True)
                self._asking.start()
        elif not self._asking.is_alive():
            self._asking, self._since = None, now
            self._compare()

    def _numbered(self) -> dict[str, str]:
        first = self._count - len(self._last) + 1
        return {str(number): text for number, text in enumerate(self._last, first)}

    def _ask(self, asked: list[Group], mine: dict[str, str]) -> None:
        self._replies = []
        for group in asked:
            with contextlib.suppress(dist.DistError):  # the process of the store has ended
                self._replies.append((group, self._exchanged(group, mine)))

    def _exchanged(self, group: Group, mine: dict[str, str]) -> dict[int, dict[str, str]]:
        """Return what the other ranks of a group have written by now, by rank."""
        place, others = group.participant(group.timeout), {}
        addresses = place.presence.addresses
        keys = [f"{place.prefix}/products/{address}/{self._mesh}" for address in addresses]
        place.store.set(keys[group.rank], json.dumps(mine))
        for rank, key in enumerate(keys):
            if rank != group.rank and place.store.check([key]):
                others[rank] = json.loads(place.store.get(key))
        return others

    def _compare(self) -> None:
        """Raise ``ProductMismatchError`` if another rank has been in another product."""
        mine = self._numbered()
        for group, others in self._replies:
            for rank, theirs in others.items():
                different = [n for n, text in mine.items() if theirs.get(n, text) != text]
                if different:
                    number = different[0]
                    raise ProductMismatchError(
                        f"the ranks are in different products: as number {number} on the mesh, "
                        f"global rank {dist.get_rank()} has {mine[number]}, rank "
                        f"{dist.get_global_rank(group.pg, rank)} has {theirs[number]}. The groups "
                        "of the mesh are broken: make new ones, and the same calls on all ranks.",
                        peer=rank,
                    )
