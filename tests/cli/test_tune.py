"""``tpkernels tune`` and ``tpkernels explain``."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.cli.test_cli import invoke, one_element_off
from tests.planning.test_table import measured
from tests.support.ranked import on_ranks
from tpkernels.bench.specs import Spec
from tpkernels.cli.tune import tune_case
from tpkernels.launch import session
from tpkernels.launch.terminal import milliseconds
from tpkernels.planning import store
from tpkernels.planning.choose import NOTHING_TUNED, Means, choose, split_rule
from tpkernels.planning.machine import cpu_flags, this_machine

SMALL = ["--op", "all_gather_matmul", "--shape", "9,64,32", "--shape", "33,64,32"]
EXPLAIN = ["explain", "--op", "all_gather_matmul", "--n", "64", "--k", "32", "--tp", "2"]


def case(n: int) -> Spec:
    return Spec("all_gather_matmul", (9, n, 32), torch.bfloat16)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return store.path_for(this_machine("cpu", 2, 1, True, threads=1))


@pytest.mark.thorough
def test_explain_before_and_after_tune(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = invoke(*EXPLAIN, "--m", "9")
    assert before.exit_code == 0, before.output
    assert before.output.count("not measured") == 4
    assert "needs" in before.output or "runs Triton kernels" in before.output  # fused
    fewest = split_rule(torch.bfloat16, cpu_flags()).min_rows
    assert f"auto chooses direct: 4 rows a rank < {fewest}" in before.output
    assert "Nothing was measured here with 2 ranks x 1 thread" in before.output
    assert "In the first calls it tries unfused, direct, pipelined" in before.output

    tuned = invoke("tune", *SMALL, "--op", "all_reduce", "--bytes", "4K", "--repeat", "3")
    assert tuned.exit_code == 0, tuned.output
    assert "9, 64, 32 bfloat16" in tuned.output and "4 KiB bfloat16" in tuned.output
    assert str(cache) in tuned.output.replace("\n", "")
    written = json.loads(cache.read_bytes())["measurements"]
    assert [(one["extent"], one["other"]) for one in written] == [(9, 64), (33, 64), (2048, 0)]
    ways = {"unfused", "ring", "direct", "pipelined"}
    left_out = ways - set(written[0]["ms"])  # where 4 rows are rounded differently from 9
    assert left_out <= {"ring", "pipelined"}
    assert set(written[2]["ms"]) == ways - {"pipelined"}
    shown = {milliseconds(ms) for ms in written[2]["ms"].values()}
    assert shown <= set(tuned.output.split()), tuned.output

    monkeypatch.delattr(session, "Ranks")  # from here on no rank can start
    after = invoke(*EXPLAIN, "--m", "9")
    assert after.output.count("not measured") == len(left_out)
    assert "In the first calls" not in after.output  # the choice is made
    times = written[0]["ms"]
    table = NOTHING_TUNED.extended([measured(case(64), **times)])
    best = choose(case(64).problem(2), Means(shared_memory=True), tuned=table).algorithm
    assert f"auto chooses {best}: tuned: {times[best]:.3g} ms, " in after.output
    assert "Measured here with 2 ranks x 1 thread: 3 cases" in after.output
    between = invoke(*EXPLAIN, "--m", "20")
    assert between.output.count("not measured") == 4
    elsewhere = invoke(*EXPLAIN, "--m", "9", "--threads", "2")
    assert "Nothing was measured here with 2 ranks x 2 threads" in elsewhere.output
    apart = invoke(*EXPLAIN, "--m", "9", "--hosts", "2")
    assert "auto chooses unfused: the ranks share no memory" in apart.output


def test_explain_weighs_the_cases_of_one_problem(cache: Path) -> None:
    machine = this_machine("cpu", 2, 1, True, threads=1)
    for n, unfused in ((64, 1.0), (128, 4.0)):
        store.update(machine, measured(case(n), unfused=unfused, direct=2.0))
    shown = invoke(*EXPLAIN, "--m", "9").output
    assert "1.00 (64), 4.00 (128)" in shown
    assert "within 2.00x of the fastest in 2 cases" in shown


@pytest.mark.parametrize("way", ["direct", "pipelined"])
@on_ranks(2)
def test_tune_leaves_out_what_is_wrong_or_rounds_differently(way: str) -> None:
    """`direct` is wrong everywhere; of `pipelined` one bit of one rank's result is another."""
    right = tpkernels.all_gather_matmul

    def damaged(*args: object, algorithm: str, **options: object) -> object:
        y = right(*args, algorithm=algorithm, **options)  # type: ignore[call-overload]
        if algorithm != way:
            return y
        if way == "direct":
            return [one_element_off(one) for one in y]
        if dist.get_rank() == 1:
            y[0].view(torch.int32).view(-1)[0] ^= 1
        return y

    with mock.patch.object(tpkernels, "all_gather_matmul", damaged):
        report = tune_case(Spec("all_gather_matmul", (512, 64, 32), torch.float32), 2, 5.0)
        assert report.verdicts[way].right is (way == "pipelined")
        assert report.measurement is not None
        assert set(report.measurement.ms) == {"unfused", "ring", "direct", "pipelined"} - {way}


@pytest.mark.thorough
def test_a_bad_cache_is_replaced(cache: Path) -> None:
    cache.parent.mkdir(0o700)
    cache.write_bytes(b"not ours")
    with pytest.warns(RuntimeWarning, match="is ignored: it is not JSON"):
        shown = invoke(*EXPLAIN, "--m", "9")
    assert "auto chooses direct" in shown.output
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert invoke("tune", *SMALL[:4], "--repeat", "2").exit_code == 0
    assert "Measured here" in invoke(*EXPLAIN, "--m", "9").output


@pytest.mark.parametrize("how", ["cannot be written", "would not be read"])
def test_a_bad_cache_folder_is_found_before_measuring(
    cache: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.delattr(session, "Ranks")
    if how == "cannot be written":
        (cache.parent.parent / "file").write_text("in the way")
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent.parent / "file"))
        message = "Error: no cache folder: "
    else:
        cache.parent.mkdir()
        cache.parent.chmod(0o770)
        message = f"Error: the cache folder '{cache.parent}' is not used: it has mode 770"
    result = invoke("tune", *SMALL)
    assert result.exit_code == 2 and message in result.output


# GPUs.


def test_explain_tells_what_a_gpu_would_need() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    shown = invoke(*EXPLAIN, "--m", "9", "--device", "cuda").output
    assert "needs a GPU that torch sees" in shown and "auto chooses unfused" in shown


@pytest.mark.parametrize(
    ("nbytes", "world", "said"),
    [
        ("16K", 8, "direct sums by ll, for these bytes and ranks by the model"),
        ("256K", 8, "direct sums by ll_two_shot"),
        ("4M", 8, "direct sums by two_shot"),
    ],
)
def test_explain_says_how_direct_sums(nbytes: str, world: int, said: str) -> None:
    given = ["--op", "all_reduce", "--bytes", nbytes, "--tp", str(world)]
    shown = " ".join(invoke("explain", *given, "--device", "cuda").output.split())
    assert said in shown
    assert "direct sums" not in invoke("explain", *given).output
