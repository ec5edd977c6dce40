"""Input of copy engines in symmetric memory of GPUs, rehearsed: CPU tensors, the kernels of
csrc/cuda run by the processor, shared memory for torch's symmetric memory."""

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
    copy_engines,
    pretending,
    space_of,
)
from tests.support.emulated import anywhere, interpreted, on_ranks
from tests.support.tiers import sweep
from tpkernels import cuda, groups
from tpkernels.algorithms import fused
from tpkernels.symm import gpu_memory, streams

ROWS, K, N = 6, 8, 5


def symmetric(group: dist.ProcessGroup, *shape: int) -> torch.Tensor:
    own = groups.get(group.group_name).ready("cuda")
    return own.make_symmetric(shape, torch.float32, torch.device("cpu"))


def gather_of(
    group: dist.ProcessGroup, variant: str = "pipelined", **options: Any
) -> Callable[..., Any]:
    op = tpkernels.all_gather_matmul
    return functools.partial(
        op, weights=torch.ones(K, N), group=group, algorithm=variant, **options
    )


def wanted(group: dist.ProcessGroup, turn: int) -> torch.Tensor:
    rows = [torch.full((ROWS, N), float(K * (rank + turn))) for rank in range(group.size())]
    return torch.cat(rows)


def check_in_place(variant: str, skip_waits: bool = False) -> None:
    """Calls under delays on input that is spoilt as soon as the op returns, which copy nothing.
    Negative control: they do not wait."""
    with pretending() as patch:
        copy_engines(patch)
        group, puts, wrong = faults.new_group(), list[int](), 0
        put = cuda.CopyCall.put
        patch.setattr(cuda.CopyCall, "put", lambda *given: puts.append(1) or put(*given))
        x, call = symmetric(group, ROWS, K), gather_of(group, variant)
        call(x)
        faults.workspace_of(group).set_chaos(
            seed=group.rank(), max_delay_us=2000, skip_waits=skip_waits
        )
        for turn in range(8):
            x.fill_(group.rank() + turn)
            got = call(x)
            x.fill_(math.nan)
            wrong += not torch.equal(got, wanted(group, turn))
    assert (anywhere(wrong) > 0) == skip_waits and not puts


@pytest.mark.parametrize(
    ("world", "skip_waits"), sweep([(3, False), (3, True), (2, False)], count=2)
)
@on_ranks()
def test_peers_read_it_in_place(skip_waits: bool) -> None:
    check_in_place("pipelined", skip_waits)


@pytest.mark.thorough
@interpreted(2)
def test_peers_read_it_in_place_for_fused() -> None:
    check_in_place("fused")


@interpreted(2)
def test_a_product_waits_for_chunks_that_are_read_in_place() -> None:
    """It is launched before the first chunk has come, and looks at words of the call meanwhile."""
    bring = fused.bring_rows

    def late(copies: Any, side: Any, peers: Any, rows: Any, whole: Any, *more: Any) -> None:
        whole[ROWS * copies.rank :][:ROWS] = rows  # for these it does not wait
        threads.append(threading.Timer(0.1, bring, (copies, side, peers, rows, whole, *more)))
        threads[-1].start()

    with pretending() as patch:
        copy_engines(patch)
        patch.setattr(fused, "bring_rows", late)
        group, threads = faults.new_group(timeout=5.0), list[threading.Timer]()
        inputs, call = [symmetric(group, ROWS, K) for _ in range(2)], gather_of(group, "fused")
        for turn, x in enumerate([*inputs, *inputs, torch.empty(ROWS, K)]):
            x.fill_(group.rank() + turn)
            got = call(x)
            threads[-1].join()
            assert torch.equal(got, wanted(group, turn)), turn
    assert len(threads) == 5


class Apart(SharedMemory):
    """Each rank has its memory at an offset of its own."""

    @staticmethod
    def offset_of(rank: int) -> int:
        return (rank + 1) * OFFSET


@pytest.mark.parametrize("memory", [Apart, SharedMemory])
@on_ranks(3)
def test_offsets_in_allocations_may_differ_between_ranks(memory: type[SharedMemory]) -> None:
    """The workspace's and an input's. Multicast addresses have the same offset on all ranks."""
    with pretending(memory) as patch:
        copy_engines(patch)
        group = faults.new_group(timeout=5.0)
        x, call = symmetric(group, ROWS, K), gather_of(group)
        for turn in range(3):
            x.fill_(group.rank() + turn)
            assert torch.equal(call(x), wanted(group, turn))
        refused = pytest.raises(NotImplementedError, match="no multicast address")
        with refused if memory is Apart else contextlib.nullcontext():
            space_of(group).grow_multicast(64)


def test_it_is_not_taken_from_torchs_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """From which ranks may get memory that other ranks have mapped before. This is torch itself,
    which cannot allocate without a GPU."""
    taken = list[object]()

    def fail(*_: Any) -> Any:
        raise RuntimeError("far enough")

    monkeypatch.setattr(gpu_memory.symmetric_memory, "get_mem_pool", taken.append)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", contextlib.nullcontext)
    monkeypatch.setattr(gpu_memory.symmetric_memory, "rendezvous", fail)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(gpu_memory.Gpu, "of", lambda _: gpu_memory.Gpu("H100"))
    two = SimpleNamespace(
        world=2, group="g", process_group="g", exchange=lambda _, mine: [mine] * 2
    )
    with pytest.raises(NotImplementedError, match=r"cannot allocate 8 bytes|far enough"):
        gpu_memory.make_symmetric(two, 8, torch.device("cuda", 0))  # type: ignore[arg-type]
    assert not taken


@on_ranks(2)
def test_other_input_is_copied() -> None:
    """Input of several kinds in one group, with what was gathered."""
    with pretending():
        group = faults.new_group()
        rank, call = group.rank(), gather_of(group, return_gathered=True)
        large, small = symmetric(group, 2 * ROWS, K), symmetric(group, ROWS, K)
        kinds = {
            "whole": small,
            "a part": large[:ROWS],
            "a part of each rank's own": large[rank : rank + ROWS],
            "strided": symmetric(group, K, ROWS).t(),
            "plain": torch.empty(ROWS, K),
        }
        for turn in range(2):
            for kind, x in kinds.items():
                x.fill_(rank + turn)
                whole, got = call(x)
                assert torch.equal(got, wanted(group, turn)), kind
                assert torch.equal(whole[:, 0] * K, got[:, 0]), kind


@on_ranks(2)
def test_ranks_that_pass_different_tensors_are_told() -> None:
    with pretending():
        group = faults.new_group(timeout=5.0)
        call, x = gather_of(group), symmetric(group, ROWS, K)
        call(x)
        dist.barrier()
        assert bool(call(torch.ones(ROWS, K) if group.rank() == 1 else x).isnan().all())
        dist.barrier()
        with pytest.raises(tpkernels.CollectiveMismatchError):
            call(x)


@on_ranks(2)
def test_it_lives_as_long_as_its_tensors() -> None:
    """How many tensors a group knows of, as they come and go."""
    with pretending():
        group = faults.new_group()
        kept, known = symmetric(group, ROWS, K), list[int]()
        segments = space_of(group).segments
        view = symmetric(group, 3, 4)[1:]
        for _ in range(2):
            segments.find(kept)
            known.append(len(segments._at))
            gc.collect()
        del view
        gc.collect()
        assert segments.find(kept) is not None and segments.find(torch.ones(2)) is None
        assert [*known, len(segments._at), len(symmetric(group, 0, 4))] == [2, 2, 1, 0]


@on_ranks(2)
def test_what_a_capture_has_read_is_kept() -> None:
    """When tensors have been dropped, one before a capture and one that was read in it. And nothing
    goes in it: torch waits for the device then, which ends the capture."""
    with pretending() as patch:
        group = faults.new_group()
        before, read = symmetric(group, ROWS, K), symmetric(group, ROWS, K)
        call, segments = gather_of(group), space_of(group).segments
        call(read)
        known = [segments.find(x) for x in (before, read)]
        memory = [weakref.ref(each.memory) for each in known if each is not None]
        del known, before
        patch.setattr(streams, "is_captured", lambda _: True)
        with pytest.raises(tpkernels.errors.CaptureError):
            symmetric(group, ROWS, K)
        call(read)
        assert [each() is not None for each in memory] == [True, True]
        patch.setattr(streams, "is_captured", lambda _: False)
        del read
        call(symmetric(group, ROWS, K))
        assert [each() is not None for each in memory] == [False, True]
        dist.barrier()
        del segments
        tpkernels.finalize()
        gc.collect()
        assert memory[1]() is not None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@on_ranks(2)
def test_without_gpus_it_is_refused() -> None:
    group = faults.new_group()
    make = functools.partial(tpkernels.empty, 4, group=group)
    endings = [faults.ending_of(functools.partial(make, device=on)) for on in ("cuda", "meta")]
    on_gpu, elsewhere, on_host = [*endings, faults.ending_of(make)]
    assert on_gpu.error == elsewhere.error == "NotImplementedError"
    assert "rank 0 needs a GPU that is visible to torch" in on_gpu.text, on_gpu
    assert elsewhere.text == "device is meta; a symmetric tensor can be on cpu or cuda"
    assert on_host.error == "", on_host
