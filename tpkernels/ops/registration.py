"""Registration of the ops under ``torch.ops.tpkernels``: kernels, gradients, autocast."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch._guards import TracingContext
from torch._library.autograd import Info, make_autograd_impl
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.utils._pytree import tree_map_only

from tpkernels import _C, groups
from tpkernels.algorithms import backends
from tpkernels.groups import GroupLike, name_of
from tpkernels.groups.call import Call
from tpkernels.local.product import CustomMatmul
from tpkernels.ops import execution, validation
from tpkernels.ops.arguments import arguments_class
from tpkernels.ops.planned_calls import plan_call
from tpkernels.ops.problems import fake_result, problem_of
from tpkernels.ops.shortcut import PLAIN_KEYS, arguments_of, kernel_above, shortcut
from tpkernels.planning.op_spec import OPS, OpSpec

Function = TypeVar("Function", bound=Callable[..., Any])

_LIBRARY = torch.library.Library("tpkernels", "DEF")
_BELOW = torch._C._after_ADInplaceOrView_keyset
# What runs each op on CPU and CUDA tensors; the dispatcher cannot be asked for it.
_KERNELS: dict[str, Callable[..., Any]] = {}
# Dims of packed weights, by the name of the argument.
_PACKED_DIMS = {"w": 3, "weights": 3, "stack": 4}
_OUR_TAG = re.compile(r" ?tpkernels\{[^}]*\}")


def communicates(op: torch._ops.OpOverload) -> bool:
    """Return whether an op of this package makes a call of a group."""
    return any(argument.name == "group" for argument in op._schema.arguments)


def define_local(
    schema: str,
    *,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    save: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    no_gradient: str = "",
    autocast: bool = False,
    overwrites: bool = False,
) -> None:
    """Make ``torch.ops.tpkernels.<name>`` of a function ``run`` for CPU and CUDA tensors, of which
    arguments named ``w``, ``weights`` or ``stack`` may be packed, and its fake kernel. Both get the
    arguments as the schema has them; `define` says what the others are. It ``overwrites`` its first
    argument, or none."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    overload = getattr(torch.ops.tpkernels, name).default
    if communicates(overload):  # a compiler must not drop it: its peers make the call, too
        torch.fx.has_side_effect(overload)
    for key in ("CPU", "CUDA", "MkldnnCPU"):  # the last for the refusal to be readable
        _LIBRARY.impl(name, run, key)
    arguments = arguments_of(overload._schema)

    def checked_fake(*args: Any, **options: Any) -> Any:
        validation.tensors(arguments.named(args, options)._asdict())
        return fake(*args, **options)

    torch.library.register_fake(f"tpkernels::{name}", checked_fake, lib=_LIBRARY)
    _KERNELS[name] = run
    if save is not None and backward is not None:
        _define_above(name, recorded=_recorded(name, save, backward))
    elif no_gradient:
        _define_above(name, instead=no_gradient, overwrites=overwrites)
    if autocast:
        _define_autocast(name)


def define(
    schema: str,
    *,
    save: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    no_gradient: str = "",
    autocast: bool = False,
    check: Callable[[torch.Tensor], None] | None = None,
) -> Callable[..., Any]:
    """Make ``torch.ops.tpkernels.<name>``, an op that communicates over ``group`` and does what its
    record in `op_spec.OPS` says; return what to call in its place (`shortcut`). The functions get
    the arguments as a named tuple with the schema's names.

    Args:
        save: ``save(ctx, given, output)`` keeps for the backward what it needs.
        backward: ``backward(ctx, needs, *grads)``, where ``needs`` has the names of the positional
            arguments and says whose gradient is needed; returns gradients by name. It runs in the
            dtypes of the forward, also under autocast, and is refused where it would have to be
            differentiated itself.
        no_gradient: what to do instead, where the op has no gradient.
        autocast: cast the operands under autocast, as ``torch.matmul`` does.
        check: of ``x``, what must be checked in every call, since the key does not tell.
    """
    parsed = torch._C.parse_schema(f"tpkernels::{schema}")
    op = schema.partition("(")[0]
    written = [one.name for one in parsed.arguments if one.alias_info and one.alias_info.is_write]
    record = op.removesuffix("_") if written else op
    arguments, family = arguments_of(parsed, record), arguments_class(OPS[record])
    run_call = execution_of(OPS[record], in_place=bool(written))

    def execute(call: Call, given: Any) -> Any:
        return run_call(call, family(**given._asdict()))

    def for_tuning(given: Any) -> Callable[[Call], Any]:
        """Return what runs a planned call and overwrites none of the caller's arguments."""
        copies = given._replace(**{name: getattr(given, name).clone() for name in written})
        return lambda call: backends.run(call, lambda: call, execute, copies)

    def plan(given: Any) -> tuple[Call, _C.calls.Bound | None]:
        validation.tensors(given._asdict())
        given = family(**given._asdict())
        group = groups.get(given.group)
        make_run = functools.partial(for_tuning, given)
        call = plan_call(group, problem_of(record, group, given), given, make_run)
        return call, execution.bind(call, given, arguments, execute, bool(written))

    def run_planned(call: Call, given: Any) -> Any:
        return backends.run(call, lambda: plan(given)[0], execute, given)

    def fake_kernel(*args: Any, **options: Any) -> Any:
        given = family(**arguments.named(args, options)._asdict())
        group = groups.get(given.group)
        # The functions of this package break the graph there.
        if TracingContext.try_get() is not None and (
            sizes := validation.empty_shards(given._asdict())
        ):
            raise NotImplementedError(
                f"torch.ops.tpkernels.{op} is in a compiled graph with {sizes}. A rank with 0 rows "
                f"could drop or reorder its call. Call tpkernels.{op}, or give every rank at least "
                "one row"
            )
        _add_positions()
        return None if written else fake_result(record, group, given)

    kernel = _C.calls.make_kernel(arguments, plan, run_planned, backends.failed, check)
    define_local(
        schema,
        run=kernel,
        fake=fake_kernel,
        save=save,
        backward=backward,
        no_gradient=no_gradient,
        autocast=autocast,
        overwrites=bool(written),
    )
    return shortcut(op, kernel, overwrites=bool(written))


def execution_of(spec: OpSpec, *, in_place: bool = False) -> Callable[[Call, Any], Any]:
    """Return what runs an op's planned calls."""
    if spec.routed:
        return execution.dispatch if spec.dispatches else execution.combine
    if spec.gathers:
        return execution.gather
    if spec.exchanges:
        return execution.exchange
    return execution.reduce_in_place if in_place else execution.reduce


def _add_positions() -> None:
    """Make torch's compile caches tell graphs apart by this rank's place in the groups that the ops
    have used. Called while a graph is traced, before its key is made. What the user has set stays.

    A call in a graph has the name of its group, not how many ranks that has nor which of them this
    is, and the shape of its result may depend on both. Without them, a graph that was compiled for
    one rank would be found in the cache by a job of two, or by the other rank. Torch's own
    collectives take the size as an argument for that reason.
    """
    places = ", ".join(
        f"{name}: {rank} of {world}" for name, rank, world in groups.ranks_and_sizes()
    )
    config = torch.compiler.config
    theirs = _OUR_TAG.sub("", config.cache_key_tag)
    tag = f"{theirs} tpkernels{{{places}}}".strip()
    if config.cache_key_tag != tag:
        config.cache_key_tag = tag


def _recorded(
    op: str, save: Callable[..., None], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """Return what runs an op and records it for autograd."""
    overload = getattr(torch.ops.tpkernels, op).default
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
            with torch._C._DisableAutocast(), groups.breaking_on_error(getattr(ctx, "group", None)):
                found = backward(ctx, needs, *grads)
            return tuple(found.get(name) for name in names[: len(ctx.needs_input_grad)])
        except BaseException as error:
            groups.break_if_interrupted(getattr(ctx, "group", None), error)
            raise

    # What torch.library.register_autograd registers. By itself it would go through the dispatcher
    # once more in a call without a gradient: 13 us, AMD EPYC Zen 3, torch 2.13, 2026-11-21.
    return make_autograd_impl(overload, Info(first_order, keep))


def _define_above(
    op: str,
    *,
    recorded: Callable[..., Any] | None = None,
    instead: str = "",
    overwrites: bool = False,
) -> None:
    """Define what autograd does for an op.

    Args:
        recorded: runs it and records it; None: the op refuses tensors that need a gradient, and
            ``instead`` says what to do then.
        overwrites: the op changes its first argument, and refuses one that cannot be overwritten.
    """
    overload, run = getattr(torch.ops.tpkernels, op).default, _KERNELS[op]

    def otherwise(keys: torch._C.DispatchKeySet, *args: Any, **options: Any) -> Any:
        if torch.is_grad_enabled():
            if recorded is not None:
                _forbid_packed(op, args)
            elif any(x.requires_grad for x in _tensors(args)):
                raise NotImplementedError(f"tpkernels.{op} has no gradient; {instead}")
        if forward_ad._current_level >= 0:
            _forbid_tangents(op, args)
        if overwrites:
            torch.autograd.graph.increment_version(args[0])  # what a backward has saved is stale
        if recorded is not None:
            return recorded(keys, *args, **options)
        return overload.redispatch(keys & _BELOW, *args, **options)

    def refuse_negative(*args: Any, **options: Any) -> None:
        raise NotImplementedError(
            f"tpkernels.{op} cannot overwrite a negative view, such as z.conj().imag; pass "
            "x.resolve_neg()"
        )

    above = kernel_above(run, otherwise, overwrites=overwrites)
    _LIBRARY.impl(op, above, "Autograd", with_keyset=True)
    if overwrites:
        _LIBRARY.impl(op, above, "ADInplaceOrView", with_keyset=True)  # without grad or autograd
        _LIBRARY.impl(op, refuse_negative, "Negative")


def _define_autocast(op: str) -> None:
    """Make an op cast its operands under autocast, as ``torch.matmul`` does.

    ``torch.library.register_autocast`` supports neither keyword arguments nor more than one dtype.
    """
    overload = getattr(torch.ops.tpkernels, op).default
    names = [argument.name for argument in overload._schema.arguments]

    def cast_and_call(device: str, key: str, *args: Any, **options: Any) -> Any:
        dtype, out_dtype = torch.get_autocast_dtype(device), options.get("out_dtype")
        off = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
        with torch._C._ExcludeDispatchKeyGuard(off):
            given = dict(zip(names, args, strict=False))  # without the defaults at the end
            with groups.breaking_on_error(given.get("group")):  # no memory for the copies
                lowered = [_lowered(n, a, dtype, out_dtype) for n, a in given.items()]
            return overload(*lowered, **options)

    for device, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        _LIBRARY.impl(op, functools.partial(cast_and_call, device, key), key)


def _lowered(name: str, value: Any, dtype: torch.dtype, out_dtype: torch.dtype | None) -> Any:
    """Return an argument as autocast passes it: floating-point tensors in ``dtype``. Unchanged are
    float64, a bias or the weight of a norm in float32 and a residual in the output's dtype, which
    the ops take with 16-bit operands, and a packed weight, whose dtype is checked."""
    if isinstance(value, (list, tuple)):
        return [_lowered(name, each, dtype, out_dtype) for each in value]
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    kept: dict[str, torch.dtype | None] = {"residual": out_dtype}
    kept |= dict.fromkeys(("biases", "bias", "norm_weight"), torch.float32)
    is_packed = value.dim() == _PACKED_DIMS.get(name)
    if value.dtype in (torch.float64, kept.get(name)) or is_packed:
        return value
    return value.to(dtype)


def _forbid_tangents(op: str, args: Iterable[Any]) -> None:
    """``NotImplementedError`` where forward-mode AD would silently treat a tangent as zero."""
    if any(forward_ad.unpack_dual(x).tangent is not None for x in _tensors(args)):
        raise NotImplementedError(
            f"tpkernels.{op} has no forward-mode derivative; use reverse mode (backward)"
        )


def _forbid_packed(op: str, args: Sequence[Any]) -> None:
    """``NotImplementedError`` where a gradient is needed and a weight, the second argument, is
    packed."""
    name = getattr(torch.ops.tpkernels, op).default._schema.arguments[1].name
    packed = any(w.dim() == _PACKED_DIMS.get(name) for w in _tensors(args[1:2]))
    if packed and any(x.requires_grad for x in _tensors(args)):
        raise NotImplementedError(
            f"tpkernels.{op} has no gradient with a packed weight; call it under torch.no_grad(), "
            "or pass the unpacked weight"
        )


def _tensors(args: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in args:
        if isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, torch.Tensor):
            yield value


def documented(run: Callable[..., Any]) -> Callable[[Function], Function]:
    """Make a function without a body, the signature and documentation of an op, call it. Its group
    may be anything that has a name, and its ``w`` a `CustomMatmul`.

    Args:
        run: what `define` returned.
    """

    def decorate(function: Function) -> Function:
        op, signature = function.__name__, inspect.signature(function)
        names = list(signature.parameters)
        at, takes_products = names.index("group"), "w" in names and not OPS[op].scaled
        kinds = [parameter.kind for parameter in signature.parameters.values()]
        positional = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)

        sizes = {name for name in names if name.endswith("_sizes")}
        past_dispatcher: Callable[..., Any] = run.past_dispatcher  # type: ignore[attr-defined]

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            try:
                if len(args) == at + 1:  # as most calls
                    args = (*args[:at], name_of(args[at]))
                elif at < len(args) <= positional:
                    args = (*args[:at], name_of(args[at]), *args[at + 1 :])
                elif "group" in options and len(args) <= at:
                    options["group"] = name_of(options["group"])
                else:
                    signature.bind(*args, **options)  # which raises
                if takes_products:
                    w = args[1] if len(args) > 1 else options.get("w")
                    if not isinstance(w, torch.Tensor) and isinstance(w, CustomMatmul):
                        return run_products(op, *args, **options)
                # Where a rank is without rows, dynamo runs this frame as it is, and compiles `run`.
                if is_dynamo_compiling() or (sizes and options and not sizes.isdisjoint(options)):
                    return run(*args, **options)
                return past_dispatcher(*args, **options)
            except BaseException as error:
                group: GroupLike | None = args[at] if at < len(args) else options.get("group")
                groups.break_if_interrupted(group, error)
                if isinstance(error, TypeError):
                    try:
                        signature.bind(*args, **options)
                    except TypeError as wrong:  # it names the argument
                        raise TypeError(f"{op}() {wrong}") from None
                raise

        # Dynamo counts graphs by code object: the ops would share one limit of recompilations.
        call.__code__ = call.__code__.replace(co_name=op)  # type: ignore[attr-defined]
        return cast(Function, call)

    return decorate


def run_products(op: str, *args: Any, **options: Any) -> Any:
    """Run an op with a `CustomMatmul` past the dispatcher, which takes no functions. A compiled
    graph breaks there."""
    run = _products
    if "torch._dynamo" in sys.modules:  # otherwise this imports it, which takes a second
        run = torch.compiler.disable(_products)
    return run(op, *args, **options)


run_products._torchdynamo_disable = True  # type: ignore[attr-defined]


def _products(op: str, *args: Any, **options: Any) -> Any:
    # As the dispatcher does.
    args, options = tree_map_only(torch.Tensor, torch.Tensor.resolve_neg, (args, options))
    for x in _tensors([*args, *options.values()]):
        if type(x) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(
                f"tpkernels.{op} with a CustomMatmul supports plain tensors only, not "
                f"{type(x).__name__}"
            )
        if x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"tpkernels.{op} has no gradient with a CustomMatmul; call it under torch.no_grad()"
            )
        if forward_ad._current_level >= 0:
            _forbid_tangents(op, [x])
        keys = torch._C._dispatch_keys(x)
        dense = x.layout == torch.strided and not x.is_meta
        if dense and keys.raw_repr() & ~PLAIN_KEYS.raw_repr():
            raise NotImplementedError(
                f"tpkernels.{op} with a CustomMatmul supports plain dense tensors only, not a "
                f"tensor with the dispatch keys {keys}"
            )
    return _KERNELS[op](*args, **options)


def bias_list(
    x: torch.Tensor, biases: Sequence[torch.Tensor | None] | None
) -> list[torch.Tensor] | None:
    """Return biases as the ops take them: lists hold tensors only, so an empty one means none."""
    if biases is None:
        return None
    return [x.new_empty(0) if bias is None else bias for bias in biases]
