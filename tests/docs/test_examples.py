"""The examples run as their first lines say."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import served
from tests.support.paths import ROOT
from tests.support.processes import output_of

EXAMPLES = ROOT / "examples"


def said_by(name: str, temporary: Path) -> str:
    text = (EXAMPLES / name).read_text()
    command = re.search(r"^    torchrun (.*)$", text, re.MULTILINE)
    assert command is not None and command[1].endswith(f"examples/{name}")
    launcher = ("-m", "torch.distributed.run", *command[1].split())
    return output_of(*launcher, seconds=250, TMPDIR=str(temporary))


# What the examples print, and the numbers that it has to hold. What they show is in the quick tier
# without torchrun: nn/, parallel/ and compile/test_models.py.
DIFFERENCE = r"differ(?:s from one process)? by at most ([\d.e-]+)"
SAID: dict[str, tuple[str, Callable[[list[float]], bool]]] = {
    "eager_ops": (DIFFERENCE, lambda found: len(found) == 2 and max(found) < 1e-4),
    "layers": (r"(?:loss|->) ([\d.]+)", lambda found: found[-1] < found[0] - 1),
    "huggingface": (
        f"{DIFFERENCE}; generated the same tokens: True",
        lambda found: found[0] < 1e-5,
    ),
    "compile_pass": (
        f"4 rewritten, 0 not rewritten(?s:.*){DIFFERENCE}",
        lambda found: found[0] < 1e-4,
    ),
    "train_fsdp_tp": (r"loss ([\d.]+)", lambda found: found[-1] < found[0] - 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAID)
def test_an_example(tmp_path: Path, name: str) -> None:
    said = said_by(f"{name}.py", tmp_path)
    pattern, right = SAID[name]
    found = [float(number) for number in re.findall(pattern, said)]
    assert found and right(found), said


@pytest.mark.slow
def test_speak(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    command = ("examples/speak.py", "the cat", "--model", served.folder(tmp_path))
    said = output_of(*command, "--ranks", 1, 2, "--tokens", 6)
    assert "All numbers of ranks gave identical text." in said


@pytest.mark.slow
def test_mesh_splits(tmp_path: Path) -> None:
    said = said_by("mesh_splits.py", tmp_path)
    names = ["M", "K", "N", "M and K", "M and N", "K and N", "M, N and K"]
    assert re.findall(r"^(\S.*): a mesh of", said, re.MULTILINE) == names
    moved = [int(one) for one in re.findall(r"communication: .* \((\d+) bytes", said)]
    assert moved == [0, 128, 0, 128, 0, 128, 384]  # of [8, 16] @ [16, 4] in float32
    assert said.count("equal to the unsharded matmul: True") == 7
    assert "first: matmul (0 bytes in total); second: [matmul + all-reduce out" in said
    assert said.endswith("= [34, 29]\n")


@pytest.mark.slow
def test_mesh_matmul(tmp_path: Path) -> None:
    said = said_by("mesh_matmul.py", tmp_path)
    assert "[2048, 2048] @ [2048, 1024] in bfloat16 on 2x2" in said
    assert "9 variants, all equal within" in said
    times = re.findall(r"^(\S.*\S) +([\d.]+) +([\d.]+)x$", said, re.MULTILINE)
    assert len(times) == 9 and all(float(ms) > 0 for _, ms, _ in times), said
