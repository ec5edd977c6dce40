"""``tpkernels explain`` of GPUs; that of measured times is in test_tune.py."""

from __future__ import annotations

import pytest
import torch

from tests.cli.test_cli import invoke

EXPLAIN = ["explain", "--op", "all_gather_matmul", "--n", "64", "--k", "32", "--tp", "2"]


def test_explain_tells_what_a_gpu_would_need() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    shown = invoke(*EXPLAIN, "--m", "9", "--device", "cuda").output
    assert "needs a GPU that torch sees" in shown and "auto chooses unfused" in shown


@pytest.mark.parametrize(
    ("nbytes", "world", "said"),
    [
        ("16K", 8, "direct sums by ll, for these bytes and ranks by the model"),
        ("256K", 8, "by ll128 where NVLink connects all GPUs, else by ll_two_shot"),
        ("1M", 8, "by ll128 where NVLink connects all GPUs, else by two_shot"),
        ("4M", 8, "direct sums by two_shot"),
    ],
)
def test_explain_says_how_direct_sums(nbytes: str, world: int, said: str) -> None:
    given = ["--op", "all_reduce", "--bytes", nbytes, "--tp", str(world)]
    shown = " ".join(invoke("explain", *given, "--device", "cuda").output.split())
    assert said in shown
    assert "direct sums" not in invoke("explain", *given).output
