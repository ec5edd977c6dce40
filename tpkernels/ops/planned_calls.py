"""From a checked problem to a planned call: what the group can run, and which algorithm is
taken."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from tpkernels import cuda
from tpkernels.algorithms.backends import implementation, unsupported
from tpkernels.errors import WorkspaceMemoryError
from tpkernels.groups.call import Call
from tpkernels.groups.group import Group
from tpkernels.ops.arguments import OpArguments
from tpkernels.ops.tuner import tune_if_new
from tpkernels.planning.algorithms import ALGORITHMS, check_algorithm
from tpkernels.planning.choose import NOTHING_TUNED, Means, candidates, choose
from tpkernels.planning.problem import VENDOR, Problem
from tpkernels.planning.qualification import Qualification
from tpkernels.symm import streams


def plan_call(
    group: Group,
    problem: Problem,
    given: OpArguments,
    make_run: Callable[[], Callable[[Call], object]],
) -> Call:
    """Plan a call with the arguments ``given``, which have been checked. A group's first call sets
    up its workspace. ``make_run()`` makes a function that runs a planned call while it is tuned."""
    plan = functools.partial(_plan_call, problem=problem, device=given.x.device)
    call = plan(group, given.algorithm)
    tuning = group.tuning_on(problem.device) if given.algorithm == "auto" else None
    if tuning is None:
        return call
    names = candidates(call.problem, _means(group, call.problem.device))
    tuned = tune_if_new(call, tuning, names, plan, make_run, given.x)
    return plan(group, "auto") if tuned else call


def _plan_call(group: Group, algorithm: str, problem: Problem, device: torch.device) -> Call:
    """Plan a call by an algorithm, or by the one that ``auto`` takes. Collective where the group
    lacks something: its workspace, measured times, kernels, room."""
    generation = group.generation
    _set_up(group, algorithm, problem)
    if problem.device == "cuda" and problem.spec.reduces:
        problem = replace(problem, numerics=group.cuda_numerics())
    tuned, left_out = NOTHING_TUNED, dict[str, str]()
    if algorithm == "auto":
        left_out |= group.measured.failures_of(problem) or {}
        if group.has_times(problem.device):
            tuned = group.tuned(problem.device)
    while True:
        means = _means(group, problem.device, left_out)
        plan = choose(problem, means, requested=algorithm, tuned=tuned)
        why = _unsupported_kernels(group, plan.algorithm, problem, device)
        if why is not None:
            left_out[plan.algorithm] = why
        elif problem.device == "cpu":
            nbytes = ALGORITHMS[plan.algorithm].workspace_bytes(problem, means.workspace_bytes)
            group.make_room(nbytes, plan.text)
        # Kernels that do not run leave fewer algorithms, and buffers that grew allow more.
        if _means(group, problem.device, left_out) == means:
            break
    function = implementation(problem, plan)
    if algorithm == "auto" and problem.device == "cuda":
        if plan.algorithm != "unfused":
            function = _or_unfused(function, group, problem, device)
        in_graphs = choose(problem, means, tuned=tuned, captured=True).algorithm
        if in_graphs != plan.algorithm:
            function = _unless_captured(function, group, problem, device, in_graphs)
    return Call(group, problem, plan, function, generation)


def _set_up(group: Group, algorithm: str, problem: Problem) -> None:
    """Set the group up for an algorithm. One that cannot run is refused before anything is sent."""
    # A group of one rank needs no workspace for torch's own calls: `unfused`, and `auto` on CUDA
    # tensors.
    runs_torch_only = ("unfused",) if problem.device == "cpu" else ("auto", "unfused")
    if algorithm != "auto":
        check_algorithm(algorithm)
    if group.world > 1 or algorithm not in runs_torch_only:
        group.ready(problem.device)
    if algorithm == "auto":
        return
    if ALGORITHMS[algorithm].sends and problem.device == "cuda" and group.uses_gloo("cuda"):
        raise NotImplementedError(
            f"algorithm '{algorithm}' of {problem.op} sends CUDA tensors, which gloo does not "
            "support; create the process group with NCCL"
        )
    in_any_order = replace(problem, numerics=VENDOR) if problem.device == "cuda" else problem
    choose(in_any_order, _means(group, problem.device), requested=algorithm)


def _unless_captured(
    function: Callable[..., Any], group: Group, problem: Problem, device: torch.device, name: str
) -> Callable[..., Any]:
    """Return a call's function that is another algorithm in the capture of a graph. All ranks
    capture the same calls. The first call outside a capture is by that algorithm, too: a capture
    can set nothing up."""
    try:
        in_graphs = _plan_call(group, name, problem, device)
    except NotImplementedError:  # on all ranks
        return function

    is_set_up, in_graphs_function = name == "unfused", in_graphs.function  # it needs nothing
    if not is_set_up:
        in_graphs_function = _or_unfused(in_graphs_function, group, problem, device)

    def run(call: Call, *operands: object) -> object:
        nonlocal is_set_up
        if is_set_up and not streams.is_captured(device):
            return function(call, *operands)
        result = in_graphs_function(in_graphs, *operands)
        is_set_up = True
        return result

    return run


def _or_unfused(
    function: Callable[..., Any], group: Group, problem: Problem, device: torch.device
) -> Callable[..., Any]:
    """Return a call's function that falls back to `unfused`, in this call and those that follow, if
    there is no memory for its workspace."""

    def run(call: Call, *operands: object) -> object:
        try:
            return function(call, *operands)
        except WorkspaceMemoryError as error:
            group.leave_out(problem, call.plan.algorithm, f"cannot allocate its workspace: {error}")
        replacement = _plan_call(group, "unfused", problem, device)
        return replacement.function(replacement, *operands)

    return run


def _means(group: Group, device: str, unsupported: Mapping[str, str] | None = None) -> Means:
    """Return what the group offers, as far as it is set up."""
    shared_memory = group.workspace is not None
    return Means(
        shared_memory,
        group.usable_bytes,
        dict(unsupported or {}),
        group.why_no_node,
        group.qualification() if device == "cuda" else Qualification(),
    )


def _unsupported_kernels(
    group: Group, algorithm: str, problem: Problem, tensor_device: torch.device
) -> str | None:
    """Return why the kernels of an algorithm cannot run on tensors of the problem's device type;
    None: they can, or there are none. ``tensor_device`` is this rank's device. Collective on
    GPUs: the ranks, which have made the same plan, find out together."""
    own, record = unsupported(algorithm, problem.device, tensor_device), ALGORITHMS[algorithm]
    kind = record.kernels.get(problem.device)
    if problem.device != "cuda" or kind is None:
        return own
    optional = record.optional_kernels.get(problem.op)
    if optional is not None and problem.world > 1:
        group.unsupported_kernels(tensor_device, optional, cuda.unsupported(tensor_device))
    return group.unsupported_kernels(tensor_device, kind, own)
