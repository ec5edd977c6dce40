"""``tpkernels.parallelize``: make an existing model tensor-parallel in place."""

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
from tpkernels.parallel.options import ModelNumerics, ModelOptions, Pack, SequenceParallel

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
    numerics: ModelNumerics = "ordered",
) -> Model:
    """Split a model over the ranks of ``mesh``, in place, and return it. All ranks call it with the
    same weights. If it raises, the model is unchanged. Without a plan it does not communicate.

    **Without a plan** it supports Hugging Face transformers models, with any head or only the base
    model: Llama, Mistral, Qwen2, Qwen3, and models with a TP plan (``base_model_tp_plan``). Their
    modules become layers of `tpkernels.nn`. Heads, MLP features, tokens and vocabulary need not be
    divisible by the number of ranks.

    Call the model as before, with the same input on all ranks. All ranks get the full logits,
    hidden states, attention weights and loss, and the gradients match the unsharded model.
    ``generate`` works; sampling needs the same random state on all ranks. If ranks pass different
    ids to the embedding, all ranks raise ValueError (RuntimeError on GPUs and in compiled code).
    Training with dropout on more than one rank raises NotImplementedError when the model is called.

    Shared modules and parameters stay shared. A replaced module would lose its hooks, hooks of its
    parameters, a custom ``forward``, and parameters, buffers or children that its class does not
    have. The call therefore raises an error that names them. Hooks on other modules stay. If
    decoder layers contain hooks, the sequence is not split.

    ``model.save_pretrained(folder)`` accepts the arguments of transformers. Called on all ranks, it
    writes the unsharded model. Rank 0 of the mesh gathers and writes the weights, unless it passes
    ``is_main_process=False``. With several replicas, pass that on all replicas but one. The
    remaining ranks return when rank 0 is done, and raise RuntimeError if it fails. The model
    remains usable. If only some ranks call it, they raise ``CollectiveTimeoutError`` after the
    group timeout.

    **With a plan of style names**, the plan replaces the TP plan of the model. **With a plan of**
    ``ParallelStyle`` **objects**, the styles are applied to any model, or to some of its modules.
    To save such a model, pass ``state_dict=`` with the result of
    ``torch.distributed.checkpoint.state_dict``.

    Args:
        model: may be on the meta device. Then call ``to_empty``, ``load_state_dict`` with the
            unsharded weights, and ``tie_weights`` of transformers. Also recreate ``rotary_emb``,
            because state dicts do not contain its buffers.
        mesh: a mesh of one dim, such as ``mesh["tp"]`` of a larger mesh.
        plan: ``ParallelStyle`` objects by module name, which may contain wildcards, as for
            ``torch.distributed.tensor.parallel.parallelize_module``. Or style names such as
            "colwise", as in the ``tp_plan`` of a transformers model.
        sequence_parallel: without a plan, whether each rank holds only its rows of the sequence
            between the matmuls, so that each matmul overlaps with a collective. False saves one
            collective per block, for decoding. "prefill" combines both: sequences of at least 16
            tokens per rank are split. None means True, or False with ``ffn_only``. Rows are not
            split in models whose layers contain parameters outside projections, norms and experts.
        ffn_only: without a plan, whether only the feed-forward layers are split. Every rank then
            computes the remaining layers in full, without sequence parallelism.
        expert_parallel: whether each rank holds full experts of an MoE layer, as in
            `tpkernels.nn.MoE`. By default each rank holds a slice of every expert.
        pack: without a plan, whether the weights are packed for inference on CPUs, as by
            `tpkernels.nn.pack_` without ``drop``. "int8" packs them as int8. The model must then be
            called under ``torch.no_grad()`` or ``torch.inference_mode()``.
        numerics: "invariant": on CPUs, the logits of a token depend only on the model and the
            preceding tokens, to the bit: not on the number of ranks, the batch, its padding, the
            chunks of the prompt, or the cache (`docs/numerics.md`). Implies ``pack=True``, whole
            experts on each rank, and no sequence parallelism. "ordered": partial sums of the ranks
            are added in rank order.

    Raises:
        TypeError: ``mesh`` is not a DeviceMesh, a style is not a ParallelStyle, or a module has an
            unexpected type. The message contains its name.
        ValueError: ``mesh`` has several dims, a name in the plan matches no module, options exclude
            each other, or the numbers of heads are inconsistent.
        NotImplementedError: the architecture is not supported, a style of its plan cannot be
            verified, or a module cannot keep ``numerics="invariant"``; a weight is quantized or
            cannot be packed; a replaced module has hooks, or is shared with a module that is split
            differently.
    """
    check_mesh(mesh)
    options = ModelOptions(
        plan=plan,
        sequence_parallel=sequence_parallel,
        ffn_only=ffn_only,
        expert_parallel=expert_parallel,
        pack=pack,
        numerics=numerics,
    )
    return split_model(model, mesh, options)


def split_model(model: Model, mesh: DeviceMesh, options: ModelOptions) -> Model:
    """Split a model like `parallelize`, after its checks."""
    if options.plan is not None and options.uses_torch_styles:
        return _apply_plan(model, mesh, options.plan)
    # Probes of model code run on the CPU, whatever the default device of the caller.
    with torch.device("cpu"):
        plans.apply(model, groups.group_name(mesh), options, mesh.device_type)
    model_methods.attach(model, mesh)
    return model


def check_mesh(mesh: DeviceMesh) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, not {type(mesh).__name__}")
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        example = f'mesh["{names[-1]}"]' if names else "a mesh of one dim"
        raise ValueError(
            f"mesh has {mesh.ndim} dims {names or tuple(mesh.shape)}; parallelize needs a mesh "
            f"of one dim: pass {example}"
        )


def _apply_plan(model: Model, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle]) -> Model:
    """Run ``parallelize_module`` of torch after all checks. torch only warns if a name matches no
    module."""
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
    """Raise errors that torch would raise only after it has changed preceding modules."""
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
        return  # other styles do not split parameters
    needs_linear_or_embedding = not isinstance(style, SequenceParallel)
    if needs_linear_or_embedding and not isinstance(module, (nn.Linear, nn.Embedding)):
        raise TypeError(
            f"{name} is a {type(module).__name__}; {type(style).__name__} supports nn.Linear and "
            "nn.Embedding"
        )
    for parameter_name, parameter in module.named_parameters():
        check_parameter(parameter, f"{name}.{parameter_name}")


def _matches(model: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that torch matches with ``pattern``. Its components may contain
    wildcards."""
    atoms = pattern.split(".") if pattern else []
    for name, module in model.named_modules():
        components = name.split(".") if name else []
        if len(components) == len(atoms) and all(map(fnmatch, components, atoms)):
            yield name, module
