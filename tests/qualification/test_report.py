"""Reports of `tpkernels qualify`: the variants that `auto` may use, and files that are not
trusted."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import ranked
from tests.support.cuda_rehearsal import ALL_QUALIFIED
from tests.support.nccl_rehearsal import nccl_code_path
from tpkernels import groups, qualification
from tpkernels.planning import qualification as reports
from tpkernels.planning.choose import Capabilities, candidates, choose
from tpkernels.planning.op_spec import RoutedOptions
from tpkernels.planning.problem import Problem
from tpkernels.planning.qualification import (
    DISQUALIFIED,
    NOT_RUN,
    QUALIFIED,
    Failure,
    Qualification,
    QualificationReport,
    StageOutcome,
)
from tpkernels.planning.table import Measurement, Table
from tpkernels.symm import streams

WRONG = Failure("wrong", "all_reduce 2x2 float32", 1, elements=4, wrong=1, first=((3, "0", "2"),))
REPORT = QualificationReport(
    "2026-11-25",
    {"2": {"words": StageOutcome(QUALIFIED, 100, 1.0)}},
    {
        "2": {
            "direct/two_shot": StageOutcome(QUALIFIED, 9, 1.0),
            "direct/ll": StageOutcome(DISQUALIFIED, 3, 1.0, failure=WRONG),
            "direct/one_shot": StageOutcome(NOT_RUN, why="the budget"),
        }
    },
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tpkernels"


def problem(op: str = "all_reduce", world: int = 2) -> Problem:
    return Problem.evenly_split(op, device="cuda", world=world, shape=(64, 64), dtype=torch.float32)


def routed(**changes: Any) -> Problem:
    """Return a dispatch with a static number of rows."""
    options = RoutedOptions(experts=8, top_k=2, max_rows=128)
    return replace(problem("moe_dispatch"), **{"options": options, **changes})


def make_capabilities(qualification: Qualification) -> Capabilities:
    return Capabilities(True, qualification=qualification)


@pytest.mark.parametrize(
    ("make_problem", "algorithm", "reason"),
    [
        (routed, "direct", "with max_rows the host does not wait for token counts"),
        (
            lambda: routed(options=RoutedOptions(experts=8, top_k=2)),
            "unfused",
            "no algorithm is known to be faster",
        ),
        (lambda: routed(dtype=torch.float64), "unfused", "direct accumulates in float32"),
        (
            lambda: routed(shape=(1 << 30, 64)),
            "unfused",
            "direct supports fewer than 2**31 (token, expert) assignments",
        ),
        (lambda: routed(world=1, sizes=(64,)), "unfused", "one rank"),
    ],
)
def test_dispatch_with_max_rows_uses_qualified_kernels(
    make_problem: Callable[[], Problem], algorithm: str, reason: str
) -> None:
    plan = choose(make_problem(), make_capabilities(Qualification(frozenset({"direct/routed"}))))
    assert plan.algorithm == algorithm and reason in plan.reason, plan
    unqualified = choose(make_problem(), make_capabilities(Qualification(frozenset({"direct/ll"}))))
    assert unqualified.algorithm == "unfused"
    if algorithm == "direct":
        assert "direct is not qualified: `tpkernels qualify` has" in unqualified.reason, unqualified


def test_auto_selects_only_qualified_variants() -> None:
    series, extent = problem().tuning_key or (None, 0)
    assert series is not None
    times = Table((Measurement(series, extent, {"unfused": 1.0, "direct": 0.1}, "2026-11-25"),))
    assert choose(problem(), make_capabilities(ALL_QUALIFIED), tuned=times).algorithm == "direct"
    for allowed in (
        Qualification(),
        Qualification(frozenset({"direct/one_shot"})),
        REPORT.qualification(4),
    ):
        plan = choose(problem(), make_capabilities(allowed), tuned=times)
        assert plan.algorithm == "unfused" and candidates(
            problem(), make_capabilities(allowed)
        ) == ["unfused"]
        assert (
            choose(problem(), make_capabilities(allowed), requested="direct").algorithm == "direct"
        )
    assert (
        choose(problem(), make_capabilities(REPORT.qualification(2)), tuned=times).algorithm
        == "direct"
    )


def test_reasons_name_the_command() -> None:
    assert "`tpkernels qualify`" in choose(problem(), make_capabilities(Qualification())).reason
    assert "`tpkernels qualify --tp 4`" in str(
        REPORT.qualification(4).reason_against("all_reduce", "direct")
    )
    reason = REPORT.qualification(2).reason_against("all_gather", "direct") or ""
    assert "direct/one_shot: the budget" in reason
    assert (
        "1 of 4 elements are wrong in all_reduce 2x2 float32, rank 1: [3] is 0, expected 2"
        in reason
    )
    assert REPORT.qualification(2).reason_against("all_reduce", "unfused") is None


def test_a_saved_report_is_loaded(cache: Path) -> None:
    assert reports.load("cpu") == (None, "")
    path = reports.save("cpu", REPORT)
    assert path.parent == cache and reports.load("cpu") == (REPORT, "")
    assert REPORT.has("direct/ll", 2) and not REPORT.has("direct/one_shot", 2)
    later = QualificationReport(
        "2026-11-26", variants={"4": {"direct/ll": StageOutcome(QUALIFIED)}}
    )
    merged = REPORT.extended(later)
    assert merged.qualification(4).variants == {"direct/ll"} and merged.qualification(
        2
    ) == REPORT.qualification(2).__class__(
        REPORT.qualification(2).variants,
        REPORT.qualification(2).reasons,
        merged.qualification(2).summary,
    )


def write_variants(**variants: Any) -> Callable[[Path], Any]:
    """Return a function that writes a report with these variants, by world size."""
    report = {"date": "2026-11-26", "litmus": {}, "variants": variants}
    return lambda path: path.write_text(
        json.dumps(json.loads(path.read_text()) | {"report": report})
    )


INVALID: dict[str, Callable[[Path], Any]] = {
    "other users can write": lambda path: path.chmod(0o666),
    "on a different machine or by different versions": lambda path: path.write_text(
        json.dumps(json.loads(path.read_text()) | {"kernels": "others"})
    ),
    "lacks the field 'date'": lambda path: path.write_text(
        json.dumps(json.loads(path.read_text()) | {"report": {"litmus": {}, "variants": {}}})
    ),
    "a world size is 'two'": write_variants(two={}),
    "a world size is '-1'": write_variants(**{"-1": {}}),
    "a world size is ' 2 '": write_variants(**{" 2 ": {}}),
    "a variant is 'directll'": write_variants(
        **{"2": {"directll": asdict(StageOutcome(QUALIFIED))}}
    ),
    "a variant is 'direct/ll/c'": write_variants(
        **{"2": {"direct/ll/c": asdict(StageOutcome(QUALIFIED))}}
    ),
    "a variant is 'another/ll'": write_variants(
        **{"2": {"another/ll": asdict(StageOutcome(QUALIFIED))}}
    ),
    "status is 'QUALIFIED'; it must be 'qualified'": write_variants(
        **{"2": {"direct/ll": asdict(StageOutcome(QUALIFIED)) | {"status": "QUALIFIED"}}}
    ),
    "Expecting value": lambda path: path.write_text("no JSON"),
}


@pytest.mark.parametrize("reason", INVALID)
def test_untrusted_files(cache: Path, reason: str) -> None:
    path = reports.save("cpu", REPORT)
    INVALID[reason](path)
    report, warning = reports.load("cpu")
    assert report is None and reason in warning and str(path) in warning


def test_changed_kernels_need_a_new_report(cache: Path) -> None:
    reports.save("cpu", REPORT)
    with mock.patch.object(reports, "kernels_digest", lambda: "of other sources"):
        assert reports.load("cpu") == (None, "")


def save_and_call(folder: str, driver: str) -> list[str]:
    """Save the report on rank 0 only. Return the kernels that small all-reduces launch."""
    launched = []
    from tpkernels.cuda import calls

    def spy(name: str, *args: object, **options: object) -> None:
        launched.append(name)
        launch(name, *args, **options)

    launch = calls.launch
    with nccl_code_path(driver, None) as patch, ranked.fresh_group() as group:
        patch.setattr(calls, "launch", spy)
        if group.rank() == 0:
            patch.setenv("XDG_CACHE_HOME", folder)
            reports.save("cuda", REPORT)
        x = torch.ones(4, 64)
        assert torch.equal(tpkernels.all_reduce(x, group, algorithm="direct"), 2 * x)
        state = groups.get(group.group_name)
        assert state.qualification().variants == {"direct/two_shot"}
        state.use_qualification(Qualification(frozenset({"direct/ll"})))
        tpkernels.all_reduce(x, group, algorithm="direct")
    return launched


def test_all_ranks_use_the_report_of_rank_0(
    ranks: object, cuda_driver: str, tmp_path: Path
) -> None:
    launched = ranks(2).run(save_and_call, str(tmp_path), cuda_driver)  # type: ignore[operator]
    assert launched == [["two_shot_all_reduce", "ll_all_reduce"]] * 2


@contextlib.contextmanager
def fake_command(
    folder: str, driver: str, has_gpu: bool = True, failure: str = ""
) -> Iterator[tuple[pytest.MonkeyPatch, list[str]]]:
    """Replace the command by a function that writes a report, and that fails if ``failure`` is not
    empty. Yield the patch and the commands that ran. The rank sees a GPU if ``has_gpu``."""
    commands: list[str] = []

    def run_command(world: int, budget: float) -> str:
        commands.append(f"{world} {budget:g}")
        reports.save("cuda", REPORT)
        return failure

    with nccl_code_path(driver, None) as patch:
        patch.setenv("XDG_CACHE_HOME", folder)
        patch.setattr(qualification, "_run_command", run_command)
        patch.setattr(torch.cuda, "is_available", lambda: has_gpu)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(streams, "is_captured", lambda _: False)
        yield patch, commands


def qualify_a_group(folder: str, driver: str, failure: str) -> tuple[list[str], str]:
    """Return the outcomes of two calls of `qualify`, and the commands that ran. The group remains
    usable."""
    outcomes: list[str] = []
    with (
        fake_command(folder, driver, failure=failure) as (patch, commands),
        ranked.fresh_group() as group,
    ):
        for _ in range(2):
            try:
                outcomes.append(str(sorted(tpkernels.qualify(group, budget=30).variants)))
            except RuntimeError as error:
                outcomes.append(str(error))
        patch.undo()
        x = torch.ones(3)
        assert torch.equal(tpkernels.all_reduce(x, group), 2 * x)
    return outcomes, ", ".join(commands)


@pytest.mark.parametrize("failure", ["", "exit code 2"])
def test_a_group_is_qualified_once(
    ranks: object, cuda_driver: str, tmp_path: Path, failure: str
) -> None:
    results = ranks(2).run(qualify_a_group, str(tmp_path), cuda_driver, failure)  # type: ignore[operator]
    expected = (
        f"`tpkernels qualify` failed on rank 0: {failure}" if failure else "['direct/two_shot']"
    )
    assert [outcomes for outcomes, _ in results] == [[expected] * 2] * 2
    assert [commands for _, commands in results] == ["2 30, 2 30" if failure else "2 30", ""]


def init_a_group(folder: str, driver: str, gpus: tuple[bool, bool]) -> tuple[list[str], bool]:
    """Return the variants that calls may use after each of two calls of `init(qualify=True)`, and
    whether this rank ran the command."""
    variants = []
    with fake_command(folder, driver, gpus[dist.get_rank()]) as (_, commands):
        group = dist.new_group()
        for _ in range(2):
            tpkernels.init(group, timeout=20.0, qualify=True)
            variants.append(str(sorted(groups.get(group.group_name).qualification().variants)))
    return variants, bool(commands)


@pytest.mark.parametrize("gpus", [(True, True), (True, False)])
def test_init_qualifies_if_all_ranks_see_gpus(
    ranks: object, cuda_driver: str, tmp_path: Path, gpus: tuple[bool, bool]
) -> None:
    results = ranks(2).run(init_a_group, str(tmp_path), cuda_driver, gpus)  # type: ignore[operator]
    expected = "['direct/two_shot']" if all(gpus) else "[]"
    assert results == [([expected] * 2, all(gpus)), ([expected] * 2, False)]


def test_the_budget_must_be_positive() -> None:
    with pytest.raises(ValueError, match="budget must be a positive number of seconds, not 0"):
        tpkernels.qualify(budget=0)
