"""Where a planned call runs: one table (op, algorithm) -> function per device type."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch

from tpkernels import cuda, kernels
from tpkernels.algorithms import fused, hierarchical, multimem, ring, unfused
from tpkernels.algorithms.direct import cpu as direct
from tpkernels.algorithms.direct import cuda as direct_cuda
from tpkernels.algorithms.parts import Products
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
    """The arguments that every op has."""

    @property
    def x(self) -> torch.Tensor: ...


Given = TypeVar("Given", bound=WithInput)
Result = TypeVar("Result")
Routed: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # rows, and how many each expert has


class Functions(NamedTuple):
    """What an algorithm has for the families of ops; None: nothing."""

    gather: Callable[[Call, torch.Tensor, Products], None]
    reduce: Callable[..., None]
    exchange: Callable[[Call, torch.Tensor, torch.Tensor], None] | None = None
    dispatch: Callable[[Call, torch.Tensor, torch.Tensor], Routed] | None = None
    combine: Callable[..., None] | None = None
    reduce_and_normalise: Callable[..., torch.Tensor] | None = None

    def of(self, spec: OpSpec) -> Callable[..., Any] | None:
        """Return what carries an op out."""
        if spec.routed:
            return self.dispatch if spec.dispatches else self.combine
        if spec.gathers:
            return self.gather
        if spec.exchanges:
            return self.exchange
        if spec.normed:
            return self.reduce_and_normalise or normalising(self.reduce)
        return self.reduce


def _table(**algorithms: Functions) -> dict[tuple[str, str], Callable[..., Any]]:
    return {
        (op, name): function
        for name, functions in algorithms.items()
        for op, spec in OPS.items()
        if (function := functions.of(spec)) is not None
        and (spec.has_matmul or not ALGORITHMS[name].overlaps_matmul)
        and not (spec.scaled and ALGORITHMS[name].plain_weights)
    }


_ANYWHERE = {
    "unfused": Functions(
        unfused.gather, unfused.reduce, unfused.exchange, unfused.dispatch, unfused.combine
    ),
    "ring": Functions(ring.gather, ring.reduce, ring.exchange),
    "fused": Functions(fused.gather, fused.reduce),
}
TABLES = {
    "cpu": _table(
        **_ANYWHERE,
        direct=Functions(
            direct.gather,
            direct.reduce,
            direct.exchange,
            direct.dispatch,
            direct.combine,
            direct.reduce_and_normalise,
        ),
        pipelined=Functions(pipelined.gather, pipelined.reduce),
        hierarchical=Functions(hierarchical.gather, hierarchical.reduce),
    ),
    "cuda": _table(
        **_ANYWHERE,
        direct=Functions(
            direct_cuda.gather,
            direct_cuda.reduce,
            None,
            direct_cuda.dispatch,
            direct_cuda.combine,
            direct_cuda.reduce_and_normalise,
        ),
        multimem=Functions(multimem.gather, multimem.reduce),
        pipelined=Functions(pipelined_cuda.gather, pipelined_cuda.reduce),
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
