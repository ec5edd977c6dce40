"""Registration of the ops under ``torch.ops.tpkernels``: kernels, gradients, autocast.

An op ``X`` that supports or rejects gradients is registered as two ops. ``X`` is
CompositeImplicitAutograd and checks whether autograd must record the call. ``_X`` holds the kernels
and falls through at the Autograd keys. A call without gradients therefore runs no Python code.
Dynamo graphs contain ``X``, graphs below AOTAutograd contain ``_X``.
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
from tpkernels.local.weight import CustomMatmul
from tpkernels.ops import execution, validation
from tpkernels.ops.arguments import OpArguments, arguments_class
from tpkernels.ops.planned_calls import plan_call
from tpkernels.ops.problems import fake_result, make_problem
from tpkernels.planning.op_spec import OPS, OpSpec
from tpkernels.torch_private import OpOverload, get_op_function, get_schema

if not _C.calls.open_exchange(torch.Tensor):
    raise ImportError(
        f"torch {torch.__version__} has no DLPack exchange interface; tpkernels needs 2.11 or later"
    )

Result = TypeVar("Result")

_LIBRARY = torch.library.Library("tpkernels", "DEF")
# Dims of packed weights, by argument name.
_PACKED_DIMS = {"w": 3, "weights": 3, "stack": 4}
_CACHE_TAG = re.compile(r" ?tpkernels\{[^}]*\}")
# Pending calls with a `CustomMatmul`, by number. The dispatcher cannot pass a function.
_CUSTOM_CALLS: dict[int, Callable[[list[torch.Tensor]], None]] = {}
_numbers = itertools.count()


def communicates(op: OpOverload) -> bool:
    """Return True if an op of this package communicates over a group."""
    return any(argument.name == "group" for argument in get_schema(op).arguments)


def make_argument_parser(
    schema: torch.FunctionSchema, spec: OpSpec | None = None
) -> _C.calls.Arguments:
    """Return the parser that converts the arguments of a call to a named tuple.

    The tuple is an instance of the argument class of the op family, or has the argument names of
    the schema.
    """
    descriptions, op = [], schema.name.removeprefix("tpkernels::")
    combines = spec is not None and spec.combines  # the rows of x follow from the routes
    for argument in schema.arguments:
        has_default = argument.has_default_value()
        default = argument.default_value if has_default else None
        any_rows = combines and argument.name == "x"
        descriptions.append((argument.name, has_default, default, argument.kwarg_only, any_rows))
    names = [argument.name for argument in schema.arguments]
    cls = namedtuple("Arguments", names) if spec is None else arguments_class(spec)
    assert set(names) <= set(cls.__annotations__ or names), f"{op} has an argument {cls} lacks"
    return _C.calls.Arguments(op, descriptions, cls)


class Op(Generic[Result]):
    """An op, callable like the overload ``torch.ops.tpkernels.X.default``.

    Calls with plain tensors that need no gradient skip ``X`` and call ``_X`` directly.

    Args:
        default, unrecorded: The overloads ``X`` and ``_X``.
        arguments: Parser of the arguments, in schema order.
        kernel: Function that runs the op on CPU and CUDA tensors.
        save, backward, no_gradient, autocast: See `define`.
        custom: Whether weights may be `CustomMatmul`.
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
        schema = get_schema(default)
        self.name = schema.name.removeprefix("tpkernels::")
        self.default, self.unrecorded = default, unrecorded
        self.save, self.backward = save, backward
        self._kernel, self._no_gradient = kernel, no_gradient
        self.positional = [arg.name for arg in schema.arguments if not arg.kwarg_only]
        self._options = [arg.name for arg in schema.arguments if arg.kwarg_only]
        self._returns = [str(result.type) for result in schema.returns]
        run_custom = self._run_custom if custom else None
        make = functools.partial(
            _C.calls.make_entry, arguments, get_op_function(unrecorded), self._record, run_custom
        )
        _LIBRARY.impl(schema.name, make(), "CompositeImplicitAutograd")
        self._enter: Callable[..., Result] = make(self.default)
        self._casts = autocast
        if autocast:  # direct calls of ``_X`` are also cast
            for overload in (self.default, self.unrecorded):
                _define_autocast(overload, self.default)

    def __call__(self, *args: Any, **options: Any) -> Result:
        return self.entry()(*args, **options)

    def entry(self) -> Callable[..., Result]:
        """Return the callable for this context: Dynamo traces the overload, not the extension."""
        return self._trace if is_dynamo_compiling() else self._enter

    def _trace(self, *args: Any, **options: Any) -> Result:
        if validation.empty_shards(options) or _has_custom(args[1:2]):
            return uncompiled(self._enter, *args, **options)
        return self.default(*args, **options)

    def call(self, function: Callable[..., Any], args: Any) -> Any:
        """Call ``function``, an overload or the kernel of the op."""
        options = {name: getattr(args, name) for name in self._options}
        return function(*(getattr(args, name) for name in self.positional), **options)

    def _record(self, args: Any) -> Any:
        """Run the op if a tensor may require a gradient or have a tangent."""
        device = args.x.device.type
        if self._casts and device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
            return self.call(self.default, args)
        self._forbid_tangents(args)
        if not (torch.is_grad_enabled() and any(x.requires_grad for x in _tensors(args))):
            return self.call(self.unrecorded, args)
        if self.backward is None:
            raise NotImplementedError(f"tpkernels.{self.name} has no gradient; {self._no_gradient}")
        second = self.positional[1]
        if any(w.dim() == _PACKED_DIMS.get(second) for w in _tensors([getattr(args, second)])):
            raise NotImplementedError(
                f"tpkernels.{self.name} has no gradient with a packed weight; call it under "
                "torch.no_grad(), or pass the unpacked weight"
            )
        if any(x.requires_grad for x in _tensors(getattr(args, name) for name in self._options)):
            raise NotImplementedError(
                f"tpkernels.{self.name} has no gradient of {', '.join(self._options)}"
            )
        operands = _tensors(getattr(args, name) for name in self.positional)
        try:
            recorded = _RecordedCall.apply(self, args, *operands)
        except RuntimeError as error:
            if "setup_context" not in str(error):
                raise
            raise NotImplementedError(
                f"tpkernels.{self.name} has no gradient under torch.func; call backward, or "
                "torch.autograd.grad"
            ) from error
        results = self.unflatten(recorded if isinstance(recorded, tuple) else (recorded,))
        return results if len(results) > 1 else results[0]

    def unflatten(self, flat: Sequence[Any]) -> tuple[Any, ...]:
        """Return flat tensors in the structure of the op results: the last may be a list."""
        if self._returns[-1] == "Tensor":
            return tuple(flat)
        single = len(self._returns) - 1
        return (*flat[:single], list(flat[single:]))

    def _run_custom(self, args: Any) -> Any:
        """Run the op with a `CustomMatmul`. The dispatcher gets the tensor operands as a list."""
        if not _has_custom(args):
            raise TypeError(
                f"the weights of tpkernels.{self.name} must be tensors or CustomMatmul: "
                f"{getattr(args, self.positional[1])!r}"
            )
        validation.tensors(args._asdict())
        validation.device(args.x)
        operands = list(_tensors(args))
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
        self._forbid_tangents(args)
        results: list[Any] = []

        def run(resolved: list[torch.Tensor]) -> None:
            remaining = iter(resolved)
            results.append(
                self.call(
                    self._kernel, args._make(_replace_tensors(value, remaining) for value in args)
                )
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

    def _forbid_tangents(self, args: Any) -> None:
        """Raise NotImplementedError if forward-mode AD would treat a tangent as zero."""
        if not torch_private.in_dual_level():
            return
        if any(forward_ad.unpack_dual(x).tangent is not None for x in _tensors(args)):
            raise NotImplementedError(
                f"tpkernels.{self.name} has no forward-mode derivative; use reverse mode (backward)"
            )


class _RecordedCall(torch.autograd.Function):
    """Autograd function of an op call."""

    @staticmethod
    def forward(ctx: Any, op: Op[Any], args: Any, *operands: torch.Tensor) -> Any:
        ctx.op = op
        values = {name: getattr(args, name) for name in op.positional}
        ctx.counts = {  # tensors per tensor argument: list length, or None for a single tensor
            name: len(value) if isinstance(value, (list, tuple)) else None
            for name, value in values.items()
            if list(_tensors([value]))
        }
        result = op.call(op.unrecorded, args)
        flat = tuple(_tensors([result]))
        assert op.save is not None
        op.save(ctx, args, result)
        return flat if len(flat) > 1 else flat[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        try:
            op: Op[Any] = ctx.op
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
            with _disabled_autocast():
                assert op.backward is not None
                input_grads = op.backward(ctx, SimpleNamespace(**needs), *op.unflatten(grads))
        except BaseException as error:
            if not (torch.is_grad_enabled() and isinstance(error, NotImplementedError)):
                groups.break_on_error(getattr(ctx, "group", None), error)
            raise
        flat: list[torch.Tensor | None] = []
        for name, count in ctx.counts.items():
            grad = input_grads.get(name)
            if count is None:
                flat.append(grad)
            else:
                flat.extend(grad or [None] * count)
        return None, None, *flat


def define_kernel(
    schema: str,
    *,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    arguments: _C.calls.Arguments | None = None,
) -> OpOverload:
    """Register ``torch.ops.tpkernels.<name>`` without a gradient and return the overload.

    ``run`` is the kernel for CPU and CUDA tensors, ``fake`` the fake kernel. Both are called with
    the arguments of the schema. Arguments named ``w``, ``weights`` or ``stack`` may be packed.
    """
    overload = _define_schema(schema)
    to_named_tuple = (arguments or make_argument_parser(get_schema(overload))).to_named_tuple

    def checked_fake(*args: Any, **options: Any) -> Any:
        validation.tensors(to_named_tuple(args, options)._asdict())
        return fake(*args, **options)

    for key in ("CPU", "CUDA", "MkldnnCPU"):  # MkldnnCPU: so that `run` raises a readable error
        _LIBRARY.impl(get_schema(overload).name, run, key)
    torch.library.register_fake(get_schema(overload).name, checked_fake, lib=_LIBRARY)
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
    """Register an op like `define_kernel`, but with a gradient or an error if it is requested.

    `define` and `Op` document the remaining arguments.
    """
    unrecorded = define_kernel(f"_{schema}", run=run, fake=fake, arguments=arguments)
    _LIBRARY.impl(get_schema(unrecorded).name, torch.library.fallthrough_kernel, "Autograd")
    return Op(
        _define_schema(schema),
        unrecorded,
        arguments or make_argument_parser(get_schema(unrecorded)),
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
    """Register ``torch.ops.tpkernels.<name>``, an op that communicates over ``group``.

    The op spec in `op_spec.OPS` determines the implementation. The functions are called with a
    named tuple of the schema arguments.

    Args:
        save: ``save(ctx, args, output)`` saves the state of the backward.
        backward: ``backward(ctx, needs, *grads)`` returns the gradients by argument name. ``needs``
            flags the positional arguments that need a gradient. The backward runs in the dtypes of
            the forward, also under autocast. Double backward raises.
        no_gradient: Advice in the error message if the op has no gradient.
        autocast: Cast the operands under autocast, as ``torch.matmul`` does.
        check: Check of ``x`` that runs in every call, because the plan cache key does not cover it.
    """
    parsed = torch_private.parse_schema(f"tpkernels::{schema}")
    op = schema.partition("(")[0]
    written = [arg.name for arg in parsed.arguments if arg.alias_info and arg.alias_info.is_write]
    spec_name = op.removesuffix("_") if written else op
    arguments = make_argument_parser(parsed, OPS[spec_name])
    execute = get_executor(OPS[spec_name], in_place=bool(written))

    def make_tuning_run(args: OpArguments) -> Callable[[Call], Any]:
        """Return a function that runs a planned call and overwrites no argument of the caller."""
        copies = args._replace(**{name: getattr(args, name).clone() for name in written})
        return lambda call: backends.run(call, lambda: call, execute, copies)

    def plan(args: OpArguments) -> tuple[Call, _C.calls.BoundCall | None]:
        validation.tensors(args._asdict())
        group = groups.get(args.group)
        make_run = functools.partial(make_tuning_run, args)
        call = plan_call(group, make_problem(spec_name, group, args), args, make_run)
        return call, execution.bind(call, args, arguments, execute, bool(written))

    def run_planned(call: Call, args: OpArguments) -> object:
        return backends.run(call, lambda: plan(args)[0], execute, args)

    def fake_kernel(*positional: Any, **options: Any) -> Any:
        args = arguments.to_named_tuple(positional, options)
        group = groups.get(args.group)
        # The public functions break the graph in this case.
        if torch_private.tracing() and (sizes := validation.empty_shards(args._asdict())):
            raise NotImplementedError(
                f"torch.ops.tpkernels.{op} is in a compiled graph with {sizes}. A rank with 0 rows "
                f"could drop or reorder its call. Call tpkernels.{op}, or give every rank at least "
                "one row"
            )
        _tag_compile_caches()
        return None if written else fake_result(spec_name, group, args)

    if written:
        _LIBRARY.impl(f"_{op}", functools.partial(_refuse_negative, op), "Negative")
    return define_local(
        schema,
        run=_C.calls.make_kernel(
            arguments, plan, run_planned, backends.handle_error, check, bool(written)
        ),
        fake=fake_kernel,
        arguments=arguments,
        save=save,
        backward=backward,
        no_gradient=no_gradient,
        autocast=autocast,
        custom=OPS[spec_name].has_matmul and not OPS[spec_name].scaled,
    )


def _define_schema(schema: str) -> OpOverload:
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    name = schema.partition("(")[0]
    overload: OpOverload = getattr(torch.ops.tpkernels, name).default
    if communicates(overload):  # a compiler must not drop it, because the peers make the call
        torch.fx.has_side_effect(overload)
    return overload


def _refuse_negative(op: str, *args: Any, **options: Any) -> None:
    raise NotImplementedError(
        f"tpkernels.{op} cannot overwrite a negative view, such as z.conj().imag; pass "
        "x.resolve_neg()"
    )


def get_executor(spec: OpSpec, *, in_place: bool = False) -> Callable[[Call, Any], Any]:
    """Return the function that executes the planned calls of an op."""
    if spec.routed:
        return execution.dispatch if spec.dispatches else execution.combine
    if spec.gathers:
        return execution.gather
    if spec.exchanges:
        return execution.exchange
    return execution.reduce_in_place if in_place else execution.reduce


def _tag_compile_caches() -> None:
    """Add rank and size of all used groups to the key of the torch compile caches.

    Called while a graph is traced, before its key is computed. A tag of the user is preserved.

    A call in a graph contains the group name, but neither rank nor size, and the result shape may
    depend on both. Without the tag, a job of two ranks would reuse a cached graph of a single rank,
    or a rank would reuse the graph of a peer. The torch collectives have a size argument for this
    reason.
    """
    ranks = ", ".join(
        f"{name}: {rank} of {world}" for name, rank, world in groups.ranks_and_sizes()
    )
    config = torch.compiler.config
    user_tag = _CACHE_TAG.sub("", config.cache_key_tag)
    tag = f"{user_tag} tpkernels{{{ranks}}}".strip()
    if config.cache_key_tag != tag:
        config.cache_key_tag = tag


def _define_autocast(overload: OpOverload, target: OpOverload) -> None:
    """Cast the operands of an op under autocast, as ``torch.matmul`` does, and call ``target``.

    ``torch.library.register_autocast`` does not support keyword arguments or several dtypes.
    """
    names = [argument.name for argument in get_schema(overload).arguments]

    def cast_and_call(device: str, *args: Any, **options: Any) -> Any:
        dtype, out_dtype = torch.get_autocast_dtype(device), options.get("out_dtype")
        passed = dict(zip(names, args, strict=False))  # without trailing defaults
        with torch.autocast(device, enabled=False):
            with groups.breaking_on_error(passed.get("group")):  # the copies may run out of memory
                cast_args = [_cast_operand(n, a, dtype, out_dtype) for n, a in passed.items()]
            return target(*cast_args, **options)

    for device, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        _LIBRARY.impl(get_schema(overload).name, functools.partial(cast_and_call, device), key)


def _cast_operand(
    name: str, value: object, dtype: torch.dtype, out_dtype: torch.dtype | None
) -> object:
    """Return an argument with floating-point tensors cast to ``dtype``.

    Not cast: float64 tensors, and packed weights, whose dtype the op checks. Also a float32 bias or
    norm weight and a residual in the output dtype, because the ops accept them with 16-bit
    operands.
    """
    if isinstance(value, (list, tuple)):
        return [_cast_operand(name, item, dtype, out_dtype) for item in value]
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    exempt: dict[str, torch.dtype | None] = {"residual": out_dtype}
    exempt |= dict.fromkeys(("biases", "bias", "norm_weight"), torch.float32)
    is_packed = value.dim() == _PACKED_DIMS.get(name)
    if value.dtype in (torch.float64, exempt.get(name)) or is_packed:
        return value
    return value.to(dtype)


def _disabled_autocast() -> ExitStack:
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


def _replace_tensors(value: object, tensors: Iterator[torch.Tensor]) -> object:
    """Return an argument in which each tensor is replaced by the next of ``tensors``."""
    if isinstance(value, (list, tuple)):
        return [_replace_tensors(item, tensors) for item in value]
    return next(tensors) if isinstance(value, torch.Tensor) else value


def _has_custom(args: Iterable[Any]) -> bool:
    return any(
        any(isinstance(item, CustomMatmul) for item in (arg if isinstance(arg, list) else [arg]))
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
    """Call a function outside the compiled graph. Breaks the graph."""
    return torch.compiler.disable(function)(*args, **options)


def bias_list(
    x: torch.Tensor, biases: Sequence[torch.Tensor | None] | None
) -> list[torch.Tensor] | None:
    """Replace each None by an empty tensor, because argument lists of ops hold only tensors."""
    if biases is None:
        return None
    return [x.new_empty(0) if bias is None else bias for bias in biases]
