"""``tpkernels tune`` and ``tpkernels explain``."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.cli.test_cli import invoke
from tests.planning.test_table import measured
from tests.support.ranked import on_ranks
from tests.support.tuned import watch_algorithms
from tpkernels.bench.specs import Spec
from tpkernels.cli.tune import tune_case
from tpkernels.launch import session
from tpkernels.launch.terminal import milliseconds
from tpkernels.planning import store
from tpkernels.planning.choose import EMPTY_TABLE, PIPELINED_MIN_ROWS, Capabilities, choose
from tpkernels.planning.machine import this_machine

SMALL = ["--op", "all_gather_matmul", "--shape", "9,64,32", "--shape", "33,64,32"]
EXPLAIN = ["explain", "--op", "all_gather_matmul", "--n", "64", "--k", "32", "--tp", "2"]


def case(m: int) -> Spec:
    return Spec("all_gather_matmul", (m, 64, 32), torch.bfloat16)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return store.get_table_path(this_machine("cpu", 2, 1, True, threads=1))


@pytest.mark.thorough
def test_explain_before_and_after_tune(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache file is unreadable at first. ``tune`` replaces it."""
    cache.parent.mkdir(0o700)
    cache.write_bytes(b"not ours")
    with pytest.warns(RuntimeWarning, match="ignoring the tuning cache .*: it is not JSON"):
        before = invoke(*EXPLAIN, "--m", "33")
    assert before.exit_code == 0, before.output
    assert before.output.count("not measured") == 4
    assert "needs a GPU, because it runs Triton kernels" in " ".join(before.output.split())  # fused
    assert f"auto selects direct: 16 rows per rank < {PIPELINED_MIN_ROWS}" in before.output
    assert "No times were measured with 2 ranks x 1 thread" in before.output

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tuned = invoke("tune", *SMALL, "--op", "all_reduce", "--bytes", "4K", "--budget", "1")
    assert tuned.exit_code == 0, tuned.output
    assert "9, 64, 32 bfloat16" in tuned.output and "4 KiB bfloat16" in tuned.output
    assert str(cache) in tuned.output.replace("\n", "")
    records = json.loads(cache.read_bytes())["measurements"]
    assert [record["extent"] for record in records] == [9, 33, 2048]
    assert set(records[0]["ms"]) == {"unfused", "direct"}  # few rows are not split
    assert set(records[1]["ms"]) == {"unfused", "ring", "direct", "pipelined"}
    shown = {milliseconds(ms) for ms in records[2]["ms"].values()}
    assert shown <= set(tuned.output.split()), tuned.output

    monkeypatch.delattr(session, "Ranks")  # from here on no rank can start
    after = invoke(*EXPLAIN, "--m", "33")
    assert "not measured" not in after.output
    times = records[1]["ms"]
    table = EMPTY_TABLE.extended([measured(case(33), **times)])
    best = choose(case(33).problem(2), Capabilities(shared_memory=True), tuned=table).algorithm
    assert f"auto selects {best}: tuned: {times[best]:.3g} ms, " in after.output
    assert "Times measured with 2 ranks x 1 thread: 3 cases" in after.output
    interpolated = invoke(*EXPLAIN, "--m", "20")
    assert interpolated.output.count("not measured") == 4
    more_threads = invoke(*EXPLAIN, "--m", "9", "--threads", "2")
    assert "No times were measured with 2 ranks x 2 threads" in more_threads.output
    on_two_hosts = invoke(*EXPLAIN, "--m", "9", "--hosts", "2")
    assert "auto selects unfused: the ranks do not share memory" in on_two_hosts.output


@on_ranks(2)
def test_tune_skips_failures_and_measures_again(tmp_path: Path) -> None:
    def fail(name: str) -> None:
        if name == "direct" and dist.get_rank() == 1:
            raise MemoryError("no room for the test")

    spec = case(33)
    folder = mock.patch.dict(os.environ, XDG_CACHE_HOME=str(tmp_path))
    with folder, watch_algorithms(before=fail), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, _, failed, _ = tune_case(spec, 0.2)
        assert list(failed) == ["direct"] and "no room for the test" in failed["direct"]
    with folder:
        chosen, ms, failed, path = tune_case(spec, 0.2)
    assert set(ms) == {"unfused", "ring", "direct", "pipelined"} and not failed
    assert chosen.reason.startswith("tuned: ") and (path.parent == tmp_path / "tpkernels")


@pytest.mark.parametrize("fault", ["cannot be written", "would not be read"])
def test_a_bad_cache_folder_is_reported_before_measuring(
    cache: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.delattr(session, "Ranks")
    if fault == "cannot be written":
        (cache.parent.parent / "file").write_text("in the way")
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent.parent / "file"))
        message = "Error: the cache folder cannot be used: "
    else:
        cache.parent.mkdir()
        cache.parent.chmod(0o770)
        message = "Error: the cache folder cannot be used: it has mode 770"
    result = invoke("tune", *SMALL)
    assert result.exit_code == 2 and message in result.output


# GPUs.


def test_explain_shows_gpu_requirements() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    shown = invoke(*EXPLAIN, "--m", "9", "--device", "cuda").output
    assert "needs a GPU that is visible to torch" in shown and "auto selects unfused" in shown


@pytest.mark.parametrize(
    ("nbytes", "world", "expected"),
    [
        ("16K", 8, "direct uses the ll variant at this size, according to the cost model"),
        ("256K", 8, "direct uses the ll_two_shot variant"),
        ("4M", 8, "direct uses the two_shot variant"),
    ],
)
def test_explain_shows_the_direct_variant(nbytes: str, world: int, expected: str) -> None:
    args = ["--op", "all_reduce", "--bytes", nbytes, "--tp", str(world)]
    shown = " ".join(invoke("explain", *args, "--device", "cuda").output.split())
    assert expected in shown
    assert "direct uses" not in invoke("explain", *args).output
