"""``torch.autograd.gradcheck`` in float64, over the inputs of all ranks at once.

Every rank holds the inputs of all ranks. `_Own` gives a rank its part and collects the gradients of
the parts; `_Everyone` shows each rank the results of all. Between them is the op, so that gradcheck
sees one function, which all ranks call in step with the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support.cases import COLLECTIVE_WAYS, MATMUL_WAYS
from tests.support.ranked import fresh_group, on_ranks
from tests.support.tiers import sweep
from tpkernels.ops.column_matmul import column_matmul

Shape = tuple[int, ...]


def _collect(part: torch.Tensor) -> tuple[torch.Tensor, ...]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, part.detach())
    return tuple(everyone)


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parts: torch.Tensor) -> torch.Tensor:
        return parts[dist.get_rank()].clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _collect(grads[0])


class _Everyone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _collect(part)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[dist.get_rank()]


@dataclass(frozen=True, kw_only=True)
class Check:
    """``call(own, same, group)``. The same on all ranks: ``same`` and, if ``replicated``, the
    results."""

    name: str
    own: Sequence[Callable[[int], Shape]]  #: shape on each rank
    same: Sequence[Shape] = ()
    call: Callable[..., Any]
    replicated: bool = False


def checks() -> Iterator[Check]:
    """Of the ops that normalise, and of `column_matmul`: test_autograd.py has the others."""
    for way in MATMUL_WAYS:
        yield Check(
            name=f"matmul_all_reduce_rms_norm {way}",
            own=(lambda r: (3, 1 + r % 2), lambda r: (1 + r % 2, 2)),
            same=((2,), (2,), (3, 2)),
            call=lambda own, same, group, way=way: tpkernels.matmul_all_reduce_rms_norm(
                *own, same[0], group, bias=same[1], residual=same[2], eps=0.1, algorithm=way
            ),
            replicated=True,
        )
    for way in COLLECTIVE_WAYS:
        yield Check(
            name=f"all_reduce_rms_norm {way}",
            own=(lambda r: (2, 3),),
            same=((3,), (2, 3)),
            call=lambda own, same, group, way=way: tpkernels.all_reduce_rms_norm(
                own[0], same[0], group, residual=same[1], eps=0.1, algorithm=way
            ),
            replicated=True,
        )
    yield Check(
        name="_column_matmul",
        own=(lambda r: (2, 1 + r % 2), lambda r: (2, 1), lambda r: (1,)),
        same=((2, 1, 2),),
        call=lambda own, same, group: column_matmul(same[0], own[:2], group, [None, own[2]]),
    )


def run_check(check: Check, group: dist.ProcessGroup, fast: bool) -> None:
    world = group.size()
    torch.manual_seed(7)
    shapes = [shape(rank) for shape in check.own for rank in range(world)] + list(check.same)
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    split = len(check.own) * world

    def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own = [_Own.apply(*tensors[i : i + world]) for i in range(0, split, world)]
        results = check.call(own, tensors[split:], group)
        flat = [results] if isinstance(results, torch.Tensor) else results
        if check.replicated:
            return tuple(flat)
        return tuple(one for result in flat for one in _Everyone.apply(result))

    try:
        torch.autograd.gradcheck(function, inputs, fast_mode=fast, check_undefined_grad=not fast)
    except Exception as error:
        raise AssertionError(f"{check.name}: {error}") from error


@pytest.mark.parametrize("world", sweep((2, 1, 3, 4)))
@pytest.mark.parametrize("fast", sweep([True, False]), ids=["projected", "whole"])
@on_ranks(timeout=280)
def test_gradcheck(fast: bool) -> None:
    """By every algorithm; the Jacobian in random directions, or all of it."""
    with fresh_group() as group:
        for check in checks():
            run_check(check, group, fast)
