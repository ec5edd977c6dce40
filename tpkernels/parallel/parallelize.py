"""``tpkernels.parallelize``: a model as it is, made tensor-parallel in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tpkernels import groups
from tpkernels.parallel import llama, plans, saving

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

Model = TypeVar("Model", bound=nn.Module)


def parallelize(
    model: Model,
    mesh: DeviceMesh,
    *,
    plan: Mapping[str, ParallelStyle] | None = None,
    sequence_parallel: bool = True,
) -> Model:
    """Splits a model over the ranks of ``mesh``, in place, and returns it. All ranks call it, with
    the same weights. Nothing is changed where it raises; without a plan nothing is sent.

    Without a plan: models of the Llama family of Hugging Face transformers (Llama, Mistral, Qwen2,
    Qwen3; with any head, or the base model alone) get the layers of `tpkernels.nn`. Any numbers of
    heads, MLP features, tokens and vocabulary split, evenly or not. They are called as before, with
    the same input on all ranks, and return the same on all: whole logits, ``last_hidden_state`` and
    loss; gradients are those of the unsharded model. ``generate`` works, each rank caching the keys
    and values of its heads; to sample, all ranks need the same random state. What a model records
    of its inside (``output_hidden_states``, ``output_attentions``) is each rank's part, and dropout
    of attention weights is drawn by each rank for its heads.

    ``model.save_pretrained(folder)`` writes the unsharded model, for ``from_pretrained``. It takes
    transformers' arguments, and all ranks call it. Rank 0 of the mesh gathers the weights and
    writes, unless it is given ``is_main_process=False``, as all replicas but one should be. The
    others return when it is done and raise RuntimeError if it fails; the model can be used on. A
    rank that calls it alone gets ``CollectiveTimeoutError`` after the group's timeout. With a plan,
    pass ``state_dict=``, as ``torch.distributed.checkpoint.state_dict`` gathers it.

    Args:
        model: it may be on the meta device. Afterwards come ``to_empty``, ``load_state_dict`` of
            the unsharded weights, transformers' ``tie_weights``, and a new ``rotary_emb``, whose
            buffers are in no state dict.
        mesh: of one dim; of several, pass the one for this: ``mesh["tp"]``.
        plan: for any other model, or parts of one: ``ParallelStyle``s by the names of modules,
            which may have wildcards, as ``torch.distributed.tensor.parallel.parallelize_module``
            takes them.
        sequence_parallel: without a plan: between the products, each rank has its rows of the
            sequence, so that the norms are split too and each product overlaps with its collective.
            For generating token by token, False saves a collective per product.

    Raises:
        TypeError: ``mesh`` is no DeviceMesh, a style no ParallelStyle, a module not of the type it
            should be; the message names it.
        ValueError: ``mesh`` has several dims; the plan names no module; heads that do not fit.
        NotImplementedError: the architecture is not in the table; a weight is quantised.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, not {type(mesh).__name__}")
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        one = f'mesh["{names[-1]}"]' if names else "a mesh of one dim"
        raise ValueError(
            f"mesh has {mesh.ndim} dims {names or tuple(mesh.shape)}; parallelize takes one: pass "
            f"{one}"
        )
    if plan is not None:
        return plans.apply(model, mesh, plan)
    llama.apply(model, mesh, sequence_parallel)
    saving.attach(model, groups.name_of(mesh))
    return model
