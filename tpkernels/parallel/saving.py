"""``save_pretrained`` for a sharded model of transformers.

Problem: rank 0 writes the shards of all ranks. Writing may take longer than the group's timeout,
and may fail on rank 0 alone.

Algorithm: all ranks learn whether rank 0 will write, and gather the weights on rank 0. It writes as
transformers does, while the others wait (`tpkernels.parallel.together`). If only rank 0 fails, all
ranks raise, and the group remains usable.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from math import prod
from typing import Any, NoReturn

from torch import nn

from tpkernels import groups
from tpkernels.nn.checkpoint import gathered
from tpkernels.nn.sharding import ShardedModule
from tpkernels.parallel.together import together

_WRITE = "write"  # what rank 0 announces


def attach(model: nn.Module, group: str) -> None:
    """Make ``save_pretrained`` of a model of transformers, and of its base model, write the
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
        """Take the arguments of transformers' method. Collective: all ranks call it.

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
        device = next(model.parameters()).device
        with together(self._group, device, "preparing to save the model") as work:
            work.text = _WRITE if arguments.get("is_main_process", True) else ""
        if work.texts[0] != _WRITE:
            return
        with groups.told_of_errors(self._group):
            shards = arguments.get("state_dict")
            if shards is None:
                shards = model.state_dict()
            state = gathered(model, shards, rank0_only=True)
        arguments |= {"state_dict": state, "is_main_process": True}
        with together(self._group, device, "saving the model"):
            if groups.get(self._group).rank == 0:
                with _as_unsharded(model):
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


def _by_name(function: Any, *args: Any, **options: Any) -> dict[str, Any]:
    """Bind the arguments of a call to their names."""
    signature = inspect.signature(function)
    arguments: dict[str, Any] = dict(signature.bind(*args, **options).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name, {})
    return arguments


@contextlib.contextmanager
def _as_unsharded(model: Any) -> Iterator[None]:
    """Make transformers count all parameters, for the index of several files, and write on rank 0
    of the group, which may not be rank 0 of the job."""
    sizes = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            sharded = isinstance(module, ShardedModule)
            sizes[parameter] = prod(module.whole_shape(name) if sharded else parameter.shape)
    total = sum(sizes.values())
    model.num_parameters = lambda *args, **options: total
    model.should_save_on_this_rank = lambda is_main_process: is_main_process
    try:
        yield
    finally:
        del model.num_parameters, model.should_save_on_this_rank
