"""Graphs for the compiler pass, traced or from ``torch.compile``.

Neither path generates code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import fx
from torch._C import DispatchKey
from torch._guards import detect_fake_mode
from torch._inductor.fx_passes.control_dependencies import control_deps
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

import tpkernels
from tests.support.ranked import fresh_group
from tpkernels.compile import FusionReport
from tpkernels.groups import GroupLike

AG, RS, AR = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"

_c10d = torch.ops._c10d_functional


def _run_graph(_: Any, graph: Callable[..., Any], *inputs: Any) -> Any:
    return graph(*inputs)


# control_deps orders nodes and stores each in a subgraph. Before 2.13, torch can generate code
# for it but cannot run such graphs.
if not control_deps.has_kernel_for_dispatch_key(DispatchKey.Autograd):
    for _key in (DispatchKey.CPU, DispatchKey.AutogradCPU):
        control_deps.py_impl(_key)(_run_graph)


def call_targets(module: fx.GraphModule) -> list[Any]:
    """Return the call targets of a graph, including calls within the graphs of single nodes."""
    graphs = [
        submodule.graph for submodule in module.modules() if isinstance(submodule, fx.GraphModule)
    ]
    return [n.target for graph in graphs for n in graph.nodes if n.op == "call_function"]


def ops_in(module: fx.GraphModule) -> Counter[str]:
    targets = [
        target for target in call_targets(module) if isinstance(target, torch._ops.OpOverload)
    ]
    return Counter(target._schema.name for target in targets)


def control_dep_ops(graph: fx.Graph) -> dict[fx.Node, str]:
    """Return the nodes that must run after a node ``args[0]``, and the op of each."""
    module: Any = graph.owning_module
    ops = {}
    for node in graph.find_nodes(op="call_function", target=control_deps):
        subgraph_node: Any = node.args[1]
        subgraph = module.get_submodule(subgraph_node.target).graph
        ops[node] = str(next(n.target for n in subgraph.nodes if n.op == "call_function"))
    return ops


def graph_runner(seen: list[Counter[str]]) -> Callable[..., Any]:
    """Return a ``torch.compile`` backend that runs inductor graphs without code generation.

    All passes of inductor run, except its own patterns: their setup dominates the run time.
    ``seen`` receives the op counts of each graph.
    """
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.virtualized import V

    def run(module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        with V.set_fake_mode(detect_fake_mode(inputs)):
            post_grad_passes(module, options.get("is_inference", False))
        module.recompile()
        seen.append(ops_in(module))
        return make_boxed_func(module.forward)

    config = {"pattern_matcher": False}
    return lambda module, inputs: compile_fx(
        module, inputs, inner_compile=run, config_patches=config
    )


def gather(x: torch.Tensor, dim: int, world: int, group: str) -> torch.Tensor:
    """Gather as torch does: along dim 0, then move the chunks to ``dim``."""
    gathered = _c10d.wait_tensor(_c10d.all_gather_into_tensor(x.contiguous(), world, group))
    return gathered if dim == 0 else torch.cat(gathered.chunk(world, 0), dim)


def scatter(x: torch.Tensor, dim: int, world: int, group: str, op: str = "sum") -> torch.Tensor:
    assert x.shape[dim] % world == 0  # torch has this too: a guard if the size is symbolic
    if dim:
        x = torch.cat(x.chunk(world, dim), 0)
    shard = _c10d.reduce_scatter_tensor(x.contiguous(), op, world, group)
    result: torch.Tensor = _c10d.wait_tensor(shard)
    return result


def reduce(x: torch.Tensor, group: str, op: str = "sum") -> torch.Tensor:
    result: torch.Tensor = _c10d.wait_tensor(_c10d.all_reduce(x.contiguous(), op, group))
    return result


def trace_and_fuse(
    function: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    only: Sequence[GroupLike] = (),
    symbolic: bool = False,
    norms: bool | None = None,
) -> tuple[fx.GraphModule, FusionReport]:
    """Trace a function and run the pass on its graph.

    With ``norms``, ops are decomposed as in inductor.

    Returns:
        The rewritten graph module and the fusion report.
    """
    from torch._inductor.decomposition import select_decomp_table

    table = None if norms is None else select_decomp_table()
    mode = "symbolic" if symbolic else "fake"
    traced = make_fx(function, decomposition_table=table, tracing_mode=mode)(*inputs)
    fusion = tpkernels.compile.fuse_collectives(*only, norms=norms)
    fusion(traced.graph)
    traced.recompile()
    return traced, fusion.report


def compare_results(got: Any, want: Any) -> list[str]:
    pairs = zip(tree_leaves(got), tree_leaves(want), strict=True)
    return [
        f"result {i} is {g}, not {w}"
        for i, (g, w) in enumerate(pairs)
        if g.dtype != w.dtype or not torch.equal(g, w)
    ]


@dataclass(frozen=True)
class Graph:
    """A function, and the expected effect of the pass on its graph."""

    function: Callable[..., Any]  #: called with inputs, world size, group name
    shapes: tuple[tuple[int | str, ...], ...]  #: input shapes; "2W": twice the world size
    ops: tuple[tuple[str, int], ...] = ()  #: ops inserted, and the number of matmuls in each
    reason: str = ""  #: reason to skip the collective
    reference: Callable[..., Any] | None = None  #: used if gloo does not support the function

    def inputs(self, rank: int, world: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Draw integers so small that all sums are exact in any order, even in 16 bits."""
        draw = torch.Generator().manual_seed(rank)

        def size(spec: int | str) -> int:
            return spec if isinstance(spec, int) else int(spec[:-1] or 1) * world

        shapes = [[size(spec) for spec in shape] for shape in self.shapes]
        return [torch.randint(-1, 2, shape, generator=draw).to(dtype) for shape in shapes]


def fused_graph(op: str, function: Callable[..., Any], *shapes: Any, matmuls: int = 1) -> Graph:
    """Create a graph in which the pass fuses one collective into an op."""
    return Graph(function, shapes, ((op, matmuls),))


def unfused_graphs(table: Iterable[tuple[Any, ...]]) -> list[tuple[str, Graph]]:
    """Create graphs whose collective is not fused, from rows of (reason, function, shapes)."""
    return [(cause, Graph(function, tuple(s), reason=cause)) for cause, function, *s in table]


def _check(graph: Graph, group: dist.ProcessGroup, dtype: torch.dtype, symbolic: bool) -> list[str]:
    group_args = (group.size(), group.group_name)
    inputs = graph.inputs(group.rank(), group.size(), dtype)
    traced, pass_report = trace_and_fuse(
        lambda *x: graph.function(*x, *group_args), inputs, symbolic=symbolic
    )
    failures = []
    ops = tuple((entry.op, entry.matmuls) for entry in pass_report.rewritten)
    reasons = [entry.reason for entry in pass_report.left_alone]
    if (ops, reasons) != (graph.ops, [graph.reason] * bool(graph.reason)):
        failures.append(f"{pass_report}, expected {graph.ops}, {graph.reason}")
    names = [str(target) for target in call_targets(traced)]
    if sum("tpkernels" in name for name in names) != len(graph.ops):
        failures.append(f"the graph holds {names}")
    if graph.ops and any("c10d" in name for name in names):
        failures.append(f"a collective is left: {names}")
    want = (graph.reference or graph.function)(*inputs, *group_args)
    return failures + compare_results(traced(*inputs), want)


def graphs_job(
    graphs: Callable[[], Iterable[tuple[str, Graph]]],
    dtype: torch.dtype = torch.float32,
    symbolic: bool = False,
) -> list[str]:
    """Check the rewritten graphs and compare their results bitwise with the functions.

    Tables of graphs contain lambdas, so a function in the test module returns them.
    """
    with fresh_group() as group, torch.no_grad():
        return [
            f"{name}: {failure}"
            for name, graph in graphs()
            for failure in _check(graph, group, dtype, symbolic)
        ]
