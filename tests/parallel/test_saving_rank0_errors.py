"""``save_pretrained`` after `tpkernels.parallelize`: whatever goes wrong on rank 0 reaches the
other ranks."""

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
from tpkernels.parallel import joint_work

pytest.importorskip("transformers")

WORLD = 2


def failing_job(what: str) -> tuple[Ending, Ending]:
    """How saving ends if something fails on rank 0, and how the group's next call ends."""
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    tpkernels.init(group, timeout=20.0)
    model, start, all_gather = (
        hf_models.make("llama"),
        threading.Thread.start,
        joint_work.all_gather,
    )
    messages: list[Any] = []

    def write(self: Any, save_directory: Any, **_: Any) -> None:
        if what == "text":
            raise OSError(f"cannot write {save_directory}")

    def start_none(self: threading.Thread) -> None:
        if self.name == joint_work.THREAD:
            raise RuntimeError("can't start new thread")
        start(self)

    def send_only_one(*args: Any, **options: Any) -> Any:
        messages.append(args)
        if len(messages) > 1:
            raise MemoryError("simulated")
        return all_gather(*args, **options)

    model.__class__ = type(type(model).__name__, (type(model),), {"save_pretrained": write})
    tpkernels.parallelize(model, dist.device_mesh.DeviceMesh.from_group(group, "cpu"))
    broken = {
        "text": mock.patch.object(joint_work, "_INTERVAL", 1.0),
        "thread": mock.patch.object(threading.Thread, "start", start_none),
        "last message": mock.patch.object(joint_work, "all_gather", send_only_one),
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
def test_the_others_raise_the_error_of_rank_0(
    ranks: RanksFixture, what: str, error: str, text: str
) -> None:
    for rank, (first, then) in enumerate(ranks(WORLD).run(failing_job, what)):
        assert first.error == (error if rank == 0 else "PeerFailedError"), first
        assert rank == 0 or f"failed on rank 0: {error}: {text}" in first.text, first
        assert text in first.text and first.seconds < 3 * PROMPT, first
        assert not then.error, then


def test_a_message_that_rank_0_cannot_send_breaks_the_group(ranks: RanksFixture) -> None:
    for rank, (first, then) in enumerate(ranks(WORLD).run(failing_job, "last message")):
        assert first.error == ("PeerLostError" if rank else "MemoryError"), first
        assert "simulated" in first.text and first.seconds < 3 * PROMPT, first
        assert then.error == "GroupBrokenError", then
