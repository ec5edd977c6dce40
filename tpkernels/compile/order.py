"""Keeps the ops in the order of the graph, on all ranks.

Inductor reorders independent nodes to save memory, by the sizes of their tensors. Ranks with uneven
shards have different sizes, so their ops would run in different orders. Inductor keeps functional
collectives in order, but does not recognise others.

The compiler wraps an op that writes into an argument into a node that does not write
(``auto_functionalized``), and unwraps it after its passes. Until then the op is an argument of that
node, and the node cannot be wrapped again, so it becomes the functional op.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import fx
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch._prims_common import compute_required_storage_length, is_contiguous_or_false
from torch.utils._ordered_set import OrderedSet

from tpkernels.compile.graph import Editor, Unsupported, is_wrapped, op_of
from tpkernels.compile.layout import value
from tpkernels.ops.registration import communicates

aten = torch.ops.aten

_WAIT = torch.ops._c10d_functional.wait_tensor.default
_EXCHANGE = "_dtensor.shard_dim_alltoall.default"
# The arguments by which a wrapper describes a view of a tensor; without any, the whole tensor.
_SLICE, _STRIDED = ("slice_dim", "slice_start", "slice_end"), ("size", "stride", "storage_offset")
_VIEW = {"alias", *_SLICE, *_STRIDED}


def tie_ops(graph: fx.Graph) -> bool:
    """Tie each op and each collective to the one before it, except two functional collectives in a
    row. Return whether anything was tied."""
    ops = {node: op for node in graph.nodes if (op := op_of(node)) is not None and op is not _WAIT}
    others = {
        node
        for node, op in ops.items()
        if (op.namespace == "tpkernels" and communicates(op)) or str(op) == _EXCHANGE
    }
    calls = [n for n, op in ops.items() if n in others or op.namespace == "_c10d_functional"]
    pairs = [pair for pair in pairwise(calls) if not others.isdisjoint(pair)]
    involved = dict.fromkeys(node for pair in pairs for node in pair)
    plain = {node: unwrap(node) if is_wrapped(node) else node for node in involved}
    after = {plain[node]: OrderedSet([_tensor_of(plain[before])]) for before, node in pairs}
    if pairs:
        preserve_node_ordering(graph, after)
    return bool(pairs)


def _tensor_of(node: fx.Node) -> fx.Node:
    """Return a tensor that an op returns; if it returns several, a new node for the first."""
    results = value(node)
    if isinstance(results, torch.Tensor):
        return node
    with node.graph.inserting_after(node):
        first = node.graph.call_function(operator.getitem, (node, 0))
    first.meta["val"] = results[0]
    return first


def functional(op: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """Return the op that returns what ``op`` writes: ``all_reduce`` for ``all_reduce_``, ``gather``
    for ``gather_out``; ``op`` itself if it does not write; None if there is no such op."""
    if not op._schema.is_mutable:
        return op
    namespace = getattr(torch.ops, op.namespace)
    packet = getattr(namespace, re.sub("(_out|_)$", "", op._opname), None)
    overload = getattr(packet, op._overloadname, None)
    return None if overload is None or overload._schema.is_mutable else overload


def unwrap(node: fx.Node) -> fx.Node:
    """Replace a wrapped op by the functional one, whose node is returned, and what the op wrote by
    what that returns. ``NotImplementedError`` if there is none, or it is not known what is
    written."""
    op = op_of(node)
    assert op is not None  # a wrapper has an op
    try:
        call, result = _functional_call(node, op)
    except Unsupported as reason:
        raise NotImplementedError(
            f"{op} cannot be kept in the order of the graph's collectives: {reason}; call an op "
            "that returns its result"
        ) from None
    if isinstance(value(node), torch.Tensor):
        node.replace_all_uses_with(result)
    for item in list(node.users):  # the written tensor, taken from a tuple
        item.replace_all_uses_with(result)
        node.graph.erase_node(item)
    node.graph.erase_node(node)
    return call


def _functional_call(node: fx.Node, op: torch._ops.OpOverload) -> tuple[fx.Node, fx.Node]:
    """Call the functional op. Return the call, and the tensor into which ``op`` would have written,
    with the call's result in the written part."""
    new = functional(op)
    written = [argument.name for argument in op._schema.arguments if argument.is_write]
    if new is None or len(written) != 1:
        raise Unsupported(f"no op returns what it writes into {', '.join(written)}")
    if op._schema.returns and not isinstance(value(node), torch.Tensor):
        raise Unsupported("it also returns something else")
    with Editor(node) as editor:
        read, write = _written_part(node, written[0], editor)
        values = {**node.kwargs, written[0]: read}
        arguments = new._schema.arguments
        positional = [values[argument.name] for argument in arguments if not argument.kwarg_only]
        keywords = {a.name: values[a.name] for a in arguments if a.kwarg_only and a.name in values}
        call: fx.Node = editor.call(new, *positional, **keywords)
        return call, write(call)


def _written_part(
    node: fx.Node, name: str, editor: Editor
) -> tuple[fx.Node | None, Callable[[fx.Node], fx.Node]]:
    """Return what the op reads that writes the argument ``name``, None if the wrapper itself
    creates that tensor, and a function that puts the op's result in its place. The wrapper
    describes the argument as a view of a base, or, in its first version, has the base itself."""
    arguments: Any = node.kwargs
    call, view, prefix = editor.call, {}, f"_{name}_"
    if name not in arguments:
        view = {k.removeprefix(prefix): v for k, v in arguments.items() if k.startswith(prefix)}
        index = view.pop("base_index", None)
        if index is None:
            return None, lambda new: new
        if view.keys() - _VIEW:
            raise Unsupported(f"it writes into a view described by {', '.join(view)}")
    base = arguments[name] if name in arguments else arguments["_all_bases"][index]
    if "slice_dim" in view:
        where = [view[key] for key in _SLICE]
        part = call(aten.slice.Tensor, base, *where)
        return part, lambda new: call(aten.slice_scatter.default, base, new, *where)
    if "stride" in view:
        where, layout = [view[key] for key in _STRIDED], _layout(base, editor)
        memory = _memory(base, layout, editor)

        def scatter(new: fx.Node) -> Any:
            written = call(aten.as_strided_scatter.default, memory, new, *where)
            return call(aten.as_strided.default, written, *layout)

        return call(aten.as_strided.default, memory, *where), scatter
    if is_contiguous_or_false(value(base)):
        return base, lambda new: new
    return base, lambda new: call(aten.copy.default, base, new)  # which keeps the strides of base


def _layout(base: fx.Node, editor: Editor) -> tuple[list[Any], list[Any], Any]:
    """Return size, stride and storage offset of ``base``, as arguments of a node."""

    def known(read: Any, number: Any, *dim: int) -> Any:
        return number if isinstance(number, int) else editor.call(read, base, *dim)

    tensor = value(base)
    size = [known(aten.sym_size.int, n, dim) for dim, n in enumerate(tensor.shape)]
    stride = [known(aten.sym_stride.int, n, dim) for dim, n in enumerate(tensor.stride())]
    return size, stride, known(aten.sym_storage_offset.default, tensor.storage_offset())


def _memory(base: fx.Node, layout: tuple[list[Any], list[Any], Any], editor: Editor) -> Any:
    """Return all elements that ``base`` spans in memory, as one dim."""
    size, stride, offset = layout
    if all(isinstance(number, int) for number in (*size, *stride, offset)):
        length: Any = compute_required_storage_length(size, stride, offset)
    else:
        length = editor.call(operator.add, offset, 1)
        for count, step in zip(size, stride, strict=True):
            distance = editor.call(operator.mul, editor.call(operator.sub, count, 1), step)
            length = editor.call(operator.add, length, distance)
    return editor.call(aten.as_strided.default, base, [length], [1], 0)
