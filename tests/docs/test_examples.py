"""The examples run as their first lines say."""

from __future__ import annotations

import re
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


@pytest.mark.slow
def test_eager_ops(tmp_path: Path) -> None:
    said = said_by("eager_ops.py", tmp_path)
    differences = re.findall(r"differ by at most ([\d.e-]+)", said)
    assert len(differences) == 2 and all(float(each) < 1e-4 for each in differences), said


@pytest.mark.slow
def test_speak(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    command = ("examples/speak.py", "the cat", "--model", served.folder(tmp_path))
    said = output_of(*command, "--ranks", 1, 2, "--tokens", 6)
    assert "The same words on each number of ranks." in said


@pytest.mark.slow
def test_mesh_splits(tmp_path: Path) -> None:
    said = said_by("mesh_splits.py", tmp_path)
    names = ["M", "K", "N", "M and K", "M and N", "K and N", "M, N and K"]
    assert re.findall(r"^(\S.*): a mesh of", said, re.MULTILINE) == names
    moved = [int(one) for one in re.findall(r"communication: .* \((\d+) bytes", said)]
    assert moved == [0, 128, 0, 128, 0, 128, 384]  # of [8, 16] @ [16, 4] in float32
    assert said.count("equal to the unsharded product: True") == 7
    assert "first: matmul (0 bytes in all); second: [matmul + all-reduce out" in said
    assert said.endswith("= [34, 29]\n")


@pytest.mark.slow
def test_mesh_matmul(tmp_path: Path) -> None:
    said = said_by("mesh_matmul.py", tmp_path)
    assert "[2048, 2048] @ [2048, 1024] in bfloat16 on 2x2" in said
    assert "9 ways, all equal within" in said
    times = re.findall(r"^(\S.*\S) +([\d.]+) +([\d.]+)x$", said, re.MULTILINE)
    assert len(times) == 9 and all(float(ms) > 0 for _, ms, _ in times), said


# What these show is in the quick tier without torchrun: nn/, parallel/ and
# compile/test_models.py.


@pytest.mark.slow
def test_layers(tmp_path: Path) -> None:
    said = said_by("layers.py", tmp_path)
    losses = re.search(r"loss ([\d.]+) -> ([\d.]+)", said)
    assert losses is not None and float(losses[2]) < float(losses[1]) - 1, said


@pytest.mark.slow
def test_huggingface(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    said = said_by("huggingface.py", tmp_path)
    assert "generated the same tokens: True" in said
    difference = re.search(r"differ by at most ([\d.e-]+);", said)
    assert difference is not None and float(difference[1]) < 1e-5, said


@pytest.mark.slow
def test_compile_pass(tmp_path: Path) -> None:
    said = said_by("compile_pass.py", tmp_path)
    assert "4 rewritten, 0 left alone" in said
    difference = re.search(r"differs from one process by at most ([\d.e-]+)", said)
    assert difference is not None and float(difference[1]) < 1e-4, said


@pytest.mark.slow
def test_training_with_fsdp_and_tensor_parallelism(tmp_path: Path) -> None:
    said = said_by("train_fsdp_tp.py", tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", said)]
    assert len(losses) >= 3 and losses[-1] < losses[0] - 2, losses
