"""``tpkernels verify``: tables, JSON, exit codes and refusals. The checks themselves are tested in
tests/integrations/test_verification.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli import test_cli
from tests.support import served
from tpkernels.integrations.transformers import verification
from tpkernels.integrations.transformers.verification import Check, Result

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served.folder(tmp_path_factory.mktemp("model"), length=64)


@pytest.mark.thorough
def test_a_model_passes(folder: Path) -> None:
    """Verify a model on one rank, on the tokens of two prompts."""
    prompts = ("--prompt", "the cat sat on", "--prompt", "it was")
    result = test_cli.invoke("verify", "--model", folder, "--tp", 1, *prompts, "--json")
    assert result.exit_code == 0, result.output
    output = json.loads(result.stdout)
    assert output["passed"] and [entry["ranks"] for entry in output["results"]] == [1]
    tokens = output["results"][0]["checks"][-1]
    assert tokens["name"] == "tokens" and tokens["difference"] <= tokens["bound"]


@pytest.mark.parametrize("difference", [0.25, 0.75, float("nan")])
def test_table_and_exit_code(
    folder: Path, monkeypatch: pytest.MonkeyPatch, difference: float
) -> None:
    check = Check("layers", difference, 0.5, "model.layers.1.mlp output, rank 1")
    arguments: list[Any] = []

    def verify(options: Any, worlds: list[int], prompts: Any, **rest: Any) -> Iterator[Result]:
        arguments.append((options.dtype, worlds, rest["decoded"], rest["threads"]))
        yield Result(2, [check], check)
        yield Result(3, [Check("logits", 0.0, 0.5, "")], None)

    monkeypatch.setattr(verification, "verify", verify)
    options = ("--tp", "2,3", "--dtype", "bf16", "--tokens", 5, "--weights", "int8")
    result = test_cli.invoke("verify", "--model", folder, *options)
    passed = difference < 0.5
    assert result.exit_code == (not passed), result.output
    assert arguments == [(torch.bfloat16, [2, 3], 5, 1)]
    lines = [line.split() for line in result.stdout.splitlines() if line.strip()]
    verdict = "PASS" if passed else "FAIL"
    row = ["layers", f"{difference:.2g}", "0.5", verdict, "model.layers.1.mlp", "output,"]
    assert [*row, "rank", "1"] in lines and lines[-1][0] == f"{verdict}:"
    kind = "rounding" if passed else "more than rounding"
    assert f"differs: model.layers.1.mlp output, rank 1 by {difference:.2g}, {kind}." in (
        result.stdout
    )
    assert "Gradients were left out: int8 weights have none." in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tp", "1,x"), "--tp: 'x' is not a positive integer"),
        (("--tokens", 0), "--tokens is 0; it must be at least 1"),
        (("--weights", "int4"), "--weights is 'int4' on device cpu; expected int8"),
        (("--dtype", "int4"), "unknown dtype 'int4'"),
        (("--prompt", ""), "--prompt '' has fewer than 2 tokens; pass a longer text"),
    ],
)
def test_refusals(folder: Path, options: tuple[object, ...], message: str) -> None:
    result = test_cli.invoke("verify", "--model", folder, *options)
    assert result.exit_code == 2 and message in result.stderr, result.output


def test_a_missing_model_is_refused(tmp_path: Path) -> None:
    result = test_cli.invoke("verify", "--model", tmp_path / "absent")
    assert result.exit_code == 2 and "absent does not exist" in result.stderr, result.output
