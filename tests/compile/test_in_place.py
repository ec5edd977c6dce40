"""Compiled ops that write in place run in order with the other ops, and write what they write in
eager mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
import torch.distributed.tensor  # defines shard_dim_alltoall
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache

import tpkernels
from tests.support.cases import RanksFixture
from tests.support.compiled import graph_runner
from tests.support.ordered import tied
from tests.support.ranked import fresh_group, report
from tests.support.tiers import sweep
from tests.support.traced import gather, reduce
from tpkernels import all_reduce, all_reduce_, matmul_all_reduce
from tpkernels.compile.graph import is_wrapped
from tpkernels.compile.order import functional, unwrap

_c10d = torch.ops._c10d_functional


def _several(h: Any, k: Any, c: Any, d: Any, _: Any, group: str) -> Any:
    first, second = h @ c, k @ d
    all_reduce_(first, group)
    all_reduce_(second, group)
    return first, second, all_reduce(h @ c.relu(), group), matmul_all_reduce(k, d, group)


def _clone(h: Any, k: Any, c: Any, d: Any, _: Any, group: str) -> Any:
    first, second = h @ c, k @ d
    copy = first.clone()
    all_reduce_(copy, group)
    all_reduce_(second, group)
    return first, copy, second


def _input(h: Any, k: Any, c: Any, d: Any, given: Any, group: str) -> Any:
    second = all_reduce(k @ d, group)
    all_reduce_(given, group)
    return second, matmul_all_reduce(h, c, group) + given


def _part(of: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """Writes into a view of a matmul's result, then into another matmul's result."""

    def function(h: Any, k: Any, c: Any, d: Any, _: Any, group: str) -> Any:
        first, second = (h @ c).relu(), k @ d
        all_reduce_(of(first), group)
        all_reduce_(second, group)
        return first, second

    return function


def _part_of_transposed(h: Any, k: Any, c: Any, d: Any, _: Any, group: str) -> Any:
    """Of a tensor that inductor makes no copy of, but a view."""
    first, second = (h @ c).t().clone(), k @ d
    all_reduce_(first[1], group)
    all_reduce_(first, group)
    all_reduce_(second, group)
    return first, second


def _part_of_input(h: Any, k: Any, c: Any, d: Any, given: Any, group: str) -> Any:
    second = all_reduce(k @ d, group)
    all_reduce_(given.t()[1:3], group)
    return second, matmul_all_reduce(h, c, group)


def _part_of_gathered(h: Any, k: Any, c: Any, d: Any, given: Any, group: str) -> Any:
    """Of a copy that is laid out as no view of what the op gathers is."""
    whole = gather(given.view(2, -1, 8), 0, 2, group)
    copy = whole.permute(2, 1, 0).clone()
    all_reduce_(copy[1], group)
    return copy, torch.cat(whole.chunk(2, 0), 1) @ c.t()


def _twice(h: Any, k: Any, c: Any, d: Any, given: Any, group: str) -> Any:
    first = h @ c
    all_reduce_(first[:2], group)
    all_reduce_(first, group)
    given.copy_(k @ d)
    all_reduce_(given, group)
    return first


def _with_torchs(h: Any, k: Any, c: Any, d: Any, _: Any, group: str) -> Any:
    first, second = h @ c, k @ d
    moved = torch.ops._dtensor.shard_dim_alltoall(first, 0, 1, group)
    all_reduce_(second, group)
    return reduce(first, group), second, moved, all_reduce(moved, group)


def _into_a_buffer(h: Any, k: Any, c: Any, d: Any, _: Any, group: str) -> Any:
    first, second = all_reduce(h @ c, group), k @ d
    whole = torch.empty(8, 8)
    _c10d.wait_tensor(_c10d.all_gather_into_tensor_out(second, 2, group, out=whole))
    return first, whole, all_reduce(second, group)


CASES: dict[str, tuple[Callable[..., Any], int]] = {  # function, collectives
    "several": (_several, 4),
    "a clone": (_clone, 2),
    "an input": (_input, 3),
    "rows": (_part(lambda x: x[1:3]), 2),
    "columns": (_part(lambda x: x[:, 2:5]), 2),
    "one row": (_part(lambda x: x[2]), 2),
    "flattened": (_part(lambda x: x.view(-1)), 2),
    "every other column": (_part(lambda x: x[1:, ::2]), 2),
    "all of it": (_part(lambda x: x[:]), 2),
    "part of a transposed one": (_part_of_transposed, 3),
    "part of an input": (_part_of_input, 3),
    "part of what is gathered": (_part_of_gathered, 2),
    "the same one twice": (_twice, 3),
    "beside torch's": (_with_torchs, 4),
}
if torch.__version__ >= "2.13":  # the call compiles it
    CASES["into a buffer"] = (_into_a_buffer, 3)


class Recorder(CustomGraphPass):
    """Records which ops of the graphs are tied, and which nodes wrap an op."""

    def __init__(self) -> None:
        self.tied: list[str] = []
        self.wrapped: list[fx.Node] = []

    def __call__(self, graph: fx.Graph) -> None:
        self.tied += tied(graph).values()
        self.wrapped += [node for node in graph.nodes if is_wrapped(node)]

    def uuid(self) -> None:
        return None


@contextmanager
def recorded() -> Iterator[Recorder]:
    recorder = Recorder()
    with inductor_config.patch(post_grad_custom_post_pass=recorder):
        yield recorder


def _inputs(rank: int, rows: int = 4) -> list[torch.Tensor]:
    """Shards of two layers; on each rank one is large and the other small. Small integers, whose
    sums are exact."""
    draw = torch.Generator().manual_seed(rank)
    n, m = ((3, 40), (30, 4))[rank]
    shapes = [(rows, 6), (rows, 6), (6, n), (6, m), (n, 8), (m, 8), (rows, 8)]
    return [torch.randint(-1, 2, shape, generator=draw).float() for shape in shapes]


def _compared(name: str, group: dist.ProcessGroup, compiler: dict[str, Any]) -> list[str]:
    body, _ = CASES[name]
    where = group.group_name

    def function(x: Any, y: Any, a: Any, b: Any, c: Any, d: Any, given: Any) -> Any:
        return body(x @ a, y @ b, c, d, given, where)

    want_inputs, inputs = _inputs(group.rank()), _inputs(group.rank())
    want = function(*want_inputs)
    torch._dynamo.reset()
    got = torch.compile(function, **compiler)(*inputs)
    pairs = {f"result {i}": pair for i, pair in enumerate(zip(got, want, strict=True))}
    if isinstance(want, torch.Tensor):
        pairs = {"the result": (got, want)}
    pairs["the input"] = inputs[-1], want_inputs[-1]
    return [
        f"{name}: {what} is {g}, strides {g.stride()}, not {w}, strides {w.stride()}"
        for what, (g, w) in pairs.items()
        if not torch.equal(g, w) or g.stride() != w.stride()
    ]


def graphs_job(name: str, dynamic: bool) -> list[str]:
    fusion = tpkernels.compile.fuse_collectives()
    with fresh_group() as group, recorded() as seen, fusion as pass_report:
        failures = _compared(name, group, {"backend": graph_runner([]), "dynamic": dynamic})
        if len(seen.tied) != CASES[name][1] - 1 or seen.wrapped:
            failures.append(f"{name}: tied are {seen.tied}, wrapped {seen.wrapped}")
        if ("writes into one of its arguments" in str(pass_report)) != (name == "into a buffer"):
            failures.append(f"{name}: {pass_report}")
        return failures


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", sweep(CASES, 2, later=3))
def test_they_are_tied_and_write_the_same(ranks: RanksFixture, name: str, dynamic: bool) -> None:
    report(f for rank in ranks(2).run(graphs_job, name, dynamic, timeout=100) for f in rank)


def first_version_job() -> list[str]:
    """The wrapper of earlier versions of torch."""
    with inductor_config.patch(enable_auto_functionalized_v2=False):
        return [
            each for name in ("several", "an input", "one row") for each in graphs_job(name, False)
        ]


@pytest.mark.thorough
def test_the_first_kind_of_wrapper(ranks: RanksFixture) -> None:
    report(f for rank in ranks(2).run(first_version_job, timeout=100) for f in rank)


def test_every_op_that_writes_has_one_that_returns() -> None:
    every = (name.split("::") for name in torch._C._dispatch_get_all_op_names())
    public = [name for space, name in every if space == "tpkernels" and name[0] != "_"]
    ops = [getattr(torch.ops.tpkernels, name).default for name in public]
    writing = [op for op in ops if op._schema.is_mutable]
    assert torch.ops.tpkernels.all_reduce_.default in writing
    assert all(functional(op) is not None for op in writing)


@pytest.mark.parametrize(
    "op, wrapped, why",
    [
        (torch.ops.aten.requires_grad_.default, {}, "no op returns what it writes into self"),
        (torch.ops.tpkernels.all_reduce_.default, {"_x_bits": 3}, "a view described by bits"),
        (torch.ops.aten.add_.Tensor, {}, "it also returns something else"),
    ],
)
def test_what_cannot_be_tied_is_refused(op: Any, wrapped: dict[str, Any], why: str) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    arguments = {"group": "0", "_x_base_index": 0, "_all_bases": [x], **wrapped}
    wrapper = torch.ops.higher_order.auto_functionalized_v2
    node = graph.call_function(wrapper, (op,), arguments)
    with pytest.raises(NotImplementedError, match=why):
        unwrap(node)
    assert list(graph.nodes)[1] is node


def inductor_job(name: str) -> list[str]:
    with fresh_group() as group, fresh_cache():
        fusion = tpkernels.compile.fuse_collectives(group)
        return _compared(name, group, {"options": fusion.options})


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_inductor_runs_them_in_one_order(ranks: RanksFixture, name: str) -> None:
    report(f for rank in ranks(2).run(inductor_job, name, timeout=280) for f in rank)
