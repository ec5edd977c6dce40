"""A parallel model on the meta device, and where each of its parameters is in a checkpoint."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tpkernels import dtypes
from tpkernels.nn.sharding import ShardedModule
from tpkernels.nn.split import Split
from tpkernels.parallel import llama
from tpkernels.parallel.checkpoints import Checkpoint
from tpkernels.parallel.checkpoints.stored import Box, Stored, package

# Older checkpoints hold the rotary embedding's buffers, which the model computes.
_IGNORED = re.compile(r"rotary_emb\.|\.rotary_emb\.")
_MOST_NAMES = 5  # in a message


@dataclass(frozen=True)
class Slot:
    """A parameter of the parallel model.

    Args:
        name: of the parameter, as the unsharded model has it.
        owners: (module, attribute) pairs that hold it; several if weights are tied.
        shape: of the unsharded parameter.
        box: the part that this rank holds.
        split: how it is split; None: it is not, or a plan has split it.
        stored: the unsharded parameter in the checkpoint.
        linear: it is the weight of a linear layer, [out_features, in_features].
    """

    name: str
    owners: tuple[tuple[nn.Module, str], ...]
    shape: tuple[int, ...]
    box: Box
    split: Split | None
    stored: Stored
    linear: bool

    def part(self, rank: int) -> Box:
        """Return the part that a rank holds if the parameter is not split by a plan."""
        return part_of(self.shape, None if self.split is None else replace(self.split, rank=rank))

    @property
    def parameter(self) -> nn.Parameter:
        """Return the parameter, or what stands for it on the meta device."""
        module, attribute = self.owners[0]
        return module.get_parameter(attribute)


@dataclass(frozen=True)
class Blueprint:
    """A parallel model on the meta device; its parameters in the order of the model."""

    model: Any
    slots: tuple[Slot, ...]
    unexpected: tuple[str, ...]  #: tensors of the checkpoint that the model has no use for

    def digest(self) -> str:
        """Return a digest that is equal on all ranks if they make the same model."""
        facts = [str(self.model.config)]
        facts += [f"{slot.name} {slot.shape} {slot.parameter.dtype}" for slot in self.slots]
        facts += [f"{slot.split and slot.split.sizes}" for slot in self.slots]
        return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def draw(
    checkpoint: Checkpoint,
    dtype: torch.dtype | None,
    parallelize: Callable[[nn.Module], nn.Module],
    any_architecture: bool,
) -> Blueprint:
    """Draw the blueprint of a checkpoint's model.

    Args:
        dtype: of the parameters; None: the checkpoint's.
        parallelize: splits a model on the meta device in place.
        any_architecture: ``parallelize`` takes other models than `tpkernels.parallel.llama` knows.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, or the tensors do not fit the configuration.
        NotImplementedError: the architecture or a dtype is not supported.
        ImportError: a package is missing.
    """
    transformers = package("transformers")
    config = checkpoint.config()
    if not any_architecture:
        llama.architecture_of(config, str(checkpoint.path))
    if getattr(config, "quantization_config", None) is not None:
        raise NotImplementedError(
            f"{checkpoint.path} is quantised; a quantised weight cannot be split: load the plain "
            "floating-point model, or a GGUF file"
        )
    if dtype is None:
        dtype = getattr(config, "dtype", None) or checkpoint.dtype()
    dtypes.check_supported(dtype, "the model")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    stored = checkpoint.tensors(model)
    whole = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    parameters = model.named_parameters(remove_duplicate=False)
    tied: dict[int, list[str]] = {}
    for name, parameter in parameters:
        tied.setdefault(id(parameter), []).append(name)
    sources = _sources(checkpoint, whole, [*tied.values()], stored)
    generation_config = checkpoint.generation_config()
    if generation_config is not None:
        model.generation_config = generation_config
    slots = tuple(_slots(parallelize(model), sources))
    unexpected = [name for name in stored if name not in whole and not _IGNORED.search(name)]
    return Blueprint(model, slots, tuple(unexpected))


def _sources(
    checkpoint: Checkpoint,
    whole: Mapping[str, tuple[int, ...]],
    tied: list[list[str]],
    stored: Mapping[str, Stored],
) -> dict[str, Stored]:
    """Find what is read for each parameter: the tensor of its name, or of a weight that it is tied
    to."""
    sources: dict[str, Stored] = {}
    missing: list[str] = []
    for names in tied:
        present = [name for name in names if name in stored]
        if not present:
            missing.append(names[0])
            continue
        source = stored[present[0]]
        if source.shape != whole[names[0]]:
            raise ValueError(
                f"{source.files}: {present[0]} has shape {list(source.shape)}, but config.json "
                f"makes it {list(whole[names[0]])}; the two are of different models"
            )
        sources |= dict.fromkeys(names, source)
    if missing:
        more = len(missing) - _MOST_NAMES
        lacking = ", ".join(missing[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
        raise ValueError(
            f"{checkpoint.path} lacks {lacking}, which its configuration asks for; copy or "
            "download it again"
        )
    return sources


def _slots(model: nn.Module, sources: Mapping[str, Stored]) -> Iterator[Slot]:
    owners: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for prefix, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{attribute}" if prefix else attribute
            owners.setdefault(id(parameter), []).append((name, module, attribute))
    for places in owners.values():
        name, module, attribute = places[0]
        stored = sources[name]
        split = module.splits.get(attribute) if isinstance(module, ShardedModule) else None
        linear = attribute == "weight" and (
            isinstance(module, nn.Linear) or hasattr(module, "in_features")
        )
        yield Slot(
            name,
            tuple((module, attribute) for _, module, attribute in places),
            stored.shape,
            _box(module.get_parameter(attribute), stored.shape, split),
            split,
            stored,
            linear,
        )


def part_of(whole: tuple[int, ...], split: Split | None) -> Box:
    """Return the part of an unsharded parameter that the rank of ``split`` holds."""
    if split is None:
        return Box.whole(whole)
    begin = [split.offset if dim == split.dim else 0 for dim in range(len(whole))]
    return Box(tuple(begin), split.local_shape(whole))


def _box(parameter: nn.Parameter, whole: tuple[int, ...], split: Split | None) -> Box:
    """Return the part of the unsharded parameter that this rank holds."""
    if type(parameter.data) is torch.Tensor:
        return part_of(whole, split)
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(parameter.data, DTensor)  # plans make nothing else
    shape, offsets = compute_local_shape_and_global_offset(
        whole, parameter.data.device_mesh, parameter.data.placements
    )
    return Box(tuple(offsets), tuple(shape))
