"""``save_pretrained`` for a sharded model of transformers.

Problem: rank 0 writes the shards of all ranks. Writing may take longer than the group's timeout,
and may fail on rank 0 alone.

Algorithm: rank 0 announces whether it will write, and the ranks gather the weights on rank 0. It
writes as transformers does, while a thread announces every second that it is not done. Then it
announces the result. Each message is an all-gather to which the other ranks contribute nothing.
So every wait is bounded, dead ranks are noticed, and no other process group is needed. If only rank
0 fails, all ranks raise, and the group remains usable.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Iterator
from enum import IntEnum
from math import prod
from typing import Any, NoReturn

import torch
from torch import nn

from tpkernels import groups
from tpkernels.errors import TpkernelsError
from tpkernels.nn.checkpoint import gathered
from tpkernels.nn.sharding import ShardedModule
from tpkernels.ops.all_gather import all_gather
from tpkernels.text import of_error

_INTERVAL = 1.0  # s, between messages of rank 0
_LENGTH = 1024  # bytes of a message, with the text of an error


class Status(IntEnum):
    """What a message from rank 0 announces."""

    SKIP = 0
    WRITE = 1
    NOT_DONE = 2
    DONE = 3
    FAILED = 4


def attach(model: nn.Module, group: str) -> None:
    """Makes ``save_pretrained`` of a model of transformers, and of its base model, write the
    unsharded weights."""
    for module in model.modules():
        if hasattr(type(module), "save_pretrained"):
            module.save_pretrained = SavePretrained(module, group)  # type: ignore[assignment]
            module.push_to_hub = refuse_to_push  # type: ignore[assignment]


def refuse_to_push(*args: Any, **options: Any) -> NoReturn:
    raise NotImplementedError(
        "push_to_hub would upload from every rank; call save_pretrained(folder, push_to_hub=True, "
        "repo_id=...) on all ranks, which uploads from rank 0"
    )


class SavePretrained:
    """The ``save_pretrained`` of one model; see `tpkernels.parallelize`."""

    def __init__(self, model: Any, group: str) -> None:
        self._model, self._group = model, group

    def __call__(self, *args: Any, **options: Any) -> None:
        """Takes the arguments of transformers' method. Collective: all ranks call it.

        Raises:
            NotImplementedError: an option writes shards, or the model has adapters.
            ValueError: the model is on the meta device.
            RuntimeError: rank 0 could not write; rank 0 itself raises its own error.
            TpkernelsError: a peer was lost, timed out or made a different call.
        """
        model = self._model
        write = type(model).save_pretrained
        arguments = _by_name(write, model, *args, **options)
        self._check(arguments)
        group = groups.get(self._group)
        writes = arguments.get("is_main_process", True)
        with groups.told_of_errors(self._group):
            status, _ = self._announce(Status.WRITE if writes else Status.SKIP)
            if status is Status.SKIP:
                return
            shards = arguments.get("state_dict")
            if shards is None:
                shards = model.state_dict()
            state = gathered(model, shards, rank0_only=True)
        if group.rank != 0:
            self._wait()
            return
        arguments |= {"state_dict": state, "is_main_process": True}
        with self._others_wait(), _as_unsharded(model):
            write(**arguments)

    def _check(self, arguments: dict[str, Any]) -> None:
        if arguments.get("distributed_checkpoint"):
            raise NotImplementedError(
                "distributed_checkpoint=True is for models that transformers has sharded; save "
                "model.state_dict() with torch.distributed.checkpoint"
            )
        if getattr(self._model, "_hf_peft_config_loaded", False):
            raise NotImplementedError(
                "the model has adapters, whose weights are not gathered; save them before "
                "tpkernels.parallelize"
            )
        if any(parameter.is_meta for parameter in self._model.parameters()):
            raise ValueError("the model is on the meta device and has no weights to save")

    def _announce(self, status: Status = Status.SKIP, text: str = "") -> tuple[Status, str]:
        """Sends rank 0's message, and returns it on all ranks. Collective."""
        with groups.told_of_errors(self._group):
            group = groups.get(self._group)
            mine = bytes([status, *text.encode()])[:_LENGTH].ljust(_LENGTH, b"\0")
            device = next(self._model.parameters()).device
            data = torch.tensor(list(mine if group.rank == 0 else b""), device=device).float()
            sizes = [_LENGTH, *[0] * (group.world - 1)]
            sent = bytes(map(int, all_gather(data, self._group, shard_sizes=sizes).tolist()))
        return Status(sent[0]), sent[1:].rstrip(b"\0").decode(errors="ignore")

    def _wait(self) -> None:
        """Returns when rank 0 has written; raises if it could not."""
        status = Status.NOT_DONE
        while status is Status.NOT_DONE:
            status, text = self._announce()
        if status is Status.FAILED:
            raise RuntimeError(f"rank 0 could not save the model: {text}")

    @contextlib.contextmanager
    def _others_wait(self) -> Iterator[None]:
        """Keeps the other ranks waiting during the block, then announces how it ended."""
        interval = min(_INTERVAL, groups.get(self._group).timeout / 4)
        ended, lost = threading.Event(), list[BaseException]()

        def keep_waiting() -> None:
            try:
                while not ended.wait(interval):
                    self._announce(Status.NOT_DONE)
            except BaseException as error:
                lost.append(error)

        thread = threading.Thread(target=keep_waiting, name="tpkernels-saving", daemon=True)
        status, text = Status.DONE, ""
        try:
            thread.start()
            yield
        except BaseException as error:
            status, text = Status.FAILED, of_error(error)
            raise
        finally:
            with groups.told_of_errors(self._group):
                ended.set()
                if thread.ident is not None:  # it was started
                    thread.join()
                with contextlib.suppress(*[TpkernelsError] if status is Status.FAILED else []):
                    if not lost:
                        self._announce(status, text)
        if lost:
            raise lost[0]


def _by_name(function: Any, *args: Any, **options: Any) -> dict[str, Any]:
    """The arguments of a call, by name."""
    signature = inspect.signature(function)
    arguments: dict[str, Any] = dict(signature.bind(*args, **options).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name, {})
    return arguments


@contextlib.contextmanager
def _as_unsharded(model: Any) -> Iterator[None]:
    """Makes transformers count all parameters, for the index of several files, and write on rank 0
    of the group, which may not be rank 0 of the job."""
    sizes = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            whole = isinstance(module, ShardedModule)
            sizes[parameter] = prod(module.whole_shape(name) if whole else parameter.shape)
    total = sum(sizes.values())
    model.num_parameters = lambda *args, **options: total
    model.should_save_on_this_rank = lambda is_main_process: is_main_process
    try:
        yield
    finally:
        del model.num_parameters, model.should_save_on_this_rank
