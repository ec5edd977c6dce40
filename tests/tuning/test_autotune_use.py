"""``tpkernels.autotune``: where its times go, and on which ranks and tensors it works."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import emulated, faults
from tests.support.cases import RanksFixture
from tests.support.cuda_rehearsal import pretending
from tests.support.ranked import apart, fresh_group, report
from tests.support.tuned import WORLD, call, own, plan_of, watched
from tpkernels.groups.group import Group
from tpkernels.planning.table import Table
from tpkernels.symm import streams


def saved_job(folder: str, blocked: str) -> tuple[bool, list[str]]:
    with mock.patch.dict(os.environ, XDG_CACHE_HOME=folder):
        with fresh_group() as group, tpkernels.autotune(group, save=True):
            call("matmul_all_reduce", group)
            kept = own(group).measured.tables["cpu"].measurements
        with fresh_group() as group:
            read = own(group).tuned("cpu").measurements
    with (
        mock.patch.dict(os.environ, XDG_CACHE_HOME=blocked),
        fresh_group() as group,
        tpkernels.autotune(group, save=True),
        warnings.catch_warnings(record=True) as given,
    ):
        warnings.simplefilter("always")
        call("matmul_all_reduce", group)
    same = [(one.series, one.ms) for one in read] == [(one.series, one.ms) for one in kept]
    return same and bool(kept), [str(each.message) for each in given]


@pytest.mark.thorough
def test_the_times_are_saved_if_asked_for(ranks: RanksFixture, tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "tpkernels").write_text("a file, not a folder")
    told = ranks(WORLD).run(saved_job, str(tmp_path), str(blocked))
    assert all(same for same, _ in told)
    assert any("autotune could not save its times" in text for text in told[0][1])
    assert not any("save" in text for _, texts in told[1:] for text in texts)


def apart_job() -> list[str]:
    """Ranks that share no memory have neither one clock nor a second workspace."""
    failures = []
    slow = {"unfused": 0.02, "ring": 0.0}
    with apart(), fresh_group() as group, watched(slow) as made, tpkernels.autotune(group):
        expected = call("matmul_all_reduce", group, algorithm="unfused")
        got = call("matmul_all_reduce", group)
        if set(made) != {"unfused", "ring"} or not torch.equal(got, expected):
            failures.append(f"{made}")
        if plan_of(group).algorithm != "ring":
            failures.append(plan_of(group).reason)
    return failures


def test_ranks_that_share_no_memory(ranks: RanksFixture) -> None:
    report(f for rank in ranks(WORLD).run(apart_job) for f in rank)


def cuda_job(driver: str) -> list[str]:
    """CPU tensors on the way of CUDA tensors. What is met in a capture is tuned after it."""
    emulated.load(driver)
    failures = []
    with pretending() as patch:
        patch.setattr(Group, "by_gloo", lambda *_: False)
        group = faults.new_group()
        own(group).measured.tables["cuda"] = Table()
        x = torch.full((8, 4), float(dist.get_rank() + 1))
        with tpkernels.autotune(group):
            for captured in (True, False):
                patch.setattr(streams, "is_captured", lambda _, captured=captured: captured)
                got = tpkernels.all_gather(x, group)
                measured = own(group).measured.tables["cuda"].measurements
                if bool(measured) == captured or got[:, 0].tolist() != [1.0] * 8 + [2.0] * 8:
                    failures.append(f"captured {captured}: {measured}")
            tpkernels.all_gather(x, group)
            if not plan_of(group).reason.startswith("tried: "):
                failures.append(plan_of(group).reason)
    return failures


def test_nothing_is_tuned_in_a_capture(ranks: RanksFixture, cuda_driver: str) -> None:
    report(f for rank in ranks(2).run(cuda_job, cuda_driver) for f in rank)
