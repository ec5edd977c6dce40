"""``save_pretrained`` after `tpkernels.parallelize` writes the same files as the unsharded model.
An error on rank 0 is raised on all ranks, and unsupported saves are refused."""

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
from tests.support.ranked import collect_messages, find_unexpected_messages, on_ranks
from tests.support.tiers import sweep
from tpkernels import nn as tnn

pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")


def check_files(model: Any, folder: Path, expected_folder: Path) -> None:
    """Check that both folders contain the same files, and that these load as ``model``."""
    names = sorted(path.name for path in expected_folder.iterdir())
    assert sorted(path.name for path in folder.iterdir()) == names
    assert filecmp.cmpfiles(folder, expected_folder, names, shallow=False)[0] == names
    reloaded = type(model).from_pretrained(folder)
    assert reloaded.generation_config.to_dict() == model.generation_config.to_dict()
    tied = reloaded.lm_head.weight is reloaded.model.embed_tokens.weight
    assert tied == model.config.tie_word_embeddings
    check_equal(reloaded.state_dict(), model.state_dict())


def check_equal(state: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(state) == set(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("model_type", "tied", "world"),
    sweep([("llama", True, 2), ("qwen3", False, 3), ("qwen3", True, 1)]),
)
@on_ranks()
def test_files_match_the_unsharded_model(tmp_path: Path, model_type: str, tied: bool) -> None:
    model = hf_models.make(model_type, tied=tied)
    model.generation_config.update(temperature=0.5, do_sample=True)
    cases: dict[str, dict[str, Any]] = {
        "one": {},
        "several": {"max_shard_size": "8KB"},
        "variant": {"variant": "small"},
    }
    for sequence in (True, False):
        parallel = copy.deepcopy(model)
        tpkernels.parallelize(parallel, hf_models.make_world_mesh(), sequence_parallel=sequence)
        for case, options in cases.items():
            expected_folder, folder = (
                tmp_path / f"{case} {sequence} wanted",
                tmp_path / f"{case} {sequence}",
            )
            if dist.get_rank() == 0:
                model.save_pretrained(expected_folder, **options)
            parallel.save_pretrained(folder, **options)
            assert (folder / "config.json").exists(), "a rank returns before it is written"
            assert (len(list(folder.glob("*.safetensors"))) > 2) == (case == "several")
            if dist.get_rank() == 0 and case != "variant":
                check_files(model, folder, expected_folder)


@on_ranks(1)
def test_a_saved_model_is_replaced(tmp_path: Path) -> None:
    """Save to one folder repeatedly, in one file and in several. Each save replaces all previous
    files."""
    parallel = tpkernels.parallelize(hf_models.make("llama"), hf_models.make_world_mesh())
    for variant in (None, "small"):
        folder, sharded = tmp_path / str(variant), {"max_shard_size": "8KB"}
        for options in ({}, sharded, {}, sharded):
            with torch.no_grad():
                parallel.model.norm.weight.mul_(2)
            parallel.save_pretrained(folder, variant=variant, **options)
            reloaded = type(parallel).from_pretrained(folder, variant=variant)
            assert torch.equal(reloaded.model.norm.weight, parallel.model.norm.weight), (
                "older weights"
            )
            files = sorted(path.name for path in folder.glob("model*"))
            assert (len(files) > 1) == any("index" in name for name in files) == bool(options)


@on_ranks(2)
def test_arguments(tmp_path: Path) -> None:
    """Save with a full or sharded ``state_dict``; the base model, a copy and a pickled model; and a
    model twice. The files contain the unsharded tensors."""
    folder, mesh = tmp_path, hf_models.make_world_mesh()
    model = hf_models.make("llama")
    parallel = tpkernels.parallelize(copy.deepcopy(model), mesh)
    torch.save(parallel, folder / f"{dist.get_rank()}.pt")
    pickled = torch.load(folder / f"{dist.get_rank()}.pt", weights_only=False)
    model_copy = copy.deepcopy(parallel)
    with torch.no_grad():
        model_copy.model.norm.weight.zero_()
    shards = {name: value for name, value in parallel.state_dict().items() if "norm" not in name}
    full = tnn.full_state_dict(parallel, rank0_only=True)
    parallel.save_pretrained(folder / "shards", True, shards)
    parallel.save_pretrained(folder / "full", state_dict=full)
    parallel.save_pretrained(folder / "twice")
    parallel.save_pretrained(save_directory=str(folder / "twice"), is_main_process=True)
    pickled.save_pretrained(folder / "pickled")
    parallel.model.save_pretrained(folder / "base")
    model_copy.save_pretrained(folder / "copy")
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


def with_save_method(model: Any, method: Callable[..., None]) -> Any:
    """Replace the class of ``model`` by a subclass with ``method`` as ``save_pretrained``."""
    model.__class__ = type(type(model).__name__, (type(model),), {"save_pretrained": method})
    return model


@on_ranks(2)
def test_only_rank_0_calls_transformers() -> None:
    """Transformers gets the arguments of the call."""
    calls = []

    def record(  # type: ignore[no-untyped-def]
        self, save_directory, is_main_process=True, state_dict=None, push_to_hub=False, **options
    ):
        calls.append((str(save_directory), is_main_process, len(state_dict), push_to_hub, options))

    model = with_save_method(hf_models.make("llama"), record)
    tpkernels.parallelize(model, hf_models.make_world_mesh())
    model.save_pretrained("a", push_to_hub=True, repo_id="b")
    model.save_pretrained("c", is_main_process=dist.get_rank() == 0)
    model.save_pretrained("d", is_main_process=dist.get_rank() == 1)
    state = len(model.state_dict())
    expected = [("a", True, state, True, {"repo_id": "b"}), ("c", True, state, False, {})]
    assert calls == (expected if dist.get_rank() == 0 else []) and state > 20


@pytest.mark.thorough
@on_ranks(3)
def test_a_mesh_of_some_ranks(tmp_path: Path) -> None:
    """Save from a mesh of ranks 1 and 2 of three. The files match the unsharded model."""
    mesh, rank = DeviceMesh("cpu", [1, 2]), dist.get_rank()
    model = hf_models.make("llama")
    folder, expected_folder = tmp_path / "model", tmp_path / "wanted"
    if rank == 0:  # transformers writes only on rank 0 of the job
        model.save_pretrained(expected_folder)
    else:
        tpkernels.parallelize(copy.deepcopy(model), mesh).save_pretrained(folder)
    dist.barrier()
    if rank == 0:
        check_files(model, folder, expected_folder)


@on_ranks(2)
def test_an_error_on_rank_0_is_raised_on_all(tmp_path: Path) -> None:
    """Rank 0 cannot create the folder, or is interrupted. All ranks raise promptly."""
    mesh = hf_models.make_world_mesh()
    (tmp_path / "file").touch()

    def interrupt(self: Any, save_directory: Any, **_: Any) -> None:
        raise KeyboardInterrupt

    models = [hf_models.make("llama"), with_save_method(hf_models.make("llama"), interrupt)]
    for model in models:
        tpkernels.parallelize(model, mesh)
    begin, folder = time.monotonic(), tmp_path / "file" / "folder"
    attempts = [lambda model=model: model.save_pretrained(folder) for model in models]
    messages = collect_messages(attempts, BaseException)
    assert time.monotonic() - begin < 2 * PROMPT
    models[0].save_pretrained(tmp_path / "folder")  # the group remains usable
    assert (tmp_path / "folder" / "model.safetensors").exists()
    prefix = "PeerFailedError: saving the model failed on rank 0: " if dist.get_rank() else ""
    for message, error in zip(messages, ["NotADirectoryError", "KeyboardInterrupt"], strict=True):
        assert message.startswith(prefix + error), message


@on_ranks(2)
def test_refusals(tmp_path: Path) -> list[str]:
    mesh, folder = hf_models.make_world_mesh(), tmp_path
    model = tpkernels.parallelize(hf_models.make("llama"), mesh)
    adapted = tpkernels.parallelize(hf_models.make("llama"), mesh)
    adapted._hf_peft_config_loaded = True
    with torch.device("meta"):
        empty = tpkernels.parallelize(hf_models.make("llama"), mesh)
    state, file = model.state_dict(), folder / "file"
    failures = find_unexpected_messages(
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
