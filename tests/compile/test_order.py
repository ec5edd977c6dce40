"""All ranks run the ops in the same order, even if their shards differ. `all_reduce_` becomes an op
that returns a result, and writes the same tensors as in eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
import torch.distributed.tensor  # defines shard_dim_alltoall
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache
from torch.utils._pytree import tree_leaves

import tpkernels
from tests.support.cases import RanksFixture
from tests.support.compiled import (
    compare_results,
    control_dep_ops,
    gather,
    graph_runner,
    reduce,
    trace_and_fuse,
)
from tests.support.ranked import check_job, collect_messages, fresh_group, on_ranks
from tpkernels import all_reduce, all_reduce_, matmul_all_reduce
from tpkernels.compile.order import tie_ops

_c10d = torch.ops._c10d_functional


def tied_job() -> list[str]:
    with fresh_group() as group:
        world, name = group.size(), group.group_name

        def function(x: torch.Tensor, w: torch.Tensor) -> Any:
            gathered = gather(x, 0, world, name) @ w
            return gathered, reduce(x.relu(), name), reduce(x.sin() @ w, name)

        inputs = [torch.ones(4, 6), torch.ones(6, 5)]
        traced, _ = trace_and_fuse(function, inputs)
        ties = control_dep_ops(traced.graph)
        want = ["_c10d_functional.all_reduce.default", "tpkernels._matmul_all_reduce.default"]
        failures = [] if list(ties.values()) == want else [str(traced.graph)]
        first, second = ties
        if second.args[0] != (first,):
            failures.append(f"{second} runs behind {second.args[0]}")
        failures += compare_results(traced(*inputs), function(*inputs))

        def manual(x: torch.Tensor, w: torch.Tensor) -> Any:
            local, topk_ids = torch.ops.tpkernels._matmul(x, w), torch.zeros(4 * world, 1).long()
            rows = torch.ops.tpkernels._moe_dispatch_rows(x, topk_ids, world, name, x)  # not tied
            return local, tpkernels.all_reduce(x, name), tpkernels.all_gather(w, name), rows

        traced, _ = trace_and_fuse(manual, inputs)
        ordered = list(control_dep_ops(traced.graph).values()) == [
            f"tpkernels._{op}.default" for op in ("all_reduce", "all_gather")
        ]
        return failures if ordered else [*failures, str(traced.graph)]


def _two_layers(group: str) -> Callable[..., Any]:
    def function(x: Any, y: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        first, second = gather(x, 0, 2, group) @ a, gather(y, 0, 2, group) @ b
        return reduce(first @ c, group), reduce(second @ d, group)

    return function


def uneven_job() -> list[str]:
    """Compile two layers with 7 and 8 features. Rank 1 holds the smaller shard of 7."""
    with fresh_group() as group, fresh_cache():
        n, m = ((4, 4), (3, 4))[group.rank()]
        shapes = [(4, 6), (4, 6), (6, n), (6, m), (n, 8), (m, 8)]
        fusion = tpkernels.compile.fuse_collectives(group)
        compiled = torch.compile(_two_layers(group.group_name), options=fusion.options)
        results = compiled(*(torch.ones(shape) for shape in shapes))
        failures = [] if len(fusion.report.rewritten) == 4 else [str(fusion.report)]
        want = [torch.full((8, 8), 6.0 * width) for width in (7, 8)]
        return failures + compare_results(results, want)


def narrow_job() -> list[str]:
    """Rank 1 holds one column, for which inductor replaces the matmul by an outer product, or no
    column."""
    failures = []
    with fresh_group() as group:
        name = group.group_name
        for columns in (1, 0):
            k = (2, columns)[group.rank()]
            torch._dynamo.reset()
            with tpkernels.compile.fuse_collectives(group) as report:
                compiled = torch.compile(lambda x, w: reduce(x @ w, name), backend=graph_runner([]))
                got = compiled(torch.ones(4, k), torch.ones(k, 5))
            failures += [str(report)] * len(report.left_alone)
            failures += compare_results(got, torch.full((4, 5), 2.0 + columns))
    return failures


def _several(h: Any, k: Any, c: Any, d: Any, _: Any, group: str) -> Any:
    first, second = h @ c, k @ d
    all_reduce_(first, group)
    all_reduce_(second, group)
    return first, second, all_reduce(h @ c.relu(), group), matmul_all_reduce(k, d, group)


def _slice_of_input(h: Any, k: Any, c: Any, d: Any, extra: Any, group: str) -> Any:
    second = all_reduce(k @ d, group)
    all_reduce_(extra.t()[1:3], group)
    return second, matmul_all_reduce(h, c, group)


def _slice_of_gathered(h: Any, k: Any, c: Any, d: Any, extra: Any, group: str) -> Any:
    """Reduce a slice of a copy whose layout no view of the gathered tensor has."""
    gathered = gather(extra.view(2, -1, 8), 0, 2, group)
    transposed = gathered.permute(2, 1, 0).clone()
    all_reduce_(transposed[1], group)
    return transposed, torch.cat(gathered.chunk(2, 0), 1) @ c.t()


def _with_torch(h: Any, k: Any, c: Any, d: Any, _: Any, group: str) -> Any:
    first, second = h @ c, k @ d
    moved = torch.ops._dtensor.shard_dim_alltoall(first, 0, 1, group)
    all_reduce_(second, group)
    return reduce(first, group), second, moved, all_reduce(moved, group)


CASES: dict[str, tuple[Callable[..., Any], int]] = {  # function and number of collectives
    "several": (_several, 4),
    "part of an input": (_slice_of_input, 3),
    "part of what is gathered": (_slice_of_gathered, 2),
    "beside torch's": (_with_torch, 4),
}


def _inputs(rank: int, rows: int = 4) -> list[torch.Tensor]:
    """Return shards of two layers: rank 0 holds a large shard of the second, rank 1 of the first.
    All elements are small integers, so sums are exact."""
    draw = torch.Generator().manual_seed(rank)
    n, m = ((3, 40), (30, 4))[rank]
    shapes = [(rows, 6), (rows, 6), (6, n), (6, m), (n, 8), (m, 8), (rows, 8)]
    return [torch.randint(-1, 2, shape, generator=draw).float() for shape in shapes]


def _compare_compiled(name: str, group: dist.ProcessGroup, compiler: dict[str, Any]) -> list[str]:
    body, _ = CASES[name]
    group_name = group.group_name

    def function(x: Any, y: Any, a: Any, b: Any, c: Any, d: Any, extra: Any) -> Any:
        return body(x @ a, y @ b, c, d, extra, group_name)

    want_inputs, inputs = _inputs(group.rank()), _inputs(group.rank())
    want = function(*want_inputs)
    torch._dynamo.reset()
    got = torch.compile(function, **compiler)(*inputs)
    pairs = (got, inputs[-1]), (want, want_inputs[-1])
    got, want = ([*tree_leaves(results), written] for results, written in pairs)
    failures = [f"{name}: {failure}" for failure in compare_results(got, want)]
    if [tensor.stride() for tensor in got] != [tensor.stride() for tensor in want]:
        failures.append(f"{name}: other strides")
    return failures


def inductor_job(name: str) -> list[str]:
    with fresh_group() as group, fresh_cache():
        fusion = tpkernels.compile.fuse_collectives(group)
        return _compare_compiled(name, group, {"options": fusion.options})


class Recorder(CustomGraphPass):
    """Record the tied ops of all graphs."""

    def __init__(self) -> None:
        self.tied: list[str] = []

    def __call__(self, graph: fx.Graph) -> None:
        self.tied += control_dep_ops(graph).values()

    def uuid(self) -> None:
        return None


def in_place_job(dynamic: bool) -> list[str]:
    failures = []
    with fresh_group() as group:
        for name, (_, collectives) in CASES.items():
            seen = Recorder()
            with (
                inductor_config.patch(post_grad_custom_post_pass=seen),
                tpkernels.compile.fuse_collectives(),
            ):
                compiler = {"backend": graph_runner([]), "dynamic": dynamic}
                failures += _compare_compiled(name, group, compiler)
            assert len(seen.tied) == collectives - 1, (name, seen.tied)
    return failures


@pytest.mark.parametrize(
    ("job", "arguments"),
    [
        (tied_job, ()),
        (narrow_job, ()),
        (in_place_job, (False,)),
        pytest.param(in_place_job, (True,), marks=pytest.mark.slow),
        pytest.param(uneven_job, (), marks=pytest.mark.slow),
        *(pytest.param(inductor_job, (name,), marks=pytest.mark.slow) for name in CASES),
    ],
)
def test_order(ranks: RanksFixture, job: Callable[..., list[str]], arguments: Any) -> None:
    check_job(ranks(2), job, *arguments, timeout=280)


def test_an_in_place_torch_collective_cannot_be_tied() -> None:
    graph = fx.Graph()
    wrapper = torch.ops.higher_order.auto_functionalized_v2
    graph.call_function(wrapper, (_c10d.all_reduce_.default,))
    graph.call_function(torch.ops.tpkernels._all_reduce.default, (graph.placeholder("x"), "0"))
    with pytest.raises(NotImplementedError, match=r"all_reduce_.* call an op that returns its"):
        tie_ops(graph)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
@on_ranks(2, timeout=200)
def test_a_rank_without_rows_keeps_all_ops(dynamic: bool, compiler: str) -> list[str]:
    """Rank 1 has no rows, so inductor sees no readers of its results. Its ops are neither dropped
    nor reordered."""
    with fresh_group() as group, fresh_cache():
        sizes: Any = {"shard_sizes": [1, 0]}

        def function(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                hidden = tpkernels.all_gather_matmul(x * 2, a, group, **sizes)
                x = tpkernels.matmul_reduce_scatter(hidden.relu(), b, group, **sizes) + x
            return x

        inputs = [torch.ones(1 - group.rank(), 4), torch.ones(4, 6), torch.ones(6, 4)]
        leaves = [x.clone().requires_grad_() for x in inputs]
        want = function(*leaves)
        want.sum().backward()
        grads = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        torch._dynamo.reset()
        got = torch.compile(function, dynamic=dynamic, backend=compiler)(*leaves)
        got.sum().backward()
        tpkernels.all_reduce(torch.ones(3), group)  # all ranks ran the same calls
        failures = compare_results([got, *(leaf.grad for leaf in leaves)], [want, *grads])
        raw = torch.compile(
            lambda x: torch.ops.tpkernels.all_gather(x, group.group_name, **sizes),
            backend="eager",
            fullgraph=True,
        )
        (message,) = collect_messages([lambda: raw(inputs[0])])
        if "with shard_sizes=[1, 0]. A rank with 0 rows could drop or reorder" not in message:
            failures.append(message)
        return failures


def test_no_rank_pads_its_matmuls() -> None:
    assert inductor_config.shape_padding
    fusion = tpkernels.compile.fuse_collectives()
    with fusion:
        assert not inductor_config.shape_padding
    assert inductor_config.shape_padding
    function = torch.compile(torch.relu, options=fusion.options)
    assert function.get_compiler_config()["shape_padding"] is False
