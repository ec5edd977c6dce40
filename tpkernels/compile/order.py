"""Keeps the ops in graph order on all ranks.

Inductor reorders independent nodes to save memory, based on tensor sizes. With uneven shards the
sizes differ between ranks, and so would the order of the ops. Inductor preserves the order of
functional collectives, but not of other ops that communicate.
"""

from __future__ import annotations

import operator
from itertools import pairwise

import torch
from torch import fx

from tpkernels.compile.graph import get_op
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
    """Make each op or collective depend on its predecessor.

    Two consecutive functional collectives need no dependency, because inductor keeps their order.

    Returns:
        Whether a dependency was added.

    Raises:
        NotImplementedError: a node writes into an argument. The compiler wraps such nodes, and a
            wrapper cannot have a dependency.
    """
    ops = {node: op for node in graph.nodes if (op := get_op(node)) is not None and op is not _WAIT}
    unordered = {
        node
        for node, op in ops.items()
        if (op.namespace == "tpkernels" and communicates(op)) or str(op) == SHARD_DIM_EXCHANGE
    }
    calls = [n for n, op in ops.items() if n in unordered or op.namespace == _WAIT.namespace]
    pairs = [pair for pair in pairwise(calls) if not unordered.isdisjoint(pair)]
    for node in (node for pair in pairs for node in pair):
        if ops[node] is not node.target:
            raise NotImplementedError(
                f"{ops[node]} cannot be kept in order with the other collectives of the graph, "
                "because it writes into an argument; call an op that returns its result"
            )
    if pairs:
        predecessors = {
            node: ordered_set.OrderedSet([_first_tensor(predecessor)])
            for predecessor, node in pairs
        }
        control_dependencies.preserve_node_ordering(graph, predecessors)
    return bool(pairs)


def _first_tensor(node: fx.Node) -> fx.Node:
    """Return the node of the first result of an op: a new getitem node if it returns several."""
    results = value(node)
    if isinstance(results, torch.Tensor):
        return node
    with node.graph.inserting_after(node):
        first = node.graph.call_function(operator.getitem, (node, 0))
    first.meta["val"] = results[0]
    return first
