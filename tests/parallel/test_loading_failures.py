"""Failures of ``tpkernels.from_pretrained``: an error on one rank is raised promptly on all ranks,
and the group remains usable."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import ColwiseParallel

import tpkernels
from tests.support import hf_folders, hf_models
from tests.support.cases import RanksFixture
from tests.support.faults import PROMPT
from tests.support.ranked import collect_messages
from tpkernels.parallel import pretrained
from tpkernels.parallel.checkpoints import INDEX
from tpkernels.parallel.shard_files import plan_shards, write_shards

pytest.importorskip("transformers")
pytest.importorskip("safetensors")


def load_job(paths: list[str], options: list[dict[str, Any]]) -> str:
    """Load ``paths[rank]`` and return the error, then check that the group remains usable."""
    mesh, rank = hf_models.make_world_mesh(), dist.get_rank()
    begin = time.monotonic()
    [message] = collect_messages(
        [lambda: tpkernels.from_pretrained(paths[rank], mesh, **options[rank])]
    )
    assert time.monotonic() - begin < 3 * PROMPT
    assert float(tpkernels.all_reduce(torch.ones(1), mesh)) == dist.get_world_size()
    return message


def load(ranks: RanksFixture, paths: list[Path], *options: dict[str, Any]) -> list[str]:
    rank_options = list(options) or [{}] * len(paths)
    return ranks(len(paths)).run(load_job, [*map(str, paths)], rank_options, timeout=60)


def rewrite(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    def do(path: Path) -> None:
        index = json.loads((path / INDEX).read_text())
        change(index["weight_map"])
        (path / INDEX).write_text(json.dumps(index))

    return do


def files(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def configure(**values: Any) -> Callable[[Path], Any]:
    return lambda path: hf_folders.change_config(path, **values)


def name_file(file: Callable[[Path], str]) -> Callable[[Path], Any]:
    """Return a change of the index: it lists ``file(path)`` as the file of the norm weight."""
    return lambda path: rewrite(lambda weights: weights.update({NORM: file(path)}))(path)


NORM = "model.norm.weight"
#: Error pattern -> damage to a checkpoint of three files.
DAMAGE: dict[str, Callable[[Path], Any]] = {
    "FileNotFoundError: .* does not exist; pass a local folder": shutil.rmtree,
    "FileNotFoundError: .*has no config.json": lambda path: (path / "config.json").unlink(),
    "FileNotFoundError: .*has neither model.safetensors nor": lambda path: (path / INDEX).unlink(),
    "FileNotFoundError: .*is listed in the index but does not exist": lambda path: files(path)[
        2
    ].unlink(),
    "ValueError: .*is damaged or truncated": (
        lambda path: os.truncate(files(path)[2], files(path)[2].stat().st_size - 8)
    ),
    r"NotImplementedError: .*\(model_type 'gpt2'\) is not supported without": (
        configure(model_type="gpt2")
    ),
    "ValueError: .*mystery": configure(model_type="mystery"),
    r"ValueError: .*shape \[22, 36\], but the configuration gives \[24, 36\]": (
        configure(intermediate_size=24)
    ),
    r"ValueError: .*but the configuration gives \[8, 36\]": configure(num_key_value_heads=2),
    "ValueError: .*does not contain model.layers.2.self_attn.q_proj.weight": configure(
        num_hidden_layers=3
    ),
    "NotImplementedError: .*is quantized": configure(quantization_config={"bits": 4}),
    "ValueError: .*is not JSON": lambda path: (path / INDEX).write_text("{"),
    "ValueError: .*lists the file '../model.safetensors'; expected a file name in the same": (
        name_file(lambda path: "../model.safetensors")
    ),
    f"ValueError: .*does not contain {NORM}, which the index lists there": (
        name_file(lambda path: files(path)[0].name)
    ),
}


def test_an_error_on_one_rank_is_raised_on_all(ranks: RanksFixture, tmp_path: Path) -> None:
    good = hf_folders.folder(tmp_path, files=3)
    bad = tmp_path / "bad"
    for pattern, damage in DAMAGE.items():
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(good, bad)
        damage(bad)
        first, second = load(ranks, [good, bad])
        assert re.match(pattern, second), f"{pattern}: {second}"
        start = re.escape(f"PeerFailedError: opening {good} failed on rank 1: ")
        assert re.match(start + pattern, first), f"{pattern}: {first}"


def test_different_models_and_options(ranks: RanksFixture, tmp_path: Path) -> None:
    llama, mistral = hf_folders.folder(tmp_path), hf_folders.folder(tmp_path, "mistral")
    llama_copy = tmp_path / "third"
    shutil.copytree(llama, llama_copy)
    for messages in (
        load(ranks, [llama, mistral]),
        load(ranks, [llama, llama_copy], {}, {"ffn_only": True}),
    ):
        for message in messages:
            assert message.startswith("ValueError: ranks 0 and 1 would load different models")
    assert load(ranks, [llama, llama_copy]) == ["nothing"] * 2


def test_arguments(ranks: RanksFixture, tmp_path: Path) -> None:
    path = hf_folders.folder(tmp_path)
    plan = {"lm_head": ColwiseParallel()}
    for options, expected in (
        (
            {"ffn_only": True, "plan": plan},
            "ValueError: ffn_only=True cannot be combined with a plan",
        ),
        ({"ffn_only": True, "sequence_parallel": True}, "ValueError: ffn_only=True needs all"),
        ({"pack": True, "plan": plan}, "NotImplementedError: pack=True packs"),
        ({"dtype": torch.int8}, "NotImplementedError: the model has dtype int8"),
        ({"plan": {"model.head": ColwiseParallel()}}, "ValueError: plan names 'model.head'"),
    ):
        for message in load(ranks, [path] * 2, options, options):
            assert message.startswith(expected) or f": {expected}" in message, message


#: Change to the index entries of a tensor that is sharded over two ranks, and text of the error.
BAD_ENTRIES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda entry: entry.pop(), "do not cover shape [22, 36] exactly once"),
    (lambda entry: entry[0].update(offsets=[1, 0]), "do not cover shape [22, 36] exactly once"),
    (lambda entry: entry[1].update(offsets=[12, 0]), "which does not fit into [22, 36]"),
    (lambda entry: entry[0].update(offsets=["a"]), "has a malformed entry"),
]


def test_index_entries_that_do_not_fit(tmp_path: Path) -> None:
    path, name = tmp_path / "shards", "model.layers.1.mlp.up_proj.weight"
    write_shards(plan_shards(hf_folders.folder(tmp_path), 2), path)
    index = (path / INDEX).read_text()
    for change, expected in BAD_ENTRIES:
        (path / INDEX).write_text(index)
        rewrite(lambda weights, change=change: change(weights[name]))(path)  # type: ignore[misc]
        with pytest.raises(ValueError, match=f"{re.escape(name)}.*{re.escape(expected)}"):
            plan_shards(path, 2)


def late_job(path: str) -> tuple[str, float]:
    """Fail a read on rank 1 after all files were checked, while rank 0 reads slowly.

    Return the error and the seconds until it is raised."""
    fill, rank = pretrained._fill, dist.get_rank()
    hf_models.make("llama")  # imports transformers before the clock starts

    def fill_late(*args: Any) -> None:
        if rank == 0:
            time.sleep(0.3)
        elif args[0].name == NORM:
            raise OSError(5, "Input/output error")
        fill(*args)

    begin = time.monotonic()
    with mock.patch.object(pretrained, "_fill", fill_late):
        [message] = collect_messages(
            [lambda: tpkernels.from_pretrained(path, hf_models.make_world_mesh())]
        )
    return message, time.monotonic() - begin


def test_a_late_failure_stops_all_ranks(ranks: RanksFixture, tmp_path: Path) -> None:
    path = hf_folders.folder(tmp_path)
    (first, seconds), (second, _) = ranks(2).run(late_job, str(path), timeout=60)
    assert second == "OSError: [Errno 5] Input/output error"
    assert first.startswith(f"PeerFailedError: reading {path} failed on rank 1: OSError: [Errno 5]")
    assert seconds < PROMPT < 0.3 * 21  # rank 0 did not read all 21 tensors


def test_a_damaged_gguf_file(ranks: RanksFixture, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    good, bad = hf_folders.gguf_file(tmp_path / "model.gguf", "Q8_0"), tmp_path / "bad.gguf"
    for size in (0, 900, -64):
        bad.write_bytes(good.read_bytes()[:size])
        messages = load(ranks, [good, bad])
        assert messages[1].startswith(f"ValueError: {bad} cannot be read"), messages[1]
        assert messages[0].startswith("PeerFailedError: opening"), messages[0]


def test_a_nan_scale_in_a_gguf_file(ranks: RanksFixture, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = hf_folders.gguf_file(tmp_path / "model.gguf", "Q8_0")
    name = "blk.1.ffn_up.weight"
    [tensor] = [t for t in gguf.GGUFReader(path, "r+").tensors if t.name == name]
    tensor.data[-1, :2] = 255  # in the shard of the last rank
    tensor.data.base.flush()
    first, second = load(ranks, [path, path], {"pack": "int8"}, {"pack": "int8"})
    wrong = "ValueError: model.layers.1.mlp.up_proj.weight has NaN or infinite elements"
    assert second.startswith(wrong) and wrong in first, (first, second)
