"""Failures of ``save_pretrained`` after `tpkernels.parallelize`: an error on rank 0 is raised on
all ranks in time, and what cannot be saved is refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tpkernels
from tests.support import hf_models
from tests.support.cases import RanksFixture
from tests.support.faults import PROMPT
from tests.support.ranked import messages_of

pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")


def _saves(model: Any, does: Callable[..., None]) -> Any:
    """A model whose class has ``does`` as its ``save_pretrained``."""
    model.__class__ = type(type(model).__name__, (type(model),), {"save_pretrained": does})
    return model


def failing_job(base: str) -> list[str]:
    """What each rank raises if rank 0 cannot create the folder or runs out of space."""
    mesh, messages = hf_models.mesh_of_all(), []
    (Path(base) / "file").touch()

    def full(self: Any, save_directory: Any, **_: Any) -> None:
        raise OSError(28, "No space left on device")

    def stopped(self: Any, save_directory: Any, **_: Any) -> None:
        raise KeyboardInterrupt

    models = {
        "folder": hf_models.make("llama"),
        "space": _saves(hf_models.make("llama"), full),
        "interrupt": _saves(hf_models.make("llama"), stopped),
    }
    for model in models.values():
        tpkernels.parallelize(model, mesh)
        begin = time.monotonic()
        try:
            model.save_pretrained(Path(base) / "file" / "folder")
            messages.append("nothing")
        except BaseException as error:
            messages.append(f"{type(error).__name__}: {error}")
        assert time.monotonic() - begin < PROMPT
    models["folder"].save_pretrained(Path(base) / "folder")  # the group still works
    messages.append(str((Path(base) / "folder" / "model.safetensors").exists()))
    return messages


def test_an_error_on_rank_0_is_raised_on_all(ranks: RanksFixture, tmp_path: Path) -> None:
    first, *others = ranks(2).run(failing_job, str(tmp_path))
    expected = ["NotADirectoryError: ", "OSError: [Errno 28] No space left", "KeyboardInterrupt"]
    for message, part in zip(first, [*expected, "True"], strict=True):
        assert message.startswith(part), first
    for other in others:
        for message, part in zip(other, expected, strict=False):
            assert message.startswith(
                f"PeerFailedError: saving the model failed on rank 0: {part}"
            ), other
        assert other[-1] == "True"


def refusals_job(base: str) -> list[str]:
    mesh, folder = hf_models.mesh_of_all(), Path(base)
    model = tpkernels.parallelize(hf_models.make("llama"), mesh)
    adapted = tpkernels.parallelize(hf_models.make("llama"), mesh)
    adapted._hf_peft_config_loaded = True
    with torch.device("meta"):
        empty = tpkernels.parallelize(hf_models.make("llama"), mesh)
    attempts: list[Callable[[], Any]] = [
        lambda: model.save_pretrained(folder, distributed_checkpoint=True),
        lambda: adapted.save_pretrained(folder),
        lambda: empty.save_pretrained(folder),
        lambda: model.push_to_hub("name"),
        model.save_pretrained,
        lambda: safetensors.save_file(model.state_dict(), folder / "file"),
        lambda: safetensors.save_model(model, str(folder / "file")),
        lambda: torch.save(model.state_dict(), folder / "file"),
    ]
    messages = messages_of(attempts)
    model.save_pretrained(folder / "after")
    return messages


def test_what_is_refused(ranks: RanksFixture, tmp_path: Path) -> None:
    expected = [
        "NotImplementedError: distributed_checkpoint=True is for models that transformers has",
        "NotImplementedError: the model has adapters",
        "ValueError: the model is on the meta device",
        "NotImplementedError: push_to_hub would upload from every rank; call save_pretrained(",
        "TypeError: missing a required argument: 'save_directory'",
        "TypeError: a ShardTensor is one rank's shard and has no storage of the unsharded tensor",
        "TypeError: a ShardTensor is one rank's shard and has no storage of the unsharded tensor",
        "TypeError: a ShardTensor is one rank's shard and cannot be pickled: save with",
    ]
    for messages in ranks(2).run(refusals_job, str(tmp_path)):
        for message, part in zip(messages, expected, strict=True):
            assert message.startswith(part), message
