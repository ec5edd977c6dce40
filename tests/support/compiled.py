"""Graphs that the compiler pass rewrites: from ``torch.compile``, without code generation, and
traced, without a compiler."""

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


def _at_once(_: Any, graph: Callable[..., Any], *inputs: Any) -> Any:
    return graph(*inputs)


# control_deps keeps nodes in order and holds each in its own graph. Before 2.13, torch can generate
# code for it but cannot run such graphs as they are.
if not control_deps.has_kernel_for_dispatch_key(DispatchKey.Autograd):
    for _key in (DispatchKey.CPU, DispatchKey.AutogradCPU):
        control_deps.py_impl(_key)(_at_once)


def called(module: fx.GraphModule) -> list[Any]:
    """What a graph calls, including calls within the graphs of single nodes."""
    graphs = [part.graph for part in module.modules() if isinstance(part, fx.GraphModule)]
    return [n.target for graph in graphs for n in graph.nodes if n.op == "call_function"]


def ops_in(module: fx.GraphModule) -> Counter[str]:
    targets = [target for target in called(module) if isinstance(target, torch._ops.OpOverload)]
    return Counter(target._schema.name for target in targets)


def tied(graph: fx.Graph) -> dict[fx.Node, str]:
    """The nodes that must run after another one, ``node.args[0]``, and the op of each."""
    module: Any = graph.owning_module
    ops = {}
    for node in graph.find_nodes(op="call_function", target=control_deps):
        within: Any = node.args[1]
        held = module.get_submodule(within.target).graph
        ops[node] = str(next(n.target for n in held.nodes if n.op == "call_function"))
    return ops


def graph_runner(seen: list[Counter[str]]) -> Callable[..., Any]:
    """A backend for ``torch.compile``: inductor makes its graphs with all passes, and they are run
    as graphs. ``seen`` gets the count of each op in each graph. Inductor's own patterns are off,
    because their set-up takes most of the time."""
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.virtualized import V

    def run(module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        with V.set_fake_mode(detect_fake_mode(inputs)):
            post_grad_passes(module, options.get("is_inference", False))
        module.recompile()
        seen.append(ops_in(module))
        return make_boxed_func(module.forward)

    without = {"pattern_matcher": False}
    return lambda module, inputs: compile_fx(
        module, inputs, inner_compile=run, config_patches=without
    )


def gather(x: torch.Tensor, dim: int, world: int, group: str) -> torch.Tensor:
    """A gather as torch writes it: along dim 0, then the chunks are moved to ``dim``."""
    whole = _c10d.wait_tensor(_c10d.all_gather_into_tensor(x.contiguous(), world, group))
    return whole if dim == 0 else torch.cat(whole.chunk(world, 0), dim)


def scatter(x: torch.Tensor, dim: int, world: int, group: str, op: str = "sum") -> torch.Tensor:
    assert x.shape[dim] % world == 0  # torch has this too: a guard if the size is symbolic
    if dim:
        x = torch.cat(x.chunk(world, dim), 0)
    part = _c10d.reduce_scatter_tensor(x.contiguous(), op, world, group)
    result: torch.Tensor = _c10d.wait_tensor(part)
    return result


def reduce(x: torch.Tensor, group: str, op: str = "sum") -> torch.Tensor:
    result: torch.Tensor = _c10d.wait_tensor(_c10d.all_reduce(x.contiguous(), op, group))
    return result


def rewritten(
    function: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    only: Sequence[GroupLike] = (),
    symbolic: bool = False,
    norms: bool | None = None,
) -> tuple[fx.GraphModule, FusionReport]:
    """The function's graph after the pass, ready to run, and the pass's report. With ``norms``, ops
    are decomposed as inductor does it."""
    from torch._inductor.decomposition import select_decomp_table

    table = None if norms is None else select_decomp_table()
    mode = "symbolic" if symbolic else "fake"
    traced = make_fx(function, decomposition_table=table, tracing_mode=mode)(*inputs)
    fusion = tpkernels.compile.fuse_collectives(*only, norms=norms)
    fusion(traced.graph)
    traced.recompile()
    return traced, fusion.report


def differences(got: Any, want: Any) -> list[str]:
    pairs = zip(tree_leaves(got), tree_leaves(want), strict=True)
    return [
        f"result {i} is {g}, not {w}"
        for i, (g, w) in enumerate(pairs)
        if g.dtype != w.dtype or not torch.equal(g, w)
    ]


@dataclass(frozen=True)
class Graph:
    """A function, and what the pass does with its graph."""

    function: Callable[..., Any]  #: of the inputs, the group's size and the group's name
    shapes: tuple[tuple[int | str, ...], ...]  #: of the inputs; "2W": twice the number of ranks
    ops: tuple[tuple[str, int], ...] = ()  #: ops inserted, and the number of matmuls in each
    reason: str = ""  #: why a collective is left alone
    reference: Callable[..., Any] | None = None  #: computes the same if gloo cannot

    def inputs(self, rank: int, world: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Integers so small that all sums are exact in any order, also in 16 bits."""
        draw = torch.Generator().manual_seed(rank)

        def size(spec: int | str) -> int:
            return spec if isinstance(spec, int) else int(spec[:-1] or 1) * world

        shapes = [[size(spec) for spec in shape] for shape in self.shapes]
        return [torch.randint(-1, 2, shape, generator=draw).to(dtype) for shape in shapes]


def one(op: str, function: Callable[..., Any], *shapes: Any, matmuls: int = 1) -> Graph:
    """A graph in which one collective becomes part of an op."""
    return Graph(function, shapes, ((op, matmuls),))


def kept(table: Iterable[tuple[Any, ...]]) -> list[tuple[str, Graph]]:
    """Graphs whose collective is left alone, from rows of a reason, a function, and shapes."""
    return [(why, Graph(function, tuple(s), reason=why)) for why, function, *s in table]


def _check(graph: Graph, group: dist.ProcessGroup, dtype: torch.dtype, symbolic: bool) -> list[str]:
    where = (group.size(), group.group_name)
    inputs = graph.inputs(group.rank(), group.size(), dtype)
    traced, pass_report = rewritten(
        lambda *x: graph.function(*x, *where), inputs, symbolic=symbolic
    )
    failures = []
    ops = tuple((entry.op, entry.matmuls) for entry in pass_report.rewritten)
    reasons = [entry.reason for entry in pass_report.left_alone]
    if (ops, reasons) != (graph.ops, [graph.reason] * bool(graph.reason)):
        failures.append(f"{pass_report}, expected {graph.ops}, {graph.reason}")
    names = [str(target) for target in called(traced)]
    if sum("tpkernels" in name for name in names) != len(graph.ops):
        failures.append(f"the graph holds {names}")
    if graph.ops and any("c10d" in name for name in names):
        failures.append(f"a collective is left: {names}")
    want = (graph.reference or graph.function)(*inputs, *where)
    return failures + differences(traced(*inputs), want)


def graphs_job(
    graphs: Callable[[], Iterable[tuple[str, Graph]]],
    dtype: torch.dtype = torch.float32,
    symbolic: bool = False,
) -> list[str]:
    """Check that each of the graphs contains what it should, and gives the same bits as the
    function. Tables of graphs hold lambdas, so a function in the test's module returns them."""
    with fresh_group() as group, torch.no_grad():
        return [
            f"{name}: {failure}"
            for name, graph in graphs()
            for failure in _check(graph, group, dtype, symbolic)
        ]
