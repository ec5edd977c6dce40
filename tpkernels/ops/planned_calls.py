"""Planning of calls: determine the capabilities of the group and select the algorithm."""

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
from tpkernels.planning.choose import EMPTY_TABLE, Capabilities, candidates, choose
from tpkernels.planning.problem import VENDOR, Problem
from tpkernels.planning.qualification import Qualification
from tpkernels.symm import streams


def plan_call(
    group: Group,
    problem: Problem,
    args: OpArguments,
    make_run: Callable[[], Callable[[Call], object]],
) -> Call:
    """Plan a call with checked arguments. The first call of a group sets up the workspace.

    ``make_run()`` returns the function that runs a planned call during tuning.
    """
    plan = functools.partial(_plan_call, problem=problem, device=args.x.device)
    call = plan(group, args.algorithm)
    tuning = group.tuning_for(problem.device) if args.algorithm == "auto" else None
    if tuning is None:
        return call
    names = candidates(call.problem, _get_capabilities(group, call.problem.device))
    tuned = tune_if_new(call, tuning, names, plan, make_run, args.x)
    return plan(group, "auto") if tuned else call


def _plan_call(group: Group, algorithm: str, problem: Problem, device: torch.device) -> Call:
    """Plan a call with ``algorithm``, or with the algorithm that ``auto`` selects.

    Collective if the group lacks a workspace, measured times, kernels or workspace capacity.
    """
    generation = group.generation
    _set_up(group, algorithm, problem)
    if problem.device == "cuda" and problem.spec.reduces:
        problem = replace(problem, numerics=group.cuda_numerics())
    timing_table, unsupported_reasons = EMPTY_TABLE, dict[str, str]()
    if algorithm == "auto":
        unsupported_reasons |= group.planner_inputs.find_failures(problem) or {}
        if group.has_times(problem.device):
            timing_table = group.timing_table(problem.device)
    while True:
        capabilities = _get_capabilities(group, problem.device, unsupported_reasons)
        plan = choose(problem, capabilities, requested=algorithm, tuned=timing_table)
        reason = _unsupported_kernels(group, plan.algorithm, problem, device)
        if reason is not None:
            unsupported_reasons[plan.algorithm] = reason
        elif problem.device == "cpu":
            nbytes = ALGORITHMS[plan.algorithm].buffer_bytes(problem, capabilities.workspace_bytes)
            group.ensure_capacity(nbytes, plan.description)
        # Unsupported kernels exclude algorithms, and larger buffers admit more. Then plan again.
        if _get_capabilities(group, problem.device, unsupported_reasons) == capabilities:
            break
    function = implementation(problem, plan)
    if algorithm == "auto" and problem.device == "cuda":
        if plan.algorithm != "unfused":
            function = _with_unfused_fallback(function, group, problem, device)
        capture_algorithm = choose(
            problem, capabilities, tuned=timing_table, captured=True
        ).algorithm
        if capture_algorithm != plan.algorithm:
            function = _with_capture_algorithm(function, group, problem, device, capture_algorithm)
    return Call(group, problem, plan, function, generation)


def _set_up(group: Group, algorithm: str, problem: Problem) -> None:
    """Set up the group for an algorithm. Raises before any data is sent if it cannot run."""
    # A group of one rank needs no workspace if torch makes the calls: `unfused`, and `auto` on
    # CUDA tensors.
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
    vendor_problem = replace(problem, numerics=VENDOR) if problem.device == "cuda" else problem
    choose(vendor_problem, _get_capabilities(group, problem.device), requested=algorithm)


def _with_capture_algorithm(
    function: Callable[..., Any], group: Group, problem: Problem, device: torch.device, name: str
) -> Callable[..., Any]:
    """Return a call function that runs algorithm ``name`` during graph capture.

    All ranks capture the same calls. The first call outside a capture also runs ``name``, because
    setup is impossible during capture.
    """
    try:
        captured_call = _plan_call(group, name, problem, device)
    except NotImplementedError:  # raised on all ranks
        return function

    is_set_up, captured_function = name == "unfused", captured_call.function  # no setup for unfused
    if not is_set_up:
        captured_function = _with_unfused_fallback(captured_function, group, problem, device)

    def run(call: Call, *operands: object) -> object:
        nonlocal is_set_up
        if is_set_up and not streams.is_captured(device):
            return function(call, *operands)
        result = captured_function(captured_call, *operands)
        is_set_up = True
        return result

    return run


def _with_unfused_fallback(
    function: Callable[..., Any], group: Group, problem: Problem, device: torch.device
) -> Callable[..., Any]:
    """Return a call function that falls back to `unfused` if the workspace cannot grow.

    The fallback applies to this call and to all later calls.
    """

    def run(call: Call, *operands: object) -> object:
        try:
            return function(call, *operands)
        except WorkspaceMemoryError as error:
            group.exclude_algorithm(
                problem, call.plan.algorithm, f"cannot allocate its workspace: {error}"
            )
        replacement = _plan_call(group, "unfused", problem, device)
        return replacement.function(replacement, *operands)

    return run


def _get_capabilities(
    group: Group, device: str, unsupported: Mapping[str, str] | None = None
) -> Capabilities:
    """Return the capabilities of the group in its current state of setup."""
    shared_memory = group.workspace is not None
    return Capabilities(
        shared_memory,
        group.usable_bytes,
        dict(unsupported or {}),
        group.no_node_reason,
        group.qualification() if device == "cuda" else Qualification(),
    )


def _unsupported_kernels(
    group: Group, algorithm: str, problem: Problem, tensor_device: torch.device
) -> str | None:
    """Return the reason why the kernels of an algorithm cannot run on the device type, or None.

    Returns None also if the algorithm has no kernels. ``tensor_device`` is the local device.
    Collective on GPUs: all ranks have made the same plan and combine their results.
    """
    reason, properties = (
        unsupported(algorithm, problem.device, tensor_device),
        ALGORITHMS[algorithm],
    )
    kind = properties.kernels.get(problem.device)
    if problem.device != "cuda" or kind is None:
        return reason
    optional = properties.optional_kernels.get(problem.op)
    if optional is not None and problem.world > 1:
        group.unsupported_kernels(tensor_device, optional, cuda.unsupported(tensor_device))
    return group.unsupported_kernels(tensor_device, kind, reason)
