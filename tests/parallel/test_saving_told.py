"""``save_pretrained`` after `tpkernels.parallelize`: whatever goes wrong on rank 0 reaches the
others, and the model lives no longer for it."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import tpkernels
from tests.support import hf_models
from tests.support.cases import RanksFixture
from tests.support.faults import PROMPT, Ending, ending_of, run_op
from tpkernels.parallel import saving

pytest.importorskip("transformers")

WORLD = 2


def failing_job(what: str) -> tuple[Ending, Ending]:
    """Saving, where something fails on rank 0, and the group's next call."""
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    tpkernels.init(group, timeout=20.0)
    model, start, say = hf_models.make("llama"), threading.Thread.start, saving.all_gather
    said: list[Any] = []

    def write(self: Any, save_directory: Any, **_: Any) -> None:
        if what == "text":
            raise OSError(f"cannot write {save_directory}")

    def start_none(self: threading.Thread) -> None:
        if self.name == "tpkernels-saving":
            raise RuntimeError("can't start new thread")
        start(self)

    def say_once(*args: Any, **options: Any) -> Any:
        said.append(args)
        if len(said) > 1:
            raise MemoryError("told to have none")
        return say(*args, **options)

    model.__class__ = type(type(model).__name__, (type(model),), {"save_pretrained": write})
    tpkernels.parallelize(model, dist.device_mesh.DeviceMesh.from_group(group, "cpu"))
    broken = {
        "text": mock.patch.object(saving, "_INTERVAL", 1.0),
        "thread": mock.patch.object(threading.Thread, "start", start_none),
        "last word": mock.patch.object(saving, "all_gather", say_once),
    }
    if dist.get_rank() == 0:
        with broken[what]:
            first = ending_of(lambda: model.save_pretrained("folder/\udcff"))
    else:
        first = ending_of(lambda: model.save_pretrained("folder/\udcff"))
    first = Ending(first.error, ascii(first.text), first.peer, first.at, first.seconds)
    return first, ending_of(lambda: run_op("all_reduce", group))


@pytest.mark.parametrize(
    ("what", "error", "text"),
    [
        ("text", "OSError", "cannot write folder/"),
        ("thread", "RuntimeError", "can't start new thread"),
    ],
)
def test_the_others_raise_what_rank_0_met_with(
    ranks: RanksFixture, what: str, error: str, text: str
) -> None:
    for rank, (first, then) in enumerate(ranks(WORLD).run(failing_job, what)):
        assert first.error == (error if rank == 0 else "RuntimeError"), first
        assert rank == 0 or f"rank 0 could not save the model: {error}: {text}" in first.text, first
        assert text in first.text and first.seconds < 3 * PROMPT, first
        assert not then.error, then


def test_a_word_that_rank_0_cannot_say_breaks_the_group(ranks: RanksFixture) -> None:
    for rank, (first, then) in enumerate(ranks(WORLD).run(failing_job, "last word")):
        assert first.error == ("PeerLostError" if rank else "MemoryError"), first
        assert "told to have none" in first.text and first.seconds < 3 * PROMPT, first
        assert then.error == "GroupBrokenError", then
