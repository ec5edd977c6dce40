"""The order in which inductor runs the ops: that of the graph, on all ranks."""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch.utils._ordered_set import OrderedSet

_WAIT = torch.ops._c10d_functional.wait_tensor.default


def keep_order(graph: fx.Graph) -> None:
    """Ties each op, and each functional collective right behind one, to the one before it.

    Inductor moves what does not depend on each other, by the sizes of what is in memory. Those
    differ between ranks that have uneven shares, and so would the order of the ops. It does not
    move functional collectives past each other, but knows nothing of others.
    """
    before: fx.Node | None = None
    after: dict[fx.Node, OrderedSet[fx.Node]] = {}
    for node in list(graph.nodes):
        ours = _namespace(node) == "tpkernels"
        if not ours and (_namespace(node) != "_c10d_functional" or node.target is _WAIT):
            continue
        if before is not None and (ours or _namespace(before) == "tpkernels"):
            after[node] = OrderedSet([_tensor_of(before)])
        before = node
    preserve_node_ordering(graph, after)


def _namespace(node: fx.Node) -> str:
    return node.target.namespace if isinstance(node.target, torch._ops.OpOverload) else ""


def _tensor_of(node: fx.Node) -> fx.Node:
    """A tensor that an op makes, right behind it."""
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        return node
    with node.graph.inserting_after(node):
        first = node.graph.call_function(operator.getitem, (node, 0))
    first.meta["val"] = value[0]
    return first
