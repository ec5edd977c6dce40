"""The order in which inductor runs the ops: that of the graph, on all ranks."""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch.utils._ordered_set import OrderedSet

_WAIT = torch.ops._c10d_functional.wait_tensor.default


def keep_order(graph: fx.Graph) -> bool:
    """Ties each op, and each functional collective right behind one, to the one before it; returns
    whether there are any.

    Inductor moves what does not depend on each other, by the sizes of what is in memory. Those
    differ between ranks that have uneven shares, and so would the order of the ops. It does not
    move functional collectives past each other, but knows nothing of others.
    """
    before: fx.Node | None = None
    after: dict[fx.Node, OrderedSet[fx.Node]] = {}
    for node in list(graph.nodes):
        ours = _is_ours(node)
        if not ours and not _is_collective(node):
            continue
        if before is not None and (ours or _is_ours(before)):
            after[node] = OrderedSet([_tensor_of(before)])
        before = node
    if after:
        preserve_node_ordering(graph, after)
    return bool(after)


def _is_ours(node: fx.Node) -> bool:
    """Whether it is an op that communicates; private ones are local."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "tpkernels":
        return False
    return not target._opname.startswith("_")


def _is_collective(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target is _WAIT:
        return False
    return target.namespace == "_c10d_functional"


def _tensor_of(node: fx.Node) -> fx.Node:
    """A tensor that an op makes, right behind it."""
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        return node
    with node.graph.inserting_after(node):
        first = node.graph.call_function(operator.getitem, (node, 0))
    first.meta["val"] = value[0]
    return first
