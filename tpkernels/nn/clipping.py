"""Gradient norms of sharded modules."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from tpkernels.nn.sharding import ShardedModule
from tpkernels.ops.all_reduce import all_reduce


def clip_grad_norm_(
    module: nn.Module, max_norm: float, *, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Run ``torch.nn.utils.clip_grad_norm_`` for a module with sharded layers: scale all gradients
    so that their 2-norm over all ranks is at most ``max_norm``. torch's function would take the
    norm of each rank's own gradients, and replicated parameters would drift apart.

    A sharded parameter counts with the shards of all ranks, a replicated one once. Sums are in
    float64. Collective: all ranks call it, with gradients for the same parameters.

    Args:
        module: the module whose gradients are scaled in place.
        max_norm: the largest norm allowed.
        error_if_nonfinite: whether a norm that is infinite or NaN is an error.

    Returns:
        The norm before clipping, a float32 scalar with the same bits on every rank.

    Raises:
        NotImplementedError: a gradient is a DTensor.
        RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is set.
        TpkernelsError: a peer was lost, timed out or made a different call.
    """
    shards = {id(p): group for p, group in _sharded(module)}
    gradients = [(p.grad, shards.get(id(p))) for p in module.parameters() if p.grad is not None]
    for gradient, _ in gradients:
        if type(gradient) is not torch.Tensor:
            raise NotImplementedError(
                f"a gradient is a {type(gradient).__name__}; for models of DTensors use "
                "torch.nn.utils.clip_grad_norm_"
            )
    device = gradients[0][0].device if gradients else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    # Groups in the order of the modules, which is the same on every rank.
    for group in dict.fromkeys([None, *shards.values()]):
        squares = torch.zeros(1, dtype=torch.float64, device=device)
        for gradient, owner in gradients:
            if owner == group:
                squares += gradient.detach().to(torch.float64).square().sum()
        total += (squares if group is None else all_reduce(squares, group)).squeeze()
    norm = total.sqrt()
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"the norm of the gradients is {norm.item()}, so they cannot be clipped")
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).item()
    for gradient, _ in gradients:
        gradient.detach().mul_(factor)
    return norm.float()


def _sharded(module: nn.Module) -> Iterator[tuple[nn.Parameter, str]]:
    """Yield the sharded parameters and their groups."""
    for part in module.modules():
        if isinstance(part, ShardedModule):
            for name in part.splits:
                yield part.get_parameter(name), part.group
