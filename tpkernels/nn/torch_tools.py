"""Support for the PyTorch tools that read or change sharded parameters.

Problem: a sharded parameter and its gradient are plain tensors, so torch treats a shard as the full
parameter. These tools would then give wrong results without an error:

- ``clip_grad_norm_`` would scale by a different norm on each rank.
- ``GradScaler`` would skip a step on some ranks only.
- ``DistributedDataParallel`` would overwrite each shard with the shard of rank 0.
- A saved optimizer state would lack the shards of all other ranks.

Algorithm: `mark` records the group that holds the shards of a parameter. If FSDP2 shards the
parameter again, both its unsharded and its sharded form are marked. Then

- the gradient becomes a `ShardGradient` after the backward has accumulated it. Norms, and the
  search for infinities, then cover the shards of all ranks. All other code sees a plain tensor.
- a wrapper (DDP, FSDP, PEFT) is checked when torch registers the wrapped module in it.
- a hook prepares an optimizer at its first step. After that its state dict has `ShardTensor`
  values, and it loads these or unsharded values.
"""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, SupportsIndex

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tpkernels import groups
from tpkernels.ops.all_gather import all_gather
from tpkernels.ops.all_reduce import all_reduce
from tpkernels.torch_private import (
    DisableTorchFunctionSubclass,
    foreach_find_infinities_and_unscale,
    foreach_norm,
)

_MARK = "_tpkernels_mark"  # attribute of a marked parameter
# Attribute of an optimizer after its first step: whether it updates shards. None for the inner
# optimizer of a wrapper: the wrapper is prepared instead.
_UPDATES_SHARDS = "_tpkernels_updates_shards"
#: Optimizers that are not elementwise: a step reads the full weight, or all weights together.
_NOT_ELEMENTWISE = {"Adafactor", "LBFGS", "Muon"}


@dataclass(frozen=True)
class Mark:
    """Description of a parameter that is a local shard."""

    group: str  #: group of the ranks that hold the shards
    to_state: Callable[[torch.Tensor], torch.Tensor]  #: wraps a shard for a state dict
    from_state: Callable[[torch.Tensor], torch.Tensor]  #: unwraps or slices a state dict value
    is_primary: bool = True  #: no lower rank holds the same shard, so it counts in norms
    #: sums the gradient of a replicated shard over the ranks that hold it
    sum_replicas: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as an empty dict, which is not a mark: the hook is not pickled either.

        Loading with ``weights_only`` accepts this class.
        """
        return OrderedDict, ()


def _get_mark(parameter: object) -> Mark | None:
    shard_mark = getattr(parameter, _MARK, None)
    return shard_mark if isinstance(shard_mark, Mark) else None


def mark(parameter: nn.Parameter, shard_mark: Mark) -> None:
    """Mark a parameter as a shard, unless it is marked, an integer or an inference tensor."""
    if _get_mark(parameter) or not parameter.is_floating_point() or parameter.is_inference():
        return
    _install()
    setattr(parameter, _MARK, shard_mark)
    needs_gradient = parameter.requires_grad
    parameter.requires_grad_(True)  # torch rejects hooks on tensors that do not require a gradient
    if shard_mark.sum_replicas is not None:
        parameter.register_hook(shard_mark.sum_replicas)
    parameter.register_post_accumulate_grad_hook(partial(_mark_gradient, shard_mark))
    parameter.requires_grad_(needs_gradient)
    _mark_gradient(shard_mark, parameter)


def _mark_gradient(shard_mark: Mark, parameter: torch.Tensor) -> None:
    gradient: Any = parameter.grad
    if gradient is not None and not isinstance(gradient, ShardGradient):
        plain: type[torch.Tensor] = type(gradient)
        gradient.__class__ = _gradient_class(plain)
        gradient.group, gradient.is_primary = shard_mark.group, shard_mark.is_primary


class ShardGradient(torch.Tensor):
    """Gradient of the local shard.

    ``linalg.vector_norm`` without ``dim`` is collective. So are the functions that
    ``clip_grad_norm_`` and ``GradScaler`` call for lists of gradients.
    """

    group: str
    is_primary: bool
    plain: type  #: original class: Tensor, or DTensor with FSDP2

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        with DisableTorchFunctionSubclass():
            return copy.deepcopy(self.detach(), memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        with DisableTorchFunctionSubclass():
            return self.detach().__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        with DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            is_global = len(args) < 3 and (kwargs or {}).get("dim") is None
            if func == torch.linalg.vector_norm and is_global:
                return _norms(args[:1], [result], *args[1:2], **(kwargs or {}))[0]
            if func == foreach_norm:
                return _norms(args[0], result, *args[1:2], **(kwargs or {}))
            if func == foreach_find_infinities_and_unscale:
                found_inf = args[1]  # stays 0 or 1, because fused optimizers compute with it
                for group in _find_groups(args[0]):
                    found_inf.copy_(all_reduce(found_inf.reshape(1), group).squeeze() > 0)
            return result


@cache
def _gradient_class(plain: type) -> type:
    bases = (ShardGradient,) if plain is torch.Tensor else (ShardGradient, plain)
    return type(f"Shard{plain.__name__}", bases, {"plain": plain})


def _find_groups(tensors: Iterable[torch.Tensor]) -> list[str]:
    """Return the groups of the sharded gradients, in order of first occurrence."""
    names = (getattr(tensor, "group", None) for tensor in tensors)
    return list(dict.fromkeys(group for group in names if group is not None))


def _norms(
    gradients: Sequence[torch.Tensor], norms: Sequence[torch.Tensor], ord: float = 2, **_: Any
) -> list[torch.Tensor]:
    """Return the norms of the unsharded gradients, from the norms of the local gradients."""
    norms = [n.full_tensor() if hasattr(n, "full_tensor") else n for n in norms]
    for group in _find_groups(gradients):
        sharded = [i for i, g in enumerate(gradients) if getattr(g, "group", None) == group]
        local = [norms[i] if gradients[i].is_primary else norms[i] * 0 for i in sharded]  # type: ignore[attr-defined]
        gathered = all_gather(torch.stack(local)[None], group)
        for i, norm in zip(sharded, torch.linalg.vector_norm(gathered, ord, 0), strict=True):
            norms[i] = norm
    return norms


def clip_grad_norm_(
    module: nn.Module, max_norm: float, *, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Clip the gradients of a sharded module by their 2-norm over all ranks. Collective.

    Equals ``torch.nn.utils.clip_grad_norm_`` on the unsharded module, but sums in float64. A
    sharded parameter counts with the shards of all ranks, a replicated parameter once. All ranks
    must have gradients for the same parameters.

    Args:
        module: a module with sharded layers.
        max_norm: maximum norm after clipping.
        error_if_nonfinite: raise if the norm is not finite.

    Returns:
        The norm before clipping, a float32 scalar that is bitwise identical on all ranks.

    Raises:
        RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is set.
    """
    # A foreach call needs gradients of one type, device and mesh.
    by_type: dict[object, list[torch.Tensor]] = {}
    for parameter in module.parameters():
        if (shard_mark := _get_mark(parameter)) is not None:
            _mark_gradient(shard_mark, parameter)  # the gradient may have been assigned
        if (gradient := parameter.grad) is not None:
            key = type(gradient), gradient.device, getattr(gradient, "device_mesh", None)
            by_type.setdefault(key, []).append(gradient)
    norms = [torch.zeros((), dtype=torch.float64)]
    for gradients in by_type.values():
        with DisableTorchFunctionSubclass():
            if not hasattr(gradients[0], "device_mesh"):
                local = list(foreach_norm(gradients, 2, torch.float64))
            else:  # foreach_norm of DTensors does not support dtype in torch 2.15
                local = [
                    torch.linalg.vector_norm(gradient, dtype=torch.float64)
                    for gradient in gradients
                ]
        norms += _norms(gradients, local)
    norms = norms[1:] or norms
    norm = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"the norm of the gradients is {norm.item()}, so they cannot be clipped")
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).item()
    for gradient in itertools.chain(*by_type.values()):
        gradient.detach().mul_(factor)
    return norm.float()


def marked_groups(parameters: Iterable[torch.Tensor]) -> list[str]:
    """Return the groups that hold the shards of the marked parameters."""
    marks = map(_get_mark, parameters)
    return list(dict.fromkeys(shard_mark.group for shard_mark in marks if shard_mark is not None))


@cache
def _install() -> None:
    register_module_module_registration_hook(_check_wrapper)
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _check_wrapper(wrapper: nn.Module, name: str, module: nn.Module | None) -> None:
    """Raise if ``wrapper`` would treat the shards in its child ``module`` as full parameters."""
    if module is None:
        return
    wrapper_type = type(wrapper)
    process_group = wrapper.__dict__.get("process_group")  # set by DDP and FSDP
    is_torch_wrapper = wrapper_type.__module__.startswith("torch.")
    is_torch_wrapper = is_torch_wrapper or isinstance(wrapper, nn.parallel.DistributedDataParallel)
    if is_torch_wrapper and isinstance(process_group, dist.ProcessGroup):
        _check_apart(wrapper_type.__name__, process_group, module.parameters())
        if isinstance(wrapper, nn.parallel.DistributedDataParallel):
            wrapper.register_forward_pre_hook(_refuse_bucket_views)
        elif any(
            "shardings" in vars(submodule) for submodule in module.modules()
        ):  # a ShardedModule
            raise NotImplementedError(
                f"{wrapper_type.__name__} flattens the parameters, which are shards, so gradient "
                "norms would differ between ranks; create the model again and use "
                "torch.distributed.fsdp.fully_shard"
            )
    elif (
        wrapper_type.__module__.startswith("peft.")
        and name in ("model", "base_model")
        and marked_groups(module.parameters())
    ):
        raise NotImplementedError(
            f"{wrapper_type.__name__} of PEFT cannot adapt a model that is sharded by tpkernels: "
            "adapters would have to be sharded like the layers. Train them on the unsharded model, "
            "merge them (merge_and_unload) and then call tpkernels.parallelize"
        )


def _check_apart(
    tool: str, process_group: dist.ProcessGroup, parameters: Iterable[torch.Tensor]
) -> None:
    """Raise ValueError if two ranks of a process group hold different shards of a parameter."""
    synced = dist.get_process_group_ranks(process_group)
    for group in marked_groups(parameters):
        ranks = dist.get_process_group_ranks(groups.get(group).pg)
        overlap = sorted({*synced} & {*ranks})
        if len(overlap) > 1:
            raise ValueError(
                f"{tool} would treat the parameters of ranks {overlap} as copies, but they are "
                f"shards of one model; ranks {ranks} all need the same batch and no {tool}. For "
                'data parallelism, make a mesh of two dims, parallelize over mesh["tp"] and pass '
                'process_group=mesh["dp"].get_group(). Accelerate and Trainer: on CPUs, start the '
                "ranks with tpkernels.spmd; on GPUs, pass Accelerator(parallelism_config="
                f"ParallelismConfig(tp_size={len(ranks)}))"
            )


def _refuse_bucket_views(wrapper: nn.parallel.DistributedDataParallel, args: object) -> None:
    if wrapper.gradient_as_bucket_view and marked_groups(wrapper.module.parameters()):
        raise NotImplementedError(
            "gradient_as_bucket_view=True replaces the gradients of shards with plain tensors, so "
            "gradient norms would differ between ranks; leave it out"
        )


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Prepare an optimizer before its first step, and pass plain gradients to every step.

    The step may be compiled, so it must not see `ShardGradient`.
    """
    if optimizer.__dict__.get(_UPDATES_SHARDS, False) is False:
        setattr(optimizer, _UPDATES_SHARDS, _prepare(optimizer))
    for parameter in _sharded_parameters(optimizer):
        if isinstance(parameter.grad, ShardGradient):
            parameter.grad.__class__ = parameter.grad.plain


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for parameter in _sharded_parameters(optimizer):
        shard_mark = _get_mark(parameter)
        assert shard_mark is not None  # the parameter is sharded
        _mark_gradient(shard_mark, parameter)


def _sharded_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    if not getattr(optimizer, _UPDATES_SHARDS, False):
        return []
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return [parameter for parameter in parameters if _get_mark(parameter) is not None]


def _prepare(optimizer: torch.optim.Optimizer) -> bool:
    """Check an optimizer and register its state dict hooks. Return whether it updates shards."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not marked_groups(parameters):
        return False
    name = type(optimizer).__name__
    process_group = getattr(optimizer, "process_group", None)
    if isinstance(process_group, dist.ProcessGroup):
        _check_apart(name, process_group, parameters)
        # ZeRO sends the state of its inner optimizer to one rank, as plain tensors.
        setattr(optimizer.optim, _UPDATES_SHARDS, None)  # type: ignore[attr-defined]
    if name in _NOT_ELEMENTWISE:
        raise NotImplementedError(
            f"{name} needs the full weights, and each rank has a shard; use an elementwise "
            "optimizer, such as AdamW"
        )
    _load_shards(optimizer)
    optimizer.register_load_state_dict_post_hook(_load_shards)
    optimizer.register_state_dict_post_hook(_shard_states)
    return True


def _load_shards(optimizer: torch.optim.Optimizer) -> None:
    """Replace loaded states of marked parameters with the local shards."""
    for parameter, state in optimizer.state.items():
        shard_mark = _get_mark(parameter)
        if shard_mark is None:
            continue
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                is_local = type(value) is torch.Tensor and value.shape == parameter.shape
                state[key] = value if is_local else shard_mark.from_state(value)


def _shard_states(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Replace states of marked parameters in a state dict with `ShardTensor`."""
    states = state_dict["state"]
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for parameter, index in zip(group["params"], saved["params"], strict=True):
            shard_mark = _get_mark(parameter)
            if shard_mark is None or index not in states:
                continue
            states[index] = state = dict(states[index])
            for key, value in state.items():
                if not isinstance(value, torch.Tensor) or value.dim() == 0:
                    continue
                if type(value) is not torch.Tensor:
                    raise NotImplementedError(
                        f"{key} of {type(optimizer).__name__} is a {type(value).__name__}: after "
                        "the first step, the state dict of an optimizer of layers that are sharded "
                        "twice, such as by fully_shard, is not supported"
                    )
                if value.shape != parameter.shape:
                    raise NotImplementedError(
                        f"{key} of {type(optimizer).__name__} has shape {list(value.shape)} for a "
                        f"shard of shape {list(parameter.shape)}; a state dict can only combine "
                        "states that have the shape of the shard"
                    )
                state[key] = shard_mark.to_state(value)
