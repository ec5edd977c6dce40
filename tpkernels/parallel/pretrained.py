"""``tpkernels.from_pretrained``: a model of transformers of which each rank reads its shard.

The model is made and split on the meta device (a `Blueprint`); then each parameter gets memory for
the rank's part, which is read into it.
"""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tpkernels import groups, torch_private
from tpkernels.common import dtypes
from tpkernels.local.packed import check_finite, pack_integers
from tpkernels.nn.packing import PackableModule
from tpkernels.nn.sharding import Box, ShardedModule, Sharding
from tpkernels.parallel import plans
from tpkernels.parallel.checkpoints import Checkpoint, StoredTensor, open_checkpoint, package
from tpkernels.parallel.joint_work import joint_work
from tpkernels.parallel.options import ModelOptions, Pack, SequenceParallel
from tpkernels.parallel.parallelize import check_mesh, split_model

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ParallelStyle
    from transformers import PreTrainedModel

# Older checkpoints hold the rotary embedding's buffers, which the model computes.
_IGNORED = re.compile(r"rotary_emb\.|\.rotary_emb\.")
_MOST_NAMES = 5  # in a message


@dataclass(frozen=True)
class Slot:
    """A parameter of the parallel model."""

    name: str  #: as the unsharded model has it
    owners: tuple[tuple[nn.Module, str], ...]  #: (module, attribute); several if weights are tied
    split: Sharding | None  #: None: it is not split, or by a plan
    stored: StoredTensor  #: the unsharded parameter in the checkpoint
    linear: bool  #: the weight of a linear layer, [out_features, in_features]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the unsharded parameter."""
        return self.stored.shape

    @property
    def parameter(self) -> nn.Parameter:
        """Return the parameter, or what stands for it on the meta device."""
        module, attribute = self.owners[0]
        return module.get_parameter(attribute)

    def parts(self) -> list[Box]:
        """Return the parts that this rank holds."""
        data = self.parameter.data
        if type(data) is not torch.Tensor:  # a DTensor: plans make nothing else
            of = cast("DTensor", data)
            shape, offsets = torch_private.tensor_utils.compute_local_shape_and_global_offset(
                self.shape, of.device_mesh, of.placements
            )
            return [Box(tuple(offsets), tuple(shape))]
        return [Box.full(self.shape)] if self.split is None else self.split.boxes(self.shape)

    def local_shape(self, rank: int | None = None) -> tuple[int, ...]:
        """Return the shape of what a rank holds, by default this one."""
        if self.split is None:
            return self.parts()[0].shape
        return self.split.local_shape(self.shape, rank)


@dataclass(frozen=True)
class Blueprint:
    """A parallel model on the meta device; its parameters in the order of the model."""

    model: PreTrainedModel
    slots: tuple[Slot, ...]
    buffers: Mapping[str, StoredTensor]  #: those that checkpoints have, by name
    unexpected: tuple[str, ...]  #: tensors of the checkpoint that the model has no use for

    def digest(self) -> str:
        """Return a digest that is equal on all ranks if they make the same model."""
        facts = [str(self.model.config)]
        for slot in self.slots:
            ranges = slot.split and slot.split.ranges
            facts.append(f"{slot.name} {slot.shape} {slot.parameter.dtype} {ranges}")
        return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def draw(
    checkpoint: Checkpoint,
    dtype: torch.dtype | None,
    split: Callable[[nn.Module], nn.Module],
    any_architecture: bool,
) -> Blueprint:
    """Draw the blueprint of a checkpoint's model; raise what `from_pretrained` raises for files.
    ``split`` splits a model on the meta device in place: those that
    `tpkernels.parallel.decoder` knows, or ``any_architecture``."""
    transformers = package("transformers")
    config = checkpoint.config()
    if not any_architecture:
        plans.check_has_plan(config, str(checkpoint.path))
    if getattr(config, "quantization_config", None) is not None:
        raise NotImplementedError(
            f"{checkpoint.path} is quantized, and quantized weights cannot be sharded; load the "
            "plain floating-point model, or a GGUF file"
        )
    if dtype is None:
        dtype = getattr(config, "dtype", None) or checkpoint.dtype()
    dtypes.check_supported(dtype, "the model")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    _keep_wide(model, dtype)
    stored = checkpoint.tensors(model)
    sources = _sources(checkpoint, model, stored)
    names = model.state_dict().keys()
    buffers = {name: sources[name] for name, _ in model.named_buffers() if name in names}
    generation_config = checkpoint.generation_config()
    if generation_config is not None:
        model.generation_config = generation_config
    slots = tuple(_slots(split(model), sources))
    unexpected = [name for name in stored if name not in names and not _IGNORED.search(name)]
    return Blueprint(model, slots, buffers, tuple(unexpected))


def _keep_wide(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give a model on the meta device the dtypes that transformers loads weights of ``dtype`` in:
    it keeps some in float32."""
    if not hasattr(model, "_get_dtype_plan"):  # older transformers
        return
    for pattern, wide in model._get_dtype_plan(dtype).items():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if re.search(pattern.replace("*", ".*"), name):
                value.data = value.data.to(wide)


def _sources(
    checkpoint: Checkpoint, model: nn.Module, stored: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Find what is read for each value of the state dict: the tensor of its name, or of a weight
    that it is tied to."""
    tied: dict[torch.Tensor, list[str]] = {}
    for name, parameter in model.state_dict(keep_vars=True).items():
        tied.setdefault(parameter, []).append(name)
    sources: dict[str, StoredTensor] = {}
    missing: list[str] = []
    for parameter, names in tied.items():
        present = next((name for name in names if name in stored), None)
        if present is None:
            missing.append(names[0])
            continue
        source = stored[present]
        if source.shape != tuple(parameter.shape):
            raise ValueError(
                f"{source.files}: {present} has shape {list(source.shape)}, but the "
                f"configuration gives {list(parameter.shape)}; they belong to different models"
            )
        sources |= dict.fromkeys(names, source)
    if missing:
        more = len(missing) - _MOST_NAMES
        lacking = ", ".join(missing[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
        raise ValueError(
            f"{checkpoint.path} does not contain {lacking}, which its configuration requires; "
            "copy or download it again"
        )
    return sources


def _slots(model: nn.Module, sources: Mapping[str, StoredTensor]) -> Iterator[Slot]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for tied in names.values():
        places = [name.rpartition(".") for name in tied]
        owners = tuple((model.get_submodule(owner), attribute) for owner, _, attribute in places)
        module, attribute = owners[0]
        split = module.splits.get(attribute) if isinstance(module, ShardedModule) else None
        linear = attribute == "weight" and hasattr(module, "in_features")
        yield Slot(tied[0], owners, split, sources[tied[0]], linear)


def from_pretrained(
    path: str | os.PathLike[str],
    mesh: DeviceMesh,
    plan: Mapping[str, ParallelStyle] | Mapping[str, str] | None = None,
    ffn_only: bool = False,
    dtype: torch.dtype | None = None,
    *,
    sequence_parallel: SequenceParallel | None = None,
    expert_parallel: bool = False,
    pack: Pack = False,
) -> PreTrainedModel:
    """Load a causal language model of transformers, split over the ranks of ``mesh``. All ranks
    call it; each reads its slices of the weights, into its shard and a buffer of some megabytes.
    The model is what `tpkernels.parallelize` makes, in evaluation mode. Needs
    ``pip install 'tpkernels[models]'``.

    If it fails on one rank, it fails on all, and the group remains usable. Files may differ between
    hosts only in where they are: the ranks compare configurations and shapes, not weights.

    Args:
        path: a local folder with ``config.json`` and safetensors files, one that `tpkernels shard`
            has written for any number of ranks, or a GGUF file. Quantised weights of a GGUF file
            are dequantised; but with ``pack="int8"``, the integers and scales of Q8_0, Q6_K, Q5_0,
            Q4_0 and IQ4_NL are packed as they are.
        mesh: a mesh of one dim, such as ``mesh["tp"]`` of a larger one. Its device type is where
            the model is: the CPU or the current GPU.
        plan, ffn_only, sequence_parallel, expert_parallel: as `tpkernels.parallelize` takes them.
        pack: as `tpkernels.parallelize` takes it, but each weight is packed when it has been read,
            and the plain one is dropped, unless an embedding is tied to it.
        dtype: of the parameters. None means the one that ``config.json`` names, or that of the
            weights; float32 for GGUF files.

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
    options = ModelOptions(
        plan=plan,
        sequence_parallel=sequence_parallel,
        ffn_only=ffn_only,
        expert_parallel=expert_parallel,
        pack=pack,
        read_later=True,
    )
    group = groups.name_of(mesh)
    device = torch.device(mesh.device_type)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    split = partial(split_model, mesh=mesh, options=options)
    with joint_work(group, device, f"opening {path}") as work:
        blueprint = draw(open_checkpoint(path), dtype, split, plan is not None)
        work.text = f"{blueprint.digest()} {sorted(plan or ())} {ffn_only=} {options.rows_split=}"
        work.text += f" {pack=} {expert_parallel=}"
    other = next((rank for rank, text in enumerate(work.texts) if text != work.texts[0]), None)
    if other is not None:
        raise ValueError(
            f"ranks 0 and {other} would load different models from {path}: their configurations, "
            "shapes or options differ; pass the same checkpoint and arguments on all ranks"
        )
    with joint_work(group, device, f"reading {path}") as work:
        with torch.device(device):
            _restore_buffers(blueprint.model, blueprint.buffers)
        for slot in blueprint.slots:
            work.check()
            _fill(slot, device, options)
    if blueprint.unexpected and groups.get(group).rank == 0:
        warnings.warn(
            f"{path} has {len(blueprint.unexpected)} tensors that "
            f"{type(blueprint.model).__name__} does not use: "
            f"{', '.join(blueprint.unexpected[:_MOST_NAMES])}",
            RuntimeWarning,
            stacklevel=2,
        )
    return blueprint.model.eval()


def _fill(slot: Slot, device: torch.device, options: ModelOptions) -> None:
    """Read this rank's part of a parameter, and pack it for the linear layers that have it."""
    layers = [
        (module, name)
        for module, name in slot.owners
        if options.pack and isinstance(module, PackableModule) and name in module.packable
    ]
    dtype, drop = options.packed_dtype, len(slot.owners) == 1
    packed = _packed_integers(slot, device) if dtype == torch.int8 and layers else None
    if packed is None or not drop:
        _read(slot, device)
    for layer, name in layers:
        if packed is None:
            layer.pack_parameter(name, drop=drop, dtype=dtype)
        else:
            layer.use_packed(name, packed, drop=drop, dtype=dtype)


def _packed_integers(slot: Slot, device: torch.device) -> torch.Tensor | None:
    """Return this rank's part packed from the checkpoint's integers, or None if they are not
    readable as such or cannot be packed."""
    [part, *others] = slot.parts()
    fits = device.type == "cpu" and slot.parameter.dtype != torch.float64 and part.size
    found = slot.stored.read_integers(part) if fits and not others else None
    if found is None:
        return None
    integers, scales = found
    check_finite(scales, slot.name)
    return pack_integers(integers.t(), scales.t())


def _read(slot: Slot, device: torch.device) -> None:
    """Give a parameter memory and read this rank's part into it."""
    empty = slot.parameter
    local = torch.empty(slot.local_shape(), dtype=empty.dtype, device=device)
    chunks = [(slot.parts()[0], local)] if slot.split is None else slot.split.chunks(local)
    for box, chunk in chunks:
        slot.stored.read(box, chunk)
    value = local
    if type(empty.data) is not torch.Tensor:
        from torch.distributed.tensor import DTensor

        sharded = cast(DTensor, empty.data)
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


def _restore_buffers(model: nn.Module, stored: Mapping[str, StoredTensor]) -> None:
    """Read the buffers that are stored, and make the rotary embeddings again on the default device:
    no state dict has theirs."""
    for name, source in stored.items():
        parent, _, attribute = name.rpartition(".")
        value = torch.empty(source.shape, dtype=model.get_buffer(name).dtype)
        source.read(Box.full(source.shape), value)
        model.get_submodule(parent).register_buffer(attribute, value)
    for name, module in list(model.named_modules()):
        if all(f"{name}.{key}" in stored for key, _ in module.named_buffers(recurse=False)):
            continue
        config = getattr(module, "config", None)
        if not type(module).__name__.endswith("RotaryEmbedding") or config is None:
            raise NotImplementedError(
                f"{name} is a {type(module).__name__} with buffers that are not in checkpoints; "
                "load the model with transformers, and call tpkernels.parallelize"
            )
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, type(module)(config=config))
