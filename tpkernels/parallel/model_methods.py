"""Methods of transformers models that need a different implementation on sharded models.

**save_pretrained.** Problem: rank 0 writes the shards of all ranks. Writing may take longer than
the group timeout, and may fail only on rank 0. Algorithm: rank 0 announces whether it will write.
The weights are gathered on rank 0, and it writes them with the transformers method while its peers
wait (`tpkernels.parallel.joint_work`). If rank 0 fails, all ranks raise and the group remains
usable.

**Continuous batching.** transformers (generation/continuous_batching) finds the ranks in
``model._device_mesh`` and derives their key-value heads from ``model.tp_plan``, assuming equal
shards. Here shards may differ in size, and with ``ffn_only`` attention is not split. The cache of
each rank is therefore created for the heads that its attention computes. Invariant: all ranks
schedule identically, each with its local cache. Blocks must therefore hold the same number of
tokens on all ranks. They do: blocks are counted in tokens, and their number is reduced over the
ranks.

**Trainer and accelerate** read the number of ranks from the model. Trainer then passes the same
batch to all ranks and does not wrap the model in DDP. On CPUs accelerate rejects tensor
parallelism, so a model that declared its ranks could not be trained there.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import glob
import inspect
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tpkernels import groups
from tpkernels.nn.linear import ColumnParallelLinear
from tpkernels.nn.sharding import ShardedModule, gather_state
from tpkernels.parallel.attention import as_sdpa
from tpkernels.parallel.decoder import SplitRowsLinear
from tpkernels.parallel.joint_work import joint_work
from tpkernels.parallel.plans import SplitInputLinear

if TYPE_CHECKING:
    from transformers import ContinuousBatchingManager, PreTrainedModel

_WRITE = "write"  # report of rank 0 if it will write


def attach(model: nn.Module, mesh: DeviceMesh) -> None:
    """Replace the methods of a sharded transformers model. ``mesh`` has one dim. Does not
    communicate."""
    for module in model.modules():
        if hasattr(type(module), "save_pretrained"):
            save = functools.partial(save_pretrained, module, groups.group_name(mesh))
            module.save_pretrained = save  # type: ignore[assignment]
            module.push_to_hub = refuse_to_push  # type: ignore[assignment]
    refuse_resizing(model)
    if mesh.size() > 1 and mesh.device_type != "cpu" and hasattr(type(model), "tp_size"):
        declare_ranks(model, mesh.size())
    original = getattr(type(model), "init_continuous_batching", None)
    if original is not None:
        sharded: PreTrainedModel = model
        # transformers finds the dim by the name "tp", whatever name the user chose.
        sharded._device_mesh = DeviceMesh.from_group(
            mesh.get_group(), mesh.device_type, mesh_dim_names=("tp",)
        )
        sharded.init_continuous_batching = functools.partial(init_batching, original, sharded)


def refuse_resizing(model: nn.Module) -> None:
    """Disable `resize_token_embeddings` of a transformers model. It cannot resize shards, and each
    rank would initialize the new rows of a replicated embedding differently."""
    for module in model.modules():
        if hasattr(type(module), "resize_token_embeddings"):
            module.resize_token_embeddings = refuse_to_resize  # type: ignore[assignment]


def declare_ranks(model: PreTrainedModel, world: int) -> None:
    """Declare to transformers and accelerate that ``world`` ranks share the model. Its attention
    may be unsplit."""
    model._tp_size = world
    if not any(
        name.endswith("k_proj") and isinstance(module, ColumnParallelLinear)
        for name, module in model.named_modules()
    ):
        model._tp_plan = {}  # otherwise caches would hold only a share of the heads
    from transformers.distributed import DistributedConfig

    with contextlib.suppress(TypeError):  # raised by transformers 5.0
        model.config.distributed_config = DistributedConfig(tp_size=world)


def refuse_to_push(*args: Any, **options: Any) -> NoReturn:
    """Raise NotImplementedError."""
    raise NotImplementedError(
        "push_to_hub would upload from every rank; call save_pretrained(folder, push_to_hub=True, "
        "repo_id=...) on all ranks, which uploads from rank 0"
    )


def refuse_to_resize(*args: Any, **options: Any) -> NoReturn:
    """Raise NotImplementedError."""
    raise NotImplementedError(
        "resize_token_embeddings is not supported on a parallelized model; call it before "
        "tpkernels.parallelize"
    )


def save_pretrained(model: PreTrainedModel, group: str, /, *args: Any, **options: Any) -> None:
    """Write the unsharded model, and replace a model that was saved in the folder before. See
    `tpkernels.parallelize`. Collective.

    Args:
        *args, **options: arguments of the transformers method.

    Raises:
        NotImplementedError: an option writes shards, or the model has adapters.
        ValueError: the model is on the meta device.
        RuntimeError: rank 0 could not write. Rank 0 raises the original error.
        TpkernelsError: a peer was lost, timed out or made a different call.
    """
    write = type(model).save_pretrained
    signature = inspect.signature(write)
    arguments: dict[str, Any] = dict(signature.bind(model, *args, **options).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name, {})
    if arguments.get("distributed_checkpoint"):
        raise NotImplementedError(
            "distributed_checkpoint=True is for models that transformers has sharded; save "
            "model.state_dict() with torch.distributed.checkpoint"
        )
    if getattr(model, "_hf_peft_config_loaded", False):
        raise NotImplementedError(
            "the model has PEFT adapters, which save_pretrained does not gather; save them before "
            "tpkernels.parallelize"
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("the model is on the meta device and has no weights to save")
    device = next(model.parameters()).device
    with joint_work(group, device, "preparing to save the model") as work:
        work.report = _WRITE if arguments.get("is_main_process", True) else ""
    if work.reports[0] != _WRITE:
        return
    with groups.breaking_on_error(group):
        shards = arguments.get("state_dict")
        if shards is None:
            shards = model.state_dict()
        state = gather_state(model, shards, rank0_only=True)
    arguments |= {"state_dict": state, "is_main_process": True}
    with joint_work(group, device, "saving the model"):
        if groups.get(group).rank == 0:
            with _as_unsharded(model):
                write(**arguments)
            _remove_stale(Path(arguments["save_directory"]), arguments.get("variant"))


def _remove_stale(folder: Path, variant: str | None) -> None:
    """Remove the index, or the single weight file, of a model that was saved in ``folder`` before
    with a different number of files. transformers does not remove it, and readers would load it
    instead of the new files."""
    stem, suffix = (f"model.{variant}", f".{variant}") if variant else ("model", "")
    is_split = any(folder.glob(glob.escape(stem) + "-?????-of-?????.safetensors"))
    index = f"model.safetensors.index{suffix}.json"
    (folder / (f"{stem}.safetensors" if is_split else index)).unlink(missing_ok=True)


@contextlib.contextmanager
def _as_unsharded(model: PreTrainedModel) -> Iterator[None]:
    """Make transformers count all parameters for the index, and write on rank 0 of the group. Rank
    0 of the group may differ from rank 0 of the job."""
    sizes = {parameter: parameter.numel() for parameter in model.parameters()}
    for module in model.modules():
        if isinstance(module, ShardedModule):
            for name in module.shardings:
                sizes[module.get_parameter(name)] = prod(module.full_shape(name))
    total = sum(sizes.values())
    model.num_parameters = lambda *args, **options: total
    model.should_save_on_this_rank = lambda is_main_process: is_main_process
    distributed_config = getattr(model.config, "distributed_config", None)
    # Otherwise transformers gathers the weights on all ranks.
    model.config.distributed_config = None
    try:
        yield
    finally:
        model.config.distributed_config = distributed_config
        del model.num_parameters, model.should_save_on_this_rank


def init_batching(
    original: Callable[..., Any], model: PreTrainedModel, /, *args: Any, **options: Any
) -> ContinuousBatchingManager:
    """Run ``model.init_continuous_batching``, the method ``original``. Raise NotImplementedError if
    this version of transformers creates its cache differently."""
    with as_sdpa(model):  # transformers accepts only its own attention functions
        manager = original(model, *args, **options)
    helper = getattr(manager, "distributed_helper", None)
    create = getattr(type(manager), "_create_batch_processor", None)
    if helper is None or not hasattr(helper, "tp_plan") or create is None:
        import transformers

        raise NotImplementedError(
            f"continuous batching of transformers {transformers.__version__} is not supported; "
            "tpkernels was tested with transformers 5.23: use model.generate"
        )
    attention, output_projection = _attention(model)
    head_dim = getattr(attention, "head_dim", None) or getattr(attention, "head_size", None)
    if head_dim is None:
        raise NotImplementedError(
            "continuous batching of transformers does not support the keys and values of "
            f"{type(attention).__name__}; use model.generate"
        )
    helper.tp_plan = {}  # otherwise transformers derives the heads per rank from it

    def create_with_local_heads() -> object:
        """Create a batch processor and its cache while ``model.config`` contains the local number
        of heads."""
        config, local = model.config, copy.copy(model.config)
        local.head_dim = head_dim
        if output_projection is not None:
            heads = config.num_attention_heads
            kv_heads = getattr(config, "num_key_value_heads", None) or heads
            local.num_key_value_heads = max(
                1,
                kv_heads
                * output_projection.in_sizes[output_projection.rank]
                // output_projection.in_features,
            )
            queries_per_kv_head = getattr(attention, "num_key_value_groups", 1)
            local.num_attention_heads = local.num_key_value_heads * queries_per_kv_head
        model.config = local
        try:
            return create(manager)  # function of the class: transformers may cache the manager
        finally:
            model.config = config

    manager._create_batch_processor = create_with_local_heads
    return manager


def _attention(model: nn.Module) -> tuple[Any, SplitRowsLinear | None]:
    """Return the first attention, and its output projection if the heads are split."""
    attention = next(m for m in model.modules() if type(m).__name__.endswith("Attention"))
    projections = (child for child in attention.children() if isinstance(child, SplitRowsLinear))
    return attention, next(
        (projection for projection in projections if not isinstance(projection, SplitInputLinear)),
        None,
    )
