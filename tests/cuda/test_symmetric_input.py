"""Symmetric GPU memory as input of copy engines, as a dry run.

CPU tensors replace CUDA tensors, the processor runs the kernels of csrc/cuda, and shared memory
replaces the symmetric memory of torch.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.cuda_rehearsal import (
    OFFSET,
    SharedMemory,
    cuda_code_path,
    get_cuda_workspace,
    use_copy_engines,
)
from tests.support.emulated import interpreted, on_ranks, sum_over_ranks
from tests.support.tiers import sweep
from tpkernels import cuda, groups
from tpkernels.algorithms import fused
from tpkernels.symm import gpu_memory, streams

ROWS, K, N = 6, 8, 5


def symmetric(group: dist.ProcessGroup, *shape: int) -> torch.Tensor:
    group_state = groups.get(group.group_name).ready("cuda")
    return group_state.make_symmetric(shape, torch.float32, torch.device("cpu"))


def make_gather(
    group: dist.ProcessGroup, algorithm: str = "pipelined", **options: Any
) -> Callable[..., Any]:
    op = tpkernels.all_gather_matmul
    return functools.partial(
        op, weights=torch.ones(K, N), group=group, algorithm=algorithm, **options
    )


def expected_rows(group: dist.ProcessGroup, iteration: int) -> torch.Tensor:
    rows = [torch.full((ROWS, N), float(K * (rank + iteration))) for rank in range(group.size())]
    return torch.cat(rows)


def check_in_place(algorithm: str, skip_waits: bool = False) -> None:
    """Run calls under delays on input that is overwritten when the op returns.

    No call may copy its input. Negative control: ``skip_waits``.
    """
    with cuda_code_path() as patch:
        use_copy_engines(patch)
        group, puts, wrong = faults.new_group(), list[int](), 0
        put = cuda.CopyCall.put
        patch.setattr(cuda.CopyCall, "put", lambda *args: puts.append(1) or put(*args))
        x, call = symmetric(group, ROWS, K), make_gather(group, algorithm)
        call(x)
        faults.get_workspace(group).set_chaos(
            seed=group.rank(), max_delay_us=2000, skip_waits=skip_waits
        )
        for iteration in range(8):
            x.fill_(group.rank() + iteration)
            got = call(x)
            x.fill_(math.nan)
            wrong += not torch.equal(got, expected_rows(group, iteration))
    assert (sum_over_ranks(wrong) > 0) == skip_waits and not puts


@pytest.mark.parametrize(
    ("world", "skip_waits"), sweep([(3, False), (3, True), (2, False)], count=2)
)
@on_ranks()
def test_peers_read_input_in_place(skip_waits: bool) -> None:
    check_in_place("pipelined", skip_waits)


@pytest.mark.thorough
@interpreted(2)
def test_peers_read_input_in_place_for_fused() -> None:
    check_in_place("fused")


@interpreted(2)
def test_matmul_waits_for_chunks_read_in_place() -> None:
    """Delay the copies of a gather.

    The matmul starts before the first chunk arrives and polls signals of the call.
    """
    copy_rows = fused.copy_peer_rows

    def delayed_copy(
        copies: Any, side_streams: Any, peers: Any, rows: Any, gathered: Any, *more: Any
    ) -> None:
        gathered[ROWS * copies.rank :][:ROWS] = rows  # the local rows need no wait
        threads.append(
            threading.Timer(0.1, copy_rows, (copies, side_streams, peers, rows, gathered, *more))
        )
        threads[-1].start()

    with cuda_code_path() as patch:
        use_copy_engines(patch)
        patch.setattr(fused, "copy_peer_rows", delayed_copy)
        group, threads = faults.new_group(timeout=5.0), list[threading.Timer]()
        inputs, call = [symmetric(group, ROWS, K) for _ in range(2)], make_gather(group, "fused")
        for iteration, x in enumerate([*inputs, *inputs, torch.empty(ROWS, K)]):
            x.fill_(group.rank() + iteration)
            got = call(x)
            threads[-1].join()
            assert torch.equal(got, expected_rows(group, iteration)), iteration
    assert len(threads) == 5


class DifferentOffsets(SharedMemory):
    """Memory with a different offset on each rank."""

    @staticmethod
    def get_offset(rank: int) -> int:
        return (rank + 1) * OFFSET


@pytest.mark.parametrize("memory", [DifferentOffsets, SharedMemory])
@on_ranks(3)
def test_offsets_in_allocations_may_differ_between_ranks(memory: type[SharedMemory]) -> None:
    """Vary the offsets of the workspace and of an input.

    Only multicast addresses need equal offsets.
    """
    with cuda_code_path(memory) as patch:
        use_copy_engines(patch)
        group = faults.new_group(timeout=5.0)
        x, call = symmetric(group, ROWS, K), make_gather(group)
        for iteration in range(3):
            x.fill_(group.rank() + iteration)
            assert torch.equal(call(x), expected_rows(group, iteration))
        refused = pytest.raises(NotImplementedError, match="no multicast address")
        with refused if memory is DifferentOffsets else contextlib.nullcontext():
            get_cuda_workspace(group).grow_multicast(64)


def test_memory_is_not_from_the_torch_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allocate symmetric memory with torch, as far as possible without a GPU.

    From the pool of torch, a rank may get memory that its peers have mapped before.
    """
    used_pools = list[object]()

    def fail(*_: Any) -> Any:
        raise RuntimeError("far enough")

    monkeypatch.setattr(gpu_memory.symmetric_memory, "get_mem_pool", used_pools.append)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", contextlib.nullcontext)
    monkeypatch.setattr(gpu_memory.symmetric_memory, "rendezvous", fail)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(gpu_memory.Gpu, "of", lambda _: gpu_memory.Gpu("H100"))
    participant = SimpleNamespace(
        world=2, group="g", process_group="g", exchange=lambda _, mine: [mine] * 2
    )
    with pytest.raises(NotImplementedError, match=r"cannot allocate 8 bytes|far enough"):
        gpu_memory.make_symmetric(participant, 8, torch.device("cuda", 0))  # type: ignore[arg-type]
    assert not used_pools


@on_ranks(2)
def test_other_input_is_copied() -> None:
    """Gather several kinds of input in one group, and return the gathered x."""
    with cuda_code_path():
        group = faults.new_group()
        rank, call = group.rank(), make_gather(group, return_gathered=True)
        large, small = symmetric(group, 2 * ROWS, K), symmetric(group, ROWS, K)
        inputs = {
            "whole": small,
            "a part": large[:ROWS],
            "a part of each rank's own": large[rank : rank + ROWS],
            "strided": symmetric(group, K, ROWS).t(),
            "plain": torch.empty(ROWS, K),
        }
        for iteration in range(2):
            for kind, x in inputs.items():
                x.fill_(rank + iteration)
                gathered, got = call(x)
                assert torch.equal(got, expected_rows(group, iteration)), kind
                assert torch.equal(gathered[:, 0] * K, got[:, 0]), kind


@on_ranks(2)
def test_ranks_with_different_tensors_raise() -> None:
    with cuda_code_path():
        group = faults.new_group(timeout=5.0)
        call, x = make_gather(group), symmetric(group, ROWS, K)
        call(x)
        dist.barrier()
        assert bool(call(torch.ones(ROWS, K) if group.rank() == 1 else x).isnan().all())
        dist.barrier()
        with pytest.raises(tpkernels.CollectiveMismatchError):
            call(x)


@on_ranks(2)
def test_memory_lives_as_long_as_its_tensors() -> None:
    """Count the registered tensors while tensors are created and released."""
    with cuda_code_path():
        group = faults.new_group()
        tensor, counts = symmetric(group, ROWS, K), list[int]()
        segments = get_cuda_workspace(group).segments
        view = symmetric(group, 3, 4)[1:]
        for _ in range(2):
            segments.find(tensor)
            counts.append(len(segments._by_address))
            gc.collect()
        del view
        gc.collect()
        assert segments.find(tensor) is not None and segments.find(torch.ones(2)) is None
        assert [*counts, len(segments._by_address), len(symmetric(group, 0, 4))] == [2, 2, 1, 0]


@on_ranks(2)
def test_captured_input_stays_alive() -> None:
    """Release one tensor before a capture, and one that the capture has read.

    The second is kept. The first is freed after the capture: to free memory, torch waits for the
    device, and that would end the capture.
    """
    with cuda_code_path() as patch:
        group = faults.new_group()
        before, read = symmetric(group, ROWS, K), symmetric(group, ROWS, K)
        call, segments = make_gather(group), get_cuda_workspace(group).segments
        call(read)
        entries = [segments.find(x) for x in (before, read)]
        memory = [weakref.ref(entry.memory) for entry in entries if entry is not None]
        del entries, before
        patch.setattr(streams, "is_captured", lambda _: True)
        with pytest.raises(tpkernels.errors.CaptureError):
            symmetric(group, ROWS, K)
        call(read)
        assert [entry() is not None for entry in memory] == [True, True]
        patch.setattr(streams, "is_captured", lambda _: False)
        del read
        call(symmetric(group, ROWS, K))
        assert [entry() is not None for entry in memory] == [False, True]
        dist.barrier()
        del segments
        tpkernels.finalize()
        gc.collect()
        assert memory[1]() is not None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@on_ranks(2)
def test_cuda_device_needs_a_gpu() -> None:
    group = faults.new_group()
    make = functools.partial(tpkernels.empty, 4, group=group)
    endings = [
        faults.record_ending(functools.partial(make, device=device)) for device in ("cuda", "meta")
    ]
    on_gpu, on_meta, on_host = [*endings, faults.record_ending(make)]
    assert on_gpu.error == on_meta.error == "NotImplementedError"
    assert "rank 0 needs a GPU that is visible to torch" in on_gpu.message, on_gpu
    assert on_meta.message == "device is meta; a symmetric tensor can be on cpu or cuda"
    assert on_host.error == "", on_host
