"""``tpkernels.from_pretrained``: load a transformers model so that each rank reads only its shard.

The model is created and split on the meta device (a `Blueprint`). Then each rank allocates the
local shard of each parameter, and reads it from the checkpoint.
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
from tpkernels.parallel.checkpoints import Checkpoint, StoredTensor, import_package, open_checkpoint
from tpkernels.parallel.joint_work import joint_work
from tpkernels.parallel.options import ModelNumerics, ModelOptions, Pack, SequenceParallel
from tpkernels.parallel.parallelize import check_mesh, split_model

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ParallelStyle
    from transformers import PreTrainedModel

# Rotary embedding buffers in old checkpoints; the model computes them.
_IGNORED = re.compile(r"rotary_emb\.|\.rotary_emb\.")
_MAX_NAMES = 5  # tensor names listed in a message


@dataclass(frozen=True)
class Slot:
    """A parameter of the parallel model and its source in the checkpoint."""

    name: str  #: name in the unsharded model
    owners: tuple[tuple[nn.Module, str], ...]  #: (module, attribute); several if weights are tied
    sharding: Sharding | None  #: None if it is replicated or split by torch styles
    stored: StoredTensor  #: unsharded parameter in the checkpoint
    linear: bool  #: whether it is the weight [out_features, in_features] of a linear layer

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the unsharded parameter."""
        return self.stored.shape

    @property
    def parameter(self) -> nn.Parameter:
        """Return the parameter, or its placeholder on the meta device."""
        module, attribute = self.owners[0]
        return module.get_parameter(attribute)

    def boxes(self) -> list[Box]:
        """Return the boxes of the unsharded parameter that this rank holds."""
        data = self.parameter.data
        if type(data) is not torch.Tensor:  # torch styles create DTensors, no other subclass
            dtensor = cast("DTensor", data)
            shape, offsets = torch_private.tensor_utils.compute_local_shape_and_global_offset(
                self.shape, dtensor.device_mesh, dtensor.placements
            )
            return [Box(tuple(offsets), tuple(shape))]
        return [Box.full(self.shape)] if self.sharding is None else self.sharding.boxes(self.shape)

    def local_shape(self, rank: int | None = None) -> tuple[int, ...]:
        """Return the shape of the shard on ``rank``, by default on this rank."""
        if self.sharding is None:
            return self.boxes()[0].shape
        return self.sharding.local_shape(self.shape, rank)


@dataclass(frozen=True)
class Blueprint:
    """A parallel model on the meta device. The slots are in the order of the model parameters."""

    model: PreTrainedModel
    slots: tuple[Slot, ...]
    buffers: Mapping[str, StoredTensor]  #: buffers in the checkpoint, by name
    unexpected: tuple[str, ...]  #: checkpoint tensors that the model does not use

    def digest(self) -> str:
        """Return a digest that is equal on all ranks if their models are equal."""
        lines = [str(self.model.config)]
        for slot in self.slots:
            ranges = slot.sharding and slot.sharding.ranges
            lines.append(f"{slot.name} {slot.shape} {slot.parameter.dtype} {ranges}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def make_blueprint(
    checkpoint: Checkpoint,
    dtype: torch.dtype | None,
    split: Callable[[nn.Module], nn.Module],
    any_architecture: bool,
) -> Blueprint:
    """Create the model of a checkpoint on the meta device. Raises the errors of `from_pretrained`
    for files.

    Args:
        split: splits a model on the meta device in place.
        any_architecture: accept models without a TP plan.
    """
    transformers = import_package("transformers")
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
    _apply_dtype_plan(model, dtype)
    stored = checkpoint.tensors(model)
    sources = _find_sources(checkpoint, model, stored)
    names = model.state_dict().keys()
    buffers = {name: sources[name] for name, _ in model.named_buffers() if name in names}
    generation_config = checkpoint.generation_config()
    if generation_config is not None:
        model.generation_config = generation_config
    slots = tuple(_make_slots(split(model), sources))
    unexpected = [name for name in stored if name not in names and not _IGNORED.search(name)]
    return Blueprint(model, slots, buffers, tuple(unexpected))


def _apply_dtype_plan(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast a model on the meta device to the dtypes in which transformers loads weights of
    ``dtype``. transformers keeps some weights in float32."""
    if not hasattr(model, "_get_dtype_plan"):  # not in older versions of transformers
        return
    for pattern, target_dtype in model._get_dtype_plan(dtype).items():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if re.search(pattern.replace("*", ".*"), name):
                value.data = value.data.to(target_dtype)


def _find_sources(
    checkpoint: Checkpoint, model: nn.Module, stored: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Return the stored tensor for each name in the state dict: the tensor of this name, or of a
    weight that is tied to it."""
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
        more = len(missing) - _MAX_NAMES
        lacking = ", ".join(missing[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
        raise ValueError(
            f"{checkpoint.path} does not contain {lacking}, which its configuration requires; "
            "copy or download it again"
        )
    return sources


def _make_slots(model: nn.Module, sources: Mapping[str, StoredTensor]) -> Iterator[Slot]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for tied in names.values():
        paths = [name.rpartition(".") for name in tied]
        owners = tuple((model.get_submodule(owner), attribute) for owner, _, attribute in paths)
        module, attribute = owners[0]
        sharding = module.shardings.get(attribute) if isinstance(module, ShardedModule) else None
        linear = attribute == "weight" and hasattr(module, "in_features")
        yield Slot(tied[0], owners, sharding, sources[tied[0]], linear)


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
    numerics: ModelNumerics = "ordered",
) -> PreTrainedModel:
    """Load a causal language model of transformers, split over the ranks of ``mesh``. All ranks
    call it.

    Each rank reads only its slices of the weights, with a buffer of a few megabytes. The result
    equals `tpkernels.parallelize` of the model, in evaluation mode. Requires ``pip install
    'tpkernels[models]'``.

    If loading fails on one rank, it fails on all ranks, and the group remains usable. Paths may
    differ between hosts, but the files must be identical: the ranks compare configurations and
    shapes, not weights.

    Args:
        path: a local folder with ``config.json`` and safetensors files, a folder written by
            `tpkernels shard` for any number of ranks, or a GGUF file. Quantized weights of a GGUF
            file are dequantized. With ``pack="int8"``, the integers and scales of Q8_0, Q6_K, Q5_0,
            Q4_0 and IQ4_NL are packed unchanged.
        mesh: a mesh of one dim, such as ``mesh["tp"]`` of a larger mesh. Its device type selects
            the device of the model: the CPU or the current GPU.
        plan, ffn_only, sequence_parallel, expert_parallel: see `tpkernels.parallelize`.
        numerics: see `tpkernels.parallelize`.
        pack: see `tpkernels.parallelize`. Each weight is packed after reading. The plain weight is
            then dropped, unless an embedding is tied to it.
        dtype: dtype of the parameters. None means the dtype in ``config.json`` or, if it is not
            set, the dtype of the weights; for GGUF files float32.

    Returns:
        The model.

    Raises:
        FileNotFoundError: a file or folder is missing.
        ImportError: a package that the format needs is missing.
        ValueError: a file is damaged or truncated, a tensor is missing, a shape differs from the
            configuration, or the models on the ranks differ. Also as for `tpkernels.parallelize`.
        TypeError, NotImplementedError: as for `tpkernels.parallelize`, or a dtype is not supported.
        RuntimeError: loading failed on a different rank. The message contains the rank and its
            error.
        TpkernelsError: a peer was lost, timed out or made a different call.
    """
    check_mesh(mesh)
    options = ModelOptions(
        plan=plan,
        sequence_parallel=sequence_parallel,
        ffn_only=ffn_only,
        expert_parallel=expert_parallel,
        pack=pack,
        numerics=numerics,
        defer_weights=True,
    )
    group = groups.group_name(mesh)
    device = torch.device(mesh.device_type)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    split = partial(split_model, mesh=mesh, options=options)
    with joint_work(group, device, f"opening {path}") as work:
        blueprint = make_blueprint(open_checkpoint(path), dtype, split, plan is not None)
        work.report = (
            f"{blueprint.digest()} {sorted(plan or ())} {ffn_only=} "
            f"{options.effective_sequence_parallel=}"
        )
        work.report += f" {pack=} {expert_parallel=} {numerics=}"
    mismatched_rank = next(
        (rank for rank, report in enumerate(work.reports) if report != work.reports[0]), None
    )
    if mismatched_rank is not None:
        raise ValueError(
            f"ranks 0 and {mismatched_rank} would load different models from {path}: their "
            "configurations, shapes or options differ; pass the same checkpoint and arguments on "
            "all ranks"
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
            f"{', '.join(blueprint.unexpected[:_MAX_NAMES])}",
            RuntimeWarning,
            stacklevel=2,
        )
    return blueprint.model.eval()


def load_unsharded(checkpoint: Checkpoint, dtype: torch.dtype | None) -> PreTrainedModel:
    """Load the unsharded model of a checkpoint on the CPU, in evaluation mode. Arguments and errors
    are described in `from_pretrained`."""
    blueprint = make_blueprint(checkpoint, dtype, lambda model: model, any_architecture=True)
    _restore_buffers(blueprint.model, blueprint.buffers)
    for slot in blueprint.slots:
        _read(slot, torch.device("cpu"))
    return blueprint.model.eval()


def _fill(slot: Slot, device: torch.device, options: ModelOptions) -> None:
    """Read the local shard of a parameter, and pack it for its linear layers."""
    layers = [
        (module, name)
        for module, name in slot.owners
        if options.packs and isinstance(module, PackableModule) and name in module.packable
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
    """Return the local shard, packed from the integers in the checkpoint, or None if the checkpoint
    does not store it as integers or it cannot be packed."""
    [box, *more] = slot.boxes()
    can_pack = device.type == "cpu" and slot.parameter.dtype != torch.float64 and box.size
    stored = slot.stored.read_integers(box) if can_pack and not more else None
    if stored is None:
        return None
    integers, scales = stored
    check_finite(scales, slot.name)
    return pack_integers(integers.t(), scales.t())


def _read(slot: Slot, device: torch.device) -> None:
    """Allocate a parameter, and read the local shard into it."""
    empty = slot.parameter
    local = torch.empty(slot.local_shape(), dtype=empty.dtype, device=device)
    chunks = [(slot.boxes()[0], local)] if slot.sharding is None else slot.sharding.chunks(local)
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
    """Read the stored buffers, and recreate the rotary embeddings on the default device. State
    dicts do not contain their buffers."""
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
