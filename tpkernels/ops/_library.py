"""Registration of the ops under ``torch.ops.tpkernels``."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch

from tpkernels.backends import Call
from tpkernels.groups import Group
from tpkernels.kernels import obstacle
from tpkernels.plan import Problem, check_algorithm, choose

_LIBRARY = torch.library.Library("tpkernels", "DEF")
_MOST_CALLS = 4096  # remembered per group


def define(schema: str, *, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Makes ``torch.ops.tpkernels.<name>``, for CPU and CUDA tensors, and its fake kernel."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CPU")
    _LIBRARY.impl(name, run, "CUDA")
    torch.library.register_fake(f"tpkernels::{name}", fake, lib=_LIBRARY)


def remember(group: Group, key: Hashable, call: Call) -> Call:
    """Keeps a planned call for the next one with the same arguments."""
    if len(group.calls) >= _MOST_CALLS:
        group.calls.clear()
    group.calls[key] = call
    return call


def plan_call(group: Group, problem: Problem, algorithm: str, on: torch.device) -> Call:
    """Plans a call whose arguments have been checked. Makes the group's workspace if that is its
    first."""
    if algorithm != "auto":
        check_algorithm(algorithm)
    if group.world > 1 or algorithm not in ("auto", "unfused"):
        group.ready()
    shared = group.shared_memory or group.world == 1
    if algorithm == "ring" and problem.device == "cuda" and group.cuda_by_gloo():
        raise NotImplementedError(
            f"algorithm 'ring' of {problem.op} sends CUDA tensors, which gloo cannot; make the "
            "group with NCCL"
        )
    no_kernels = obstacle(problem.device)
    if algorithm == "fused" and problem.device == "cuda":
        no_kernels = group.no_gpu_kernels(on, no_kernels)
    plan = choose(
        problem,
        shared_memory=shared,
        no_kernels=no_kernels,
        requested=algorithm,
    )
    return Call(group, problem, plan)


def forbid_grad(op: str, tensors: Iterable[torch.Tensor | None]) -> None:
    """Raises where a gradient would silently be wrong: the ops have no backward."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise NotImplementedError(
            f"tpkernels.{op} has no gradient; call it under torch.no_grad() or detach its inputs"
        )
