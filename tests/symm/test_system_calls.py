"""Systems on which ranks cannot share memory: kernels and filters that refuse a system call; and
Pythons that lack the functions for one."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.cases import RanksFixture
from tests.support.faults import Ending, shares_memory
from tests.support.processes import output_of
from tests.support.tiers import sweep
from tpkernels import _C
from tpkernels.launch import Ranks

WRAPPERS = ("pidfd_open", "memfd_create", "MFD_CLOEXEC")


def unsupported_job(call: str, rank: int, refusal: int) -> tuple[bool, list[str], Ending, str]:
    """One rank has a kernel without a system call, or a filter that forbids it."""
    group = faults.group_of(dist.new_group())
    open_it = getattr(_C.host, call)

    def refuse(*_: Any) -> int:
        raise OSError(refusal, os.strerror(refusal))

    if group.rank() == rank:
        setattr(_C.host, call, refuse)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tpkernels.init(group, 5.0, faults.WORKSPACE_BYTES)
            ending = faults.ending_of(lambda: faults.run_op("matmul_reduce_scatter", group))
            refused = faults.ending_of(lambda: tpkernels.empty(4, group=group)).text
    finally:
        setattr(_C.host, call, open_it)
    return shares_memory(group), [str(one.message) for one in caught], ending, refused


@pytest.mark.parametrize("call", ["open_memfd", "open_pidfd"])
@pytest.mark.parametrize(("rank", "refusal"), sweep([(0, 38), (1, 1)]), ids=["ENOSYS", "EPERM"])
def test_ranks_without_a_system_call_use_the_process_group(
    ranks: RanksFixture, call: str, rank: int, refusal: int
) -> None:
    name = call.replace("open_pidfd", "pidfd_open").replace("open_memfd", "memfd_create")
    for at, (shared, caught, ending, refused) in enumerate(
        ranks(2).run(unsupported_job, call, rank, refusal)
    ):
        assert not shared and not ending.error, ending
        why = f"rank {rank} cannot share memory: {name}: {os.strerror(refusal)}"
        assert why in refused, refused
        assert len(caught) == (at == 0), caught  # rank 0 alone warns
        assert all("the ranks are on one machine" in one and why in one for one in caught)


def without_job() -> bool:
    with pytest.MonkeyPatch.context() as patch:
        for name in WRAPPERS:
            patch.delattr(os, name, raising=False)
        group = faults.new_group()
        faults.run_op("all_reduce", group)
        return shares_memory(group)


def test_a_python_without_the_functions_works_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conda's Python, and those built for old systems."""
    for name in WRAPPERS:
        monkeypatch.delattr(os, name, raising=False)
    with Ranks(2) as ranks:
        assert ranks.run(without_job) == [True, True]


def test_the_import_needs_none_of_the_functions() -> None:
    remove = f"import os; [vars(os).pop(name, None) for name in {WRAPPERS}]; import tpkernels"
    output_of("-c", remove)


def test_one_rank_needs_no_system_call(ranks: RanksFixture) -> None:
    ((shared, caught, ending, _),) = ranks(1).run(unsupported_job, "open_memfd", 0, 38)
    assert not shared and not ending.error and not caught, (ending, caught)
