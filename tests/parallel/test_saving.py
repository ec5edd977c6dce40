"""``save_pretrained`` after `tpkernels.parallelize` writes the files of the unsharded model."""

from __future__ import annotations

import copy
import filecmp
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import tpkernels
from tests.support import hf_models
from tests.support.cases import RanksFixture
from tests.support.ranked import report
from tests.support.tiers import sweep
from tpkernels import nn as tnn

pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")


def _differences(model: Any, folder: Path, want: Path) -> list[str]:
    """How the files in a folder differ from those in ``want``."""
    names = sorted(path.name for path in want.iterdir())
    present = sorted(path.name for path in folder.iterdir())
    failures = [] if names == present else [f"{folder.name} has the files {present}, not {names}"]
    for name in names:
        if name in present and not filecmp.cmp(folder / name, want / name, shallow=False):
            failures.append(f"{folder.name}: {name} differs")
    if failures:
        return failures
    again = type(model).from_pretrained(folder)
    if again.generation_config.to_dict() != model.generation_config.to_dict():
        failures.append(f"{folder.name}: another generation config")
    if (
        again.lm_head.weight is again.model.embed_tokens.weight
    ) != model.config.tie_word_embeddings:
        failures.append(f"{folder.name}: the embeddings are not tied as they were")
    states = again.state_dict(), model.state_dict()
    if list(states[0]) != list(states[1]):
        return [*failures, f"{folder.name}: {list(states[0])}"]
    return failures + [n for n in states[1] if not torch.equal(states[0][n], states[1][n])]


def saving_job(base: str, model_type: str, tied: bool) -> list[str]:
    folder, failures = Path(base), []
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
            want, got = folder / f"{way} {sequence} wanted", folder / f"{way} {sequence}"
            if dist.get_rank() == 0:
                model.save_pretrained(want, **options)
            parallel.save_pretrained(got, **options)
            if dist.get_rank() == 0 and way != "variant":
                failures += _differences(model, got, want)
            if not (got / "config.json").exists():
                failures.append(f"rank {dist.get_rank()} returns before {got} is written")
            parts = len(list(got.glob("*.safetensors")))
            if (parts > 2) != (way == "several"):
                failures.append(f"{got} has {parts} files of weights")
    return failures


@pytest.mark.parametrize("world", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))])
@pytest.mark.parametrize("tied", sweep([True, False]))
@pytest.mark.parametrize("model_type", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_the_files_are_the_unsharded_models(
    ranks: RanksFixture, tmp_path: Path, world: int, tied: bool, model_type: str
) -> None:
    results = ranks(world).run(saving_job, str(tmp_path), model_type, tied, timeout=120)
    report(failure for rank in results for failure in rank)


def arguments_job(base: str) -> list[str]:
    """Saves the caller's state dict, whole or sharded; the base model alone; a copy; and twice."""
    folder, failures, mesh = Path(base), [], hf_models.mesh_of_all()
    model = hf_models.make("llama")
    parallel = tpkernels.parallelize(copy.deepcopy(model), mesh)
    other = copy.deepcopy(parallel)
    with torch.no_grad():
        other.model.norm.weight.zero_()
    shards = {name: value for name, value in parallel.state_dict().items() if "norm" not in name}
    whole = tnn.full_state_dict(parallel, rank0_only=True)
    parallel.save_pretrained(folder / "shards", True, shards)
    parallel.save_pretrained(folder / "whole", state_dict=whole)
    parallel.save_pretrained(folder / "twice")
    parallel.save_pretrained(save_directory=str(folder / "twice"), is_main_process=True)
    parallel.model.save_pretrained(folder / "base")
    other.save_pretrained(folder / "copy")
    if dist.get_rank() == 0:
        want = model.state_dict()
        for name in ("shards", "whole", "twice", "base", "copy"):
            got = safetensors.load_file(folder / name / "model.safetensors")
            names = {each for each in want if name != "shards" or "norm" not in each}
            if name == "base":
                names = {each[6:] for each in names if each.startswith("model.")}
            if set(got) != names:
                failures.append(f"{name}: has {sorted(got)}")
            for each, value in got.items():
                full = want[each if name != "base" else f"model.{each}"]
                zero = name == "copy" and each == "model.norm.weight"
                if not torch.equal(value, torch.zeros_like(full) if zero else full):
                    failures.append(f"{name}: {each} differs")
    return failures


def test_arguments(ranks: RanksFixture, tmp_path: Path) -> None:
    report(failure for rank in ranks(2).run(arguments_job, str(tmp_path)) for failure in rank)


def passed_on_job() -> list[Any]:
    """The arguments with which transformers' method is called."""
    model = hf_models.make("llama")
    calls = []

    class Recording(type(model)):  # type: ignore[misc]
        def save_pretrained(  # type: ignore[no-untyped-def]
            self, save_directory, is_main_process=True, state_dict=None, push_to_hub=False, **rest
        ):
            calls.append((str(save_directory), is_main_process, len(state_dict), push_to_hub, rest))

    model.__class__ = Recording
    tpkernels.parallelize(model, hf_models.mesh_of_all())
    model.save_pretrained("a", push_to_hub=True, repo_id="b")
    model.save_pretrained("c", is_main_process=dist.get_rank() == 0)
    model.save_pretrained("d", is_main_process=dist.get_rank() == 1)
    return calls


def test_rank_0_alone_calls_transformers(ranks: RanksFixture) -> None:
    first, second = ranks(2).run(passed_on_job)
    assert second == []
    state = first[0][2]
    assert first == [("a", True, state, True, {"repo_id": "b"}), ("c", True, state, False, {})]
    assert state > 20


def groups_job(base: str) -> list[str]:
    """Ranks 1 and 2 of three, which are ranks 0 and 1 of their mesh."""
    mesh, rank = DeviceMesh("cpu", [1, 2]), dist.get_rank()
    model = hf_models.make("llama")
    folder, want = Path(base) / "model", Path(base) / "wanted"
    if rank == 0:  # transformers writes only on rank 0 of the job
        model.save_pretrained(want)
    else:
        tpkernels.parallelize(copy.deepcopy(model), mesh).save_pretrained(folder)
    dist.barrier()
    return _differences(model, folder, want) if rank == 0 else []


@pytest.mark.thorough
def test_a_group_that_is_not_all_ranks(ranks: RanksFixture, tmp_path: Path) -> None:
    report(f for rank in ranks(3).run(groups_job, str(tmp_path), timeout=100) for f in rank)


def pickled_job(base: str) -> list[str]:
    """A model that was pickled on each rank and loaded again saves its weights."""
    path, model = Path(base) / f"{dist.get_rank()}.pt", hf_models.make("llama")
    torch.save(tpkernels.parallelize(copy.deepcopy(model), hf_models.mesh_of_all()), path)
    again = torch.load(path, weights_only=False)
    again.save_pretrained(Path(base) / "again")
    if dist.get_rank() == 0:
        model.save_pretrained(Path(base) / "wanted")
        return _differences(model, Path(base) / "again", Path(base) / "wanted")
    return []


def test_a_pickled_model(ranks: RanksFixture, tmp_path: Path) -> None:
    report(failure for rank in ranks(2).run(pickled_job, str(tmp_path)) for failure in rank)
