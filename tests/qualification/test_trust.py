"""What a record of `tpkernels qualify` lets `auto` take, and that no other file does."""

from __future__ import annotations

import json
import os
from pathlib import Path
from unittest import mock

import pytest
import torch

import tpkernels
from tests.support import ranked
from tests.support.cuda_rehearsal import TRUSTED
from tests.support.nccl_rehearsal import over_nccl
from tpkernels import groups
from tpkernels.planning import trust
from tpkernels.planning.choose import Means, candidates, choose
from tpkernels.planning.problem import Problem
from tpkernels.planning.table import Measurement, Table
from tpkernels.planning.trust import (
    DISQUALIFIED,
    NOT_RUN,
    QUALIFIED,
    Failure,
    Outcome,
    Record,
    Trust,
)

WRONG = Failure("wrong", "all_reduce 2x2 float32", 1, elements=4, wrong=1, first=((3, "0", "2"),))
RECORD = Record(
    "2026-11-25",
    {"2": {"words": Outcome(QUALIFIED, 100, 1.0)}},
    {
        "2": {
            "direct/two_shot": Outcome(QUALIFIED, 9, 1.0),
            "direct/ll": Outcome(DISQUALIFIED, 3, 1.0, failure=WRONG),
            "direct/one_shot": Outcome(NOT_RUN, why="the budget"),
        }
    },
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tpkernels"


def problem(op: str = "all_reduce", world: int = 2) -> Problem:
    return Problem.evenly_split(op, device="cuda", world=world, shape=(64, 64), dtype=torch.float32)


def means(trusted: Trust) -> Means:
    return Means(True, trust=trusted)


def test_auto_takes_nothing_else_whatever_the_times() -> None:
    series, extent = problem().tuning_key or (None, 0)
    assert series is not None
    times = Table((Measurement(series, extent, 0, {"unfused": 1.0, "direct": 0.1}, "2026-11-25"),))
    assert choose(problem(), means(TRUSTED), tuned=times).algorithm == "direct"
    for trusted in (Trust(), Trust(frozenset({"direct/one_shot"})), RECORD.trust(4)):
        plan = choose(problem(), means(trusted), tuned=times)
        assert plan.algorithm == "unfused" and candidates(problem(), means(trusted)) == ["unfused"]
        assert choose(problem(), means(trusted), requested="direct").algorithm == "direct"
    assert choose(problem(), means(RECORD.trust(2)), tuned=times).algorithm == "direct"


def test_the_reasons_say_what_to_do() -> None:
    assert "`tpkernels qualify`" in choose(problem(), means(Trust())).reason
    assert "`tpkernels qualify --tp 4`" in str(RECORD.trust(4).why_not("all_reduce", "direct"))
    reason = RECORD.trust(2).why_not("all_gather", "direct") or ""
    assert "direct/one_shot: the budget" in reason
    assert "1 of 4 elements wrong in all_reduce 2x2 float32, rank 1: [3] 0 for 2" in reason
    assert RECORD.trust(2).why_not("all_reduce", "unfused") is None


def test_a_record_is_read_back(cache: Path) -> None:
    assert trust.load("cpu") == (None, "")
    path = trust.save("cpu", RECORD)
    assert path.parent == cache and trust.load("cpu") == (RECORD, "")
    assert RECORD.has("direct/ll", 2) and not RECORD.has("direct/one_shot", 2)
    later = Record("2026-11-26", ways={"4": {"direct/ll": Outcome(QUALIFIED)}})
    both = RECORD.extended(later)
    assert both.trust(4).ways == {"direct/ll"} and both.trust(2) == RECORD.trust(2).__class__(
        RECORD.trust(2).ways, RECORD.trust(2).reasons, both.trust(2).record
    )


SPOILT = {
    "others can write": lambda path: path.chmod(0o666),
    "another machine": lambda path: path.write_text(
        json.dumps(json.loads(path.read_text()) | {"kernels": "others"})
    ),
    "no 'date'": lambda path: path.write_text(
        json.dumps(json.loads(path.read_text()) | {"record": {"litmus": {}, "ways": {}}})
    ),
    "Expecting value": lambda path: path.write_text("no JSON"),
}


@pytest.mark.parametrize("why", SPOILT)
def test_a_file_that_is_not_to_be_trusted(cache: Path, why: str) -> None:
    path = trust.save("cpu", RECORD)
    SPOILT[why](path)
    record, warning = trust.load("cpu")
    assert record is None and why in warning and str(path) in warning


def test_changed_kernels_have_another_record(cache: Path) -> None:
    trust.save("cpu", RECORD)
    with mock.patch.object(trust, "kernels_digest", lambda: "of other sources"):
        assert trust.load("cpu") == (None, "")


def save_and_call(folder: str, driver: str) -> list[str]:
    """On a rank: rank 0 alone has the record. The kernels that an all-reduce of few bytes takes."""
    if torch.distributed.get_rank() == 0:
        os.environ["XDG_CACHE_HOME"] = folder
        trust.save("cuda", RECORD)
    launched = []
    from tpkernels.cuda import calls

    def spy(name: str, *args: object, **options: object) -> None:
        launched.append(name)
        launch(name, *args, **options)

    launch = calls.launch
    with over_nccl(driver, None) as patch, ranked.fresh_group() as group:
        patch.setattr(calls, "launch", spy)
        x = torch.ones(4, 64)
        assert torch.equal(tpkernels.all_reduce(x, group, algorithm="direct"), 2 * x)
        own = groups.get(group.group_name)
        assert own.trust().ways == {"direct/two_shot"}
        own.use_trust(Trust(frozenset({"direct/ll"})))
        tpkernels.all_reduce(x, group, algorithm="direct")
    return launched


def test_all_ranks_go_by_the_record_of_rank_0(
    ranks: object, cuda_driver: str, tmp_path: Path
) -> None:
    found = ranks(2).run(save_and_call, str(tmp_path), cuda_driver)  # type: ignore[operator]
    assert found == [["two_shot_all_reduce", "ll_all_reduce"]] * 2
