"""Dispatch of planned calls: one table (op, algorithm) -> function per device type."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch

from tpkernels import cuda, kernels
from tpkernels.algorithms import fused, hierarchical, multimem, ring, unfused
from tpkernels.algorithms.chunks import GatherOutputs
from tpkernels.algorithms.direct import cpu as direct
from tpkernels.algorithms.direct import cuda as direct_cuda
from tpkernels.algorithms.pipelined import cpu as pipelined
from tpkernels.algorithms.pipelined import cuda as pipelined_cuda
from tpkernels.algorithms.point_to_point import close_connections
from tpkernels.algorithms.reduction import with_rms_norm
from tpkernels.errors import RECOVERABLE, TpkernelsError
from tpkernels.groups.call import Call
from tpkernels.local.ranges import profiling, record_waits
from tpkernels.planning.algorithms import ALGORITHMS
from tpkernels.planning.choose import Plan
from tpkernels.planning.op_spec import OPS, OpSpec
from tpkernels.planning.problem import Problem


class HasInput(Protocol):
    """Arguments of an op: every op has an input x."""

    @property
    def x(self) -> torch.Tensor: ...


Args = TypeVar("Args", bound=HasInput)
Result = TypeVar("Result")
DispatchResult: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # rows, and rows per expert


class OpFunctions(NamedTuple):
    """Functions of an algorithm, one per family of ops. None: the family is not supported."""

    gather: Callable[[Call, torch.Tensor, GatherOutputs], None]
    reduce: Callable[..., None]
    exchange: Callable[[Call, torch.Tensor, torch.Tensor], None] | None = None
    dispatch: Callable[[Call, torch.Tensor, torch.Tensor], DispatchResult] | None = None
    combine: Callable[..., None] | None = None
    reduce_and_normalise: Callable[..., torch.Tensor] | None = None

    def select(self, spec: OpSpec) -> Callable[..., Any] | None:
        """Return the function for an op, or None if the algorithm does not support it."""
        if spec.routed:
            return self.dispatch if spec.dispatches else self.combine
        if spec.gathers:
            return self.gather
        if spec.exchanges:
            return self.exchange
        if spec.normed:
            return self.reduce_and_normalise or with_rms_norm(self.reduce)
        return self.reduce


def _table(**algorithms: OpFunctions) -> dict[tuple[str, str], Callable[..., Any]]:
    return {
        (op, name): function
        for name, functions in algorithms.items()
        for op, spec in OPS.items()
        if (function := functions.select(spec)) is not None
        and (spec.has_matmul or not ALGORITHMS[name].overlaps_matmul)
        and not (spec.scaled and ALGORITHMS[name].plain_weights)
    }


_PORTABLE = {
    "unfused": OpFunctions(
        unfused.gather, unfused.reduce, unfused.exchange, unfused.dispatch, unfused.combine
    ),
    "ring": OpFunctions(ring.gather, ring.reduce, ring.exchange),
    "fused": OpFunctions(fused.gather, fused.reduce),
}
TABLES = {
    "cpu": _table(
        **_PORTABLE,
        direct=OpFunctions(
            direct.gather,
            direct.reduce,
            direct.exchange,
            direct.dispatch,
            direct.combine,
            direct.reduce_and_normalise,
        ),
        pipelined=OpFunctions(pipelined.gather, pipelined.reduce),
        hierarchical=OpFunctions(hierarchical.gather, hierarchical.reduce),
    ),
    "cuda": _table(
        **_PORTABLE,
        direct=OpFunctions(
            direct_cuda.gather,
            direct_cuda.reduce,
            None,
            direct_cuda.dispatch,
            direct_cuda.combine,
            direct_cuda.reduce_and_normalise,
        ),
        multimem=OpFunctions(multimem.gather, multimem.reduce),
        pipelined=OpFunctions(pipelined_cuda.gather, pipelined_cuda.reduce),
    ),
}


def unsupported(algorithm: str, device: str, tensor_device: torch.device) -> str | None:
    """Return the reason why the kernels of an algorithm cannot run on a device type.

    Args:
        device: device type of the tensors.
        tensor_device: device of that type in this process.

    Returns:
        The reason, or None if the kernels can run or the algorithm has no kernels.
    """
    match ALGORITHMS[algorithm].kernels.get(device):
        case "Triton":
            return kernels.unsupported(device)
        case "CUDA":
            return cuda.unsupported(tensor_device)
        case "multicast":
            return cuda.unsupported(tensor_device) or cuda.multicast_unsupported(tensor_device)
    return None


def implementation(problem: Problem, plan: Plan) -> Callable[..., Any]:
    """Return the function that executes a plan. On CPUs it records the end of the call."""
    function = TABLES[problem.device][problem.op, plan.algorithm]
    return _recorded(function) if problem.device == "cpu" else function


@functools.cache
def _recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(call: Call, *args: Any) -> Any:
        completed = False
        try:
            result = function(call, *args)
            completed = True
            return result
        finally:
            if (workspace := call.group.local_workspace) is not None:
                workspace.channel.end_call(completed)

    return run


def handle_error(call: Call, error: BaseException) -> None:
    """Break the group after an error in a call and notify the peers, unless it is `RECOVERABLE`."""
    if not isinstance(error, RECOVERABLE):
        call.group.mark_broken(error)
        close_connections(call, error)


def run(
    call: Call, replan: Callable[[], Call], execute: Callable[[Call, Args], Result], args: Args
) -> Result:
    """Run ``execute(call, args)`` under the group lock.

    If the group dropped the plan while this call waited for the lock, ``replan()`` provides a
    new call. All work after the argument checks belongs inside ``execute``. An error there, such
    as a failed allocation of a result, breaks the group and is reported to the peers that wait
    for this rank.
    """
    group = call.group
    try:
        group.drain()
        with group.lock:
            group.check_usable()
            if call.problem.device == "cuda":
                group.clear_stale_calls(call.problem, args.x.device)
            if call.generation != group.generation:
                call = replan()
            try:
                group.in_call = True
                if call.problem.device == "cuda":
                    group.check_kernels(call.plan.description)
                with record_waits(group.local_workspace) if profiling() else nullcontext():
                    result = execute(call, args)
            except BaseException as error:
                handle_error(call, error)
                raise
            finally:
                group.in_call = False
    except (TpkernelsError, *RECOVERABLE):
        raise
    except BaseException as error:  # includes signal handlers during the wait for the lock
        group.break_between_calls(error)
        raise
    if group.notices:
        group.warn()
    return result
