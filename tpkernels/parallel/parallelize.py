"""``tpkernels.parallelize`` makes an existing model tensor-parallel in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tpkernels import groups
from tpkernels.nn.sharding import check_parameter
from tpkernels.parallel import model_methods, plans
from tpkernels.parallel.options import ModelOptions, Pack, SequenceParallel

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

Model = TypeVar("Model", bound=nn.Module)


def parallelize(
    model: Model,
    mesh: DeviceMesh,
    *,
    plan: Mapping[str, ParallelStyle] | Mapping[str, str] | None = None,
    sequence_parallel: SequenceParallel | None = None,
    ffn_only: bool = False,
    expert_parallel: bool = False,
    pack: Pack = False,
) -> Model:
    """Split a model over the ranks of ``mesh``, in place, and return it. All ranks call it, with
    the same weights. If it raises, the model is unchanged. Without a plan it does not communicate.

    **Without a plan** it takes models of Hugging Face transformers, with any head or as the base
    model alone: Llama, Mistral, Qwen2, Qwen3, and those that bring a plan (``base_model_tp_plan``).
    Their modules become layers of `tpkernels.nn`. Heads, MLP features, tokens and vocabulary need
    not divide by the ranks.

    The model is called as before, with the same input on all ranks. All ranks get whole logits,
    hidden states, attention weights and loss, and the gradients of the unsharded model.
    ``generate`` works; sampling needs the same random state on all ranks. If ranks pass other ids
    to the embedding, all of them raise ValueError (on GPUs and in compiled code RuntimeError).
    Training with dropout raises NotImplementedError on more than one rank, when the model is
    called.

    Modules and parameters that are shared stay shared. What a module that is replaced would lose is
    refused by name: its hooks and those of its parameters, a ``forward`` of its own, more
    parameters, buffers or children than its class has. Hooks on other modules stay. The sequence is
    not split in a model with hooks in its decoder layers.

    ``model.save_pretrained(folder)``, with transformers' arguments and on all ranks, writes the
    unsharded model. Rank 0 of the mesh gathers the weights and writes them, unless it is passed
    ``is_main_process=False``; with several replicas, pass that on all but one. The other ranks
    return when rank 0 is done, and raise RuntimeError if it fails; the model remains usable. A rank
    that calls it alone gets ``CollectiveTimeoutError`` after the group's timeout.

    **With a plan** of names of styles it does the same by this plan. **With a plan** of torch's
    styles it applies these to any model, or to parts of one. To save such a
    model, pass ``state_dict=`` as ``torch.distributed.checkpoint.state_dict`` gathers it.

    Args:
        model: may be on the meta device. Then call ``to_empty``, ``load_state_dict`` with the
            unsharded weights and transformers' ``tie_weights``, and recreate ``rotary_emb``, whose
            buffers are in no state dict.
        mesh: a mesh of one dim, such as ``mesh["tp"]`` of a larger one.
        plan: ``ParallelStyle`` objects by module name, which may have wildcards, as
            ``torch.distributed.tensor.parallel.parallelize_module`` takes them. Or names of styles
            such as "colwise", as in the ``tp_plan`` of a model of transformers.
        sequence_parallel: without a plan, whether each rank has only its rows of the sequence
            between the matmuls, so that each overlaps with its collective. For generation token by
            token, False saves one collective per block. "prefill" does both: it splits sequences
            of 16 tokens a rank and more. None means True, unless ``ffn_only`` is set. Layers that
            may do more with rows than projections and norms do are never split by rows.
        ffn_only: without a plan, whether only the feed-forward layers are split. Every rank then
            computes the rest in full, without sequence parallelism.
        expert_parallel: whether each rank has whole experts of a mixture, as `tpkernels.nn.MoE`. By
            default each has a part of every expert.
        pack: without a plan, whether the weights are packed for inference on CPUs, as
            `tpkernels.nn.pack_` does without ``drop``, or with "int8" in int8. It is called under
            ``torch.no_grad()`` or ``torch.inference_mode()``.

    Raises:
        TypeError: ``mesh`` is not a DeviceMesh, a style is not a ParallelStyle, or a module is not
            of the expected type; the message names it.
        ValueError: ``mesh`` has several dims, a name in the plan matches no module, options
            exclude each other, or the heads do not fit together.
        NotImplementedError: the architecture is not supported, or its plan has a style that could
            be wrong; a weight is quantised, or it cannot be packed; what is replaced has hooks, or
            is shared with what is split in another way.
    """
    check_mesh(mesh)
    options = ModelOptions(
        plan=plan,
        sequence_parallel=sequence_parallel,
        ffn_only=ffn_only,
        expert_parallel=expert_parallel,
        pack=pack,
    )
    return split_model(model, mesh, options)


def split_model(model: Model, mesh: DeviceMesh, options: ModelOptions) -> Model:
    """Do what `parallelize` does, after its checks."""
    if options.plan is not None and options.of_torch:
        return _apply_plan(model, mesh, options.plan)
    with torch.device("cpu"):  # of what tries the model's code, whatever the caller's default is
        plans.apply(model, groups.name_of(mesh), options)
    model_methods.attach(model, mesh)
    return model


def check_mesh(mesh: DeviceMesh) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, not {type(mesh).__name__}")
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        one = f'mesh["{names[-1]}"]' if names else "a mesh of one dim"
        raise ValueError(
            f"mesh has {mesh.ndim} dims {names or tuple(mesh.shape)}; parallelize needs a mesh "
            f"of one dim: pass {one}"
        )


def _apply_plan(model: Model, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle]) -> Model:
    """Run torch's ``parallelize_module`` with all checks made first: torch only warns about a name
    that matches nothing."""
    from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

    if not plan:
        raise ValueError("plan is empty; name at least one module")
    for pattern, style in plan.items():
        if not isinstance(style, ParallelStyle):
            raise TypeError(
                f"plan[{pattern!r}] is a {type(style).__name__}, not a "
                "torch.distributed.tensor.parallel.ParallelStyle"
            )
        modules = list(_matches(model, pattern))
        if not modules:
            names = [name for name, _ in model.named_modules() if name]
            raise plans.no_module(model, pattern, names)
        for name, module in modules:
            plans.check_style(model, name, module, style)
            _check_module(name or type(model).__name__, module, style, mesh)
    parallelize_module(model, mesh, dict(plan))
    model_methods.refuse_resizing(model)
    return model


def _check_module(name: str, module: nn.Module, style: ParallelStyle, mesh: DeviceMesh) -> None:
    """Raise what torch would raise only after changing the modules before this one."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
    )

    from tpkernels.parallel import styles

    if isinstance(style, (styles.FusedColwiseParallel, styles.FusedRowwiseParallel)):
        try:
            style.check(module, mesh)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise type(error)(f"{name}: {error}") from None
        return
    if not isinstance(style, (ColwiseParallel, RowwiseParallel, SequenceParallel)):
        return  # Other styles split no parameters.
    takes_linears = not isinstance(style, SequenceParallel)
    if takes_linears and not isinstance(module, (nn.Linear, nn.Embedding)):
        raise TypeError(
            f"{name} is a {type(module).__name__}; {type(style).__name__} supports nn.Linear and "
            "nn.Embedding"
        )
    for parameter_name, parameter in module.named_parameters():
        check_parameter(parameter, f"{name}.{parameter_name}")


def _matches(model: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that torch matches with ``pattern``, whose parts may have wildcards."""
    atoms = pattern.split(".") if pattern else []
    for name, module in model.named_modules():
        parts = name.split(".") if name else []
        if len(parts) == len(atoms) and all(map(fnmatch, parts, atoms)):
            yield name, module
