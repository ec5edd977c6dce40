"""What the ranks of a mesh agree on when they meet a product: that all make the same one, and the
machine by whose rates all plan it.

Problem: the ops compare the signatures of their calls at the first wait. A new product needs more.
Different products may consist of equal calls (one gathers w, the other gathers the result), whose
data would mix; may communicate in different groups, each until its timeout; and one may communicate
nothing, and return.

Algorithm: the ranks exchange a new product, as text, along each mesh dim in turn. After the last
dim each knows the products of the whole mesh. If they differ, all raise the same error. On the way
each group takes the machine of its first rank, in the end that of the rank at coordinates 0.

A known product is not exchanged again: if ranks make different known ones, their ops differ. What
is known follows from the exchanges alone, so all ranks know, and forget, the same products.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tpkernels import groups
from tpkernels.errors import HARMLESS, CaptureError, CollectiveMismatchError, TpkernelsError
from tpkernels.groups.group import Group
from tpkernels.planning.cost import Profile
from tpkernels.planning.store import machine_here, profile_in, profile_text

_MOST_KNOWN = 1024  # products


class Agreement:
    """What this rank and the others of a mesh have agreed on: ``products`` and their plans, and the
    ``machine``. ``names`` are those of this rank's groups, one for each mesh dim. It does not hold
    the mesh, which may keep alive the process group that keeps the agreement."""

    def __init__(self, mesh: DeviceMesh, names: tuple[str, ...]) -> None:
        self.names, self.device, self._shape = names, mesh.device_type, tuple(mesh.shape)
        self.text = f"the {mesh.device_type} mesh {mesh.mesh.tolist()}"
        self.products: dict[Hashable, Any] = {}  #: the last to be added; uses do not count
        self.machine: Profile | None = None

    @classmethod
    def on(cls, mesh: DeviceMesh) -> Agreement:
        """Return that of a mesh. Equal meshes may have other groups."""
        names = tuple(groups.name_of((mesh, dim)) for dim in range(mesh.ndim))
        on_meshes, key = groups.get(names[-1]).on_meshes, (names, hash(mesh))
        found: Agreement | None = on_meshes.get(key)
        return found or on_meshes.setdefault(key, cls(mesh, names))

    def _groups(self) -> list[Group]:
        """Return this rank's groups of several ranks."""
        sizes = zip(self.names, self._shape, strict=True)
        return [groups.get(name) for name, size in sizes if size > 1]

    def add(self, key: Hashable, product: object) -> None:
        """Know a product; forget the oldest one of too many."""
        self.products[key] = product
        if len(self.products) > _MOST_KNOWN:
            del self.products[next(iter(self.products))]

    def compare(self, product: str, machine: Profile) -> None:
        """Compare a new product with those of the other ranks, and agree on a machine. Collective.

        Raises:
            CollectiveMismatchError: on all ranks; nothing else was sent, and the groups can go on.
            PeerLostError, CollectiveTimeoutError, GroupBrokenError.
        """
        rates, products = profile_text(machine), {product: [dist.get_rank()]}
        with self.break_on_error(product):
            for group in [group.ready(self.device) for group in self._groups()]:
                statement = [rates, products]
                everyone = group.exchange_in_turn("a new sharded_matmul", statement, self.device)
                rates, products = everyone[0][0], {}
                for _, theirs in everyone:
                    for text, ranks in theirs.items():
                        products.setdefault(text, []).extend(ranks)
            self.machine = profile_in(rates)
        if len(products) > 1:
            found = sorted((sorted(ranks), text) for text, ranks in products.items())
            raise CollectiveMismatchError(
                "the ranks are in different calls: "
                + "; ".join(f"global ranks {ranks} in {text}" for ranks, text in found)
                + ". No data was sent. Make the same call on all ranks.",
                peer=next(ranks[0] for ranks, text in found if text != product),
            )

    @contextlib.contextmanager
    def break_on_error(self, product: str) -> Iterator[None]:
        """Break all groups of the mesh if the block raises: this rank takes no further part in the
        product. Not for `CaptureError`, before which nothing was queued, nor for what all ranks of
        a mesh's one group raise."""
        try:
            yield
        except BaseException as error:
            broken, ours = self._groups(), isinstance(error, TpkernelsError)
            if isinstance(error, HARMLESS) and (
                len(broken) == 1 or isinstance(error, CaptureError)
            ):
                raise
            for group in broken:  # the error's peer is a rank of one group only
                group.break_between_calls(type(error)(f"{product}: {error}") if ours else error)
            if isinstance(error, TpkernelsError):
                raise type(error)(f"{product}: {error}", peer=error.peer) from error
            raise


def machine_of(mesh: DeviceMesh) -> Profile:
    """Return the machine that the ranks of a mesh have agreed on; before that, and on a rank
    outside the mesh, this rank's machine. Local."""
    agreed = None if mesh.get_coordinate() is None else Agreement.on(mesh).machine
    return agreed or machine_here(mesh.device_type, mesh.size())[1]
