"""Keeps the ops in the order of the graph, on all ranks."""

from __future__ import annotations

import operator
from itertools import pairwise

import torch
from torch import fx
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch.utils._ordered_set import OrderedSet

from tpkernels.compile.graph import is_wrapped, op_of
from tpkernels.compile.in_place import unwrap

_WAIT = torch.ops._c10d_functional.wait_tensor.default


def keep_order(graph: fx.Graph) -> bool:
    """Tie each op and each collective to the one before it, except two functional collectives in a
    row. Returns whether anything was tied.

    Inductor reorders independent nodes to save memory, by the sizes of their tensors. Ranks with
    uneven shards have different sizes, so their ops would run in different orders. Inductor keeps
    functional collectives in order, but does not recognise others.

    Ops that write into an argument become functional, because a wrapped op cannot be tied.
    """
    calls = [node for node in graph.nodes if _is_functional_collective(node) or _is_other(node)]
    pairs = [pair for pair in pairwise(calls) if any(map(_is_other, pair))]
    if not pairs:
        return False
    involved = dict.fromkeys(node for pair in pairs for node in pair)
    plain = {node: unwrap(node) if is_wrapped(node) else node for node in involved}
    after = {plain[node]: OrderedSet([_tensor_of(plain[before])]) for before, node in pairs}
    preserve_node_ordering(graph, after)
    return True


def _is_functional_collective(node: fx.Node) -> bool:
    op = op_of(node)
    return op is not None and op.namespace == "_c10d_functional" and op is not _WAIT


def _is_other(node: fx.Node) -> bool:
    """Return whether it communicates without inductor's knowledge: our ops, except private ones,
    which are local, and DTensor's all-to-all."""
    op = op_of(node)
    if op is None:
        return False
    ours = op.namespace == "tpkernels" and not op._opname.startswith("_")
    return ours or str(op) == "_dtensor.shard_dim_alltoall.default"


def _tensor_of(node: fx.Node) -> fx.Node:
    """A tensor that an op returns; if it returns several, a new node for the first."""
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        return node
    with node.graph.inserting_after(node):
        first = node.graph.call_function(operator.getitem, (node, 0))
    first.meta["val"] = value[0]
    return first
