"""The registry of groups by name, and public functions with a ``group`` argument.

`_groups`, `_backends`, `_inherited` and `_checked_dims` are the mutable state of this module.
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

from tpkernels.errors import RECOVERABLE, TpkernelsError
from tpkernels.groups.group import Backend, Group
from tpkernels.planning.table import Table
from tpkernels.torch_private import (
    REGISTERED_GROUPS,
    assume_constant_result,
    flattened_mesh,
    get_backend,
    original_mesh_group,
    resolve_process_group,
)

GroupLike: TypeAlias = str | dist.ProcessGroup | DeviceMesh | tuple[DeviceMesh, int | str]

_EXIT_SECONDS = 5.0  # limit of the wait for asynchronous collectives when the process ends
_groups: dict[str, Group] = {}
# The backends "tpkernels" (c10d/backend.py) by the name of their process group.
_backends: weakref.WeakValueDictionary[str, Backend] = weakref.WeakValueDictionary()
_registry_lock = threading.RLock()  # reentrant, for signal handlers
# In a fork: process groups of the parent, with its process id.
_inherited: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
# Per mesh, the dims (as passed) whose rank order was checked against their process groups.
_checked_dims: weakref.WeakKeyDictionary[DeviceMesh, set[int | str | None]] = (
    weakref.WeakKeyDictionary()
)


def _unregister(
    group: Group, cause: str = "the end of its process group", registry: dict[str, Group] = _groups
) -> None:
    """Unregister a group and close it. ``registry`` is an argument because this may run at
    interpreter shutdown, after module globals were deleted."""
    if registry.get(group.name) is group:
        registry.pop(group.name, None)
        group.unregister()
        group.close(cause)


def _after_fork() -> None:
    """Disown the groups of the parent, in the child of a fork."""
    # The holder may be a thread that was not copied. Standard library modules do the same.
    _registry_lock._at_fork_reinit()  # type: ignore[attr-defined]
    registered = [group._pg() for group in _groups.values()]  # includes groups that torch destroyed
    for pg in [*REGISTERED_GROUPS, *registered]:
        if pg is not None and pg not in _inherited:
            _inherited[pg] = os.getppid()
            # Never freed: the gloo destructor would wait forever for threads of the parent.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(pg))
    for group in list(_groups.values()):
        group.disown(os.getppid())


os.register_at_fork(after_in_child=_after_fork)


def group_name(group: GroupLike) -> str:
    """Return the name of a process group.

    Args:
        group: a ``ProcessGroup``, a one-dimensional ``DeviceMesh``, ``(mesh, dim)``, or a name.

    Raises:
        TypeError: ``group`` has a different type.
        ValueError: this rank is not in the group, the group was destroyed, or the mesh has several
            dims and no dim was selected.
        NotImplementedError: the rank order along a mesh dim differs from the order in its process
            group.
    """
    value: object = group
    if isinstance(value, str):
        return value
    if isinstance(value, dist.ProcessGroup):
        if is_dynamo_compiling() or value in REGISTERED_GROUPS:
            return value.group_name
        return _existing_group_name(value)
    if isinstance(value, DeviceMesh):
        if value.ndim != 1:
            raise ValueError(
                f"group is a mesh with {value.ndim} dims {value.mesh_dim_names or ''}; pass "
                "(mesh, dim) to select one of them"
            )
        return _existing_group_name(_get_mesh_group(value, None))
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], DeviceMesh):
        return _existing_group_name(_get_mesh_group(*value))
    if value is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"global rank {dist.get_rank()} is not in this group")
    raise TypeError(
        "group must be a ProcessGroup, a DeviceMesh, (DeviceMesh, dim) or the name of a group, "
        f"not {type(value).__name__}"
    )


def _existing_group_name(pg: dist.ProcessGroup) -> str:
    """Return the name of a process group. Raise ``ValueError`` if it was destroyed, because a later
    group may have the same name."""
    name: str = pg.group_name
    if is_dynamo_compiling() or pg in REGISTERED_GROUPS or _resolve_or_none(name) is pg:
        return name
    raise ValueError(
        f"process group '{name}' was destroyed on this rank; pass a group that was created after "
        "the last init_process_group, and recreate meshes and layers"
    )


def _get_mesh_group(mesh: DeviceMesh, dim: int | str | None) -> dist.ProcessGroup:
    """Return the process group that a mesh dim was created with. ``get_group`` looks it up by name
    and may return a later group with the same name."""
    pg = mesh.get_group(dim)
    _check_order(mesh, dim)
    return pg if is_dynamo_compiling() else original_mesh_group(mesh, pg)


@assume_constant_result
def _check_order(mesh: DeviceMesh, dim: int | str | None) -> None:
    """Raise ``NotImplementedError``, on all ranks of the mesh, if the rank order along a dim
    differs from the process group. The ops gather and scatter in the order of the process group."""
    checked = _checked_dims.setdefault(mesh, set())
    if dim in checked:
        return
    names, group_ranks = (
        mesh.mesh_dim_names or (),
        dist.get_process_group_ranks(mesh.get_group(dim)),
    )
    if isinstance(dim, str) and dim not in names:
        mesh, number = flattened_mesh(mesh, dim), 0
    else:
        number = names.index(dim) if isinstance(dim, str) else dim or 0
    for line in mesh.mesh.movedim(number, -1).reshape(-1, len(group_ranks)).tolist():
        order = group_ranks if set(line) == set(group_ranks) else sorted(line)
        if line != order:
            raise NotImplementedError(
                f"mesh dim {dim or number!r} has ranks {line}, but the order in their process "
                f"group is {order}, and shards follow the group; create a mesh whose ranks ascend "
                "along this dim, or pass mesh.get_group(dim) to use the order of the group"
            )
    checked.add(dim)


def _resolve_or_none(name: str) -> dist.ProcessGroup | None:
    """Return the current process group of that name, or None."""
    try:
        return resolve_process_group(name)
    except Exception:
        return None


def get(name: str) -> Group:
    """Return the group of that name. Creates it at the first use.

    Raises:
        ValueError: this rank has no process group of that name.
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
                _unregister(group)
                group = None
            if group is None:
                group = Group(pg, _unregister, _find_backend(pg, name))
                if pg in _inherited:
                    group.disown(_inherited[pg])
                group = _groups.setdefault(name, group)  # a signal handler may have set it
                group.register_group(name, weakref.ref(pg))
    return group


def register_backend(backend: Backend) -> None:
    """Register the backend of a process group that torch is creating."""
    _backends[backend.name] = backend


def unregister_backend(backend: Backend) -> None:
    """Unregister the backend of a process group that torch destroys. A later process group may
    have its name."""
    if _backends.get(backend.name) is backend:
        del _backends[backend.name]


def _find_backend(pg: dist.ProcessGroup, name: str) -> Backend | None:
    """Return the backend "tpkernels" of a process group, or None if its CPU tensors use a different
    backend."""
    backend = _backends.get(name)
    if backend is None or getattr(pg, "backend", None) is backend:  # a PythonGroup
        return backend
    cpu_backend = get_backend(pg, "cpu")
    return backend if cpu_backend is not None and cpu_backend.name() == "tpkernels" else None


def timing_tables(device: str) -> dict[str, Table]:
    """Return the timing tables for a device type by group name."""
    return {
        name: group.planner_inputs.tables[device]
        for name, group in list(_groups.items())
        if device in group.planner_inputs.tables
    }


def ranks_and_sizes() -> list[tuple[str, int, int]]:
    """Return (name, rank, world size) of each group that the ops have used."""
    return sorted((name, group.rank, group.world) for name, group in list(_groups.items()))


def autotuned_groups() -> list[str]:
    """Return the names of the groups for which `autotune` is on."""
    return sorted(
        name for name, group in list(_groups.items()) if group.planner_inputs.tuning is not None
    )


# Errors of argument checks, in the ops or in torch. They are raised before a rank sends data, so
# they do not break the group. If a signal handler raises one during a call or a wait, the group is
# broken there.
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
    """Break the group if an asynchronous error such as Ctrl-C interrupted an op. This rank then has
    either not run the call or lost its result. Also called from `csrc/calls/kernel.h`."""
    # Activation checkpointing ends a recomputation with a private error after the last call.
    recomputed = type(error).__module__ == "torch.utils.checkpoint"
    if group is not None and not recomputed and not isinstance(error, _RAISED_BEFORE_SENDING):
        with contextlib.suppress(Exception):
            get(group_name(group)).break_between_calls(error)


def break_on_error(name: str | None, error: BaseException) -> None:
    """Break the named group and notify the peers, because an error before or between calls left
    this rank out of step. Does nothing for a ``TpkernelsError``, because the group is broken
    already, and for `RECOVERABLE` errors."""
    if name is not None and not isinstance(error, (TpkernelsError, *RECOVERABLE)):
        get(name).break_between_calls(error)


@contextlib.contextmanager
def breaking_on_error(name: str | None) -> Iterator[None]:
    """Call `break_on_error` if the block raises."""
    try:
        yield
    except BaseException as error:
        break_on_error(name, error)
        raise


def get_or_default(group: GroupLike | None) -> Group:
    """Return the group, or the group of the default process group for None."""
    if group is None:
        if not dist.is_initialized():
            raise ValueError(
                "the default process group does not exist; call "
                "torch.distributed.init_process_group"
            )
        group = dist.group.WORLD
        assert group is not None  # for the type checker: initialised above
    return get(group_name(group))


def check(group: GroupLike | None = None) -> None:
    """Raise the error if a group has failed. Not collective: no data is sent.

    On GPUs a call only queues its work. If a kernel fails, it fills the results with NaN, and the
    next call of the group raises the error. Call this function before an optimizer step to raise
    the error earlier. It waits until the queued calls of the group have run, as
    ``torch.cuda.synchronize`` would, so call it once per step and not after every op. It does not
    wait for graph replays: synchronise their stream first. During a graph capture it does not wait.

    Args:
        group: the process group; None for the default process group.

    Raises:
        CollectiveTimeoutError, CollectiveMismatchError: a kernel on a GPU failed.
        PeerLostError: the process of a peer ended, or a peer left a call. If the ranks do not share
            memory, only calls detect this.
        GroupBrokenError: the group failed before.
    """
    get_or_default(group).check()


def empty(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    group: GroupLike,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Create a zero-filled symmetric tensor in memory that all ranks of ``group`` map. Collective.

    An op with a symmetric input skips the copy into its workspace. Peers read the input in place,
    and the op returns after they have read it. Keep the tensor while any rank passes its symmetric
    tensor to an op.

    On a GPU (``device="cuda"``) only ``all_gather_matmul`` uses it, in the variants with copy
    engines: `pipelined`, and `fused` for large shards. Either all ranks pass the same full
    symmetric tensor, or no rank passes one; otherwise a ``CollectiveMismatchError`` is raised. A
    slice of one is copied like an ordinary tensor.

    Args:
        shape: sizes of the dims, identical on all ranks.
        dtype: dtype of the elements, identical on all ranks.
        group: the process group.
        device: "cpu" or "cuda".

    Raises:
        NotImplementedError: the ranks, or their GPUs, do not share memory.
        CaptureError: called on a GPU during a graph capture.
        CollectiveMismatchError, CollectiveTimeoutError, PeerLostError, MemoryError.
    """
    if any(size < 0 for size in shape):
        raise ValueError(f"shape {list(shape)} has a negative size")
    target = torch.device(device)
    if target.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"device is {target}; a symmetric tensor can be on cpu or cuda")
    ready = get(group_name(group)).ready(target.type)
    tensor = ready.make_symmetric(tuple(shape), dtype, None if target.type == "cpu" else target)
    ready.warn()
    return tensor


def finalize() -> None:
    """Free the workspaces of all groups. Waits for running calls of other threads.

    Queued GPU kernels get 5 s to complete. After that they stop waiting for peers. Memory in use by
    a captured graph is not freed. The workspaces are also freed when the process ends.

    Raises:
        RuntimeError: a signal handler calls this function during a call.
    """
    all_groups = list(_groups.values())
    for group in all_groups:
        if group.current_thread_in_call():
            raise RuntimeError(
                f"group '{group.name}' is in a call on this thread; a signal handler or callback "
                "cannot call tpkernels.finalize during a call"
            )
    # The registry lock is not held, because a signal handler may call this function. After an
    # interrupt the remaining groups are unchanged.
    for group in all_groups:
        group.drain()
        with group.lock:
            _unregister(group, cause="tpkernels.finalize")


def _at_exit(registry: dict[str, Group] = _groups) -> None:
    """Release waiting kernels and unregister all groups without closing them. The operating system
    frees the memory, and peers detect the end of the process. Otherwise the groups would be
    destroyed during interpreter shutdown, after module globals were deleted."""
    for group in list(registry.values()):
        group.drain(_EXIT_SECONDS)
        group.leave()
    registry.clear()


atexit.register(_at_exit)
