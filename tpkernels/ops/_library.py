"""Registration of the ops under ``torch.ops.tpkernels``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._library.autograd import Info, make_autograd_impl
from torch.autograd import forward_ad

from tpkernels import cuda, groups
from tpkernels.backends import implementation, unsupported
from tpkernels.call import Call
from tpkernels.groups.group import Group
from tpkernels.planning.algorithms import ALGORITHMS, check_algorithm
from tpkernels.planning.choose import NOTHING_TUNED, Means, choose
from tpkernels.planning.problem import Problem

_LIBRARY = torch.library.Library("tpkernels", "DEF")
_MOST_CALLS = 4096  # remembered per group
_CPU, _CUDA = (
    torch._C.DispatchKeySet(key) for key in (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)
)


def define(schema: str, *, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Makes ``torch.ops.tpkernels.<name>``, for CPU and CUDA tensors, and its fake kernel."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CPU")
    _LIBRARY.impl(name, run, "CUDA")
    torch.library.register_fake(f"tpkernels::{name}", fake, lib=_LIBRARY)


def define_backward(
    op: str, *, run: Callable[..., Any], save: Callable[..., None], backward: Callable[..., Any]
) -> None:
    """Gives an op its gradient.

    Args:
        run: the op's kernel for CPU and CUDA tensors.
        save: ``save(ctx, inputs, keyword_only_inputs, output)``; without the second where the op
            has no keyword-only arguments.
        backward: ``backward(ctx, needs, *grads)`` with, for each positional argument, whether its
            gradient is needed; returns the gradients. It runs in the dtypes of the forward, also
            under autocast, and is refused where it would have to be differentiated itself.
    """
    overload = getattr(torch.ops.tpkernels, op).default
    count = sum(not argument.kwarg_only for argument in overload._schema.arguments)

    def first_order(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                f"tpkernels.{op} has no second derivative; call backward without create_graph=True"
            )
        given = ctx.needs_input_grad  # without the defaults at the end
        needs = (*given, *(False,) * (count - len(given)))
        with torch._C._DisableAutocast(), groups.told_of_errors(getattr(ctx, "group", None)):
            return backward(ctx, needs, *grads)[: len(given)]

    # What torch.library.register_autograd registers. By itself it would go through the dispatcher
    # once more in a call without a gradient: 13 us, AMD EPYC Zen 3, torch 2.13, 2026-11-21.
    recorded = make_autograd_impl(overload, Info(first_order, save))
    below, grad_enabled = torch._C._after_ADInplaceOrView_keyset, torch.is_grad_enabled
    any_requires_grad = torch._C._any_requires_grad

    def dispatch(keys: torch._C.DispatchKeySet, *args: Any, **options: Any) -> Any:
        if forward_ad._current_level >= 0:
            _forbid_tangents(op, args)
        rest = keys & below
        plain = rest == _CPU or rest == _CUDA  # nothing that traces or wraps is below autograd
        if plain and not (grad_enabled() and any_requires_grad(*args)):
            return run(*args, **options)
        return recorded(keys, *args, **options)

    _LIBRARY.impl(op, dispatch, "Autograd", with_keyset=True)


def define_in_place(op: str, *, run: Callable[..., Any], instead: str) -> None:
    """Has an op that overwrites its first argument say so to autograd, and refuse what has a
    gradient or cannot be overwritten; ``instead`` is what to call then."""
    overload = getattr(torch.ops.tpkernels, op).default
    below = torch._C._after_ADInplaceOrView_keyset
    increment_version = torch.autograd.graph.increment_version

    def refuse_negative(x: torch.Tensor, *args: Any, **options: Any) -> None:
        raise NotImplementedError(
            f"tpkernels.{op} cannot overwrite a negative view, such as z.conj().imag; pass "
            "x.resolve_neg()"
        )

    def dispatch(
        keys: torch._C.DispatchKeySet, x: torch.Tensor, *args: Any, **options: Any
    ) -> None:
        if x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(f"tpkernels.{op} has no gradient; {instead}")
        if forward_ad._current_level >= 0:
            _forbid_tangents(op, [x])
        increment_version(x)  # what was saved of it is no longer valid
        rest = keys & below
        if rest in (_CPU, _CUDA):
            run(x, *args, **options)
        else:
            overload.redispatch(rest, x, *args, **options)

    _LIBRARY.impl(op, dispatch, "Autograd", with_keyset=True)
    _LIBRARY.impl(op, dispatch, "ADInplaceOrView", with_keyset=True)  # without grad or autograd
    _LIBRARY.impl(op, refuse_negative, "Negative")


def _forbid_tangents(op: str, args: Iterable[Any]) -> None:
    """``NotImplementedError`` where forward-mode differentiation would take a tangent for zero."""
    for value in args:
        if isinstance(value, (list, tuple)):
            _forbid_tangents(op, value)
        elif isinstance(value, torch.Tensor) and _has_tangent(value):
            raise NotImplementedError(
                f"tpkernels.{op} has no forward-mode derivative; use reverse mode (backward)"
            )


def _has_tangent(x: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(x).tangent is not None


def define_autocast(op: str) -> None:
    """Has an op with a matmul cast its operands under autocast, as ``torch.matmul`` does.

    ``torch.library.register_autocast`` is for ops without keyword arguments, and for one dtype.
    """
    overload = getattr(torch.ops.tpkernels, op).default
    names = [argument.name for argument in overload._schema.arguments]

    def cast_and_call(device: str, key: str, *args: Any, **options: Any) -> Any:
        dtype, out_dtype = torch.get_autocast_dtype(device), options.get("out_dtype")
        off = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
        with torch._C._ExcludeDispatchKeyGuard(off):
            given = dict(zip(names, args, strict=False))  # without the defaults at the end
            with groups.told_of_errors(given.get("group")):  # no memory for the copies
                lowered = [_lowered(n, a, dtype, out_dtype) for n, a in given.items()]
            return overload(*lowered, **options)

    for device, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        _LIBRARY.impl(op, functools.partial(cast_and_call, device, key), key)


def _lowered(name: str, value: Any, dtype: torch.dtype, out_dtype: torch.dtype | None) -> Any:
    """An argument as autocast has it: floating tensors in ``dtype``, float64 as it is, like a bias
    in float32 and a residual in the output's dtype, which the ops take beside 16-bit operands."""
    if isinstance(value, (list, tuple)):
        return [_lowered(name, each, dtype, out_dtype) for each in value]
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    kept = {"biases": torch.float32, "bias": torch.float32, "residual": out_dtype}
    if value.dtype in (torch.float64, kept.get(name)):
        return value
    return value.to(dtype)


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
    if algorithm == "ring" and problem.device == "cuda" and group.by_gloo("cuda"):
        raise NotImplementedError(
            f"algorithm 'ring' of {problem.op} sends CUDA tensors, which gloo cannot; make the "
            "group with NCCL"
        )
    if algorithm != "auto":  # what cannot run is refused before anything is sent
        choose(problem, _means(group), requested=algorithm)
    tuned = NOTHING_TUNED
    if not (problem.device == "cuda" and group.by_gloo("cuda")):  # times are taken with NCCL
        tuned = group.tuned(problem.device)
    missing: dict[str, str] = {}
    while True:
        means = _means(group, missing)
        plan = choose(problem, means, requested=algorithm, tuned=tuned)
        why = _unsupported_kernels(group, plan.algorithm, problem, on)
        if why is not None:
            missing[plan.algorithm] = why
            continue
        if problem.device == "cpu":
            record = ALGORITHMS[plan.algorithm]
            group.make_room(record.workspace_bytes(problem, means.workspace_bytes), plan.text)
        if _means(group, missing) == means:
            return Call(group, problem, plan, implementation(problem, plan))


def _means(group: Group, unsupported: Mapping[str, str] | None = None) -> Means:
    """What the group has, as far as it is set up."""
    workspace = group.workspace
    usable = group.workspace_bytes if workspace is None else workspace.usable_bytes
    return Means(workspace is not None or group.world == 1, usable, dict(unsupported or {}))


def _unsupported_kernels(
    group: Group, algorithm: str, problem: Problem, on: torch.device
) -> str | None:
    """Why the kernels of an algorithm cannot run on tensors of the problem's device type; None:
    they can, or there are none. ``on`` is this rank's device. Collective on GPUs: the ranks, which
    have made the same plan, find out together."""
    own, record = unsupported(algorithm, problem.device, on), ALGORITHMS[algorithm]
    kind = record.kernels.get(problem.device)
    if problem.device != "cuda" or kind is None:
        return own
    optional = record.optional_kernels.get(problem.op)
    if optional is not None and problem.world > 1:
        group.unsupported_kernels(on, optional, cuda.unsupported(on))
    return group.unsupported_kernels(on, kind, own)


def bias_list(
    x: torch.Tensor, biases: Sequence[torch.Tensor | None] | None
) -> list[torch.Tensor] | None:
    """Biases as the ops take them, whose lists hold tensors only: one of no elements is none."""
    if biases is None:
        return None
    return [x.new_empty(0) if bias is None else bias for bias in biases]
