"""Keeps the ops in the order of the graph, on all ranks.

Inductor reorders independent nodes to save memory, by the sizes of their tensors. Ranks with uneven
shards have different sizes, so their ops would run in different orders. Inductor keeps functional
collectives in order, but does not recognise others.
"""

from __future__ import annotations

import operator
from itertools import pairwise

import torch
from torch import fx

from tpkernels.compile.graph import op_of
from tpkernels.compile.layout import value
from tpkernels.ops.registration import communicates
from tpkernels.torch_private import (
    SHARD_DIM_EXCHANGE,
    c10d_functional,
    control_dependencies,
    ordered_set,
)

_WAIT = c10d_functional.wait_tensor.default


def tie_ops(graph: fx.Graph) -> bool:
    """Tie each op and each collective to the one before it, except two functional collectives in a
    row. Return whether anything was tied. Raise NotImplementedError if one of them is wrapped,
    because it writes into an argument: the wrapper cannot be tied."""
    ops = {node: op for node in graph.nodes if (op := op_of(node)) is not None and op is not _WAIT}
    others = {
        node
        for node, op in ops.items()
        if (op.namespace == "tpkernels" and communicates(op)) or str(op) == SHARD_DIM_EXCHANGE
    }
    calls = [n for n, op in ops.items() if n in others or op.namespace == _WAIT.namespace]
    pairs = [pair for pair in pairwise(calls) if not others.isdisjoint(pair)]
    for node in (node for pair in pairs for node in pair):
        if ops[node] is not node.target:
            raise NotImplementedError(
                f"{ops[node]} cannot be kept in order with the other collectives of the graph, "
                "because it writes into an argument; call an op that returns its result"
            )
    if pairs:
        after = {node: ordered_set.OrderedSet([_tensor_of(before)]) for before, node in pairs}
        control_dependencies.preserve_node_ordering(graph, after)
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
