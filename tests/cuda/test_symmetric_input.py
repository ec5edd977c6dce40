"""Input of copy engines in symmetric memory of GPUs, rehearsed: CPU tensors, the kernels of
csrc/cuda run by the processor, shared memory for torch's symmetric memory."""

from __future__ import annotations

import functools
import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import emulated, faults
from tests.support.cases import RanksFixture
from tests.support.cuda_rehearsal import pretending, space_of
from tests.support.faults import Ending
from tests.support.tiers import sweep
from tpkernels import cuda, groups
from tpkernels.symm import streams

ROWS, K, N = 6, 8, 5


def symmetric(group: dist.ProcessGroup, *shape: int) -> torch.Tensor:
    own = groups.get(group.group_name).ready("cuda")
    return own.make_symmetric(shape, torch.float32, torch.device("cpu"))


def gather_of(group: dist.ProcessGroup, way: str, **options: Any) -> Callable[..., Any]:
    op = tpkernels.all_gather_matmul
    return functools.partial(op, weights=torch.ones(K, N), group=group, algorithm=way, **options)


def wanted(group: dist.ProcessGroup, turn: int) -> torch.Tensor:
    rows = [torch.full((ROWS, N), float(K * (rank + turn))) for rank in range(group.size())]
    return torch.cat(rows)


def overwritten_job(driver: str, way: str, skip_waits: bool) -> tuple[int, int]:
    """Calls under delays on input that is spoilt as soon as the op returns; how many were wrong,
    and how often something was put."""
    emulated.load(driver)
    with pretending() as patch:
        patch.setattr("tpkernels.algorithms.fused.COPY_ENGINE_BYTES", 0)
        group, puts, wrong = faults.new_group(), list[int](), 0
        put = cuda.CopyCall.put
        patch.setattr(cuda.CopyCall, "put", lambda *given: puts.append(1) or put(*given))
        x, call = symmetric(group, ROWS, K), gather_of(group, way)
        call(x)
        faults.workspace_of(group).set_chaos(
            seed=group.rank(), max_delay_us=2000, skip_waits=skip_waits
        )
        for turn in range(8):
            x.fill_(group.rank() + turn)
            got = call(x)
            x.fill_(math.nan)
            wrong += not torch.equal(got, wanted(group, turn))
        return wrong, len(puts)


@pytest.mark.parametrize("world", sweep([3, 2]))
def test_peers_read_it_in_place(ranks: RanksFixture, cuda_driver: str, world: int) -> None:
    told = ranks(world).run(overwritten_job, cuda_driver, "pipelined", False)
    assert told == [(0, 0)] * world


@pytest.mark.thorough
def test_peers_read_it_in_place_for_fused(interpreting: RanksFixture, cuda_driver: str) -> None:
    assert interpreting(2).run(overwritten_job, cuda_driver, "fused", False) == [(0, 0)] * 2


def test_calls_that_do_not_wait_are_wrong(ranks: RanksFixture, cuda_driver: str) -> None:
    """Negative control of the tests above."""
    told = ranks(3).run(overwritten_job, cuda_driver, "pipelined", True)
    assert sum(wrong for wrong, _ in told) > 0


def inputs_job(driver: str) -> list[str]:
    """Input of several kinds in one group, with what was gathered; which results were wrong."""
    emulated.load(driver)
    with pretending():
        group, wrong = faults.new_group(), []
        rank, call = group.rank(), gather_of(group, "pipelined", return_gathered=True)
        large, small = symmetric(group, 2 * ROWS, K), symmetric(group, ROWS, K)
        strided = symmetric(group, K, ROWS).t()
        kinds = {
            "whole": small,
            "a part": large[:ROWS],
            "a part of each rank's own": large[rank : rank + ROWS],
            "strided": strided,
            "plain": torch.empty(ROWS, K),
        }
        for turn in range(2):
            for kind, x in kinds.items():
                x.fill_(rank + turn)
                whole, got = call(x)
                right = torch.equal(got, wanted(group, turn))
                if not right or not torch.equal(whole[:, 0] * K, got[:, 0]):
                    wrong.append(f"{kind}: {got}")
        return wrong


def test_other_input_is_copied(ranks: RanksFixture, cuda_driver: str) -> None:
    assert ranks(2).run(inputs_job, cuda_driver) == [[], []]


def suite_job(driver: str, way: str, delay_us: int) -> list[tuple[str, bool]]:
    from benchmarks.gpu.in_place import check_job

    emulated.load(driver)
    with pretending():
        return check_job("cpu", way, 3, delay_us)


def test_the_gpu_suites_check(ranks: RanksFixture, cuda_driver: str) -> None:
    """It has not seen a GPU; here it runs on the CPU."""
    told = ranks(2).run(suite_job, cuda_driver, "pipelined", 200)
    assert told == [[("symmetric input", True)]] * 2


@pytest.mark.thorough
def test_the_gpu_suites_check_for_fused(interpreting: RanksFixture, cuda_driver: str) -> None:
    told = interpreting(2).run(suite_job, cuda_driver, "copied", 0)
    assert told == [[("symmetric input", True)]] * 2


def unlike_job(driver: str) -> tuple[bool, Ending]:
    """Rank 1 passes another tensor than the others."""
    emulated.load(driver)
    with pretending():
        group = faults.new_group(timeout=5.0)
        call, x = gather_of(group, "pipelined"), symmetric(group, ROWS, K)
        call(x)
        dist.barrier()
        result = call(torch.ones(ROWS, K) if group.rank() == 1 else x)
        spoilt = bool(result.isnan().all())
        dist.barrier()
        return spoilt, faults.ending_of(functools.partial(call, x))


def test_ranks_that_pass_different_tensors_are_told(ranks: RanksFixture, cuda_driver: str) -> None:
    for spoilt, after in ranks(2).run(unlike_job, cuda_driver):
        assert spoilt
        assert after.error == "CollectiveMismatchError", after


def dropped_job(driver: str) -> list[int]:
    """How many tensors a group knows of, as they come and go."""
    emulated.load(driver)
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
        return [*known, len(segments._at), len(symmetric(group, 0, 4))]


def test_it_lives_as_long_as_its_tensors(ranks: RanksFixture, cuda_driver: str) -> None:
    assert ranks(2).run(dropped_job, cuda_driver) == [[2, 2, 1, 0]] * 2


def recorded_job(driver: str) -> list[bool]:
    """Which tensors' memory is there when they have been dropped: one before a capture and one
    that was read in it, within the capture, after the next call, and after the group."""
    emulated.load(driver)
    with pretending() as patch:
        group, found = faults.new_group(), []
        before, read = symmetric(group, ROWS, K), symmetric(group, ROWS, K)
        call, segments = gather_of(group, "pipelined"), space_of(group).segments
        call(read)
        known = [segments.find(x) for x in (before, read)]
        memory = [weakref.ref(each.memory) for each in known if each is not None]
        del known, before
        patch.setattr(streams, "is_captured", lambda _: True)
        ending = faults.ending_of(functools.partial(symmetric, group, ROWS, K))
        call(read)
        found += [each() is not None for each in memory]
        patch.setattr(streams, "is_captured", lambda _: False)
        del read
        call(symmetric(group, ROWS, K))
        found += [each() is not None for each in memory]
        dist.barrier()
        del segments
        tpkernels.finalize()
        gc.collect()
        return [*found, memory[1]() is not None, ending.error == "CaptureError"]


def test_what_a_capture_has_read_is_kept(ranks: RanksFixture, cuda_driver: str) -> None:
    """And nothing goes in it: torch waits for the device then, which ends the capture."""
    told = ranks(2).run(recorded_job, cuda_driver)
    assert told == [[True, True, False, True, True, True]] * 2


def refused_job() -> list[Ending]:
    group = faults.new_group()
    make = functools.partial(tpkernels.empty, 4, group=group)
    endings = [faults.ending_of(functools.partial(make, device=on)) for on in ("cuda", "meta")]
    return [*endings, faults.ending_of(make)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_gpus_it_is_refused(ranks: RanksFixture) -> None:
    for on_gpu, elsewhere, on_host in ranks(2).run(refused_job):
        assert on_gpu.error == elsewhere.error == "NotImplementedError"
        assert "rank 0 needs a GPU that torch sees" in on_gpu.text, on_gpu
        assert elsewhere.text == "device is meta; a symmetric tensor can be on cpu or cuda"
        assert on_host.error == "", on_host
