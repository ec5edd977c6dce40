"""What the ranks of a mesh agree on before a product: the machine by whose rates all plan, and that
all are in the same product; and the last products of a rank, which ranks that wait compare.

Problem: ranks that disagree about a product may have plans that communicate in different groups,
where nobody finds out until a wait times out, which names neither product.

Algorithm, of a new product: a rank that meets a product for the first time compares it with the
other ranks', along each mesh dim in turn. What travels is the smallest and the largest of the
ranks' checksums. After the last dim all ranks know those of the whole mesh, and if they differ, all
exchange the products as text and raise the same error. A product that is known needs none of this:
what is known follows from what the ranks have agreed on, so all know the same ones.

Sync, of the machine: it is that of the mesh's first rank. Along each mesh dim in turn, a group
takes what its first rank has. After the first dim all ranks along it have the same, and so the
first ranks of the groups of the second dim have that of the rank whose coordinates are 0.

Algorithm, of known products (`History`): each rank numbers its products on a mesh that communicate.
A rank that has waited for a while within one, and again after each such while, writes the last few,
as text, to the store of each of its groups on the mesh, and reads what the others of these groups
have written. It is an error if two ranks have different products under one number. The rank waited
for is in one of this rank's groups, so no other store needs reading. A thread asks the stores:
their server may hang, and waits are bounded. On CUDA tensors only the host's waits poll.

Sync, of known products: a rank writes before it reads, so of two waiting ranks, the one that writes
last sees the mismatch at once, and the other at its next poll. The key holds the address of the
rank in its group, which is made anew with the group (`Presence`): nothing stale is read.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
import zlib
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from math import prod
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tpkernels import groups
from tpkernels.errors import (
    HARMLESS,
    CaptureError,
    CollectiveMismatchError,
    ProductMismatchError,
    TpkernelsError,
)
from tpkernels.groups.group import Group
from tpkernels.planning.cost import Profile
from tpkernels.planning.store import machine_here, profile_in, profile_text

_MOST_KNOWN = 1024  # products
_PATIENCE = 0.3  # seconds of waiting between two polls of the other ranks
_MOST_COMPARED = 16  # products
_NEW_PRODUCT, _DIFFERENT = "a new sharded_matmul", "sharded_matmul calls that differ"


class Agreement:
    """What this rank and the others of a mesh have agreed on. Kept by the group of the mesh's last
    dim, and without the mesh, which may keep that group's process group alive.

    Attributes:
        names: of this rank's groups, one for each mesh dim.
        text: the mesh in errors, different for different meshes.
        products: what has been planned, for the products that the ranks agreed on last. Using one
            does not count: ranks may use them in different orders, and must forget the same ones.
        machine: that of the mesh's first rank; None before the first product.
    """

    def __init__(self, mesh: DeviceMesh, names: tuple[str, ...]) -> None:
        self.names, self.sizes, self.device = names, tuple(mesh.shape), mesh.device_type
        self.text, self._ranks = _text_of(mesh), mesh.mesh.tolist()
        self.products: dict[Hashable, Any] = {}
        self.history = History([name for name, size in self._sized() if size > 1], self.text)
        self.machine: Profile | None = None

    @classmethod
    def on(cls, mesh: DeviceMesh) -> Agreement:
        """Return that of a mesh. Equal meshes may have other groups."""
        names = tuple(map(groups.name_of, [(mesh, dim) for dim in range(mesh.ndim)]))
        on_meshes, key = groups.get(names[-1]).on_meshes, (names, hash(mesh))
        found: Agreement | None = on_meshes.get(key)
        return found or on_meshes.setdefault(key, cls(mesh, names))

    def _sized(self) -> Iterator[tuple[str, int]]:
        return zip(self.names, self.sizes, strict=True)

    def _groups(self) -> Iterator[Group]:
        """Yield this rank's groups of several ranks."""
        return (groups.get(name) for name, size in self._sized() if size > 1)

    def add(self, key: Hashable, product: Any) -> None:
        """Know a product; forget the oldest one of too many."""
        self.products[key] = product
        if len(self.products) > _MOST_KNOWN:
            del self.products[next(iter(self.products))]
        self.history.attach()

    def disagreement(self, product: str) -> CollectiveMismatchError | None:
        """Return what all ranks of the mesh raise if they differ in the product, described as text.
        Nothing else has been sent then, and the groups can go on. Collective.

        Raises:
            PeerLostError, CollectiveTimeoutError, CollectiveMismatchError, GroupBrokenError.
        """
        lowest = highest = zlib.crc32(product.encode())
        products = {str(dist.get_rank()): product}
        try:
            ready = [group.ready(self.device) for group in self._groups()]
            for group in ready:
                bounds = group.exchange_in_turn(_NEW_PRODUCT, (lowest, highest), self.device)
                lowest, highest = min(low for low, _ in bounds), max(high for _, high in bounds)
            if lowest == highest:
                return None
            for group in ready:
                for statement in group.exchange_in_turn(_DIFFERENT, products, self.device):
                    products |= statement
        except TpkernelsError as error:
            raise type(error)(f"{product}: {error}", peer=error.peer) from error
        return _mismatch({int(rank): text for rank, text in products.items()}, product)

    def agreed_machine(self) -> Profile:
        """Return the machine of the mesh's first rank. Collective at the first call on a mesh."""
        if self.machine is None:
            text = ""
            for dim, name in enumerate(self.names):
                purpose = f"the first product on the {self.device} mesh {self._ranks}, dim {dim}"
                group = groups.get(name).ready(self.device)
                text = group.from_rank_0(purpose, functools.partial(self._or_own, text))
            self.machine = profile_in(text)
        return self.machine

    def _or_own(self, agreed: str) -> str:
        return agreed or profile_text(machine_here(self.device, prod(self.sizes))[1])

    @contextlib.contextmanager
    def break_on_error(self) -> Iterator[None]:
        """Mark all groups of the mesh broken if the block raises, because this rank takes no
        further part in the product; not for `CaptureError`, before which nothing was queued, nor
        for what all ranks of a mesh's one group raise."""
        try:
            yield
        except CaptureError:
            raise
        except BaseException as error:
            if isinstance(error, HARMLESS) and len(list(self._groups())) == 1:
                raise
            # The peer is a rank of one group only.
            without_peer = type(error)(str(error)) if isinstance(error, TpkernelsError) else error
            for group in self._groups():
                group.break_between_calls(without_peer)
            raise


class History:
    """The last products of this rank on one mesh, and its groups there."""

    def __init__(self, names: Sequence[str], mesh: str) -> None:
        self._names, self._mesh = names, mesh  # the mesh itself would keep its groups alive
        self._count = 0
        self._last: deque[str] = deque(maxlen=_MOST_COMPARED)
        self._thread: int | None = None  # that is within a product
        self._since: float | None = None  # the first poll in it, or the last comparison
        self._asking: threading.Thread | None = None
        self._replies: list[tuple[Group, dict[int, dict[str, str]]]] = []  # to the last that asked
        self._attached = False

    def attach(self) -> None:
        """Make waits in the mesh's groups, which are set up by now, call `_poll`."""
        if not self._attached:
            for name in self._names:
                groups.get(name).add_wait_hook(self._poll)
            self._attached = True

    def begin(self, text: str) -> None:
        """Begin a product: until `end`, this thread's waits poll the other ranks' products."""
        self._count += 1
        self._last.append(text)
        self._since, self._thread = None, threading.get_ident()

    def end(self) -> None:
        self._thread = None

    def _poll(self) -> None:
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


def known_machine(mesh: DeviceMesh) -> Profile:
    """Return what `Agreement.agreed_machine` has returned on a mesh; before that, and on a rank
    outside the mesh, this rank's machine. Local."""
    agreed = None if mesh.get_coordinate() is None else Agreement.on(mesh).machine
    return agreed or machine_here(mesh.device_type, mesh.size())[1]


def _text_of(mesh: DeviceMesh) -> str:
    """Describe the mesh in errors, differently for different meshes."""
    ranks, shape = mesh.mesh.flatten().tolist(), " x ".join(map(str, mesh.shape))
    names = f" ({', '.join(mesh.mesh_dim_names)})" if mesh.mesh_dim_names else ""
    if ranks == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"a {mesh.device_type} mesh of {shape}{names}, ranks {ranks[0]} to {ranks[-1]}"
    return f"the {mesh.device_type} mesh {mesh.mesh.tolist()}{names}"


def _mismatch(products: dict[int, str], own: str) -> CollectiveMismatchError:
    by_text: dict[str, list[int]] = {}
    for rank, text in sorted(products.items()):
        by_text.setdefault(text, []).append(rank)
    parts = [
        f"global {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} in {text}"
        for text, ranks in by_text.items()
    ]
    return CollectiveMismatchError(
        f"the ranks are in different products: {'; '.join(parts)}. Nothing has been sent: make the "
        "same call on all ranks.",
        peer=next(rank for rank, text in sorted(products.items()) if text != own),
    )
