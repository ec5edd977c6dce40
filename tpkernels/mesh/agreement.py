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
from typing import Generic, TypeVar

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

T = TypeVar("T")


class Known(Generic[T]):
    """What has been planned on a mesh, for the products that its ranks agreed on last. Using one
    does not count: ranks may use them in different orders, and must forget the same ones."""

    def __init__(self, history: History) -> None:
        self._planned: dict[Hashable, T] = {}
        self.history = history

    def get(self, product: Hashable) -> T | None:
        return self._planned.get(product)

    def add(self, product: Hashable, planned: T) -> T:
        self._planned[product] = planned
        if len(self._planned) > _MOST_KNOWN:
            del self._planned[next(iter(self._planned))]
        return planned


def known_on(mesh: DeviceMesh) -> Known[T]:
    """Return the products that the ranks of a mesh know. They are kept by the group of its last
    dim, and without the mesh, which may keep that group's process group alive."""
    by_mesh = _last_group(mesh).on_meshes
    key = mesh.shape, hash(mesh)
    known = by_mesh.get(key)
    if known is not None:
        return known
    names = tuple(group.name for group in _groups(mesh))
    return by_mesh.setdefault(key, Known(History(names, mesh_text(mesh))))


def disagreement(product: str, mesh: DeviceMesh) -> CollectiveMismatchError | None:
    """Return what all ranks of a mesh raise if they differ in the product, described as text.
    Nothing else has been sent then, and the groups can go on. Collective.

    Raises:
        PeerLostError, CollectiveTimeoutError, CollectiveMismatchError, GroupBrokenError.
    """
    lowest = highest = zlib.crc32(product.encode())
    products = {str(dist.get_rank()): product}
    try:
        ready = [group.ready(mesh.device_type) for group in _groups(mesh)]
        for group in ready:
            bounds = group.numbers_of_all(_NEW_PRODUCT, (lowest, highest), mesh.device_type)
            lowest, highest = min(low for low, _ in bounds), max(high for _, high in bounds)
        if lowest == highest:
            return None
        for group in ready:
            for statement in group.statements(_DIFFERENT, products, mesh.device_type):
                products |= statement
    except TpkernelsError as error:
        raise type(error)(f"{product}: {error}", peer=error.peer) from error
    return _mismatch({int(rank): text for rank, text in products.items()}, product)


@contextlib.contextmanager
def in_step(mesh: DeviceMesh) -> Iterator[None]:
    """Run a product. An error in it marks all groups of the mesh broken: this rank will not take
    part in the rest of the product."""
    try:
        yield
    except CaptureError:  # nothing has been queued: the groups can go on
        raise
    except BaseException as error:
        # The peer is a rank of one group only.
        without_peer = type(error)(str(error)) if isinstance(error, TpkernelsError) else error
        for group in _groups(mesh):
            group.break_between_calls(without_peer)
        raise


def mesh_text(mesh: DeviceMesh) -> str:
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


def _groups(mesh: DeviceMesh) -> Iterator[Group]:
    """Yield this rank's groups of several ranks."""
    for dim, size in enumerate(mesh.shape):
        if size > 1:
            yield groups.get(groups.name_of((mesh, dim)))


def _last_group(mesh: DeviceMesh) -> Group:
    return groups.get(groups.name_of((mesh, mesh.ndim - 1)))


def agreed_machine(mesh: DeviceMesh) -> Profile:
    """Return the machine of the mesh's first rank. Collective at the first call on a mesh."""
    text = _known(mesh)
    if text is None:
        for dim in range(mesh.ndim):
            group = groups.get(groups.name_of((mesh, dim))).ready(mesh.device_type)
            text = group.from_rank_0(
                _purpose(mesh, dim),
                lambda before=text: before or _own(mesh),  # type: ignore[misc]
            )
        assert text is not None  # a mesh has a dim
    return profile_in(text)


def known_machine(mesh: DeviceMesh) -> Profile:
    """Return what `agreed_machine` has returned on a mesh; before that, and on a rank outside the
    mesh, this rank's machine. Local."""
    text = _known(mesh) if mesh.get_coordinate() is not None else None
    return profile_in(_own(mesh) if text is None else text)


def _known(mesh: DeviceMesh) -> str | None:
    """Return what the ranks have agreed on: the group of the last dim is the last to know."""
    return _last_group(mesh).known_from_rank_0(_purpose(mesh, mesh.ndim - 1))


def _own(mesh: DeviceMesh) -> str:
    return profile_text(own_machine(mesh.device_type, mesh.size())[1])


@functools.lru_cache(maxsize=256)
def _purpose(mesh: DeviceMesh, dim: int) -> str:
    """Name an exchange, equally for equal meshes."""
    return f"the first product on the {mesh.device_type} mesh {mesh.mesh.tolist()}, dim {dim}"
