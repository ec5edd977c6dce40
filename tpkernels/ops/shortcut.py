"""Calls past torch's dispatcher where it has nothing to do (csrc/calls/shortcut.h).

With TPKERNELS_PYTHON_CALLS=1 nothing here relies on how torch keeps its dispatch keys: calls take
longer, and their results are the same.
"""

from __future__ import annotations

import concurrent.futures
from collections import namedtuple
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from tpkernels import _C
from tpkernels.common import defaults
from tpkernels.local.ranges import profiling
from tpkernels.ops import validation
from tpkernels.planning.op_spec import OPS

Result = TypeVar("Result")
_State: TypeAlias = tuple[int, int, bool, list[int]]  # PlainState of csrc/calls/shortcut.h


def key_set(*names: str) -> torch._C.DispatchKeySet:
    """Return dispatch keys by name; torch's enumeration for Python lacks some."""
    keys = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(names[0]))
    for name in names[1:]:
        keys = keys.add(torch._C._dispatch_key_parse(name))
    return keys


# Of CPU and CUDA tensors whose memory holds their values.
PLAIN_KEYS = key_set(
    "CPU", "CUDA", "ADInplaceOrView", "AutogradCPU", "AutogradCUDA", "AutocastCPU", "AutocastCUDA"
)
if not _C.calls.open_exchange(torch.Tensor, PLAIN_KEYS.raw_repr()):
    raise ImportError(
        f"torch {torch.__version__} has no DLPack exchange interface; tpkernels needs 2.11 or later"
    )


def arguments_of(schema: torch.FunctionSchema, record: str = "") -> _C.calls.Arguments:
    """Make a call's arguments a named tuple with the names and the defaults of an op's schema."""
    described, op = [], schema.name.removeprefix("tpkernels::")
    combines = record in OPS and OPS[record].combines  # whose rows follow from the routes
    for argument in schema.arguments:
        has_default = argument.has_default_value()
        default = argument.default_value if has_default else None
        any_rows = combines and argument.name == "x"
        described.append((argument.name, has_default, default, argument.kwarg_only, any_rows))
    names = [argument.name for argument in schema.arguments]
    cls = namedtuple("Arguments", names)  # type: ignore[misc]
    return _C.calls.Arguments(op, described, cls)


def outside_modes(work: Callable[[], Result]) -> Result:
    """Run ``work`` in a thread of its own: a mode may be on in this one."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def keys_of_thread() -> tuple[int, int]:
    """Return the keys that are included and excluded, as torch says."""
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    return included.raw_repr(), excluded.raw_repr()


def find_key_sets() -> bool:
    """Make the extension read key sets from memory, and return whether it finds them there."""
    numbers = torch.empty(1, device="cpu")
    tensors = [
        numbers,
        torch._neg_view(numbers),
        torch.empty(1, device="cpu", dtype=torch.complex64).conj(),
        torch.empty(1, device="meta"),
        torch.empty(1, device="cpu").to_sparse(),
        torch.nn.Parameter(numbers),
    ]
    with torch.inference_mode():
        tensors.append(torch.empty(1, device="cpu"))
    samples = [(x, x._cdata, torch._C._dispatch_keys(x).raw_repr()) for x in tensors]
    if not _C.calls.find_key_sets(samples, keys_of_thread()):
        return False
    with torch.inference_mode():
        if _C.calls.keys_of_thread() == keys_of_thread():
            return True
    return _C.calls.find_key_sets([], (0, 0))


def _state(*tensors: Any) -> _State:
    """Return the state of this thread, with tensors of these key sets."""
    records = not torch.is_inference_mode_enabled()
    return *keys_of_thread(), records, [keys.raw_repr() for keys in tensors]


def _plain_states() -> list[_State]:
    """Return the states in which nothing but autograd is on: outside inference mode, and within,
    whose tensors cannot be overwritten outside it."""
    dense = torch._C._dispatch_keys(torch.empty(0))
    on_gpu = key_set("CUDA", "AutocastCUDA")  # a machine without a GPU cannot ask for them
    on_gpu_outside = key_set("CUDA", "AutocastCUDA", "ADInplaceOrView", "AutogradCUDA")
    with torch.inference_mode():
        inference = torch._C._dispatch_keys(torch.empty(0))
        within = _state(dense, inference, on_gpu, on_gpu_outside)
    with torch.inference_mode(False):
        return [within, _state(dense, on_gpu_outside)]


_STATES: list[_State] = []  # none is plain
if not defaults.python_calls():
    outside_modes(find_key_sets)
    _STATES = outside_modes(_plain_states)
_is_plain = _C.calls.make_is_plain(_STATES)


def is_plain(*values: Any) -> bool:
    """Return whether the dispatcher has nothing to do for an op with these arguments: it may be run
    as a function. Lists are looked into."""
    return not is_dynamo_compiling() and not profiling() and _is_plain(*values)


def kernel_above(
    run: Callable[..., Any], otherwise: Callable[..., Any], *, overwrites: bool
) -> Callable[..., Any]:
    """Return a kernel for the Autograd keys: ``run`` where nothing is to be done for autograd and
    below, else ``otherwise``."""
    if defaults.python_calls():
        return otherwise
    plain = [key_set(*keys).raw_repr() for keys in (["CPU"], ["CUDA"])]
    below = torch._C._after_ADInplaceOrView_keyset.raw_repr()
    return _C.calls.make_above(run, otherwise, below, plain, overwrites)


def shortcut(
    op: str, kernel: Callable[..., Any] | None = None, *, overwrites: bool = False
) -> Callable[..., Any]:
    """Return what to call in place of ``torch.ops.tpkernels.<op>.default``, which takes the
    shortcut too: it is what compiled graphs call.

    Args:
        kernel: what runs the op; None: it is the local matmul.
        overwrites: the op changes its first argument.
    """
    overload = getattr(torch.ops.tpkernels, op).default
    through_dispatcher = overload._op

    def dispatched(*args: Any, **options: Any) -> Any:
        return through_dispatcher(*args, **options)

    versioned = key_set("ADInplaceOrView").raw_repr()
    arguments = arguments_of(overload._schema)
    short = _C.calls.make_shortcut(arguments, kernel, dispatched, _STATES, versioned, overwrites)
    overload._op = short

    def call(*args: Any, **options: Any) -> Any:
        if is_dynamo_compiling():  # it knows the op, not the shortcut
            if validation.empty_shards(options):
                return _uncompiled(overload, *args, **options)
            return overload(*args, **options)
        return short(*args, **options)

    call.past_dispatcher = short  # type: ignore[attr-defined]
    return call


def _uncompiled(op: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Break compiled graphs."""
    return torch.compiler.disable(op)(*args, **options)


_uncompiled._torchdynamo_disable = True  # type: ignore[attr-defined]
