"""Failures of ``tpkernels.from_pretrained``: what is wrong on one rank is raised on all, in time,
and the group remains usable."""

from __future__ import annotations

import json
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
from tests.support.ranked import messages_of
from tpkernels.parallel import pretrained
from tpkernels.parallel.checkpoints import INDEX
from tpkernels.parallel.shard_files import plan_shards, write_shards

pytest.importorskip("transformers")
pytest.importorskip("safetensors")


def load_job(paths: list[str], options: list[dict[str, Any]]) -> str:
    """Loads ``paths[rank]``; then makes sure that the group still works."""
    mesh, rank = hf_models.mesh_of_all(), dist.get_rank()
    begin = time.monotonic()
    [message] = messages_of([lambda: tpkernels.from_pretrained(paths[rank], mesh, **options[rank])])
    assert time.monotonic() - begin < 3 * PROMPT
    assert float(tpkernels.all_reduce(torch.ones(1), mesh)) == dist.get_world_size()
    return message


def load(ranks: RanksFixture, paths: list[Path], *options: dict[str, Any]) -> list[str]:
    each_options = list(options) or [{}] * len(paths)
    return ranks(len(paths)).run(load_job, [*map(str, paths)], each_options, timeout=60)


def rewritten_index(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = path / INDEX
    index = json.loads(file.read_text())
    change(index)
    file.write_text(json.dumps(index))


def last_file(path: Path) -> Path:
    return sorted(path.glob("*.safetensors"))[-1]


def truncate(path: Path) -> None:
    with last_file(path).open("r+b") as file:
        file.truncate(last_file(path).stat().st_size - 8)


def set_entry(path: Path, name: str, value: Any) -> None:
    rewritten_index(path, lambda index: index["weight_map"].update({name: value}))


NORM = "model.norm.weight"
#: What is done to a checkpoint of three files, and the beginning and a part of the error.
DAMAGE: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "no folder": (shutil.rmtree, "FileNotFoundError: there is no ", "pass a local folder"),
    "no config": (
        lambda path: (path / "config.json").unlink(),
        "FileNotFoundError: ",
        "has no config.json",
    ),
    "no weights": (
        lambda path: (path / INDEX).unlink(),
        "FileNotFoundError: ",
        "has neither model.safetensors nor",
    ),
    "a missing file": (
        lambda path: last_file(path).unlink(),
        "FileNotFoundError: ",
        ".safetensors is missing, and the index names it",
    ),
    "a truncated file": (truncate, "ValueError: ", "is damaged or truncated"),
    "another architecture": (
        lambda path: hf_folders.change_config(path, model_type="gemma"),
        "NotImplementedError: ",
        "(model_type 'gemma') is not supported without a plan; these are: llama,",
    ),
    "an unknown architecture": (
        lambda path: hf_folders.change_config(path, model_type="mystery"),
        "ValueError: ",
        "mystery",
    ),
    "another shape": (
        lambda path: hf_folders.change_config(path, intermediate_size=24),
        "ValueError: ",
        "has shape [22, 36], but config.json makes it [24, 36]",
    ),
    "heads that do not fit": (
        lambda path: hf_folders.change_config(path, num_key_value_heads=2),
        "ValueError: ",
        "but config.json makes it [8, 36]",
    ),
    "more layers": (
        lambda path: hf_folders.change_config(path, num_hidden_layers=3),
        "ValueError: ",
        "lacks model.layers.2.self_attn.q_proj.weight",
    ),
    "quantised": (
        lambda path: hf_folders.change_config(path, quantization_config={"bits": 4}),
        "NotImplementedError: ",
        "is quantised",
    ),
    "an index that is not JSON": (
        lambda path: (path / INDEX).write_text("{"),
        "ValueError: ",
        "is not JSON",
    ),
    "a file elsewhere": (
        lambda path: set_entry(path, NORM, "../model.safetensors"),
        "ValueError: ",
        "names the file '../model.safetensors', not one in its folder",
    ),
    "a tensor that is not there": (
        lambda path: set_entry(path, NORM, min(path.glob("*.safetensors")).name),
        "ValueError: ",
        f"has no {NORM}, which the index says it has",
    ),
}


def test_what_is_wrong_on_one_rank_is_raised_on_all(ranks: RanksFixture, tmp_path: Path) -> None:
    good = hf_folders.folder(tmp_path, files=3)
    bad = tmp_path / "bad"
    for name, (damage, kind, part) in DAMAGE.items():
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(good, bad)
        damage(bad)
        first, second = load(ranks, [good, bad])
        assert second.startswith(kind) and part in second, f"{name}: {second}"
        start = f"PeerFailedError: opening {good} failed on rank 1: {kind}"
        assert first.startswith(start) and part in first, f"{name}: {first}"


def test_different_models_and_options(ranks: RanksFixture, tmp_path: Path) -> None:
    one, other = hf_folders.folder(tmp_path), hf_folders.folder(tmp_path, "mistral")
    third = tmp_path / "third"
    shutil.copytree(one, third)
    for messages in (
        load(ranks, [one, other]),
        load(ranks, [one, third], {}, {"ffn_only": True}),
    ):
        for message in messages:
            assert message.startswith("ValueError: ranks 0 and 1 would load different models")
    assert load(ranks, [one, third]) == ["nothing"] * 2


def test_arguments(ranks: RanksFixture, tmp_path: Path) -> None:
    path = hf_folders.folder(tmp_path)
    plan = {"lm_head": ColwiseParallel()}
    for options, part in (
        ({"ffn_only": True, "plan": plan}, "ValueError: ffn_only=True and a plan both say"),
        ({"ffn_only": True, "sequence_parallel": True}, "ValueError: ffn_only=True computes"),
        ({"pack": True, "plan": plan}, "NotImplementedError: pack=True packs"),
        ({"dtype": torch.int8}, "NotImplementedError: the model has dtype int8"),
        ({"plan": {"model.head": ColwiseParallel()}}, "ValueError: plan names 'model.head'"),
    ):
        for message in load(ranks, [path] * 2, options, options):
            assert message.startswith(part) or f": {part}" in message, message


#: What is done to the pieces of a tensor in the index of two ranks, and a part of the error.
PIECES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda entry: entry.pop(), "do not fill [22, 36]"),
    (lambda entry: entry[0].update(offsets=[1, 0]), "do not fill [22, 36]"),
    (lambda entry: entry[1].update(offsets=[12, 0]), "which is not within [22, 36]"),
    (lambda entry: entry[0].update(offsets=["a"]), "has a malformed entry"),
]


def test_pieces_that_do_not_fit(tmp_path: Path) -> None:
    path, name = tmp_path / "shards", "model.layers.1.mlp.up_proj.weight"
    write_shards(plan_shards(hf_folders.folder(tmp_path), 2), path)
    index = (path / INDEX).read_text()
    for change, part in PIECES:
        (path / INDEX).write_text(index)
        rewritten_index(path, lambda index, change=change: change(index["weight_map"][name]))
        with pytest.raises(ValueError, match=f"{re.escape(name)}.*{re.escape(part)}"):
            plan_shards(path, 2)


def late_job(path: str) -> tuple[str, float]:
    """A file cannot be read after it was checked; rank 1 alone notices, while rank 0 is slow."""
    fill, rank = pretrained._fill, dist.get_rank()
    hf_models.make("llama")  # the import of transformers is not timed

    def fill_late(*args: Any) -> None:
        if rank == 0:
            time.sleep(0.3)
        elif args[0].name == NORM:
            raise OSError(5, "Input/output error")
        fill(*args)

    begin = time.monotonic()
    with mock.patch.object(pretrained, "_fill", fill_late):
        [message] = messages_of([lambda: tpkernels.from_pretrained(path, hf_models.mesh_of_all())])
    return message, time.monotonic() - begin


def test_a_rank_that_fails_late_stops_the_others(ranks: RanksFixture, tmp_path: Path) -> None:
    path = hf_folders.folder(tmp_path)
    (first, seconds), (second, _) = ranks(2).run(late_job, str(path), timeout=60)
    assert second == "OSError: [Errno 5] Input/output error"
    assert first.startswith(f"PeerFailedError: reading {path} failed on rank 1: OSError: [Errno 5]")
    assert seconds < PROMPT < 0.3 * 21  # it did not read all of its 21 tensors


def test_a_damaged_gguf_file(ranks: RanksFixture, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    good, bad = hf_folders.gguf_file(tmp_path / "model.gguf", "Q8_0"), tmp_path / "bad.gguf"
    for size in (0, 900, -64):
        bad.write_bytes(good.read_bytes()[:size])
        messages = load(ranks, [good, bad])
        assert messages[1].startswith(f"ValueError: {bad} cannot be read"), messages[1]
        assert messages[0].startswith("PeerFailedError: opening"), messages[0]
