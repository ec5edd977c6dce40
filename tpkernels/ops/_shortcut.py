"""What the functions and the layers of this package call in place of ``torch.ops.tpkernels``: the
same ops, past torch's dispatcher where it has nothing to do (csrc/calls/shortcut.h)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.compiler import is_dynamo_compiling

from tpkernels import _C, validation
from tpkernels.local.ranges import profiling
from tpkernels.ops._arguments import arguments_of
from tpkernels.ops._key_sets import key_set, keys_of_thread, outside_modes
from tpkernels.ops._library import kernel_of

_State: TypeAlias = tuple[int, int, bool, list[int]]  # PlainState of csrc/calls/shortcut.h


def _state(*tensors: Any) -> _State:
    """Return the state of this thread, with tensors of these key sets."""
    records = not torch.is_inference_mode_enabled()
    return *keys_of_thread(), records, [keys.raw_repr() for keys in tensors]


def _plain_states() -> list[_State]:
    """Nothing but autograd, or inference mode, whose tensors cannot be overwritten outside it."""
    dense, packed = torch._C._dispatch_keys(torch.empty(0)), key_set("MkldnnCPU")
    packed_outside = key_set("MkldnnCPU", "ADInplaceOrView", "AutogradOther")
    on_gpu = key_set("CUDA", "AutocastCUDA")  # a machine without a GPU cannot ask for them
    on_gpu_outside = key_set("CUDA", "AutocastCUDA", "ADInplaceOrView", "AutogradCUDA")
    with torch.inference_mode():
        inference = torch._C._dispatch_keys(torch.empty(0))
        within = _state(dense, inference, packed, packed_outside, on_gpu, on_gpu_outside)
    with torch.inference_mode(False):
        return [within, _state(dense, packed_outside, on_gpu_outside)]


_STATES = outside_modes(_plain_states)
_is_plain = _C.calls.make_is_plain(_STATES)


def is_plain(*values: Any) -> bool:
    """Return whether the dispatcher has nothing to do for an op with these arguments: it may be run
    as a function. Lists are looked into."""
    return not is_dynamo_compiling() and not profiling() and _is_plain(*values)


def _overload(op: str) -> tuple[Any, Callable[..., Any]]:
    """An op's overload, and what calls it through the dispatcher."""
    overload = getattr(torch.ops.tpkernels, op).default
    through_dispatcher = overload._op

    def dispatched(*args: Any, **options: Any) -> Any:
        return through_dispatcher(*args, **options)

    return overload, dispatched


def _in_place_of(overload: Any, short: Callable[..., Any]) -> Callable[..., Any]:
    overload._op = short

    def call(*args: Any, **options: Any) -> Any:
        if is_dynamo_compiling():  # it knows the op, not the shortcut
            if validation.empty_shards(options):
                return _uncompiled(overload, *args, **options)
            return overload(*args, **options)
        return short(*args, **options)

    return call


def _uncompiled(op: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Break compiled graphs."""
    return torch.compiler.disable(op)(*args, **options)


_uncompiled._torchdynamo_disable = True  # type: ignore[attr-defined]


def shortcut(op: str, *, overwrites: bool = False) -> Callable[..., Any]:
    """Return what to call in place of ``torch.ops.tpkernels.<op>.default``, which takes the
    shortcut too: it is what compiled graphs call. ``overwrites``: the op changes its first
    argument."""
    overload, dispatched = _overload(op)
    short = _C.calls.make_shortcut(
        arguments_of(overload._schema),
        kernel_of(op),
        dispatched,
        _STATES,
        key_set("ADInplaceOrView").raw_repr(),
        overwrites,
    )
    return _in_place_of(overload, short)


def matmul_shortcut(op: str) -> Callable[..., Any]:
    """The same for the local matmul."""
    overload, dispatched = _overload(op)
    arguments = arguments_of(overload._schema)
    return _in_place_of(
        overload, _C.calls.make_shortcut(arguments, None, dispatched, _STATES, 0, False)
    )
