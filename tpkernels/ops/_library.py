"""Registration of the ops under ``torch.ops.tpkernels``."""

from __future__ import annotations

import functools
import sys
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._guards import TracingContext
from torch._library.autograd import Info, make_autograd_impl
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

from tpkernels import _C, backends, groups, validation
from tpkernels.call import Call
from tpkernels.groups.group import Group
from tpkernels.local.packed import is_packed
from tpkernels.local.product import LocalProduct, Weight
from tpkernels.ops._arguments import PLAIN_KEYS, arguments_of
from tpkernels.ops._cache_key import add_positions
from tpkernels.ops._key_sets import key_set
from tpkernels.planning.problem import Problem
from tpkernels.tuning.planned_calls import plan_call

LIBRARY = torch.library.Library("tpkernels", "DEF")
_BELOW = torch._C._after_ADInplaceOrView_keyset


# What runs each op on CPU and CUDA tensors; the dispatcher cannot be asked for it.
_KERNELS: dict[str, Callable[..., Any]] = {}


def define_local(schema: str, *, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Make ``torch.ops.tpkernels.<name>`` of a function ``run`` for CPU and CUDA tensors, of which
    arguments named ``w`` or ``weights`` may be packed, and its fake kernel. Both get the arguments
    as the schema has them."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, run, "CPU")
    LIBRARY.impl(name, run, "CUDA")
    parsed = torch._C.parse_schema(f"tpkernels::{schema}")
    arguments = arguments_of(parsed)
    if any(argument.name in ("w", "weights") for argument in parsed.arguments):
        LIBRARY.impl(name, run, "MkldnnCPU")

    def checked_fake(*args: Any, **options: Any) -> Any:
        validation.tensors(arguments.named(args, options)._asdict())
        return fake(*args, **options)

    torch.library.register_fake(f"tpkernels::{name}", checked_fake, lib=LIBRARY)
    _KERNELS[name] = run


def define(
    schema: str,
    *,
    problem: Callable[[Group, Any], Problem],
    execute: Callable[[Call, Any], Any],
    fake: Callable[[Group, Any], Any],
    check: Callable[[torch.Tensor], None] | None = None,
) -> None:
    """Make ``torch.ops.tpkernels.<name>``, an op that communicates over ``group``. The functions
    get the arguments as a named tuple with the schema's names.

    Args:
        problem: checks the arguments and says what the ranks must agree on. Called once per set of
            arguments; the plan is remembered.
        execute: runs a planned call. All that can fail for one rank alone, such as an allocation,
            belongs there.
        fake: what the op returns, without data.
        check: of ``x``, what must be checked in every call, since the key does not tell.
    """
    parsed = torch._C.parse_schema(f"tpkernels::{schema}")
    arguments, op = arguments_of(parsed), schema.partition("(")[0]
    written = [one.name for one in parsed.arguments if one.alias_info and one.alias_info.is_write]

    def on_trial(given: Any) -> Callable[[Call], Any]:
        """Return what runs a planned call and overwrites none of the caller's arguments."""
        copies = given._replace(**{name: getattr(given, name).clone() for name in written})
        return lambda call: backends.run(call, lambda: call, execute, copies)

    def plan(given: Any) -> tuple[Call, _C.calls.Bound | None]:
        validation.tensors(given._asdict())
        group = groups.get(given.group)
        make_run = functools.partial(on_trial, given)
        call = plan_call(group, problem(group, given), given, make_run)
        return call, backends.bind(call, given, arguments, execute, bool(written))

    def run_planned(call: Call, given: Any) -> Any:
        return backends.run(call, lambda: plan(given)[0], execute, given)

    def fake_kernel(*args: Any, **options: Any) -> Any:
        given = arguments.named(args, options)
        group = groups.get(given.group)
        # The functions of this package break the graph there.
        if TracingContext.try_get() is not None and (
            sizes := validation.empty_shards(given._asdict())
        ):
            raise NotImplementedError(
                f"torch.ops.tpkernels.{op} in a compiled graph with {sizes}: a rank without rows "
                f"would drop or move its call. Call tpkernels.{op}, or give each rank a row"
            )
        add_positions()
        return fake(group, given)

    kernel = _C.calls.make_kernel(arguments, plan, run_planned, backends.failed, check)
    define_local(schema, run=kernel, fake=fake_kernel)


def kernel_of(op: str) -> Callable[..., Any]:
    """Return what runs an op on CPU and CUDA tensors."""
    return _KERNELS[op]


def define_backward(op: str, *, save: Callable[..., None], backward: Callable[..., Any]) -> None:
    """Give an op its gradient.

    Args:
        save: ``save(ctx, given, output)`` with the op's arguments as a named tuple.
        backward: ``backward(ctx, needs, *grads)``, where ``needs`` has the names of the positional
            arguments and says whose gradient is needed; returns gradients by name. It runs in the
            dtypes of the forward, also under autocast, and is refused where it would have to be
            differentiated itself.
    """
    overload, run = getattr(torch.ops.tpkernels, op).default, _KERNELS[op]
    arguments = arguments_of(overload._schema)
    names = [each.name for each in overload._schema.arguments if not each.kwarg_only]
    needs_of = namedtuple("Needs", names, defaults=[False] * len(names))  # type: ignore[misc]

    def keep(ctx: Any, inputs: Any, output: Any, keyword_only_inputs: Any = None) -> None:
        save(ctx, arguments.named(inputs, keyword_only_inputs or {}), output)

    def first_order(ctx: Any, *grads: Any) -> Any:
        try:
            if torch.is_grad_enabled():
                raise NotImplementedError(
                    f"tpkernels.{op} has no second derivative; call backward without "
                    "create_graph=True"
                )
            needs = needs_of(*ctx.needs_input_grad)  # without the defaults at the end
            with torch._C._DisableAutocast(), groups.told_of_errors(getattr(ctx, "group", None)):
                found = backward(ctx, needs, *grads)
            return tuple(found.get(name) for name in names[: len(ctx.needs_input_grad)])
        except BaseException as error:
            groups.break_if_left(getattr(ctx, "group", None), error)
            raise

    # What torch.library.register_autograd registers. By itself it would go through the dispatcher
    # once more in a call without a gradient: 13 us, AMD EPYC Zen 3, torch 2.13, 2026-11-21.
    recorded = make_autograd_impl(overload, Info(first_order, keep))

    def otherwise(keys: torch._C.DispatchKeySet, *args: Any, **options: Any) -> Any:
        if forward_ad._current_level >= 0:
            _forbid_tangents(op, args)
        if torch.is_grad_enabled():
            _forbid_packed(op, args)
        return recorded(keys, *args, **options)

    LIBRARY.impl(op, _above(run, otherwise, overwrites=False), "Autograd", with_keyset=True)


def _above(
    run: Callable[..., Any], otherwise: Callable[..., Any], *, overwrites: bool
) -> Callable[..., Any]:
    """A kernel for the Autograd keys; csrc/calls/kernel.h."""
    plain = [key_set(*keys).raw_repr() for keys in (["CPU"], ["CUDA"], ["CPU", "MkldnnCPU"])]
    return _C.calls.make_above(run, otherwise, _BELOW.raw_repr(), plain, overwrites)


def define_without_gradient(op: str, *, instead: str) -> None:
    """Make an op refuse tensors that need a gradient; ``instead`` says what to do then."""
    overload, run = getattr(torch.ops.tpkernels, op).default, _KERNELS[op]

    def otherwise(keys: torch._C.DispatchKeySet, *args: Any, **options: Any) -> Any:
        if torch.is_grad_enabled() and any(x.requires_grad for x in _tensors(args)):
            raise NotImplementedError(f"tpkernels.{op} has no gradient; {instead}")
        if forward_ad._current_level >= 0:
            _forbid_tangents(op, args)
        return overload.redispatch(keys & _BELOW, *args, **options)

    LIBRARY.impl(op, _above(run, otherwise, overwrites=False), "Autograd", with_keyset=True)


def define_in_place(op: str, *, instead: str) -> None:
    """Make an op that overwrites its first argument tell autograd so, and refuse tensors that need
    a gradient or cannot be overwritten; ``instead`` says what to do in that case."""
    overload, run = getattr(torch.ops.tpkernels, op).default, _KERNELS[op]

    def refuse_negative(x: torch.Tensor, *args: Any, **options: Any) -> None:
        raise NotImplementedError(
            f"tpkernels.{op} cannot overwrite a negative view, such as z.conj().imag; pass "
            "x.resolve_neg()"
        )

    def otherwise(
        keys: torch._C.DispatchKeySet, x: torch.Tensor, *args: Any, **options: Any
    ) -> None:
        if x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(f"tpkernels.{op} has no gradient; {instead}")
        if forward_ad._current_level >= 0:
            _forbid_tangents(op, [x])
        torch.autograd.graph.increment_version(x)  # tensors saved for a backward are stale
        overload.redispatch(keys & _BELOW, x, *args, **options)

    above = _above(run, otherwise, overwrites=True)
    LIBRARY.impl(op, above, "Autograd", with_keyset=True)
    LIBRARY.impl(op, above, "ADInplaceOrView", with_keyset=True)  # without grad or autograd
    LIBRARY.impl(op, refuse_negative, "Negative")


def _forbid_tangents(op: str, args: Iterable[Any]) -> None:
    """``NotImplementedError`` where forward-mode AD would silently treat a tangent as zero."""
    if any(map(_has_tangent, _tensors(args))):
        raise NotImplementedError(
            f"tpkernels.{op} has no forward-mode derivative; use reverse mode (backward)"
        )


def _forbid_packed(op: str, args: Iterable[Any]) -> None:
    """``NotImplementedError`` where a gradient is needed and a weight is packed."""
    tensors = [x for x in _tensors(args) if x.requires_grad or is_packed(x)]
    if any(x.requires_grad for x in tensors) and any(is_packed(x) for x in tensors):
        raise NotImplementedError(
            f"tpkernels.{op} has no gradient with a packed weight; call it under torch.no_grad(), "
            "or pass the plain weight"
        )


def _tensors(args: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in args:
        if isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, torch.Tensor):
            yield value


def _has_tangent(x: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(x).tangent is not None


def callable_for(
    op: str, weights: Sequence[Weight], usual: Callable[..., Any]
) -> Callable[..., Any]:
    """Return what runs an op with these weights: what runs it with tensors, or, as the dispatcher
    takes no functions, its kernel where one of them is a `LocalProduct`."""
    for w in weights:
        # The first question is cheap; the class of the second is abstract.
        if not isinstance(w, torch.Tensor) and isinstance(w, LocalProduct):
            return functools.partial(_run_products, op)
    return usual


def _run_products(op: str, *args: Any, **options: Any) -> Any:
    """Break compiled graphs, which cannot have a function of the caller as a part."""
    run = _products
    if "torch._dynamo" in sys.modules:  # otherwise this imports it, which takes a second
        run = torch.compiler.disable(_products)
    return run(op, *args, **options)


_run_products._torchdynamo_disable = True  # type: ignore[attr-defined]


def _products(op: str, *args: Any, **options: Any) -> Any:
    # As the dispatcher does.
    args, options = tree_map_only(torch.Tensor, torch.Tensor.resolve_neg, (args, options))
    for x in _tensors([*args, *options.values()]):
        if type(x) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(
                f"tpkernels.{op} with a LocalProduct takes plain tensors, not {type(x).__name__}"
            )
        if x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"tpkernels.{op} has no gradient with a LocalProduct; call it under torch.no_grad()"
            )
        if forward_ad._current_level >= 0:
            _forbid_tangents(op, [x])
        keys = torch._C._dispatch_keys(x)
        dense = x.layout == torch.strided and not x.is_meta
        if dense and keys.raw_repr() & ~PLAIN_KEYS.raw_repr():
            raise NotImplementedError(
                f"tpkernels.{op} with a LocalProduct takes dense tensors with memory of their own, "
                f"not one with the dispatch keys {keys}"
            )
    return _KERNELS[op](*args, **options)


def bias_list(
    x: torch.Tensor, biases: Sequence[torch.Tensor | None] | None
) -> list[torch.Tensor] | None:
    """Biases as the ops take them: their lists hold tensors only, so an empty one means none."""
    if biases is None:
        return None
    return [x.new_empty(0) if bias is None else bias for bias in biases]
