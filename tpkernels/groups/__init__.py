"""The registry of groups by name, and the public functions that take a group.

`_groups`, `_inherited` and `_in_order` are the only module state here that changes.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import threading
import weakref
from collections.abc import Iterator
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.errors import HARMLESS, TpkernelsError
from tpkernels.groups.group import Group
from tpkernels.planning.table import Table
from tpkernels.torch_private import (
    REGISTERED_GROUPS,
    assume_constant_result,
    flattened_mesh,
    group_made_for,
    resolve_process_group,
)

GroupLike: TypeAlias = str | dist.ProcessGroup | DeviceMesh | tuple[DeviceMesh, int | str]

_groups: dict[str, Group] = {}
_registry_lock = threading.RLock()  # a signal handler may need it where its thread has it
# Process groups that were made before this process was forked off, and the process that made them.
_inherited: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
# The dims of a mesh, as they were given, whose ranks have the order of their process groups.
_in_order: weakref.WeakKeyDictionary[DeviceMesh, set[int | str | None]] = (
    weakref.WeakKeyDictionary()
)


def _forget(
    group: Group, by: str = "the end of its process group", registry: dict[str, Group] = _groups
) -> None:
    """Unregister a group and close it. ``registry`` is an argument because this may run at
    interpreter shutdown, when module globals are gone."""
    if registry.get(group.name) is group:
        registry.pop(group.name, None)
        group.retire()
        group.close(by)


def _after_fork() -> None:
    """Disown the parent's groups, in the child of a fork."""
    # As the standard library's modules do: a thread that was not copied may hold it.
    _registry_lock._at_fork_reinit()  # type: ignore[attr-defined]
    registered = [group._pg() for group in _groups.values()]  # also where torch has destroyed it
    for pg in [*REGISTERED_GROUPS, *registered]:
        if pg is not None and pg not in _inherited:
            _inherited[pg] = os.getppid()
            # Never freed: gloo's destructor would wait for the parent's threads, for ever.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(pg))
    for group in list(_groups.values()):
        group.disown(os.getppid())


os.register_at_fork(after_in_child=_after_fork)


def name_of(group: GroupLike) -> str:
    """Return the name of a process group, given as one, as a mesh dimension, or by name.

    Raises:
        TypeError: ``group`` is none of these.
        ValueError: this rank is not in it, it was destroyed, or a mesh has several dims and none
            was named.
        NotImplementedError: the ranks along a mesh dim have another order than its process groups.
    """
    given: object = group
    if isinstance(given, str):
        return given
    if isinstance(given, dist.ProcessGroup):
        if is_dynamo_compiling() or given in REGISTERED_GROUPS:
            return given.group_name
        return _name_of_present(given)
    if isinstance(given, DeviceMesh):
        if given.ndim != 1:
            raise ValueError(
                f"group is a mesh with {given.ndim} dims {given.mesh_dim_names or ''}; pass "
                "(mesh, dim) to select one of them"
            )
        return _name_of_present(_group_of_mesh(given, None))
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], DeviceMesh):
        return _name_of_present(_group_of_mesh(*given))
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"global rank {dist.get_rank()} is not in this group")
    raise TypeError(
        "group must be a ProcessGroup, a DeviceMesh, (DeviceMesh, dim) or the name of a group, "
        f"not {type(given).__name__}"
    )


def _name_of_present(pg: dist.ProcessGroup) -> str:
    """Return the name of a process group. Raise ``ValueError`` if it was destroyed: a later group
    may have its name now."""
    name: str = pg.group_name
    if is_dynamo_compiling() or pg in REGISTERED_GROUPS or _resolved(name) is pg:
        return name
    raise ValueError(
        f"process group '{name}' was destroyed on this rank; pass a group that was created after "
        "the last init_process_group, and recreate meshes and layers"
    )


def _group_of_mesh(mesh: DeviceMesh, dim: int | str | None) -> dist.ProcessGroup:
    """Return the process group that a mesh dim was created with. ``get_group`` looks it up by name
    and may return a later group of that name."""
    found = mesh.get_group(dim)
    _check_order(mesh, dim)
    return found if is_dynamo_compiling() else group_made_for(mesh, found)


@assume_constant_result
def _check_order(mesh: DeviceMesh, dim: int | str | None) -> None:
    """Raise ``NotImplementedError``, on all ranks of the mesh alike, if its ranks along a dim have
    another order than their process group, in which the ops gather and scatter."""
    checked = _in_order.setdefault(mesh, set())
    if dim in checked:
        return
    names, own = mesh.mesh_dim_names or (), dist.get_process_group_ranks(mesh.get_group(dim))
    if isinstance(dim, str) and dim not in names:
        mesh, number = flattened_mesh(mesh, dim), 0
    else:
        number = names.index(dim) if isinstance(dim, str) else dim or 0
    for line in mesh.mesh.movedim(number, -1).reshape(-1, len(own)).tolist():
        order = own if set(line) == set(own) else sorted(line)
        if line != order:
            raise NotImplementedError(
                f"mesh dim {dim or number!r} has ranks {line}, but the order in their process "
                f"group is {order}, and shards follow the group; create a mesh whose ranks ascend "
                "along this dim, or pass mesh.get_group(dim) to use the order of the group"
            )
    checked.add(dim)


def _resolved(name: str) -> dist.ProcessGroup | None:
    """Return the process group that has a name now."""
    try:
        return resolve_process_group(name)
    except Exception:
        return None


def get(name: str) -> Group:
    """Return the group of that name.

    Raises:
        ValueError: there is none on this rank.
    """
    try:
        pg = resolve_process_group(name)
    except Exception as error:
        raise ValueError(
            f"process group '{name}' does not exist on this rank; it was not created, was "
            "destroyed, or does not contain this rank"
        ) from error
    group = _groups.get(name)
    if group is None or group.pg is not pg:
        with _registry_lock:
            group = _groups.get(name)
            if group is not None and group.pg is not pg:
                _forget(group)
                group = None
            if group is None:
                group = Group(pg, _forget)
                if pg in _inherited:
                    group.disown(_inherited[pg])
                group = _groups.setdefault(name, group)  # a signal handler may have been first
                group.admit(name, weakref.ref(pg))
    return group


def known_times(device: str) -> dict[str, Table]:
    """Return the measured times that groups have for a device type, by the group's name."""
    return {
        name: group.measured.tables[device]
        for name, group in list(_groups.items())
        if device in group.measured.tables
    }


def ranks_and_sizes() -> list[tuple[str, int, int]]:
    """Return the groups that the ops have used, each with this rank and the number of ranks."""
    return sorted((name, group.rank, group.world) for name, group in list(_groups.items()))


def autotuned_groups() -> list[str]:
    """Return the names of the groups for which `autotune` is on."""
    return sorted(
        name for name, group in list(_groups.items()) if group.measured.tuning is not None
    )


# Errors that an op raises before anything is sent, from its own checks or torch's. Signal handlers
# may raise these too: within a call, and while waiting, any error breaks the group.
_RAISED_BEFORE_SENDING = (
    ValueError,
    TypeError,
    RuntimeError,
    AttributeError,
    LookupError,
    MemoryError,
    Warning,
)


def break_if_interrupted(group: GroupLike | None, error: BaseException) -> None:
    """Break the group if an op was interrupted, that is, ended by an error that can come at any
    time, such as Ctrl-C. This rank may not have made the call; if it has, it still lacks the
    result. `csrc/calls/kernel.h` calls this, too."""
    # Activation checkpointing ends a recomputation by an error of its own, behind the last call.
    recomputed = type(error).__module__ == "torch.utils.checkpoint"
    if group is not None and not recomputed and not isinstance(error, _RAISED_BEFORE_SENDING):
        with contextlib.suppress(Exception):
            get(name_of(group)).break_between_calls(error)


def break_on_error(name: str | None, error: BaseException) -> None:
    """Break the named group, and tell its peers, because this rank met an error before or between
    calls and is out of step. Not for the errors of a call, which has seen to that."""
    if name is not None and not isinstance(error, (TpkernelsError, *HARMLESS)):
        get(name).break_between_calls(error)


@contextlib.contextmanager
def breaking_on_error(name: str | None) -> Iterator[None]:
    """Do what `break_on_error` says if the block raises."""
    try:
        yield
    except BaseException as error:
        break_on_error(name, error)
        raise


def named_or_default(group: GroupLike | None) -> Group:
    """Return the group; None: that of the default process group."""
    if group is None:
        if not dist.is_initialized():
            raise ValueError(
                "the default process group does not exist; call "
                "torch.distributed.init_process_group"
            )
        group = dist.group.WORLD
        assert group is not None  # for the type checker: initialised above
    return get(name_of(group))


def check(group: GroupLike | None = None) -> None:
    """Raise the error if a group has failed. Not collective: it sends nothing.

    On GPUs a call only queues its work, and a failure there turns the results into NaN. The next
    call of the group raises it; this function does so before the optimizer steps with them. It
    waits until the queued calls of the group have run, as ``torch.cuda.synchronize`` would, so
    call it once a step and not after every op. Replays of a graph are not waited for: synchronise
    their stream first. While a graph is captured nothing is waited for.

    Args:
        group: the process group; None for the default one.

    Raises:
        CollectiveTimeoutError, CollectiveMismatchError: a kernel on a GPU failed.
        PeerLostError: a peer's process has ended, or it left a call. Between ranks that share no
            memory, calls find this, not this function.
        GroupBrokenError: the group has failed before.
    """
    named_or_default(group).check()


def empty(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    group: GroupLike,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Make a symmetric tensor, filled with zeros, in memory that all ranks of ``group`` map.

    An op that finds its input in one skips the copy into its workspace: peers read it in place, and
    the op returns when they have. Collective: all ranks give the same shape and dtype, and keep the
    tensor while any rank passes its own to an op.

    On a GPU (``device="cuda"``) an ``all_gather_matmul`` finds it where copy engines move the
    input: by `pipelined`, and by `fused` for large shards. Either all ranks pass the same whole
    tensor or none passes one; otherwise a ``CollectiveMismatchError`` is raised. A part of one
    counts as an ordinary tensor and is copied.

    Raises:
        NotImplementedError: the ranks, or their GPUs, share no memory.
        CaptureError: on a GPU, in a capture.
        CollectiveMismatchError, CollectiveTimeoutError, PeerLostError, MemoryError.
    """
    if any(size < 0 for size in shape):
        raise ValueError(f"shape {list(shape)} has a negative size")
    on = torch.device(device)
    if on.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"device is {on}; a symmetric tensor can be on cpu or cuda")
    ready = get(name_of(group)).ready(on.type)
    tensor = ready.make_symmetric(tuple(shape), dtype, None if on.type == "cpu" else on)
    ready.warn()
    return tensor


def finalize() -> None:
    """Free the workspaces of all groups, waiting for calls that other threads have under way. Also
    happens when the process ends. Kernels that are queued on GPUs have 5 s to end, then they stop
    waiting for peers. Memory that a captured graph uses is kept.

    Raises:
        RuntimeError: it is called within a call, by a signal handler.
    """
    present = list(_groups.values())
    for group in present:
        if group.within_call():
            raise RuntimeError(
                f"group '{group.name}' is in a call on this thread; a signal handler or callback "
                "cannot call tpkernels.finalize during a call"
            )
    # No lock of the registry is held meanwhile: a signal handler may call this, too. An interrupt
    # leaves the groups that remain as they were.
    for group in present:
        with group.lock:
            _forget(group, by="tpkernels.finalize")


def _at_exit(registry: dict[str, Group] = _groups) -> None:
    """Release waiting kernels and unregister all groups, without closing them: the system frees the
    memory, and the process's end tells the peers. Otherwise the groups would be destroyed during
    interpreter shutdown, when module globals are gone."""
    for group in list(registry.values()):
        group.leave()
    registry.clear()


atexit.register(_at_exit)
