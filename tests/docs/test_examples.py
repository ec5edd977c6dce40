"""The examples run with the commands in their docstrings."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import served
from tests.support.paths import ROOT
from tests.support.processes import python_output

EXAMPLES = ROOT / "examples"


def run_example(name: str, temporary: Path) -> str:
    source = (EXAMPLES / name).read_text()
    command = re.search(r"^    torchrun (.*)$", source, re.MULTILINE)
    assert command is not None and command[1].endswith(f"examples/{name}")
    launcher = ("-m", "torch.distributed.run", *command[1].split())
    return python_output(*launcher, seconds=250, TMPDIR=str(temporary))


# Numbers in the output of each example, and a check of them. The quick tier tests the same features
# without torchrun: nn/, parallel/ and compile/test_models.py.
DIFFERENCE = r"differ(?:s from one process)? by at most ([\d.e-]+)"
CHECKS: dict[str, tuple[str, Callable[[list[float]], bool]]] = {
    "eager_ops": (DIFFERENCE, lambda values: len(values) == 2 and max(values) < 1e-4),
    "layers": (r"(?:loss|->) ([\d.]+)", lambda values: values[-1] < values[0] - 1),
    "huggingface": (
        f"{DIFFERENCE}; generated the same tokens: True",
        lambda values: values[0] < 1e-5,
    ),
    "compile_pass": (
        f"4 rewritten, 0 not rewritten(?s:.*){DIFFERENCE}",
        lambda values: values[0] < 1e-4,
    ),
    "train_fsdp_tp": (r"loss ([\d.]+)", lambda values: values[-1] < values[0] - 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_an_example(tmp_path: Path, name: str) -> None:
    output = run_example(f"{name}.py", tmp_path)
    pattern, right = CHECKS[name]
    values = [float(number) for number in re.findall(pattern, output)]
    assert values and right(values), output


@pytest.mark.slow
def test_speak(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    command = ("examples/speak.py", "the cat", "--model", served.folder(tmp_path))
    output = python_output(*command, "--ranks", 1, 2, "--tokens", 6)
    assert "All numbers of ranks gave identical text." in output


@pytest.mark.slow
def test_mesh_splits(tmp_path: Path) -> None:
    output = run_example("mesh_splits.py", tmp_path)
    names = ["M", "K", "N", "M and K", "M and N", "K and N", "M, N and K"]
    assert re.findall(r"^(\S.*): a mesh of", output, re.MULTILINE) == names
    moved = [int(nbytes) for nbytes in re.findall(r"communication: .* \((\d+) bytes", output)]
    assert moved == [0, 128, 0, 128, 0, 128, 384]  # [8, 16] @ [16, 4] in float32
    assert output.count("equal to the unsharded matmul: True") == 7
    assert "first: matmul (0 bytes in total); second: [matmul + all-reduce out" in output
    assert output.endswith("= [34, 29]\n")


@pytest.mark.slow
def test_mesh_matmul(tmp_path: Path) -> None:
    output = run_example("mesh_matmul.py", tmp_path)
    assert "[2048, 2048] @ [2048, 1024] in bfloat16 on 2x2" in output
    assert "9 variants, all equal within" in output
    times = re.findall(r"^(\S.*\S) +([\d.]+) +([\d.]+)x$", output, re.MULTILINE)
    assert len(times) == 9 and all(float(ms) > 0 for _, ms, _ in times), output
