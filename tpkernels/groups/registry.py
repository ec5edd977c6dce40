"""Process groups by name, and the functions that take one.

The registry below is the package's only mutable module state.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import weakref
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from tpkernels import defaults
from tpkernels.groups.group import Group

GroupLike: TypeAlias = str | dist.ProcessGroup | DeviceMesh | tuple[DeviceMesh, int | str]

_groups: dict[str, Group] = {}
_registry_lock = threading.Lock()
# Process groups that were made before this process was forked off, and the process that made them.
_inherited: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def _forget(group: Group, registry: dict[str, Group] = _groups) -> None:
    """Its process group is gone. That may be when this module's names have gone, too."""
    if registry.get(group.name) is group:
        del registry[group.name]
        group.close()


def _after_fork() -> None:
    """In the child: the parent's groups are not its own."""
    # As the standard library's modules do: a thread that was not copied may hold it.
    _registry_lock._at_fork_reinit()  # type: ignore[attr-defined]
    for pg in list(distributed_c10d._world.pg_map):
        if pg not in _inherited:
            _inherited[pg] = os.getppid()
            # Never freed: gloo's destructor would wait for the parent's threads, for ever.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(pg))
    for group in list(_groups.values()):
        group.disown(os.getppid())


os.register_at_fork(after_in_child=_after_fork)


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
    given: Any = name  # a NewType of str in newer torch
    try:
        pg = distributed_c10d._resolve_process_group(given)
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
                group = Group(pg, _forget)
                if pg in _inherited:
                    group.disown(_inherited[pg])
                _groups[name] = group
    return group


def init(
    group: GroupLike | None = None,
    timeout: float = defaults.TIMEOUT,
    workspace_bytes: int | None = None,
) -> None:
    """Sets a group up for the ops. Optional: the first op does it with the defaults. Collective.

    Args:
        group: the process group; None for the default one.
        timeout: seconds that one wait for a peer may take before ``CollectiveTimeoutError``, which
            breaks the group. Choose it longer than any pause in which one rank works alone while
            the others wait in an op, such as writing a checkpoint on rank 0.
        workspace_bytes: what each of the two data buffers that a rank shares may grow to; default
            64 MiB. They start at 1 MiB and grow when a call can use more. Larger calls run in
            several steps.

    Raises:
        ValueError: an argument is out of range, differs between ranks, or the group is in use with
            others.
        MemoryError: the shared memory does not fit.
    """
    if not 0 < timeout <= 86400:
        raise ValueError(f"timeout must be in (0, 86400] seconds, not {timeout}")
    nbytes = defaults.WORKSPACE_BYTES if workspace_bytes is None else workspace_bytes
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
    return get(name_of(group)).ready().make_symmetric(tuple(shape), dtype)


def finalize() -> None:
    """Gives back the workspaces of all groups. Also happens when the process ends.

    Raises:
        RuntimeError: it is called within a call, by a signal handler.
    """
    with _registry_lock:
        for group in _groups.values():
            if group.within_call():
                raise RuntimeError(
                    f"group '{group.name}' is in a call on this thread: a signal handler, or a "
                    "callback, cannot finalize within a call"
                )
        for group in _groups.values():
            group.close(wait=True)
        _groups.clear()


# What the process has goes with it, and its end tells the peers. Without this, what is left of the
# groups would be taken apart among modules that have no names any more.
atexit.register(_groups.clear)
