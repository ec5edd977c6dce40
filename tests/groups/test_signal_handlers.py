"""Signal handlers that use a group while their thread waits in a collective operation: they are
refused, and the operation goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.cases import RanksFixture
from tests.support.faults import Ending
from tests.support.ranked import report
from tests.support.tiers import covering, sweep
from tpkernels.nccl import Communicator

WORLD = 2
WAITS = ["init", "first call", "empty", "growth", "communicator"]
LARGE = 1 << 20  # elements, for which a workspace must grow


@contextlib.contextmanager
def handler_of_rank_0(handle: Callable[[], object]) -> Iterator[list[Ending]]:
    """Rank 0 handles a signal while it waits for the others, which are late. Yields the endings of
    ``handle``."""
    endings: list[Ending] = []
    before = signal.signal(signal.SIGUSR2, lambda *_: endings.append(faults.ending_of(handle)))
    if dist.get_rank() == 0:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGUSR2)).start()
    else:
        time.sleep(0.8)
    try:
        yield endings
    finally:
        signal.signal(signal.SIGUSR2, before)


def handled_job(waits_in: str, uses: str) -> list[str]:
    group = faults.group_of(dist.new_group())
    calls: dict[str, Callable[[], object]] = {
        "init": lambda: tpkernels.init(group, faults.PATIENCE, 8 << 20),
        "first call": lambda: faults.run_op("all_reduce", group),
        "empty": lambda: tpkernels.empty(4, group=group),
        "growth": lambda: tpkernels.all_reduce(torch.ones(LARGE), group, algorithm="direct"),
        "communicator": lambda: Communicator(group, timeout=faults.PATIENCE),
    }
    if waits_in != "init":
        calls["init"]()
    if waits_in in ("empty", "growth"):
        faults.run_op("all_reduce", group)
    failures = []
    handle = tpkernels.finalize if uses == "finalize" else calls[uses]
    with handler_of_rank_0(handle) as handled:
        ending = faults.ending_of(calls[waits_in])
    lacks_gpu = waits_in == "communicator" and ending.error == "NotImplementedError"
    if ending.error and not lacks_gpu:
        failures.append(f"what waited: {ending}")
    if dist.get_rank() == 0 and [one.error for one in handled] != ["RuntimeError"]:
        failures.append(f"the handler: {handled}")
    failures += [str(one) for one in handled if " within a call" not in one.text]
    faults.run_op("matmul_all_reduce", group)
    return failures


@pytest.mark.parametrize(("waits_in", "uses"), covering(product(WAITS, ["first call", "finalize"])))
def test_a_handler_is_refused_wherever_ranks_wait(
    ranks: RanksFixture, waits_in: str, uses: str
) -> None:
    results = ranks(WORLD).run(handled_job, waits_in, uses)
    report(failure for rank in results for failure in rank)


@pytest.mark.parametrize("uses", sweep(["init", "empty", "communicator"]))
def test_all_collective_operations_are_refused_in_a_handler(ranks: RanksFixture, uses: str) -> None:
    results = ranks(WORLD).run(handled_job, "growth", uses)
    report(failure for rank in results for failure in rank)


def backward_job() -> list[str]:
    """A handler whose backward is refused, and which catches the error."""
    group = faults.new_group()
    x = torch.ones(4, 4, requires_grad=True)
    result = tpkernels.all_gather_matmul(x, torch.ones(4, 4), group)
    with handler_of_rank_0(lambda: result.sum().backward()) as handled:
        first = faults.ending_of(lambda: faults.run_op("all_reduce", group))
    result.sum().backward()
    errors = [one.error for one in handled]
    wrong = [] if errors == ["RuntimeError"] * (dist.get_rank() == 0) else [str(handled)]
    return wrong + ([str(first)] if first.error else [])


def test_a_refused_backward_breaks_nothing(ranks: RanksFixture) -> None:
    report(failure for rank in ranks(WORLD).run(backward_job) for failure in rank)


def save_job(folder: str) -> list[str]:
    """A handler that tries to save a model and is refused."""
    from tests.support import hf_models

    mesh = hf_models.mesh_of_all()
    model = tpkernels.parallelize(hf_models.make("llama"), mesh)
    faults.run_op("all_reduce", mesh.get_group())
    with handler_of_rank_0(lambda: model.save_pretrained(folder)) as handled:
        first = faults.ending_of(lambda: faults.run_op("all_reduce", mesh.get_group()))
    model.save_pretrained(folder)
    errors = [one.error for one in handled]
    wrong = [] if errors == ["RuntimeError"] * (dist.get_rank() == 0) else [str(handled)]
    return wrong + ([str(first)] if first.error else [])


@pytest.mark.thorough
def test_a_refused_save_breaks_nothing(ranks: RanksFixture, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    report(failure for rank in ranks(WORLD).run(save_job, str(tmp_path)) for failure in rank)
