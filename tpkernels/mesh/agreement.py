"""The machine by whose rates all ranks of a mesh plan: that of the mesh's first rank.

Sync: along each mesh dim in turn, a group takes what its first rank has. After the first dim all
ranks along it have the same, and so the first ranks of the groups of the second dim have that of
the rank whose coordinates are 0.
"""

from __future__ import annotations

import functools

from torch.distributed.device_mesh import DeviceMesh

from tpkernels import groups
from tpkernels.planning.machines import Profile, own_machine, parse, to_text


def agreed_machine(mesh: DeviceMesh) -> Profile:
    """The machine of the mesh's first rank. Collective at the first call on a mesh."""
    text = _known(mesh)
    if text is None:
        for dim in range(mesh.ndim):
            group = groups.get(groups.name_of((mesh, dim))).ready(mesh.device_type)
            text = group.from_rank_0(
                _purpose(mesh, dim),
                lambda before=text: before or _own(mesh),  # type: ignore[misc]
            )
        assert text is not None  # a mesh has a dim
    return parse(text)


def known_machine(mesh: DeviceMesh) -> Profile:
    """What `agreed_machine` has returned on a mesh; before that, and on a rank outside the mesh,
    this rank's machine. Local."""
    text = _known(mesh) if mesh.get_coordinate() is not None else None
    return parse(_own(mesh) if text is None else text)


def _known(mesh: DeviceMesh) -> str | None:
    """What the ranks have agreed on: the group of the last dim is the last to know."""
    last = mesh.ndim - 1
    group = groups.get(groups.name_of((mesh, last)))
    return group.known_from_rank_0(_purpose(mesh, last))


def _own(mesh: DeviceMesh) -> str:
    return to_text(own_machine(mesh.device_type, mesh.size())[1])


@functools.lru_cache(maxsize=256)
def _purpose(mesh: DeviceMesh, dim: int) -> str:
    """The same for equal meshes."""
    return f"the first product on the mesh {mesh.mesh.tolist()}, dim {dim}"
