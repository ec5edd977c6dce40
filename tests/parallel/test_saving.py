"""``save_pretrained`` after `tpkernels.parallelize` writes the files of the unsharded model. An
error on rank 0 is raised on all ranks, and what cannot be saved is refused."""

from __future__ import annotations

import copy
import filecmp
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import tpkernels
from tests.support import hf_models
from tests.support.faults import PROMPT
from tests.support.ranked import messages_of, on_ranks, unlike
from tests.support.tiers import sweep
from tpkernels import nn as tnn

pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")


def check_files(model: Any, folder: Path, wanted: Path) -> None:
    """The files in a folder are those in ``wanted``, and they are of ``model``."""
    names = sorted(path.name for path in wanted.iterdir())
    assert sorted(path.name for path in folder.iterdir()) == names
    assert filecmp.cmpfiles(folder, wanted, names, shallow=False)[0] == names
    again = type(model).from_pretrained(folder)
    assert again.generation_config.to_dict() == model.generation_config.to_dict()
    tied = again.lm_head.weight is again.model.embed_tokens.weight
    assert tied == model.config.tie_word_embeddings
    check_equal(again.state_dict(), model.state_dict())


def check_equal(state: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(state) == set(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("model_type", "tied", "world"),
    sweep([("llama", True, 2), ("qwen3", False, 3), ("qwen3", True, 1)]),
)
@on_ranks()
def test_the_files_are_the_unsharded_models(tmp_path: Path, model_type: str, tied: bool) -> None:
    model = hf_models.make(model_type, tied=tied)
    model.generation_config.update(temperature=0.5, do_sample=True)
    ways: dict[str, dict[str, Any]] = {
        "one": {},
        "several": {"max_shard_size": "8KB"},
        "variant": {"variant": "small"},
    }
    for sequence in (True, False):
        parallel = copy.deepcopy(model)
        tpkernels.parallelize(parallel, hf_models.mesh_of_all(), sequence_parallel=sequence)
        for way, options in ways.items():
            wanted, saved = tmp_path / f"{way} {sequence} wanted", tmp_path / f"{way} {sequence}"
            if dist.get_rank() == 0:
                model.save_pretrained(wanted, **options)
            parallel.save_pretrained(saved, **options)
            assert (saved / "config.json").exists(), "a rank returns before it is written"
            assert (len(list(saved.glob("*.safetensors"))) > 2) == (way == "several")
            if dist.get_rank() == 0 and way != "variant":
                check_files(model, saved, wanted)


@on_ranks(1)
def test_a_model_that_was_saved_before_is_replaced(tmp_path: Path) -> None:
    """In another number of files."""
    parallel = tpkernels.parallelize(hf_models.make("llama"), hf_models.mesh_of_all())
    for variant in (None, "small"):
        folder, several = tmp_path / str(variant), {"max_shard_size": "8KB"}
        for options in ({}, several, {}, several):
            with torch.no_grad():
                parallel.model.norm.weight.mul_(2)
            parallel.save_pretrained(folder, variant=variant, **options)
            again = type(parallel).from_pretrained(folder, variant=variant)
            assert torch.equal(again.model.norm.weight, parallel.model.norm.weight), "older weights"
            files = sorted(path.name for path in folder.glob("model*"))
            assert (len(files) > 1) == any("index" in name for name in files) == bool(options)


@on_ranks(2)
def test_arguments(tmp_path: Path) -> None:
    """Saves the caller's state dict, whole or sharded; the base model alone; a copy; a pickled one;
    and twice."""
    folder, mesh = tmp_path, hf_models.mesh_of_all()
    model = hf_models.make("llama")
    parallel = tpkernels.parallelize(copy.deepcopy(model), mesh)
    torch.save(parallel, folder / f"{dist.get_rank()}.pt")
    pickled = torch.load(folder / f"{dist.get_rank()}.pt", weights_only=False)
    other = copy.deepcopy(parallel)
    with torch.no_grad():
        other.model.norm.weight.zero_()
    shards = {name: value for name, value in parallel.state_dict().items() if "norm" not in name}
    full = tnn.full_state_dict(parallel, rank0_only=True)
    parallel.save_pretrained(folder / "shards", True, shards)
    parallel.save_pretrained(folder / "full", state_dict=full)
    parallel.save_pretrained(folder / "twice")
    parallel.save_pretrained(save_directory=str(folder / "twice"), is_main_process=True)
    pickled.save_pretrained(folder / "pickled")
    parallel.model.save_pretrained(folder / "base")
    other.save_pretrained(folder / "copy")
    if dist.get_rank() == 0:
        state = model.state_dict()
        zeroed = {"model.norm.weight": torch.zeros_like(state["model.norm.weight"])}
        expected = {
            "shards": {name: value for name, value in state.items() if "norm" not in name},
            **dict.fromkeys(("full", "twice", "pickled"), state),
            "base": {name[6:]: value for name, value in state.items() if name[:6] == "model."},
            "copy": state | zeroed,
        }
        for name, values in expected.items():
            check_equal(safetensors.load_file(folder / name / "model.safetensors"), values)


def saves(model: Any, does: Callable[..., None]) -> Any:
    """A model whose class has ``does`` as its ``save_pretrained``."""
    model.__class__ = type(type(model).__name__, (type(model),), {"save_pretrained": does})
    return model


@on_ranks(2)
def test_rank_0_alone_calls_transformers() -> None:
    """With the arguments that it gets."""
    calls = []

    def record(  # type: ignore[no-untyped-def]
        self, save_directory, is_main_process=True, state_dict=None, push_to_hub=False, **others
    ):
        calls.append((str(save_directory), is_main_process, len(state_dict), push_to_hub, others))

    model = saves(hf_models.make("llama"), record)
    tpkernels.parallelize(model, hf_models.mesh_of_all())
    model.save_pretrained("a", push_to_hub=True, repo_id="b")
    model.save_pretrained("c", is_main_process=dist.get_rank() == 0)
    model.save_pretrained("d", is_main_process=dist.get_rank() == 1)
    state = len(model.state_dict())
    wanted = [("a", True, state, True, {"repo_id": "b"}), ("c", True, state, False, {})]
    assert calls == (wanted if dist.get_rank() == 0 else []) and state > 20


@pytest.mark.thorough
@on_ranks(3)
def test_a_group_that_is_not_all_ranks(tmp_path: Path) -> None:
    """Ranks 1 and 2 of three, which are ranks 0 and 1 of their mesh."""
    mesh, rank = DeviceMesh("cpu", [1, 2]), dist.get_rank()
    model = hf_models.make("llama")
    folder, wanted = tmp_path / "model", tmp_path / "wanted"
    if rank == 0:  # transformers writes only on rank 0 of the job
        model.save_pretrained(wanted)
    else:
        tpkernels.parallelize(copy.deepcopy(model), mesh).save_pretrained(folder)
    dist.barrier()
    if rank == 0:
        check_files(model, folder, wanted)


@on_ranks(2)
def test_an_error_on_rank_0_is_raised_on_all(tmp_path: Path) -> None:
    """It cannot create the folder, or is interrupted."""
    mesh = hf_models.mesh_of_all()
    (tmp_path / "file").touch()

    def stopped(self: Any, save_directory: Any, **_: Any) -> None:
        raise KeyboardInterrupt

    models = [hf_models.make("llama"), saves(hf_models.make("llama"), stopped)]
    for model in models:
        tpkernels.parallelize(model, mesh)
    begin, folder = time.monotonic(), tmp_path / "file" / "folder"
    attempts = [lambda model=model: model.save_pretrained(folder) for model in models]
    messages = messages_of(attempts, BaseException)
    assert time.monotonic() - begin < 2 * PROMPT
    models[0].save_pretrained(tmp_path / "folder")  # the group still works
    assert (tmp_path / "folder" / "model.safetensors").exists()
    prefix = "PeerFailedError: saving the model failed on rank 0: " if dist.get_rank() else ""
    for message, error in zip(messages, ["NotADirectoryError", "KeyboardInterrupt"], strict=True):
        assert message.startswith(prefix + error), message


@on_ranks(2)
def test_what_is_refused(tmp_path: Path) -> list[str]:
    mesh, folder = hf_models.mesh_of_all(), tmp_path
    model = tpkernels.parallelize(hf_models.make("llama"), mesh)
    adapted = tpkernels.parallelize(hf_models.make("llama"), mesh)
    adapted._hf_peft_config_loaded = True
    with torch.device("meta"):
        empty = tpkernels.parallelize(hf_models.make("llama"), mesh)
    state, file = model.state_dict(), folder / "file"
    failures = unlike(
        {
            "distributed_checkpoint=True is for models that transformers has": lambda: (
                model.save_pretrained(folder, distributed_checkpoint=True)
            ),
            "the model has PEFT adapters": lambda: adapted.save_pretrained(folder),
            "the model is on the meta device": lambda: empty.save_pretrained(folder),
            "upload from every rank; call save_pretrained(": lambda: model.push_to_hub("name"),
            "missing a required argument: 'save_directory'": model.save_pretrained,
            "is one rank's shard and has no storage": lambda: safetensors.save_file(state, file),
            "has no storage of the unsharded": lambda: safetensors.save_model(model, str(file)),
            "is one rank's shard and cannot be pickled: save": lambda: torch.save(state, file),
        }
    )
    model.save_pretrained(folder / "after")
    return failures
