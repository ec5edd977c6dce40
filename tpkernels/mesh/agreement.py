"""Handshake of the ranks of a mesh before a new sharded matmul.

Problem: all ranks must run the same matmul, and plan it with the rates of the same machine. The ops
compare the signatures of their calls at the first wait. For a new matmul that is not enough:

- Different matmuls may consist of equal op calls: rank 0 gathers w while rank 1 gathers the result.
  Their data would mix.
- Different matmuls may communicate in different groups. Each group would wait until its timeout.
- A matmul without communication would return without an error.

Algorithm: a new matmul is compared before any data is sent.

1. Each rank describes its matmul as text, and takes the rates that the mesh has agreed on before.
   In the first handshake it reads the rates of the local machine.
2. For each mesh dim in order, the ranks of the group exchange their rates and the matmuls they have
   received so far. Each rank merges the matmuls, and adopts the rates of the first rank of the
   group.
3. After the last mesh dim, each rank holds the matmuls of all ranks of the mesh, and the rates of
   the rank at coordinates 0.
4. If the matmuls differ, all ranks raise the same error.
5. Otherwise each rank plans the matmul with these rates, and caches it.

A cached matmul skips the handshake. If ranks then run different cached matmuls, only the op
signatures reveal it.

Invariant 1 (identical caches): all ranks of a mesh cache and evict the same matmuls, because only
handshakes change the cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tpkernels import groups
from tpkernels.errors import RECOVERABLE, CaptureError, CollectiveMismatchError, TpkernelsError
from tpkernels.groups.group import Group
from tpkernels.planning.cost import Profile
from tpkernels.planning.store import load_local_profile, profile_from_json, profile_to_json

_MAX_CACHED = 1024  # matmuls per mesh


class Agreement:
    """Matmuls and profile that the ranks of a mesh have agreed on.

    Holds no reference to the mesh: the mesh may keep the process group alive, and the group stores
    the agreement.

    Attributes:
        names: names of the local groups, one per mesh dim.
    """

    def __init__(self, mesh: DeviceMesh, names: tuple[str, ...]) -> None:
        self.names, self.device, self._shape = names, mesh.device_type, tuple(mesh.shape)
        self.mesh_description = f"the {mesh.device_type} mesh {mesh.mesh.tolist()}"
        self.executors: dict[Hashable, Any] = {}  #: cache, evicted in insertion order
        self.profile: Profile | None = None

    @classmethod
    def for_mesh(cls, mesh: DeviceMesh) -> Agreement:
        """Return the agreement of a mesh. Equal meshes may have different groups."""
        names = tuple(groups.group_name((mesh, dim)) for dim in range(mesh.ndim))
        agreements, key = groups.get(names[-1]).mesh_agreements, (names, hash(mesh))
        agreement: Agreement | None = agreements.get(key)
        return agreement or agreements.setdefault(key, cls(mesh, names))

    def _groups(self) -> list[Group]:
        """Return the local groups with more than one rank."""
        sizes = zip(self.names, self._shape, strict=True)
        return [groups.get(name) for name, size in sizes if size > 1]

    def add(self, key: Hashable, executor: object) -> None:
        """Cache a matmul, and evict the oldest matmul if the cache is full."""
        self.executors[key] = executor
        if len(self.executors) > _MAX_CACHED:
            del self.executors[next(iter(self.executors))]

    def compare(self, matmul: str, profile: Profile) -> None:
        """Compare a new matmul over the ranks of the mesh, and agree on a profile. Collective.

        Raises:
            CollectiveMismatchError: the ranks run different matmuls. All ranks raise it. No data
                was sent, and the groups remain usable.
            PeerLostError, CollectiveTimeoutError, GroupBrokenError.
        """
        rates, ranks_by_matmul = profile_to_json(profile), {matmul: [dist.get_rank()]}
        with self.break_on_error(matmul):
            for group in [group.ready(self.device) for group in self._groups()]:
                message = [rates, ranks_by_matmul]
                messages = group.lock_and_exchange("a new sharded_matmul", message, self.device)
                rates, ranks_by_matmul = messages[0][0], {}
                for _, peer_matmuls in messages:
                    for description, ranks in peer_matmuls.items():
                        ranks_by_matmul.setdefault(description, []).extend(ranks)
            self.profile = profile_from_json(rates)
        if len(ranks_by_matmul) > 1:
            calls = sorted(
                (sorted(ranks), description) for description, ranks in ranks_by_matmul.items()
            )
            raise CollectiveMismatchError(
                "the ranks are in different calls: "
                + "; ".join(
                    f"global ranks {ranks} in {description}" for ranks, description in calls
                )
                + ". No data was sent. Make the same call on all ranks.",
                peer=next(ranks[0] for ranks, description in calls if description != matmul),
            )

    @contextlib.contextmanager
    def break_on_error(self, matmul: str) -> Iterator[None]:
        """Break all groups of the mesh if the block raises, because this rank leaves the matmul.

        Two kinds of errors break no group: `CaptureError`, because no work was queued before it,
        and on a mesh with one group the errors that all its ranks raise.
        """
        try:
            yield
        except BaseException as error:
            groups_to_break, is_tpkernels_error = self._groups(), isinstance(error, TpkernelsError)
            if isinstance(error, RECOVERABLE) and (
                len(groups_to_break) == 1 or isinstance(error, CaptureError)
            ):
                raise
            for group in groups_to_break:  # error without ``peer``: that rank is in only one group
                group.break_between_calls(
                    type(error)(f"{matmul}: {error}") if is_tpkernels_error else error
                )
            if isinstance(error, TpkernelsError):
                raise type(error)(f"{matmul}: {error}", peer=error.peer) from error
            raise


def get_profile(mesh: DeviceMesh) -> Profile:
    """Return the profile that the ranks of a mesh have agreed on. Local.

    Before the first handshake, and on ranks outside the mesh, return the profile of the local
    machine.
    """
    agreed = None if mesh.get_coordinate() is None else Agreement.for_mesh(mesh).profile
    return agreed or load_local_profile(mesh.device_type, mesh.size())[1]
