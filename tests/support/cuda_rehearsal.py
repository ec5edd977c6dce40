"""Dry run of the CUDA code path on CPU tensors: only the device is replaced.

Shared memory stands in for the symmetric memory of torch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import faults
from tests.support.multimem_rehearsal import Multimem
from tpkernels import groups
from tpkernels.algorithms import multimem
from tpkernels.groups.group import Group
from tpkernels.ops import validation
from tpkernels.planning.algorithms import ALGORITHMS
from tpkernels.planning.op_spec import OPS
from tpkernels.planning.qualification import COPY_ENGINES, Qualification, get_variants
from tpkernels.symm import gpu_memory, host
from tpkernels.symm.cuda import CudaWorkspace

FUSED_OPS = ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]


@dataclass(frozen=True)
class Handle:
    buffer_ptrs: list[int]
    offset: int  # bytes from the start of the allocation
    arena: Any
    multicast_ptr: int = 1 << 60


OFFSET = 256  # bytes from the start of the allocation


ALL_QUALIFIED = Qualification(
    frozenset(
        {
            variant
            for spec in OPS.values()
            for name in ALGORITHMS
            for variant in get_variants(spec, name)
        }
    )
    | {f"fused/{COPY_ENGINES}"}
)


class SharedMemory:
    """The subset of the torch symmetric memory API that is used.

    `get_offset`, the offset of the memory in its allocation, may differ between ranks.
    """

    empty = staticmethod(torch.empty)

    @classmethod
    def empty_strided_p2p(cls, size: Any, stride: Any, dtype: Any, device: Any) -> torch.Tensor:
        return cls.empty(*size, dtype=dtype, device=device)

    @staticmethod
    def get_offset(rank: int) -> int:
        return OFFSET

    @classmethod
    def rendezvous(cls, memory: torch.Tensor, name: str) -> Handle:
        workspace = groups.get(name).workspace
        assert workspace is not None
        world, rank = workspace.participant.world, workspace.participant.rank
        offsets, count, dtype = (
            list(map(cls.get_offset, range(world))),
            memory.numel(),
            memory.dtype,
        )
        arena = workspace._make_extra_arena("a rehearsal", max(offsets) + count)

        def get_region(rank: int) -> torch.Tensor:
            return torch.frombuffer(arena.region(rank, offsets[rank], count), dtype=dtype)

        memory.set_(get_region(rank))
        if isinstance(multimem._ops, Multimem):
            regions = functools.partial(map, get_region, range(world))
            multimem._ops.memory[memory.data_ptr(), name] = regions
        return Handle([arena.region(rank).address for rank in range(world)], offsets[rank], arena)


def use_symmetric_memory(patch: pytest.MonkeyPatch, memory: type[SharedMemory]) -> None:
    """Replace the symmetric memory of torch by ``memory``."""
    patch.setattr(gpu_memory, "symmetric_memory", memory)
    patch.setattr(gpu_memory, "SymmetricMemory", memory)


def memory_with_handle(change: Callable[[Handle], Handle]) -> type[SharedMemory]:
    """Return a `SharedMemory` whose rendezvous passes each handle through ``change``."""

    class Changed(SharedMemory):
        @staticmethod
        def rendezvous(memory: torch.Tensor, name: str) -> Handle:
            return change(SharedMemory.rendezvous(memory, name))

    return Changed


@contextlib.contextmanager
def cuda_code_path(
    memory: Any = SharedMemory, qualification: Qualification | None = ALL_QUALIFIED
) -> Iterator[pytest.MonkeyPatch]:
    """Let CPU tensors use the code path of CUDA tensors, with all kernels supported.

    ``qualification``: the qualified variants, or None to read the report on disk.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validation, "device", lambda _: "cuda")
        patch.setattr("tpkernels.ops.planned_calls.unsupported", lambda *_: None)
        use_symmetric_memory(patch, memory)
        patch.setattr(multimem, "_ops", Multimem())
        if qualification is not None:
            patch.setattr(Group, "qualification", lambda _: qualification)
        patch.setattr(host, "_FIRST_SIGNALS", 4)  # small, so that workspaces grow
        patch.setattr(host, "_FIRST_BYTES", 1 << 12)
        yield patch


def use_copy_engines(patch: pytest.MonkeyPatch) -> None:
    """Let `fused` gather by copy engines for any size. A chunk is a row of tiles."""
    patch.setattr("tpkernels.algorithms.fused.COPY_ENGINE_BYTES", 0)
    patch.setattr("tpkernels.kernels.all_gather_matmul._CHUNK_BYTES", 1)


def get_cuda_workspace(group: dist.ProcessGroup) -> CudaWorkspace:
    return faults.get_workspace(group).cuda_workspaces[torch.device("cpu")]
