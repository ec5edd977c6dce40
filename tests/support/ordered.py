"""Graphs with ``control_deps``, an op that keeps nodes in order and holds each in its own graph.
Before 2.13, torch can generate code for it but has no kernel; with this module such graphs also run
as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch._C import DispatchKey
from torch._inductor.fx_passes.control_dependencies import control_deps


def _at_once(_: Any, graph: Callable[..., Any], *inputs: Any) -> Any:
    return graph(*inputs)


if not control_deps.has_kernel_for_dispatch_key(DispatchKey.Autograd):
    for _key in (DispatchKey.CPU, DispatchKey.AutogradCPU):
        control_deps.py_impl(_key)(_at_once)


def called(module: fx.GraphModule) -> list[Any]:
    """What a graph calls, including calls within the graphs of single nodes."""
    graphs = [part.graph for part in module.modules() if isinstance(part, fx.GraphModule)]
    return [n.target for graph in graphs for n in graph.nodes if n.op == "call_function"]


def tied(graph: fx.Graph) -> dict[fx.Node, str]:
    """The nodes that must run after another one, ``node.args[0]``, and the op of each."""
    module: Any = graph.owning_module
    ops = {}
    for node in graph.find_nodes(op="call_function", target=control_deps):
        within: Any = node.args[1]
        held = module.get_submodule(within.target).graph
        ops[node] = str(next(n.target for n in held.nodes if n.op == "call_function"))
    return ops
