"""A process group in Python, for machines without the compiled bridge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from tpkernels.groups.c10d.async_calls import CallWork
from tpkernels.groups.c10d.backend import Backend
from tpkernels.torch_private import use_gloo


class PythonGroup(dist.ProcessGroup):
    """A process group that passes the calls of torch to a `Backend`, where bridge.cpp cannot be
    compiled. torch then ignores the backends of other devices."""

    def __init__(self, backend: Backend, store: dist.Store) -> None:
        super().__init__(backend.rank, backend.world)  # type: ignore[call-arg]
        self.backend, self._store = backend, store
        use_gloo(self, backend.gloo)

    def get_group_store(self) -> dist.Store:
        return self._store

    def getBackendName(self) -> str:
        return "tpkernels"

    def shutdown(self) -> None:
        self.backend.shutdown()

    def abort(self) -> None:
        self.backend.abort()

    def send(self, *args: Any) -> dist.Work:
        return self.backend.transport.send(*args)

    def recv(self, *args: Any) -> dist.Work:
        return self.backend.transport.recv(*args)

    def recv_anysource(self, *args: Any) -> dist.Work:
        return self.backend.transport.recv_anysource(*args)


# The collectives of a process group, under their names in torch 2.13 and before: the method of a
# `Backend`, and the type of the last argument.
_COLLECTIVES = {
    "allreduce": ("allreduce", AllreduceOptions),
    "allreduce_coalesced": ("allreduce_coalesced", AllreduceOptions),
    "broadcast": ("broadcast", BroadcastOptions),
    "reduce": ("reduce", ReduceOptions),
    "allgather": ("allgather", AllgatherOptions),
    "all_gather_single": ("_allgather_base", AllgatherOptions),
    "_allgather_base": ("_allgather_base", AllgatherOptions),
    "all_gather_single_coalesced": ("allgather_into_tensor_coalesced", AllgatherOptions),
    "allgather_into_tensor_coalesced": ("allgather_into_tensor_coalesced", AllgatherOptions),
    "gather": ("gather", GatherOptions),
    "scatter": ("scatter", ScatterOptions),
    "reduce_scatter": ("reduce_scatter", ReduceScatterOptions),
    "reduce_scatter_single": ("_reduce_scatter_base", ReduceScatterOptions),
    "_reduce_scatter_base": ("_reduce_scatter_base", ReduceScatterOptions),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor_coalesced", ReduceScatterOptions),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_tensor_coalesced", ReduceScatterOptions),
    "all_to_all_single": ("alltoall_base", AllToAllOptions),
    "alltoall_base": ("alltoall_base", AllToAllOptions),
    "alltoall": ("alltoall", AllToAllOptions),
    "barrier": ("barrier", BarrierOptions),
}


def _check_device(tensors: object) -> None:
    if isinstance(tensors, (list, tuple)):
        for tensor in tensors:
            _check_device(tensor)
    elif isinstance(tensors, torch.Tensor) and tensors.device.type != "cpu":
        raise NotImplementedError(
            f"a tensor is on {tensors.device}, but without a C++ compiler a process group with the "
            "backend tpkernels serves CPU tensors only; install g++, or use a second process group"
        )


def _collective(name: str, options: Callable[[], Any]) -> Callable[..., dist.Work]:
    def start(self: PythonGroup, *args: Any, opts: Any = None) -> dist.Work:
        if not (args and hasattr(args[-1], "asyncOp")):
            args = *args, options() if opts is None else opts
        _check_device(args[:-1])
        work = getattr(self.backend, name)(*args)
        return CallWork.completed(name, []) if work is None else work  # torch in C++ needs a work

    return start


for _name, _target in _COLLECTIVES.items():
    setattr(PythonGroup, _name, _collective(*_target))
