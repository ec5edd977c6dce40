"""Process groups as the ops see them: who is in them, and the workspace they share.

The registry below is the package's only mutable module state.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group

from tpkernels.errors import CollectiveTimeoutError, GroupBrokenError, TpkernelsError
from tpkernels.symm.host import HostWorkspace
from tpkernels.symm.reach import share_a_host
from tpkernels.symm.rendezvous import Member
from tpkernels.symm.waiter import Waiter

GroupLike: TypeAlias = str | dist.ProcessGroup | DeviceMesh | tuple[DeviceMesh, int | str]

DEFAULT_TIMEOUT = 30.0
DEFAULT_WORKSPACE_BYTES = 32 << 20


class Group:
    """A process group with its workspace. Calls on it are ordered by ``lock``."""

    def __init__(self, pg: dist.ProcessGroup) -> None:
        # Not ours to keep alive: a destroyed process group takes its workspace with it.
        self._pg = weakref.ref(pg, self._forget)
        self.name: str = pg.group_name
        self.rank: int = pg.rank()
        self.world: int = pg.size()
        self.timeout = DEFAULT_TIMEOUT
        self._workspace_bytes = DEFAULT_WORKSPACE_BYTES
        self.workspace: HostWorkspace | None = None
        self.calls: dict[Hashable, Any] = {}  # checked and planned calls, by their arguments
        self.lock = threading.RLock()
        self.waiter = Waiter()
        self._ready = False
        self._broken: str | None = None
        self._no_gpu_kernels: dict[tuple[torch.device, str], str | None] = {}

    @property
    def pg(self) -> dist.ProcessGroup:
        """The process group; alive as long as it is registered with torch."""
        pg = self._pg()
        if pg is None:
            raise GroupBrokenError(f"process group '{self.name}' has been destroyed")
        return pg

    def _forget(self, _: object) -> None:
        self.close()
        if _groups.get(self.name) is self:
            del _groups[self.name]

    def ready(self) -> Group:
        """Makes the workspace at the first call; collective then."""
        if not self._ready:
            self.init(DEFAULT_TIMEOUT, DEFAULT_WORKSPACE_BYTES)
        return self

    @property
    def shared_memory(self) -> bool:
        """Whether all ranks map each other's memory."""
        return self.workspace is not None

    def by_gloo(self, device: str) -> bool:
        """Whether gloo, which moves the host's memory, has the group's tensors of a device type."""
        return self.pg._get_backend(torch.device(device)).name() == "gloo"

    def init(self, timeout: float, workspace_bytes: int) -> None:
        """See ``tpkernels.init``."""
        with self.lock:
            self.check_usable()
            if self._ready:
                if (timeout, workspace_bytes) == (self.timeout, self._workspace_bytes):
                    return
                raise ValueError(
                    f"group '{self.name}' is in use with timeout={self.timeout:g}, "
                    f"workspace_bytes={self._workspace_bytes}; it cannot change to {timeout:g}, "
                    f"{workspace_bytes}"
                )
            member = Member(self.pg.get_group_store(), self.name, self.rank, self.world, timeout)
            try:
                if self.world == 1 or self._one_host(member, workspace_bytes):
                    self.workspace = HostWorkspace(member, workspace_bytes)
            except (ValueError, MemoryError):  # on all ranks alike: they may try again
                raise
            except BaseException as error:
                self.leave(error)
                raise
            self.timeout, self._workspace_bytes = timeout, workspace_bytes
            self._ready = True

    def _one_host(self, member: Member, workspace_bytes: int) -> bool:
        """Agrees with the other ranks on the options, and on whether all can share memory."""
        options = {"timeout": member.timeout, "workspace_bytes": workspace_bytes}
        one_host, said = share_a_host(member, {"options": options})
        for rank, other in enumerate(said):
            if other["options"] != options:
                raise ValueError(
                    f"tpkernels.init of group '{self.name}': rank {self.rank} gives {options}, "
                    f"rank {rank} gives {other['options']}; all ranks must give the same"
                )
        return one_host

    def no_gpu_kernels(self, device: torch.device, kernels: str, own: str | None) -> str | None:
        """Why kernels of a kind, Triton or CUDA, cannot run on the ranks' GPUs, this rank's being
        ``device``; None: they can. ``own`` is what this rank knows already. The ranks find out
        together, at the first call, by trying: collective."""
        if self.workspace is None:
            return own
        key = device, kernels
        if key not in self._no_gpu_kernels:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"group '{self.name}' has run no {kernels} kernels yet: call the op once "
                    "before the capture of a graph"
                )
            with self.lock:
                self.check_usable()
                try:
                    self.workspace.open_cuda(device, kernels, own)
                    self._no_gpu_kernels[key] = None
                except NotImplementedError as obstacle:
                    self._no_gpu_kernels[key] = f"does not run here: {obstacle}"
                except BaseException as error:
                    self.leave(error)
                    raise
        return self._no_gpu_kernels[key]

    def leave(self, error: BaseException) -> None:
        """This rank left a call with ``error``: peers that wait for it are told, and no further
        call can run."""
        self._broken = f"{type(error).__name__}: {error}".removesuffix(": ")
        if self.workspace is not None:
            peer = error.peer if isinstance(error, TpkernelsError) else None
            late = isinstance(error, CollectiveTimeoutError)
            self.workspace.abandon(self._broken, late, -1 if peer is None else peer)

    def check_usable(self) -> None:
        """Raises ``GroupBrokenError`` after a failure."""
        if self._broken is not None:
            raise GroupBrokenError(
                f"group '{self.name}' is broken and can run no more calls; make a new group. "
                f"It broke with: {self._broken}"
            )

    def close(self) -> None:
        """Gives the workspace back."""
        self.waiter.close()
        if self.workspace is not None:
            self.workspace.close()
            self.workspace = None


_groups: dict[str, Group] = {}
_registry_lock = threading.Lock()


def name_of(group: GroupLike) -> str:
    """The name of a process group, given as one, as a mesh dimension, or by name.

    Raises:
        TypeError: ``group`` is none of these.
        ValueError: this rank is not in it, or a mesh has several dims and none was named.
    """
    given: Any = group
    if isinstance(given, str):
        return given
    if isinstance(given, dist.ProcessGroup):
        return given.group_name
    if isinstance(given, DeviceMesh):
        if given.ndim != 1:
            raise ValueError(
                f"a mesh of {given.ndim} dims {given.mesh_dim_names or ''} names no single group; "
                "pass (mesh, dim)"
            )
        return given.get_group().group_name
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], DeviceMesh):
        return given[0].get_group(given[1]).group_name
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"rank {dist.get_rank()} of the world is not in this group")
    raise TypeError(
        "group must be a ProcessGroup, a DeviceMesh, (DeviceMesh, dim) or a group's name, "
        f"not {type(given).__name__}"
    )


def get(name: str) -> Group:
    """The group of that name.

    Raises:
        ValueError: there is none on this rank.
    """
    try:
        pg = _resolve_process_group(cast(Any, name))  # a NewType of str in newer torch
    except Exception as error:
        raise ValueError(
            f"no process group '{name}' on this rank; it was not made, was destroyed, or this rank "
            "is not in it"
        ) from error
    group = _groups.get(name)
    if group is None or group.pg is not pg:
        with _registry_lock:
            group = _groups.get(name)
            if group is None or group.pg is not pg:
                if group is not None:
                    group.close()
                group = _groups[name] = Group(pg)
    return group


def init(
    group: GroupLike | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    workspace_bytes: int | None = None,
) -> None:
    """Sets a group up for the ops. Optional: the first op does it with the defaults. Collective.

    Args:
        group: the process group; None for the default one.
        timeout: seconds that one wait for a peer may take before ``CollectiveTimeoutError``.
        workspace_bytes: size of one of the two data buffers that each rank shares; default 32 MiB.
            Larger calls run in several steps.

    Raises:
        ValueError: an argument is out of range, differs between ranks, or the group is in use with
            others.
        MemoryError: the shared memory does not fit.
    """
    if not 0 < timeout <= 86400:
        raise ValueError(f"timeout must be in (0, 86400] seconds, not {timeout}")
    nbytes = DEFAULT_WORKSPACE_BYTES if workspace_bytes is None else workspace_bytes
    if nbytes < 1 << 16:
        raise ValueError(f"workspace_bytes must be at least 65536, not {nbytes}")
    if nbytes > 1 << 56:  # sizes of whole arenas must fit 64 bits
        raise ValueError(f"workspace_bytes must be at most {1 << 56}, not {nbytes}")
    if group is None:
        if not dist.is_initialized():
            raise ValueError("no default process group: call torch.distributed.init_process_group")
        group = dist.group.WORLD
        assert group is not None  # for the type checker: initialised above
    get(name_of(group)).init(float(timeout), int(nbytes))


def empty(*shape: int, dtype: torch.dtype = torch.float32, group: GroupLike) -> torch.Tensor:
    """A symmetric tensor: like ``torch.empty`` (zero-filled here), but in memory that all ranks of
    ``group`` map. An op that finds its input in one skips the copy into its workspace: peers read
    it in place, and the op returns when they have. Collective: all ranks give the same shape and
    dtype, and keep the tensor while any rank passes its own to an op.

    Raises:
        NotImplementedError: the ranks share no memory.
        CollectiveMismatchError, CollectiveTimeoutError, PeerLostError, MemoryError.
    """
    if any(size < 0 for size in shape):
        raise ValueError(f"shape {list(shape)} has a negative size")
    own = get(name_of(group)).ready()
    with own.lock:
        own.check_usable()
        if own.workspace is None:
            raise NotImplementedError(
                f"symmetric tensors need memory shared by all ranks; group '{own.name}' spans hosts"
            )
        try:
            return own.workspace.make_symmetric(tuple(shape), dtype)
        except MemoryError:  # on all ranks alike: the group goes on
            raise
        except BaseException as error:
            own.leave(error)
            raise


def finalize() -> None:
    """Gives back the workspaces of all groups. Also happens when the process ends."""
    with _registry_lock:
        for group in _groups.values():
            group.close()
        _groups.clear()
