"""CPU tensors take the code path of CUDA tensors: everything but the device itself. Shared memory
stands in for torch's symmetric memory."""

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
from tpkernels.planning.qualification import COPY_ENGINES, Qualification, variants_of
from tpkernels.symm import gpu_memory, host
from tpkernels.symm.cuda import CudaWorkspace

FUSED_OPS = ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]


@dataclass(frozen=True)
class Handle:
    buffer_ptrs: list[int]
    offset: int  # bytes, of the memory in its allocation
    arena: Any
    multicast_ptr: int = 1 << 60


OFFSET = 256  # bytes before the memory, in its allocation


# Every variant is qualified.
ALL_QUALIFIED = Qualification(
    frozenset(
        {
            variant
            for spec in OPS.values()
            for name in ALGORITHMS
            for variant in variants_of(spec, name)
        }
    )
    | {f"fused/{COPY_ENGINES}"}
)


class SharedMemory:
    """The part of torch's symmetric memory that is used. `offset_of` a rank's memory in its
    allocation may differ between ranks."""

    empty = staticmethod(torch.empty)

    @classmethod
    def empty_strided_p2p(cls, size: Any, stride: Any, dtype: Any, device: Any) -> torch.Tensor:
        return cls.empty(*size, dtype=dtype, device=device)

    @staticmethod
    def offset_of(rank: int) -> int:
        return OFFSET

    @classmethod
    def rendezvous(cls, memory: torch.Tensor, name: str) -> Handle:
        workspace = groups.get(name).workspace
        assert workspace is not None
        world, own = workspace.participant.world, workspace.participant.rank
        offsets, count, dtype = list(map(cls.offset_of, range(world))), memory.numel(), memory.dtype
        arena = workspace._further_arena("a rehearsal", max(offsets) + count)

        def part(rank: int) -> torch.Tensor:
            return torch.frombuffer(arena.region(rank, offsets[rank], count), dtype=dtype)

        memory.set_(part(own))
        if isinstance(multimem._ops, Multimem):
            parts = functools.partial(map, part, range(world))
            multimem._ops.memory[memory.data_ptr(), name] = parts
        return Handle([arena.region(rank).address for rank in range(world)], offsets[own], arena)


def use_memory(patch: pytest.MonkeyPatch, memory: type[SharedMemory]) -> None:
    """Let ``memory`` take the place of torch's symmetric memory."""
    patch.setattr(gpu_memory, "symmetric_memory", memory)
    patch.setattr(gpu_memory, "SymmetricMemory", memory)


def with_handle(change: Callable[[Handle], Handle]) -> type[SharedMemory]:
    """Memory whose handles are changed."""

    class Changed(SharedMemory):
        @staticmethod
        def rendezvous(memory: torch.Tensor, name: str) -> Handle:
            return change(SharedMemory.rendezvous(memory, name))

    return Changed


@contextlib.contextmanager
def pretending(
    memory: Any = SharedMemory, qualification: Qualification | None = ALL_QUALIFIED
) -> Iterator[pytest.MonkeyPatch]:
    """CPU tensors take the code path of CUDA tensors, and no kernel is unsupported.
    ``qualification``: what is qualified; None: as the report on disk says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validation, "device", lambda _: "cuda")
        patch.setattr("tpkernels.ops.planned_calls.unsupported", lambda *_: None)
        use_memory(patch, memory)
        patch.setattr(multimem, "_ops", Multimem())
        if qualification is not None:
            patch.setattr(Group, "qualification", lambda _: qualification)
        patch.setattr(host, "_FIRST_WORDS", 4)  # so that they have to grow
        patch.setattr(host, "_FIRST_BYTES", 1 << 12)
        yield patch


def copy_engines(patch: pytest.MonkeyPatch) -> None:
    """`fused` gathers by copy engines, whatever the size; a chunk is a row of tiles."""
    patch.setattr("tpkernels.algorithms.fused.COPY_ENGINE_BYTES", 0)
    patch.setattr("tpkernels.kernels.all_gather_matmul._CHUNK_BYTES", 1)


def space_of(group: dist.ProcessGroup) -> CudaWorkspace:
    return faults.workspace_of(group).on_gpus[torch.device("cpu")]
