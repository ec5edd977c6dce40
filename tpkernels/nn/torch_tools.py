"""What PyTorch's own tools do with parameters of which each rank holds a shard.

Problem: such a parameter, and its gradient, are plain tensors, so torch takes a shard for the whole
parameter. ``clip_grad_norm_`` would scale by another norm on each rank, ``GradScaler`` skip a step
on some ranks only, ``DistributedDataParallel`` overwrite each shard with rank 0's, and a saved
state of an optimizer lack the other ranks' shards: all without an error.

Algorithm: `mark` says of a parameter which group holds its shards; of one that FSDP2 shards again,
too, in its unsharded and its sharded form. Then

- its gradient becomes a `ShardGradient` when the backward has accumulated it. Norms of it, and the
  search for infinities, take in the shards of all ranks. All else treats it as a plain tensor.
- a module that wraps it (DDP, FSDP, PEFT) is checked when torch registers the wrapped module in it.
- an optimizer that updates it is prepared by a hook at its first step. From then on its state dict
  has `ShardTensor` values, and it loads these or unsharded ones.
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
# Attribute of an optimizer that has made a step: whether it updates shards; None: another one does
# that by this one.
_UPDATES_SHARDS = "_tpkernels_updates_shards"
#: Optimizers whose step computes with the whole weight, or with all weights at once.
_NOT_ELEMENTWISE = {"Adafactor", "LBFGS", "Muon"}


@dataclass(frozen=True)
class Mark:
    """What is known of a parameter of which this rank holds a shard."""

    group: str  #: whose ranks hold the shards
    to_state: Callable[[torch.Tensor], torch.Tensor]  #: wraps a shard for a state dict
    from_state: Callable[[torch.Tensor], torch.Tensor]  #: unwraps it, or takes it from a whole one
    counts: bool = True  #: in norms; no other rank before this one has the same shard
    #: of a shard that several ranks have: sums its gradient over them
    total: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Be pickled as an empty dict, which is no mark: the hook is not pickled either. It is of a
        class that loads of weights only take."""
        return OrderedDict, ()


def _mark_of(parameter: object) -> Mark | None:
    found = getattr(parameter, _MARK, None)
    return found if isinstance(found, Mark) else None


def mark(parameter: nn.Parameter, shard: Mark) -> None:
    """Mark a parameter, which may be marked already."""
    if _mark_of(parameter) or not parameter.is_floating_point() or parameter.is_inference():
        return
    _install()
    setattr(parameter, _MARK, shard)
    needs_gradient = parameter.requires_grad
    parameter.requires_grad_(True)  # torch takes no hook of a parameter that is frozen for now
    if shard.total is not None:
        parameter.register_hook(shard.total)
    parameter.register_post_accumulate_grad_hook(partial(_mark_gradient, shard))
    parameter.requires_grad_(needs_gradient)
    _mark_gradient(shard, parameter)


def _mark_gradient(shard: Mark, parameter: torch.Tensor) -> None:
    gradient: Any = parameter.grad
    if gradient is not None and not isinstance(gradient, ShardGradient):
        plain: type[torch.Tensor] = type(gradient)
        gradient.__class__ = _gradient_class(plain)
        gradient.group, gradient.counts = shard.group, shard.counts


class ShardGradient(torch.Tensor):
    """The gradient of this rank's shard. ``linalg.vector_norm`` without ``dim``, and what
    ``clip_grad_norm_`` and ``GradScaler`` call for lists of gradients, are collective."""

    group: str
    counts: bool
    plain: type  #: what it is besides: a Tensor, or a DTensor of FSDP2

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
            of_all = len(args) < 3 and (kwargs or {}).get("dim") is None
            if func == torch.linalg.vector_norm and of_all:
                return _norms(args[:1], [result], *args[1:2], **(kwargs or {}))[0]
            if func == foreach_norm:
                return _norms(args[0], result, *args[1:2], **(kwargs or {}))
            if func == foreach_find_infinities_and_unscale:
                found_inf = args[1]  # 0 or 1: fused optimizers count with it
                for group in _groups_of(args[0]):
                    found_inf.copy_(all_reduce(found_inf.reshape(1), group).squeeze() > 0)
            return result


@cache
def _gradient_class(plain: type) -> type:
    bases = (ShardGradient,) if plain is torch.Tensor else (ShardGradient, plain)
    return type(f"Shard{plain.__name__}", bases, {"plain": plain})


def _groups_of(tensors: Iterable[torch.Tensor]) -> list[str]:
    """Return the groups of the gradients that are sharded, in the order of the first of each."""
    groups_of = (getattr(tensor, "group", None) for tensor in tensors)
    return list(dict.fromkeys(group for group in groups_of if group is not None))


def _norms(
    gradients: Sequence[torch.Tensor], norms: Sequence[torch.Tensor], ord: float = 2, **_: Any
) -> list[torch.Tensor]:
    """Return the norms of unsharded gradients, from those of what this rank has of them."""
    norms = [n.full_tensor() if hasattr(n, "full_tensor") else n for n in norms]
    for group in _groups_of(gradients):
        sharded = [i for i, g in enumerate(gradients) if getattr(g, "group", None) == group]
        local = [norms[i] if gradients[i].counts else norms[i] * 0 for i in sharded]  # type: ignore[attr-defined]
        gathered = all_gather(torch.stack(local)[None], group)
        for i, norm in zip(sharded, torch.linalg.vector_norm(gathered, ord, 0), strict=True):
            norms[i] = norm
    return norms


def clip_grad_norm_(
    module: nn.Module, max_norm: float, *, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale all gradients of a module with sharded layers so that their 2-norm over all ranks is at
    most ``max_norm``, as ``torch.nn.utils.clip_grad_norm_`` does, but with sums in float64.

    A sharded parameter counts with the shards of all ranks, a replicated one once. Collective: all
    ranks call it, with gradients for the same parameters. Return the norm before clipping, a
    float32 scalar with the same bits on every rank.

    Raises:
        RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is set.
    """
    by_kind: dict[object, list[torch.Tensor]] = {}  # one call takes gradients of one kind
    for parameter in module.parameters():
        if (shard := _mark_of(parameter)) is not None:
            _mark_gradient(shard, parameter)  # which may have been assigned
        if (gradient := parameter.grad) is not None:
            kind = type(gradient), gradient.device, getattr(gradient, "device_mesh", None)
            by_kind.setdefault(kind, []).append(gradient)
    norms = [torch.zeros((), dtype=torch.float64)]
    for gradients in by_kind.values():
        with DisableTorchFunctionSubclass():
            if not hasattr(gradients[0], "device_mesh"):
                local = list(foreach_norm(gradients, 2, torch.float64))
            else:  # of DTensors it takes no dtype in torch 2.15
                local = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in gradients]
        norms += _norms(gradients, local)
    norms = norms[1:] or norms
    norm = torch.linalg.vector_norm(torch.stack([each.to(norms[0].device) for each in norms]))
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"the norm of the gradients is {norm.item()}, so they cannot be clipped")
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).item()
    for gradient in itertools.chain(*by_kind.values()):
        gradient.detach().mul_(factor)
    return norm.float()


def marked_groups(parameters: Iterable[torch.Tensor]) -> list[str]:
    """Return the groups that hold the shards of marked parameters."""
    marks = map(_mark_of, parameters)
    return list(dict.fromkeys(shard.group for shard in marks if shard is not None))


@cache
def _install() -> None:
    register_module_module_registration_hook(_check_wrapper)
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _check_wrapper(wrapper: nn.Module, name: str, module: nn.Module | None) -> None:
    """Raise if a module that now gets ``module`` as its child would treat shards as whole."""
    if module is None:
        return
    kind = type(wrapper)
    process_group = wrapper.__dict__.get("process_group")  # of DDP and FSDP
    of_torch = kind.__module__.startswith("torch.")
    of_torch = of_torch or isinstance(wrapper, nn.parallel.DistributedDataParallel)
    if of_torch and isinstance(process_group, dist.ProcessGroup):
        _check_apart(kind.__name__, process_group, module.parameters())
        if isinstance(wrapper, nn.parallel.DistributedDataParallel):
            wrapper.register_forward_pre_hook(_refuse_bucket_views)
        elif any("splits" in vars(part) for part in module.modules()):  # a ShardedModule
            raise NotImplementedError(
                f"{kind.__name__} flattens the parameters, which are shards, so gradient norms "
                "would differ between ranks; create the model again and use "
                "torch.distributed.fsdp.fully_shard"
            )
    elif (
        kind.__module__.startswith("peft.")
        and name in ("model", "base_model")
        and marked_groups(module.parameters())
    ):
        raise NotImplementedError(
            f"{kind.__name__} of PEFT cannot adapt a model that is sharded by tpkernels: adapters "
            "would have to be sharded like the layers. Train them on the unsharded model, merge "
            "them (merge_and_unload) and then call tpkernels.parallelize"
        )


def _check_apart(
    tool: str, process_group: dist.ProcessGroup, parameters: Iterable[torch.Tensor]
) -> None:
    """Raise ValueError if two ranks of a process group hold different shards of a parameter."""
    synced = dist.get_process_group_ranks(process_group)
    for group in marked_groups(parameters):
        ranks = dist.get_process_group_ranks(groups.get(group).pg)
        both = sorted({*synced} & {*ranks})
        if len(both) > 1:
            raise ValueError(
                f"{tool} would treat the parameters of ranks {both} as copies, but they are shards "
                f"of one model; ranks {ranks} all need the same batch and no {tool}. For data "
                'parallelism, make a mesh of two dims, parallelize over mesh["tp"] and pass '
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
    """Before a step of any optimizer: prepare it, if it is the first. The step itself, which may be
    compiled, gets plain tensors for gradients."""
    if optimizer.__dict__.get(_UPDATES_SHARDS, False) is False:
        setattr(optimizer, _UPDATES_SHARDS, _prepare(optimizer))
    for parameter in _sharded_parameters(optimizer):
        if isinstance(parameter.grad, ShardGradient):
            parameter.grad.__class__ = parameter.grad.plain


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for parameter in _sharded_parameters(optimizer):
        shard = _mark_of(parameter)
        assert shard is not None  # it is sharded
        _mark_gradient(shard, parameter)


def _sharded_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    if not getattr(optimizer, _UPDATES_SHARDS, False):
        return []
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return [parameter for parameter in parameters if _mark_of(parameter) is not None]


def _prepare(optimizer: torch.optim.Optimizer) -> bool:
    """Check an optimizer, and add what its state dict needs. Return whether it updates shards."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not marked_groups(parameters):
        return False
    kind = type(optimizer).__name__
    process_group = getattr(optimizer, "process_group", None)
    if isinstance(process_group, dist.ProcessGroup):
        _check_apart(kind, process_group, parameters)
        # ZeRO sends the state of the optimizer within it to one rank, as plain tensors.
        setattr(optimizer.optim, _UPDATES_SHARDS, None)  # type: ignore[attr-defined]
    if kind in _NOT_ELEMENTWISE:
        raise NotImplementedError(
            f"{kind} needs the full weights, and each rank has a shard; use an elementwise "
            "optimizer, such as AdamW"
        )
    _take_shards(optimizer)
    optimizer.register_load_state_dict_post_hook(_take_shards)
    optimizer.register_state_dict_post_hook(_shard_states)
    return True


def _take_shards(optimizer: torch.optim.Optimizer) -> None:
    """Replace what a state dict had for marked parameters by this rank's shards."""
    for parameter, state in optimizer.state.items():
        shard = _mark_of(parameter)
        if shard is None:
            continue
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                whole = type(value) is torch.Tensor and value.shape == parameter.shape
                state[key] = value if whole else shard.from_state(value)


def _shard_states(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Replace the states of marked parameters in a state dict by `ShardTensor`."""
    states = state_dict["state"]
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for parameter, index in zip(group["params"], saved["params"], strict=True):
            shard = _mark_of(parameter)
            if shard is None or index not in states:
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
                state[key] = shard.to_state(value)
