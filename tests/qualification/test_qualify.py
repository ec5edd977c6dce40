"""`tpkernels qualify`, rehearsed between processes: the kernels of csrc/cuda on the emulated
driver, those of Triton under their interpreter. A clean pass; then faults, one at a time, each of
which disqualifies what it spoils, and nothing else."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.support import emulated
from tests.support.nccl_rehearsal import over_nccl
from tests.support.tiers import thorough
from tpkernels.planning.trust import DISQUALIFIED, QUALIFIED, Outcome, Record
from tpkernels.qualification.run import run
from tpkernels.qualification.schedule import Topology, schedule
from tpkernels.symm import cuda

TWO = Topology(("a GPU",) * 2, 90, nvlink=True)


@contextlib.contextmanager
def rehearsal(
    driver: str, kernel: str = "", kind: str = "", patch: Callable[[], Any] | None = None
) -> Iterator[None]:
    """On a rank: the way of CUDA tensors, where lines arrive whole; rank 1 has a fault of ``kind``
    in ``kernel``, or is patched."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(over_nccl(driver, None))
        stack.enter_context(mock.patch.object(cuda, "why_lines_may_tear", lambda *_: None))
        if dist.get_rank() == 1:
            emulated.library().emulated_plant(kernel.encode(), kind.encode())
            if patch is not None:
                stack.enter_context(patch())
        yield


def qualified(around: Any, *names: str) -> dict[str, Outcome]:
    """The outcomes of the stages with these names, or of all."""
    stages = [stage for stage in schedule(TWO) if not names or stage.name in names]
    record: Record = run(stages, "cpu", around=around)
    return {**record.litmus["2"], **record.ways["2"]}


@pytest.mark.thorough
def test_a_clean_pass(cuda_driver: str) -> None:
    outcomes = qualified(functools.partial(rehearsal, cuda_driver))
    assert {outcome.status for outcome in outcomes.values()} == {QUALIFIED}, outcomes
    assert all(outcome.checks >= 18 for outcome in outcomes.values())


# Kernel, kind of the fault, what it disqualifies, what stays, and what the record says of it.
SHARDS, SUMS = "one_shot_all_gather", "two_shot_all_reduce"
FAULTS = {
    "torn line": ("ll128_all_reduce", "direct/ll128", "direct/ll_two_shot", "wrong"),
    "torn word": ("ll_all_reduce", "direct/ll", "direct/ll_two_shot", "wrong"),
    "missing fence": (SHARDS, "direct/one_shot", "direct/ll", "wrong"),
    "stale parity": (SUMS, "direct/two_shot", "direct/ll", "wrong"),
    "wrong peer offset": (SHARDS, "direct/one_shot", "direct/two_shot", "wrong"),
    "off-by-one rows": (SUMS, "direct/two_shot", "direct/one_shot", "wrong"),
    "lost wake-up": (SHARDS, "direct/one_shot", "direct/two_shot", "error"),
    "hang": (SHARDS, "direct/one_shot", "direct/two_shot", "hang"),
    "crash": ("ll_two_shot_all_reduce", "direct/ll_two_shot", "direct/two_shot", "crash"),
}


@pytest.mark.parametrize(
    "fault",
    [
        "wrong peer offset",
        "crash",
        *map(thorough, [f for f in FAULTS if f not in ("wrong peer offset", "crash")]),
    ],
)
def test_a_fault_disqualifies_its_way(cuda_driver: str, fault: str) -> None:
    kernel, spoilt, whole, kind = FAULTS[fault]
    around = functools.partial(rehearsal, cuda_driver, kernel, fault)
    with mock.patch("tpkernels.qualification.run._LEAST_S", 25.0):
        outcomes = qualified(around, "lines", spoilt, whole)
    assert outcomes[whole].status == QUALIFIED, outcomes[whole]
    assert outcomes[spoilt].status == DISQUALIFIED
    failure = outcomes[spoilt].failure
    print(failure)
    assert failure is not None and failure.kind == kind, failure
