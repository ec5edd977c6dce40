"""The command line: output, detection of wrong results, and refusal of bad input."""

from __future__ import annotations

import os
import re
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import tpkernels
from tests.support.processes import python
from tpkernels.cli import app
from tpkernels.launch import session, terminal

TINY_DEMO = ["demo", "--m", "18", "--hidden", "64", "--ffn", "66", "--repeat", "1"]
LAYERS = "explain --model llama3-70b --tp 1,2,4,8,16,32,64 --machine h200"


def invoke(*args: object) -> Result:
    return CliRunner().invoke(app, list(map(str, args)))


@pytest.fixture
def only_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process the only rank of a launcher, so that the command uses patched functions."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in launcher.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.slow
def test_demo_passes_with_uneven_shards() -> None:
    result = python("-m", "tpkernels", *TINY_DEMO, "--nproc", 3, seconds=60)
    assert result.returncode == 0, result.stdout + result.stderr
    first, *table, last = result.stdout.splitlines()
    assert first.startswith(
        "The all-gather + matmul and matmul + reduce-scatter of a transformer layer on 3 ranks"
    )
    assert last == "PASS: all results are correct"
    for row in ("QKV", "attention out", "gate and up", "down", "18, 192, 64", "18, 64, 66"):
        assert any(row in line for line in table)
    assert max(map(len, result.stdout.splitlines())) <= 100
    warnings = result.stderr.splitlines()  # printed on fewer than three cores
    assert all(line.startswith("Starting 3 ranks x 1 thread on") for line in warnings), warnings


def check_refused(args: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Require that a command fails with one line and starts no rank."""
    monkeypatch.delattr(session, "Ranks")
    result = invoke(*args.split())
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert result.output.startswith("Error: ")
    assert result.output.count("\n") == 1


def one_element_off(y: torch.Tensor) -> torch.Tensor:
    """Return ``y`` with one element off by a tenth of the largest element, or by 1 for integers."""
    y = y.clone()
    y.view(-1)[y.numel() // 2] += 0.1 * y.abs().max() if y.is_floating_point() else 1
    return y


def test_demo_fails_if_a_result_is_wrong(only_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    right = tpkernels.matmul_reduce_scatter

    def wrong(*args: Any, algorithm: str, **options: Any) -> torch.Tensor:
        y = right(*args, algorithm=algorithm, **options)
        return one_element_off(y) if algorithm == "auto" else y

    monkeypatch.setattr(tpkernels, "matmul_reduce_scatter", wrong)
    result = invoke(*TINY_DEMO)
    assert result.exit_code == 1, result.output
    assert "FAIL: wrong results: attention out (auto), down (auto)" in result.output
    assert result.output.count(" WRONG") == 2 and "PASS" not in result.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("bench --op gather", "unknown op 'gather'; choose from all_gather_matmul,"),
        ("bench --algorithm fast", "unknown algorithm 'fast'; choose from auto, unfused,"),
        ("bench --dtype int8", "unknown dtype 'int8'; choose from fp32, fp16, bf16,"),
        ("bench --shape 16,16", "shape '16,16' is not M,N,K"),
        ("bench --op all_gather_matmul --shape 8,33,16", "N of 8,33,16 is 33"),
        ("bench --op all_reduce --bytes 64X", "size '64X' is not a number of bytes"),
        (
            "bench --op all_reduce --bytes 3",
            "--bytes 3 is not divisible by the 2 bytes of a bfloat16 element",
        ),
        (
            "bench --op all_reduce --algorithm pipelined",
            "algorithm 'pipelined' cannot run all_reduce: it overlaps communication with a matmul, "
            "but this op does not contain a matmul",
        ),
        ("bench --nproc 0", "--tp: '0' is not a positive integer"),
        ("bench --threads 5000", "--threads is 5000; it must be at most 1024"),
        ("bench --repeat 9999999999999", "--repeat is 9999999999999; it must be at most"),
        ("bench --model llama9", "unknown model 'llama9'; choose from gemma2-9b,"),
        ("bench --model smollm2-135m --m 16 --tp 5", "N of 16,1216,576 smollm2-135m qkv is 1216"),
        ("bench --m 16", "--m needs --model; --shape gives M, N and K"),
        ("bench --seconds 0", "--seconds is 0; it must be positive"),
        ("bench --device tpu", "unknown device 'tpu'; choose from cpu, cuda"),
        ("demo --m 0", "--m is 0; it must be at least 1"),
        ("demo --nproc 4 --ffn 3", "--ffn is 3; it must be at least 4, the number of ranks"),
        ("demo --nproc 5000 --ffn 5000", "--nproc is 5000; it must be at most 1024"),
        ("profile", "pass either --op or a script"),
        ("profile /nowhere/x.py", "the script '/nowhere/x.py' does not exist"),
        ("profile --op all_reduce --calls 0", "--calls is 0"),
        ("profile --op all_gather_matmul --algorithm fused", "TRITON_INTERPRET=1"),
        ("profile --op all_reduce --out /proc", "cannot write '/proc/trace.json'"),
        ("tune --op gather", "unknown op 'gather'; choose from all_gather_matmul,"),
        ("tune --op all_gather_matmul --shape 8,33,16", "N of 8,33,16 is 33"),
        ("tune --tp 1", "nothing to tune with --tp 1: a single rank does not communicate"),
        ("explain --op all_reduce --m 4", "all_reduce needs --bytes, without --m"),
        (
            "explain --op matmul_all_reduce --m 4",
            "matmul_all_reduce needs --m, --n and --k, without --bytes",
        ),
        ("explain --op matmul_all_reduce --m 4 --n 4 --k 5", "K of 4,4,5 is 5"),
        ("explain --op all_reduce --bytes 4K,1M", "--bytes 4K,1M has 2 sizes; pass one"),
        ("explain --op all_reduce --bytes 4 --device tpu", "unknown device 'tpu'"),
        ("explain --op all_reduce --model llama3-8b", "pass either --op or --model"),
        (
            "explain --op all_reduce --bytes 4 --tp 1,2",
            "a list of --tp, --machine and --json need --model",
        ),
        (f"{LAYERS} --m 8", "--m, --n, --k and --bytes need --op"),
        (f"{LAYERS} --decode 0", "--decode is 0; it must be at least 1"),
        (LAYERS.replace("h200", "tpu"), "unknown machine 'tpu'; choose from this, a100-pcie"),
        (LAYERS.replace("h200", "this"), "with 64 ranks x 1 thread; run tpkernels tune --machine"),
        (LAYERS.replace("64", "0"), "--tp: '0' is not a positive integer"),
        (LAYERS.replace("64", "128"), "--tp is 128; llama3-70b has 64 attention heads"),
    ],
)
def test_bad_input_is_one_line_before_any_rank_starts(
    args: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # an empty tuning cache
    check_refused(args, message, monkeypatch)


def test_version() -> None:
    result = invoke("--version")
    assert (result.exit_code, result.output) == (0, f"tpkernels {tpkernels.__version__}\n")


@pytest.mark.parametrize(("ranks", "warned"), [(2, False), (3, True)])
def test_more_threads_than_cores_are_reported(
    ranks: int, warned: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    terminal.warn_oversubscription(ranks, 2)
    warning = "Starting 3 ranks x 2 threads on 4 cores: threads share cores, which is slow.\n"
    assert capsys.readouterr().err == (warning if warned else "")


@pytest.mark.parametrize(
    "command",
    [
        "info",
        "explain --op matmul_reduce_scatter --m 2048 --n 4096 --k 4096 --tp 2",
        "explain --op all_reduce --bytes 1M --device cuda --tp 8",
        LAYERS,
        "qualify --device cpu --plan",
    ],
)
def test_tables_fit_100_columns(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No line is longer than 100 characters, and no text is cut off."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # an empty tuning cache
    characters = {}
    for width in (100, 300, 100):  # the first `info` loads NCCL, and later output names it
        monkeypatch.setattr(terminal, "_WIDTH", width)
        result = invoke(*command.split())
        assert result.exit_code == 0, result.output
        assert max(map(len, result.output.splitlines())) <= width
        memory = re.sub(r"[\d.]+ GiB available", "", result.output)  # changes all the time
        characters[width] = Counter("".join(memory.split()).replace("─", ""))
    assert characters[100] == characters[300]


def test_nproc_must_match_the_launcher(only_rank: None) -> None:
    result = invoke("demo", "--nproc", "2")
    assert result.exit_code == 2
    assert "--nproc is 2 but torchrun set WORLD_SIZE to 1" in result.output
    result = invoke("bench", "--tp", "1,2")
    assert result.exit_code == 2
    assert "--tp is 2 but torchrun started 1 rank (WORLD_SIZE); leave --tp out" in result.output
