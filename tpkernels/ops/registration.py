"""Registration of the ops under ``torch.ops.tpkernels``: kernels, gradients, autocast.

An op ``X`` with a gradient, or with a refusal of one, is two. ``X`` is CompositeImplicitAutograd:
it asks whether autograd has to record the call. ``_X`` has the kernels and falls through at the
Autograd keys. So a call that needs no gradient runs no Python code. Dynamo's graphs contain ``X``,
those below AOTAutograd ``_X``.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from tpkernels import _C, groups, torch_private
from tpkernels.algorithms import backends
from tpkernels.groups.call import Call
from tpkernels.local.product import CustomMatmul
from tpkernels.ops import execution, validation
from tpkernels.ops.arguments import OpArguments, arguments_class
from tpkernels.ops.planned_calls import plan_call
from tpkernels.ops.problems import fake_result, problem_of
from tpkernels.planning.op_spec import OPS, OpSpec
from tpkernels.torch_private import OpOverload, call_of, schema_of

if not _C.calls.open_exchange(torch.Tensor):
    raise ImportError(
        f"torch {torch.__version__} has no DLPack exchange interface; tpkernels needs 2.11 or later"
    )

Result = TypeVar("Result")

_LIBRARY = torch.library.Library("tpkernels", "DEF")
# Dims of packed weights, by the name of the argument.
_PACKED_DIMS = {"w": 3, "weights": 3, "stack": 4}
_OUR_TAG = re.compile(r" ?tpkernels\{[^}]*\}")
# Calls with a `CustomMatmul` that are on their way through the dispatcher, which takes no function.
_CUSTOM_CALLS: dict[int, Callable[[list[torch.Tensor]], None]] = {}
_numbers = itertools.count()


def communicates(op: OpOverload) -> bool:
    """Return whether an op of this package makes a call of a group."""
    return any(argument.name == "group" for argument in schema_of(op).arguments)


def arguments_of(schema: torch.FunctionSchema, spec: OpSpec | None = None) -> _C.calls.Arguments:
    """Return what makes a call's arguments one object: of its family's class, or of a named tuple
    with the names of the schema."""
    described, op = [], schema.name.removeprefix("tpkernels::")
    combines = spec is not None and spec.combines  # whose rows follow from the routes
    for argument in schema.arguments:
        has_default = argument.has_default_value()
        default = argument.default_value if has_default else None
        any_rows = combines and argument.name == "x"
        described.append((argument.name, has_default, default, argument.kwarg_only, any_rows))
    names = [argument.name for argument in schema.arguments]
    cls = namedtuple("Arguments", names) if spec is None else arguments_class(spec)
    assert set(names) <= set(cls.__annotations__ or names), f"{op} has an argument {cls} lacks"
    return _C.calls.Arguments(op, described, cls)


class Op(Generic[Result]):
    """An op, callable as its overload ``torch.ops.tpkernels.X.default``. A call with plain tensors
    that needs no gradient goes to ``_X`` at once.

    Args:
        default, unrecorded: the overloads ``X`` and ``_X``.
        arguments: its arguments, in the order of its schema.
        kernel: what runs it on CPU and CUDA tensors.
        save, backward, no_gradient, autocast: see `define`.
        custom: whether weights may be `CustomMatmul`.
    """

    def __init__(
        self,
        default: OpOverload,
        unrecorded: OpOverload,
        arguments: _C.calls.Arguments,
        kernel: Callable[..., Any],
        *,
        save: Callable[..., None] | None,
        backward: Callable[..., Any] | None,
        no_gradient: str,
        autocast: bool,
        custom: bool,
    ) -> None:
        schema = schema_of(default)
        self.name = schema.name.removeprefix("tpkernels::")
        self.default, self.unrecorded = default, unrecorded
        self.save, self.backward = save, backward
        self._kernel, self._no_gradient = kernel, no_gradient
        self.positional = [each.name for each in schema.arguments if not each.kwarg_only]
        self._options = [each.name for each in schema.arguments if each.kwarg_only]
        self._returns = [str(each.type) for each in schema.returns]
        run_custom = self._run_custom if custom else None
        make = functools.partial(
            _C.calls.make_entry, arguments, call_of(unrecorded), self._record, run_custom
        )
        _LIBRARY.impl(schema.name, make(), "CompositeImplicitAutograd")
        self._enter: Callable[..., Result] = make(self.default)
        self._casts = autocast
        if autocast:  # a call that enters at ``_X`` is cast, too
            for overload in (self.default, self.unrecorded):
                _define_autocast(overload, self.default)

    def __call__(self, *args: Any, **options: Any) -> Result:
        return self.entry()(*args, **options)

    def entry(self) -> Callable[..., Result]:
        """Return what to call here: dynamo knows the overload, not the extension."""
        return self._trace if is_dynamo_compiling() else self._enter

    def _trace(self, *args: Any, **options: Any) -> Result:
        if validation.empty_shards(options) or _has_custom(args[1:2]):
            return uncompiled(self._enter, *args, **options)
        return self.default(*args, **options)

    def call(self, function: Callable[..., Any], given: Any) -> Any:
        """Call one of the op's overloads, or its kernel."""
        options = {name: getattr(given, name) for name in self._options}
        return function(*(getattr(given, name) for name in self.positional), **options)

    def _record(self, given: Any) -> Any:
        """Run the op where a tensor may require a gradient or have a tangent."""
        device = given.x.device.type
        if self._casts and device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
            return self.call(self.default, given)
        self._forbid_tangents(given)
        if not (torch.is_grad_enabled() and any(x.requires_grad for x in _tensors(given))):
            return self.call(self.unrecorded, given)
        if self.backward is None:
            raise NotImplementedError(f"tpkernels.{self.name} has no gradient; {self._no_gradient}")
        second = self.positional[1]
        if any(w.dim() == _PACKED_DIMS.get(second) for w in _tensors([getattr(given, second)])):
            raise NotImplementedError(
                f"tpkernels.{self.name} has no gradient with a packed weight; call it under "
                "torch.no_grad(), or pass the unpacked weight"
            )
        if any(x.requires_grad for x in _tensors(getattr(given, name) for name in self._options)):
            raise NotImplementedError(
                f"tpkernels.{self.name} has no gradient of {', '.join(self._options)}"
            )
        operands = _tensors(getattr(given, name) for name in self.positional)
        try:
            recorded = _Recorded.apply(self, given, *operands)
        except RuntimeError as error:
            if "setup_context" not in str(error):
                raise
            raise NotImplementedError(
                f"tpkernels.{self.name} has no gradient under torch.func; call backward, or "
                "torch.autograd.grad"
            ) from error
        nested = self.nested(recorded if isinstance(recorded, tuple) else (recorded,))
        return nested if len(nested) > 1 else nested[0]

    def nested(self, flat: Sequence[Any]) -> tuple[Any, ...]:
        """Return tensors as the op returns them: the last may be a list."""
        if self._returns[-1] == "Tensor":
            return tuple(flat)
        single = len(self._returns) - 1
        return (*flat[:single], list(flat[single:]))

    def _run_custom(self, given: Any) -> Any:
        """Run the op with a weight that is no tensor. The other operands go through the dispatcher
        as a list."""
        if not _has_custom(given):
            raise TypeError(
                f"the weights of tpkernels.{self.name} must be tensors or CustomMatmul: "
                f"{getattr(given, self.positional[1])!r}"
            )
        validation.tensors(given._asdict())
        validation.device(given.x)
        operands = list(_tensors(given))
        for x in operands:
            if type(x) not in (torch.Tensor, torch.nn.Parameter):
                raise TypeError(
                    f"tpkernels.{self.name} with a CustomMatmul supports plain tensors only, not "
                    f"{type(x).__name__}"
                )
        if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
            raise NotImplementedError(
                f"tpkernels.{self.name} has no gradient with a CustomMatmul; call it under "
                "torch.no_grad()"
            )
        self._forbid_tangents(given)
        results: list[Any] = []

        def run(resolved: list[torch.Tensor]) -> None:
            left = iter(resolved)
            results.append(
                self.call(self._kernel, given._make(_replaced(value, left) for value in given))
            )

        number = next(_numbers)
        try:
            _CUSTOM_CALLS[number] = run
            torch.ops.tpkernels.with_operands.default(operands, number)
        finally:
            _CUSTOM_CALLS.pop(number, None)
        if not results:
            raise NotImplementedError(
                f"tpkernels.{self.name} with a CustomMatmul was not run, by a dispatch mode"
            )
        return results[0]

    def _forbid_tangents(self, given: Any) -> None:
        """``NotImplementedError`` where forward-mode AD would take a tangent for zero."""
        if not torch_private.in_dual_level():
            return
        if any(forward_ad.unpack_dual(x).tangent is not None for x in _tensors(given)):
            raise NotImplementedError(
                f"tpkernels.{self.name} has no forward-mode derivative; use reverse mode (backward)"
            )


class _Recorded(torch.autograd.Function):
    """A call of an op that autograd records."""

    @staticmethod
    def forward(ctx: Any, op: Op[Any], given: Any, *operands: torch.Tensor) -> Any:
        ctx.of = op
        values = {name: getattr(given, name) for name in op.positional}
        ctx.counts = {  # of the tensors of each argument that has any; None: it is one
            name: len(value) if isinstance(value, (list, tuple)) else None
            for name, value in values.items()
            if list(_tensors([value]))
        }
        result = op.call(op.unrecorded, given)
        flat = tuple(_tensors([result]))
        assert op.save is not None
        op.save(ctx, given, result)
        return flat if len(flat) > 1 else flat[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        try:
            op: Op[Any] = ctx.of
            if torch.is_grad_enabled():
                raise NotImplementedError(
                    f"tpkernels.{op.name} has no second derivative; call backward without "
                    "create_graph=True"
                )
            needed = iter(ctx.needs_input_grad[2:])
            needs = dict.fromkeys(op.positional, False) | {
                name: next(needed) if count is None else list(itertools.islice(needed, count))
                for name, count in ctx.counts.items()
            }
            with _without_autocast():
                assert op.backward is not None
                found = op.backward(ctx, SimpleNamespace(**needs), *op.nested(grads))
        except BaseException as error:
            if not (torch.is_grad_enabled() and isinstance(error, NotImplementedError)):
                groups.break_on_error(getattr(ctx, "group", None), error)
            raise
        flat: list[torch.Tensor | None] = []
        for name, count in ctx.counts.items():
            of_argument = found.get(name)
            if count is None:
                flat.append(of_argument)
            else:
                flat.extend(of_argument or [None] * count)
        return None, None, *flat


def define_kernel(
    schema: str,
    *,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    arguments: _C.calls.Arguments | None = None,
) -> OpOverload:
    """Make ``torch.ops.tpkernels.<name>`` of a function ``run`` for CPU and CUDA tensors and its
    fake kernel, without a gradient; return its overload. Both get the arguments as the schema has
    them. Arguments named ``w``, ``weights`` or ``stack`` may be packed."""
    overload = _define_schema(schema)
    named = (arguments or arguments_of(schema_of(overload))).named

    def checked_fake(*args: Any, **options: Any) -> Any:
        validation.tensors(named(args, options)._asdict())
        return fake(*args, **options)

    for key in ("CPU", "CUDA", "MkldnnCPU"):  # the last for the refusal to be readable
        _LIBRARY.impl(schema_of(overload).name, run, key)
    torch.library.register_fake(schema_of(overload).name, checked_fake, lib=_LIBRARY)
    return overload


def define_local(
    schema: str,
    *,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    arguments: _C.calls.Arguments | None = None,
    save: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    no_gradient: str = "",
    autocast: bool = False,
    custom: bool = False,
) -> Op[Any]:
    """Make an op of a function, as `define_kernel` does, with a gradient or the refusal of one.
    `define` and `Op` say what the other arguments are."""
    unrecorded = define_kernel(f"_{schema}", run=run, fake=fake, arguments=arguments)
    _LIBRARY.impl(schema_of(unrecorded).name, torch.library.fallthrough_kernel, "Autograd")
    return Op(
        _define_schema(schema),
        unrecorded,
        arguments or arguments_of(schema_of(unrecorded)),
        run,
        save=save,
        backward=backward,
        no_gradient=no_gradient,
        autocast=autocast,
        custom=custom,
    )


def define(
    schema: str,
    *,
    save: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    no_gradient: str = "",
    autocast: bool = False,
    check: Callable[[torch.Tensor], None] | None = None,
) -> Op[Any]:
    """Make ``torch.ops.tpkernels.<name>``, an op that communicates over ``group`` and does what its
    record in `op_spec.OPS` says; return it. The functions get the arguments as a named tuple with
    the schema's names.

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
    parsed = torch_private.parse_schema(f"tpkernels::{schema}")
    op = schema.partition("(")[0]
    written = [one.name for one in parsed.arguments if one.alias_info and one.alias_info.is_write]
    record = op.removesuffix("_") if written else op
    arguments = arguments_of(parsed, OPS[record])
    execute = execution_of(OPS[record], in_place=bool(written))

    def for_tuning(given: OpArguments) -> Callable[[Call], Any]:
        """Return what runs a planned call and overwrites none of the caller's arguments."""
        copies = given._replace(**{name: getattr(given, name).clone() for name in written})
        return lambda call: backends.run(call, lambda: call, execute, copies)

    def plan(given: OpArguments) -> tuple[Call, _C.calls.Bound | None]:
        validation.tensors(given._asdict())
        group = groups.get(given.group)
        make_run = functools.partial(for_tuning, given)
        call = plan_call(group, problem_of(record, group, given), given, make_run)
        return call, execution.bind(call, given, arguments, execute, bool(written))

    def run_planned(call: Call, given: OpArguments) -> object:
        return backends.run(call, lambda: plan(given)[0], execute, given)

    def fake_kernel(*args: Any, **options: Any) -> Any:
        given = arguments.named(args, options)
        group = groups.get(given.group)
        # The functions of this package break the graph there.
        if torch_private.tracing() and (sizes := validation.empty_shards(given._asdict())):
            raise NotImplementedError(
                f"torch.ops.tpkernels.{op} is in a compiled graph with {sizes}. A rank with 0 rows "
                f"could drop or reorder its call. Call tpkernels.{op}, or give every rank at least "
                "one row"
            )
        _add_positions()
        return None if written else fake_result(record, group, given)

    if written:
        _LIBRARY.impl(f"_{op}", functools.partial(_refuse_negative, op), "Negative")
    return define_local(
        schema,
        run=_C.calls.make_kernel(
            arguments, plan, run_planned, backends.failed, check, bool(written)
        ),
        fake=fake_kernel,
        arguments=arguments,
        save=save,
        backward=backward,
        no_gradient=no_gradient,
        autocast=autocast,
        custom=OPS[record].has_matmul and not OPS[record].scaled,
    )


def _define_schema(schema: str) -> OpOverload:
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    name = schema.partition("(")[0]
    overload: OpOverload = getattr(torch.ops.tpkernels, name).default
    if communicates(overload):  # a compiler must not drop it: its peers make the call, too
        torch.fx.has_side_effect(overload)
    return overload


def _refuse_negative(op: str, *args: Any, **options: Any) -> None:
    raise NotImplementedError(
        f"tpkernels.{op} cannot overwrite a negative view, such as z.conj().imag; pass "
        "x.resolve_neg()"
    )


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


def _define_autocast(overload: OpOverload, then: OpOverload) -> None:
    """Make an op cast its operands under autocast, as ``torch.matmul`` does, and call ``then``.

    ``torch.library.register_autocast`` supports neither keyword arguments nor more than one dtype.
    """
    names = [argument.name for argument in schema_of(overload).arguments]

    def cast_and_call(device: str, *args: Any, **options: Any) -> Any:
        dtype, out_dtype = torch.get_autocast_dtype(device), options.get("out_dtype")
        given = dict(zip(names, args, strict=False))  # without the defaults at the end
        with torch.autocast(device, enabled=False):
            with groups.breaking_on_error(given.get("group")):  # no memory for the copies
                lowered = [_lowered(n, a, dtype, out_dtype) for n, a in given.items()]
            return then(*lowered, **options)

    for device, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        _LIBRARY.impl(schema_of(overload).name, functools.partial(cast_and_call, device), key)


def _lowered(name: str, value: object, dtype: torch.dtype, out_dtype: torch.dtype | None) -> object:
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


def _without_autocast() -> ExitStack:
    stack = ExitStack()
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def _tensors(args: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in args:
        if isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, torch.Tensor):
            yield value


def _replaced(value: object, tensors: Iterator[torch.Tensor]) -> object:
    """Return an argument with the next of the tensors in the place of each of its own."""
    if isinstance(value, (list, tuple)):
        return [_replaced(each, tensors) for each in value]
    return next(tensors) if isinstance(value, torch.Tensor) else value


def _has_custom(args: Iterable[Any]) -> bool:
    return any(
        any(isinstance(each, CustomMatmul) for each in (arg if isinstance(arg, list) else [arg]))
        for arg in args
    )


def _run_custom_call(operands: list[torch.Tensor], number: int) -> None:
    _CUSTOM_CALLS.pop(number)(operands)


_LIBRARY.define("with_operands(Tensor[] operands, int number) -> ()")
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("with_operands", _run_custom_call, _key)
_LIBRARY.impl("with_operands", torch.library.fallthrough_kernel, "Autograd")


@torch_private.skip_in_graphs
def uncompiled(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Break compiled graphs."""
    return torch.compiler.disable(function)(*args, **options)


def bias_list(
    x: torch.Tensor, biases: Sequence[torch.Tensor | None] | None
) -> list[torch.Tensor] | None:
    """Return biases as the ops take them: lists hold tensors only, so an empty one means none."""
    if biases is None:
        return None
    return [x.new_empty(0) if bias is None else bias for bias in biases]
