"""The ops under modes and transforms of torch: inference mode, version counters, forward-mode
differentiation, vmap."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.autograd import forward_ad

import tpkernels
from tests.support import faults
from tests.support.cases import CONCRETE_MATMUL_ALGORITHMS, one_of_each
from tests.support.ranked import check_cases, fresh_group, on_ranks
from tests.support.tiers import sweep
from tpkernels import groups


@pytest.mark.parametrize("first", sweep(CONCRETE_MATMUL_ALGORITHMS, 2))
@on_ranks(2)
def test_evaluation_before_training(first: str) -> list[str]:
    """The first calls of a group run in inference mode, the next outside it, the last in inference
    mode again."""
    with fresh_group() as group:
        cases = [case for case in one_of_each(group.size()) if case.algorithm in (first, "direct")]
        failures = []
        for inference in (True, False, True):
            with torch.inference_mode(inference):
                failures += check_cases(cases, group)
        x = torch.ones(64, 8, requires_grad=True)
        w = torch.ones(8, 8, requires_grad=True)
        tpkernels.matmul_all_reduce(x, w, group, algorithm=first).sum().backward()
        return failures


@on_ranks(2, fixture="interpreter_ranks")
def test_kernels_set_up_in_inference_mode_can_be_aborted() -> list[str]:
    with fresh_group() as group:
        with torch.inference_mode():
            first = _fused(group)
        workspace = groups.get(group.group_name).workspace
        assert workspace is not None and workspace._device_workspace is not None
        workspace._device_workspace.abort(0)  # as the watcher thread does
        workspace._device_workspace.control.zero_()
        return [*first, *_fused(group)]


def _fused(group: torch.distributed.ProcessGroup) -> list[str]:
    x, w = torch.ones(16, 16), torch.ones(16, 16)
    result = tpkernels.matmul_all_reduce(x, w, group, algorithm="fused")
    expected = torch.full((16, 16), 16.0 * group.size())
    return [] if torch.equal(result, expected) else [f"{result}"]


@on_ranks(2)
def test_autograd_detects_changes_in_place() -> None:
    """A tensor that is saved for the backward is reduced in place, through an alias."""
    with fresh_group() as group:
        for change in (
            lambda y: tpkernels.all_reduce_(y, group),
            lambda y: torch.ops.tpkernels.all_reduce_(y, group.group_name),
        ):
            for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
                x = torch.ones(3, requires_grad=True)
                y = x.exp()
                with mode():
                    before = y._version
                    change(y.detach() if mode is torch.enable_grad else y)
                assert y._version != before, f"{mode.__name__}: the version counter did not move"
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    y.sum().backward()


@on_ranks(2)
def test_forward_mode_is_refused() -> None:
    """Forward mode is refused before any data is sent, within ``torch.func`` as well."""
    x, w = torch.ones(4, 4), torch.ones(4, 4)
    with fresh_group() as group:
        workspace = faults.get_workspace(group)
        tpkernels.all_reduce(x, group)
        ops: list[Callable[[torch.Tensor], object]] = [
            lambda x: tpkernels.all_gather(x, group),
            lambda x: tpkernels.reduce_scatter(x, group),
            lambda x: tpkernels.all_reduce(x, group),
            lambda x: tpkernels.all_reduce_(x, group),
            lambda x: tpkernels.all_gather_matmul(x, w, group),
            lambda x: tpkernels.all_gather_matmul(w, [w, x], group),
            lambda x: tpkernels.matmul_reduce_scatter(x, w, group),
            lambda x: tpkernels.matmul_all_reduce(x, w, group, residual=x),
        ]
        for op in ops:
            epoch = workspace.epoch
            for api in ("dual", "jvp"):
                with pytest.raises(NotImplementedError, match="has no forward-mode derivative"):
                    if api == "jvp":
                        torch.func.jvp(op, (x.clone(),), (x,))
                    else:
                        with forward_ad.dual_level():
                            op(forward_ad.make_dual(x.clone(), x))
                assert workspace.epoch == epoch, f"{api}: something was sent"
        with forward_ad.dual_level():  # tensors without tangents are accepted
            tpkernels.all_reduce(x, group)
        tpkernels.all_reduce(x, group)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@on_ranks(2)
def test_vmap_and_function_transforms() -> None:
    """``torch.vmap`` and ``torch.func`` behave as docs/ops.md describes."""
    x, w = torch.arange(24.0).view(2, 4, 3), torch.ones(3, 3)
    with fresh_group() as group:
        workspace = faults.get_workspace(group)
        for op in (
            lambda x: tpkernels.all_gather(x, group),
            lambda x: tpkernels.reduce_scatter(x, group),
            lambda x: tpkernels.all_reduce(x, group),
            lambda x: tpkernels.matmul_reduce_scatter(x, w, group),
            lambda x: tpkernels.matmul_all_reduce(x, w, group),
        ):
            expected = torch.stack([op(row) for row in x])
            assert torch.equal(torch.vmap(op)(x), expected), "vmap: not the results one by one"
        epoch = workspace.epoch
        for call in (
            lambda: torch.vmap(lambda x: tpkernels.all_gather_matmul(x, w, group))(x),
            lambda: torch.vmap(lambda x: tpkernels.all_reduce_(x, group))(x.clone()),
            lambda: torch.func.grad(lambda x: tpkernels.all_reduce(x, group).sum())(x),
        ):
            with pytest.raises(RuntimeError):
                call()
        assert workspace.epoch == epoch, "something was sent"
