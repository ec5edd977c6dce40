"""``tpkernels.from_pretrained``: a model of transformers of which each rank reads its shard."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tpkernels import groups
from tpkernels.nn.linear import pack_
from tpkernels.parallel import blueprint
from tpkernels.parallel.blueprint import Blueprint, Slot
from tpkernels.parallel.checkpoints import open_checkpoint
from tpkernels.parallel.llama import SequenceParallel
from tpkernels.parallel.parallelize import check_mesh, check_options, parallelize
from tpkernels.parallel.together import together

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


def from_pretrained(
    path: str | os.PathLike[str],
    mesh: DeviceMesh,
    plan: Mapping[str, ParallelStyle] | None = None,
    ffn_only: bool = False,
    dtype: torch.dtype | None = None,
    *,
    sequence_parallel: SequenceParallel | None = None,
    pack: bool = False,
) -> Any:
    """Load a causal language model of transformers, split over the ranks of ``mesh``. All ranks
    call it.

    Each rank reads its slices of the weights and nothing else: it holds its shard and a buffer of
    some megabytes. The model is what `tpkernels.parallelize` makes, in evaluation mode, and is
    used as described there. transformers has to be installed, with safetensors or ``gguf``:
    ``pip install 'tpkernels[models]'``.

    If it fails on one rank, it fails on all, and the group remains usable. Files may differ between
    hosts only in where they are: the ranks compare configurations and shapes, not weights.

    Args:
        path: a local folder with ``config.json`` and safetensors files, one that `tpkernels shard`
            has written for any number of ranks, or a GGUF file. Quantised weights of a GGUF file
            are dequantised.
        mesh: a mesh of one dim, such as ``mesh["tp"]`` of a larger one. Its device type is where
            the model is: the CPU or the current GPU.
        plan, ffn_only, sequence_parallel, pack: as `tpkernels.parallelize` takes them.
        dtype: of the parameters. None means the one that ``config.json`` names, or that of the
            weights; float32 for GGUF files.

    Returns:
        The model, a ``PreTrainedModel``.

    Raises:
        FileNotFoundError: a file or folder is missing.
        ImportError: a package that the format needs is missing.
        ValueError: a file is damaged or truncated, a tensor is missing or has another shape than
            the configuration says, ranks find different models, or as `tpkernels.parallelize`.
        TypeError, NotImplementedError: as `tpkernels.parallelize`; or a dtype is not supported.
        RuntimeError: loading failed on another rank; the message names it and has its error.
        TpkernelsError: a peer was lost, timed out or made a different call.
    """
    check_mesh(mesh)
    rows_split = check_options(plan, sequence_parallel, ffn_only, pack)
    group, device = groups.name_of(mesh), _device_of(mesh)

    def split(model: nn.Module) -> nn.Module:
        rows = None if plan is not None else rows_split
        return parallelize(model, mesh, plan=plan, ffn_only=ffn_only, sequence_parallel=rows)

    with together(group, device, f"opening {path}") as work:
        found = blueprint.draw(open_checkpoint(path), dtype, split, plan is not None)
        work.text = f"{found.digest()} {sorted(plan or ())} {ffn_only=} {rows_split=} {pack=}"
    other = next((rank for rank, text in enumerate(work.texts) if text != work.texts[0]), None)
    if other is not None:
        raise ValueError(
            f"ranks 0 and {other} would load different models from {path}: their configurations, "
            "shapes or options differ; pass the same checkpoint and arguments on all ranks"
        )
    with together(group, device, f"reading {path}") as work:
        with torch.device(device):
            _restore_buffers(found.model)
        for slot in found.slots:
            work.check()
            _fill(slot, device)
        if pack:
            pack_(found.model)
    if found.unexpected and groups.get(group).rank == 0:
        _warn_of_unexpected(found, path)
    return found.model.eval()


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def _fill(slot: Slot, device: torch.device) -> None:
    """Give a parameter memory and read this rank's part into it."""
    empty = slot.parameter
    local = torch.empty(slot.box.shape, dtype=empty.dtype, device=device)
    slot.stored.read(slot.box, local)
    value = local
    if type(empty.data) is not torch.Tensor:
        from torch.distributed.tensor import DTensor

        sharded: Any = empty.data
        value = DTensor.from_local(
            local,
            sharded.device_mesh,
            sharded.placements,
            run_check=False,
            shape=sharded.shape,
            stride=sharded.stride(),
        )
    parameter = nn.Parameter(value, empty.requires_grad)
    for module, attribute in slot.owners:
        module.register_parameter(attribute, parameter)


def _restore_buffers(model: nn.Module) -> None:
    """Make the rotary embeddings again on the default device: their buffers are in no state
    dict."""
    for name, module in list(model.named_modules()):
        if not any(True for _ in module.named_buffers(recurse=False)):
            continue
        config = getattr(module, "config", None)
        if not type(module).__name__.endswith("RotaryEmbedding") or config is None:
            raise NotImplementedError(
                f"{name} is a {type(module).__name__} with buffers that no checkpoint has; load "
                "the model with transformers, and call tpkernels.parallelize"
            )
        parent, _, attribute = name.rpartition(".")
        make: Any = type(module)
        setattr(model.get_submodule(parent), attribute, make(config=config))


def _warn_of_unexpected(found: Blueprint, path: str | os.PathLike[str]) -> None:
    names = ", ".join(found.unexpected[:5])
    warnings.warn(
        f"{path} has {len(found.unexpected)} tensors that {type(found.model).__name__} does not "
        f"use: {names}",
        RuntimeWarning,
        stacklevel=3,
    )
