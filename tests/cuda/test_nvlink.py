"""LL128 is taken where NVLink connects all GPUs, and all ranks take the same way: an NVML
made for the tests, and the kernels of csrc/cuda on the CPU."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import emulated
from tests.support.cases import Case, RanksFixture, each
from tests.support.cuda_rehearsal import pretending, space_of
from tests.support.emulated import on_ranks, require_none
from tests.support.ranked import check_cases, fresh_group
from tests.support.tiers import sweep
from tpkernels import groups
from tpkernels.cuda import calls
from tpkernels.planning import machine
from tpkernels.planning.machine import Machine, this_machine
from tpkernels.symm import nvlink

F32 = torch.float32
SMALL, MIDDLE = (64, 16), (300, 64)  # 4 KiB and 75 KiB in fp32
# What the ranks find, by rank; and what rank 0 is told.
DOUBTS = {
    "a pair is not linked": (
        {0: {"EMULATED_UNLINKED": "0-2"}},
        "rank 0: no NVLink from GPU-0 to GPU-2",
    ),
    "one direction": ({3: {"EMULATED_UNLINKED": "3-1"}}, "rank 3: no NVLink from GPU-3 to GPU-1"),
    "off on one rank": ({1: {"NCCL_PROTO": "^LL128"}}, r"rank 1: NCCL_PROTO is '\^LL128'"),
    "a GPU that NVML lacks": ({2: {"gpu": "GPU-9"}}, r"rank 0: .*GPU-9\) returns 6"),
    "one GPU for two": ({2: {"gpu": "GPU-1"}}, "rank 1: shares GPU-1 with another rank"),
    "no GPU": ({0: {"gpu": ""}}, "rank 0: no GPU"),
    "no NVML": (
        {1: {"library": "libmissing.so"}},
        "rank 1: NVML says nothing about links: libmissing",
    ),
    "another library": ({1: {"library": "libm.so.6"}}, "rank 1: NVML says nothing .*nvmlInit_v2"),
}


@pytest.fixture(scope="session")
def nvml(cxx_cache: Path) -> str:
    return str(emulated.build(cxx_cache, "nvml.cpp", "-fPIC", "-shared"))


@contextmanager
def links(library: str, rank: int, doubt: str) -> Iterator[pytest.MonkeyPatch]:
    """What a rank finds: all GPUs linked, or less in a doubt of ``DOUBTS``."""
    with pytest.MonkeyPatch.context() as patch:
        found = dict(DOUBTS[doubt][0].get(rank, {})) if doubt else {}
        patch.setattr("tpkernels.nvml.LIBRARY", found.pop("library", library))
        gpu = found.pop("gpu", f"GPU-{rank}") or None
        patch.setattr(nvlink, "_uuid", lambda _: gpu)
        for name, value in found.items():
            patch.setenv(name, value)
        yield patch


@pytest.mark.parametrize("doubt", ["", *sweep(DOUBTS, count=1, later=2)])
@on_ranks(4)
def test_ll128_over_nvlink(nvml: str, doubt: str) -> None:
    """The ways that calls of two sizes take, in every workspace of the group, however it grows;
    with the bits of the other algorithms. A doubt of one rank is a no for all."""
    ways, run, logged = [], calls.all_reduce, []

    def spy(*given: Any) -> None:
        ways.append(given[6])
        run(*given)

    with pretending() as patch, fresh_group() as group:
        patch.setattr(calls, "all_reduce", spy)
        patch.setattr(
            "tpkernels.symm.cuda._logger.info", lambda text, *more: logged.append(text % more)
        )
        with links(nvml, group.rank(), doubt):
            cases = each(
                Case(op="all_reduce", shape=SMALL),
                Case(op="all_reduce", shape=MIDDLE),
                Case(op="matmul_all_reduce", shape=MIDDLE, k=(5,)),
                dtypes=(F32,),
                algorithms=("direct",),
                integers=(False,),
            )
            require_none(check_cases(cases, group))
        space = space_of(group)
    # 75 KiB without LL128: by words one hop, on 4 ranks
    assert ways == (["ll"] * 3 if doubt else ["ll", "ll128", "ll128"]), ways
    assert len(space.spaces) > 1
    assert {"ll128" in each.ways for each in space.spaces} == {not doubt}
    if not doubt:
        told = ["are whole, by what NVML says of NVLink" in line for line in logged]
        assert told == [True] * (group.rank() == 0), logged


def why_job(library: str, doubt: str) -> str | None:
    with fresh_group() as group, links(library, group.rank(), doubt):
        participant = groups.get(group.group_name).participant(20.0)
        return nvlink.why_lines_may_tear(participant, torch.device("cpu"))


@pytest.mark.parametrize("doubt", DOUBTS)
def test_all_ranks_are_told_alike(ranks: RanksFixture, nvml: str, doubt: str) -> None:
    told = ranks(4).run(why_job, nvml, doubt)
    assert len(set(told)) == 1 and told[0] is not None
    assert re.match(DOUBTS[doubt][1], told[0]), told[0]


@pytest.mark.parametrize(
    ("protocols", "on"),
    [
        (None, True),
        ("LL,LL128,Simple", True),
        ("ll128", True),
        ("^LL", True),
        ("^LL128", False),
        ("^Simple, LL128", False),
        ("Simple", False),
        ("", False),
        ("allreduce:LL128", False),
        ("^allreduce:LL128", False),
    ],
)
def test_what_keeps_nccl_from_ll128_does_here(protocols: str | None, on: bool) -> None:
    assert nvlink._allows_ll128(protocols) is on


def test_times_on_gpus_are_those_of_their_links_and_libraries(
    nvml: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of nothing on the host: `tpkernels tune` has other threads than torchrun."""
    monkeypatch.setattr("tpkernels.nvml.LIBRARY", nvml)
    monkeypatch.setattr("tpkernels.nvml.uuid_of", lambda number: f"GPU-{number}")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))

    def found() -> Machine:
        machine._gpus.cache_clear()
        return this_machine("cuda", 4, 1, True)

    first = found()
    assert first.gpus == "0 pairs of 4 without NVLink; driver 580.65.06, NCCL 2.27.3"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(99))
    assert found().file_name == first.file_name
    others = set()
    for name, value in (("EMULATED_DRIVER", "590.1"), ("EMULATED_UNLINKED", "1-3")):
        monkeypatch.setenv(name, value)
        others.add(found().file_name)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 1))
    others.add(found().file_name)
    monkeypatch.setattr("tpkernels.nvml.LIBRARY", "libmissing.so")
    assert found().gpus == "4, links unknown: OSError; driver unknown, NCCL 2.28.1"
    assert len(others | {first.file_name, found().file_name}) == 5
    machine._gpus.cache_clear()


def test_a_cpu_has_no_nvlink() -> None:
    assert nvlink._uuid(torch.device("cpu")) is None
    assert nvlink._why_not([None, None], 0) == "no GPU"
