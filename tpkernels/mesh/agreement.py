"""What the ranks of a mesh agree on before a product: the machine by whose rates all plan, and that
all are in the same product.

Problem: ranks that disagree about a product may have plans that communicate in different groups,
where nobody finds out until a wait times out.

Algorithm: a rank that meets a product for the first time compares it with the other ranks', along
each mesh dim in turn. What travels is the smallest and the largest of the ranks' checksums. After
the last dim all ranks know those of the whole mesh, and if they differ, all exchange the products
as text and raise the same error. A product that is known needs none of this: what is known follows
from what the ranks have agreed on, so all know the same ones. Ranks in different known ones find
out when they wait (history.py).

Sync: the machine is that of the mesh's first rank. Along each mesh dim in turn, a group takes what
its first rank has. After the first dim all ranks along it have the same, and so the first ranks of
the groups of the second dim have that of the rank whose coordinates are 0.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Hashable, Iterator
from math import prod
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tpkernels import groups
from tpkernels.errors import CaptureError, CollectiveMismatchError, TpkernelsError
from tpkernels.groups.group import Group
from tpkernels.mesh.history import History
from tpkernels.planning.cost import Profile
from tpkernels.planning.store import own_machine, profile_in, profile_text

_MOST_KNOWN = 1024  # products
_NEW_PRODUCT, _DIFFERENT = "a new sharded_matmul", "sharded_matmul calls that differ"


class Agreement:
    """What this rank and the others of a mesh have agreed on. Kept by the group of the mesh's last
    dim, and without the mesh, which may keep that group's process group alive.

    Attributes:
        names: of this rank's groups, one for each mesh dim.
        sizes: ranks along each mesh dim.
        device: the mesh's device type.
        text: the mesh in errors, different for different meshes.
        products: what has been planned, for the products that the ranks agreed on last. Using one
            does not count: ranks may use them in different orders, and must forget the same ones.
        history: the last products that communicated.
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
                bounds = group.statements(_NEW_PRODUCT, (lowest, highest), self.device)
                lowest, highest = min(low for low, _ in bounds), max(high for _, high in bounds)
            if lowest == highest:
                return None
            for group in ready:
                for statement in group.statements(_DIFFERENT, products, self.device):
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
        return agreed or profile_text(own_machine(self.device, prod(self.sizes))[1])

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Run a product. An error in it marks all groups of the mesh broken: this rank will not
        take part in the rest of the product."""
        try:
            yield
        except CaptureError:  # nothing has been queued: the groups can go on
            raise
        except BaseException as error:
            # The peer is a rank of one group only.
            without_peer = type(error)(str(error)) if isinstance(error, TpkernelsError) else error
            for group in self._groups():
                group.break_between_calls(without_peer)
            raise


def known_machine(mesh: DeviceMesh) -> Profile:
    """Return what `Agreement.agreed_machine` has returned on a mesh; before that, and on a rank
    outside the mesh, this rank's machine. Local."""
    agreed = None if mesh.get_coordinate() is None else Agreement.on(mesh).machine
    return agreed or own_machine(mesh.device_type, mesh.size())[1]


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
