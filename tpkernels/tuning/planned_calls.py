"""From a checked problem to a planned call: what the group can run, and which algorithm is
taken."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from tpkernels import cuda
from tpkernels.backends import implementation, unsupported
from tpkernels.call import Call
from tpkernels.groups.group import Group
from tpkernels.planning.algorithms import ALGORITHMS, check_algorithm
from tpkernels.planning.choose import NOTHING_TUNED, Means, candidates, choose
from tpkernels.planning.machine import instructions
from tpkernels.planning.problem import Problem
from tpkernels.tuning.tuner import tried, tuned


def plan_call(
    group: Group, problem: Problem, given: Any, make_run: Callable[[], Callable[[Call], object]]
) -> Call:
    """Plan a call with the arguments ``given``, which have been checked. A group's first call sets
    up its workspace. ``make_run()`` makes what runs a planned call on trial."""
    algorithm, on = given.algorithm, given.x.device
    call = _plan_call(group, problem, algorithm, on)
    if algorithm != "auto":
        return call

    def plan(on_group: Group, name: str) -> Call:
        return _plan_call(on_group, problem, name, on)

    if group.measured.tuning is not None:
        names = candidates(call.problem, _means(group))
        return plan(group, "auto") if tuned(call, names, plan, make_run, given) else call
    return tried(call, functools.partial(plan, group))


def _plan_call(group: Group, problem: Problem, algorithm: str, on: torch.device) -> Call:
    generation = group.generation
    if algorithm != "auto":
        check_algorithm(algorithm)
    # One rank's CUDA tensors, and what is asked of torch alone, need no workspace.
    takes_torchs = ("unfused",) if problem.device == "cpu" else ("auto", "unfused")
    if group.world > 1 or algorithm not in takes_torchs:
        group.ready(problem.device)
    by_sends = algorithm != "auto" and ALGORITHMS[algorithm].sends
    if by_sends and problem.device == "cuda" and group.uses_gloo("cuda"):
        raise NotImplementedError(
            f"algorithm '{algorithm}' of {problem.op} sends CUDA tensors, which gloo cannot; make "
            "the group with NCCL"
        )
    if algorithm != "auto":  # refuses what cannot run before anything is sent
        choose(problem, _means(group), requested=algorithm)
    if problem.device == "cuda" and problem.spec.reduces:
        problem = replace(problem, numerics=group.cuda_numerics())
    has_times = group.has_times(problem.device)
    tuned = group.tuned(problem.device) if has_times else NOTHING_TUNED
    missing = dict(group.measured.failures_of(problem) or {}) if algorithm == "auto" else {}
    while True:
        means = _means(group, missing)
        plan = choose(problem, means, requested=algorithm, tuned=tuned)
        why = _unsupported_kernels(group, plan.algorithm, problem, on)
        if why is not None:
            missing[plan.algorithm] = why
            continue
        if problem.device == "cpu":
            nbytes = ALGORITHMS[plan.algorithm].workspace_bytes(problem, means.workspace_bytes)
            group.make_room(nbytes, plan.text)
        if _means(group, missing) == means:
            return Call(group, problem, plan, implementation(problem, plan), generation)


def _means(group: Group, unsupported: Mapping[str, str] | None = None) -> Means:
    """Return what the group offers, as far as it is set up."""
    shared_memory = group.workspace is not None
    missing = dict(unsupported or {})
    return Means(shared_memory, group.usable_bytes, instructions(), missing, group.why_no_node)


def _unsupported_kernels(
    group: Group, algorithm: str, problem: Problem, on: torch.device
) -> str | None:
    """Return why the kernels of an algorithm cannot run on tensors of the problem's device type;
    None: they can, or there are none. ``on`` is this rank's device. Collective on GPUs: the ranks,
    which have made the same plan, find out together."""
    own, record = unsupported(algorithm, problem.device, on), ALGORITHMS[algorithm]
    kind = record.kernels.get(problem.device)
    if problem.device != "cuda" or kind is None:
        return own
    optional = record.optional_kernels.get(problem.op)
    if optional is not None and problem.world > 1:
        group.unsupported_kernels(on, optional, cuda.unsupported(on))
    return group.unsupported_kernels(on, kind, own)
