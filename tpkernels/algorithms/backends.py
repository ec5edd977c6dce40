"""Where a planned call runs: one table (op, algorithm) -> function per device type."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Protocol, TypeVar

import torch

from tpkernels import cuda, kernels
from tpkernels.algorithms import fused, hierarchical, multimem, ring, unfused
from tpkernels.algorithms.direct import cpu as direct
from tpkernels.algorithms.direct import cuda as direct_cuda
from tpkernels.algorithms.pipelined import cpu as pipelined
from tpkernels.algorithms.pipelined import cuda as pipelined_cuda
from tpkernels.algorithms.point_to_point import hang_up
from tpkernels.algorithms.reduction import normalising
from tpkernels.errors import HARMLESS, TpkernelsError
from tpkernels.groups.call import Call
from tpkernels.local.ranges import profiling, recorded_waits
from tpkernels.planning.algorithms import ALGORITHMS
from tpkernels.planning.choose import Plan
from tpkernels.planning.op_spec import OPS, OpSpec
from tpkernels.planning.problem import Problem


class WithInput(Protocol):
    """An op's arguments, as far as all ops have them."""

    @property
    def x(self) -> torch.Tensor: ...


Given = TypeVar("Given", bound=WithInput)
Result = TypeVar("Result")


def _function(module: Any, spec: OpSpec) -> Callable[..., Any] | None:
    """Return what carries an op out; None: the algorithm has nothing for it."""
    if spec.routed:
        return getattr(module, "dispatch" if spec.dispatches else "combine", None)
    if spec.gathers:
        return module.gather
    if spec.exchanges:
        return getattr(module, "exchange", None)
    if spec.normed:
        return getattr(module, "reduce_and_normalise", None) or normalising(module.reduce)
    return module.reduce


def _table(**algorithms: Any) -> dict[tuple[str, str], Callable[..., Any]]:
    return {
        (op, name): function
        for name, module in algorithms.items()
        for op, spec in OPS.items()
        if (function := _function(module, spec)) is not None
        and (spec.has_matmul or not ALGORITHMS[name].overlaps_matmul)
        and not (spec.scaled and module is fused)
    }


_ANYWHERE = {"unfused": unfused, "ring": ring, "fused": fused}
TABLES = {
    "cpu": _table(**_ANYWHERE, direct=direct, pipelined=pipelined, hierarchical=hierarchical),
    "cuda": _table(
        **_ANYWHERE,
        direct=direct_cuda,
        multimem=multimem,
        pipelined=pipelined_cuda,
    ),
}


def unsupported(algorithm: str, device: str, tensor_device: torch.device) -> str | None:
    """Return why the kernels of an algorithm cannot run on tensors of a device type; None: they
    can, or the algorithm has none. ``tensor_device`` is this process's device of that type."""
    match ALGORITHMS[algorithm].kernels.get(device):
        case "Triton":
            return kernels.unsupported(device)
        case "CUDA":
            return cuda.unsupported(tensor_device)
        case "multicast":
            return cuda.unsupported(tensor_device) or cuda.without_multicast(tensor_device)
    return None


def implementation(problem: Problem, plan: Plan) -> Callable[..., Any]:
    """Return the function that executes a plan."""
    return TABLES[problem.device][problem.op, plan.algorithm]


def failed(call: Call, error: BaseException) -> None:
    """Break the group of a call that ends in an error, and tell the peers, unless the error is
    `HARMLESS`."""
    if not isinstance(error, HARMLESS):
        call.group.mark_broken(error)
        hang_up(call, error)


def run(
    call: Call, plan: Callable[[], Call], execute: Callable[[Call, Given], Result], given: Given
) -> Result:
    """Run ``execute(call, given)``, with a new ``plan()`` if the group has forgotten the call
    while it waited for its turn. Calls on one group run one after another. Everything an op does
    after its arguments are checked belongs inside: an error there, such as no memory for a result,
    breaks the group and is reported to the peers that wait for this rank.
    """
    group = call.group
    try:
        with group.lock:
            group.check_usable()
            if call.problem.device == "cuda":
                group.forget_stale_calls(call.problem, given.x.device)
            if call.generation != group.generation:
                call = plan()
            try:
                group.in_call = True
                if call.problem.device == "cuda":
                    group.check_kernels(call.plan.text)
                with recorded_waits(group.local_workspace) if profiling() else nullcontext():
                    result = execute(call, given)
            except BaseException as error:
                failed(call, error)
                raise
            finally:
                group.in_call = False
    except (TpkernelsError, *HARMLESS):
        raise
    except BaseException as error:  # also of a signal handler, in the wait for the turn
        group.break_between_calls(error)
        raise
    if group.notices:
        group.warn()
    return result
