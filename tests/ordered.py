"""Graphs that hold ``control_deps``, which keeps nodes in order and has a graph for each. With this
module they run as they are also where torch has only code for that and no kernel: before 2.13."""

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
    """What a graph calls, also from within graphs of single nodes."""
    graphs = [part.graph for part in module.modules() if isinstance(part, fx.GraphModule)]
    return [n.target for graph in graphs for n in graph.nodes if n.op == "call_function"]
