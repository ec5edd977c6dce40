"""The ops under ``torch.library.opcheck``, fake kernels and ``torch.compile``.

Training steps compile to one graph, bitwise identical to eager, and a new M does not compile a new
graph.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

import tpkernels
from tests.support.ranked import fresh_group, on_ranks
from tests.support.tiers import sweep, thorough
from tpkernels.groups import GroupLike

F32, BF16 = torch.float32, torch.bfloat16

ALL_TESTS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)
WITHOUT_SCHEMA = ALL_TESTS[1:]  # torch cannot compare fp8 tensors

Sample = tuple[str, tuple[Any, ...], dict[str, Any]]


def samples(name: str, rank: int, world: int) -> Iterator[Sample]:
    """Yield (op, arguments, options) of calls of every op on the group ``name``."""
    torch.manual_seed(rank)
    x, w, w2 = torch.randn(6, 8), torch.randn(8, 5), torch.randn(8, 3)
    blocks = torch.randn(2, 6, 3, 8)
    sizes = [6 + r for r in range(world)]
    uneven = torch.randn(sizes[rank], 8)
    splits = tpkernels.shard_sizes(7, world)
    yield "all_gather", (x, name), {}
    yield "all_gather", (x.t(), name, 1), {"algorithm": "unfused"}
    yield "all_gather", (uneven, name), {"shard_sizes": sizes}
    yield "all_gather_matmul", (x, [w], name), {}
    yield "all_gather_matmul", (blocks, [w, w2], name, 1), {"return_gathered": True}
    yield "all_gather_matmul", (uneven, [w], name), {"shard_sizes": sizes, "biases": [w[0]]}
    yield (
        "all_gather_matmul",
        (x.to(BF16), [w.to(BF16), w2.to(BF16)], name),
        {"out_dtype": F32, "biases": [torch.empty(0), w2[0]], "algorithm": "pipelined"},
    )
    yield "reduce_scatter", (blocks, name, 1), {"algorithm": "direct"}
    yield "reduce_scatter", (x.to(BF16), name), {"out_dtype": F32}
    yield "reduce_scatter", (torch.randn(7, 2), name), {"shard_sizes": splits}
    for algorithm in ("unfused", "ring", "direct", "pipelined"):
        options: dict[str, Any] = {"algorithm": algorithm}
        extra = {"bias": w[0], "residual": torch.randn(6 // world, 5), **options}
        yield "matmul_reduce_scatter", (x, w, name), extra
        yield "matmul_all_reduce", (x, w, name), {"residual": torch.randn(6, 5), **options}
        yield "matmul_all_reduce_rms_norm", (x, w, w[0], name), {"bias": w[1], **options}
    yield (
        "matmul_reduce_scatter",
        (blocks, w2.expand(8, 3), name, 3),
        {"shard_sizes": None} | ({"shard_sizes": tpkernels.shard_sizes(3, world)}),
    )
    yield (
        "matmul_all_reduce",
        (blocks.to(BF16), w.t().contiguous().t().to(BF16), name),
        {"out_dtype": F32, "wire_dtype": F32, "bias": w[0]},
    )
    yield "column_matmul", (blocks, [w, w2.expand(8, 3)], name, [torch.empty(0), w2[0]]), {}
    yield "column_matmul", (x.to(BF16), [w.t().contiguous().t().to(BF16)], name), {}
    yield "grouped_matmul", (x, w.expand(2, 8, 5), torch.tensor([2, 4])), {}
    yield from scaled_samples(name, sizes, rank)
    yield "all_to_all", (x.t(), name, 0, 1), {"algorithm": "unfused"}
    options = {"gather_sizes": [6] * world, "scatter_sizes": splits}
    yield "all_to_all", (torch.randn(6, 7).to(BF16), name), options
    yield "all_reduce", (x, name), {}
    yield "all_reduce", (x.t().to(BF16), name), {"out_dtype": F32}
    yield "all_reduce_rms_norm", (x.to(BF16), x[0], name), {"residual": x.to(BF16), "eps": 0.5}
    yield "all_reduce_rms_norm", (x.t(), x.t()[0], name), {"algorithm": "unfused"}
    yield "all_reduce_", (x.clone(), name), {}
    yield "all_reduce_", (torch.randn(8, 6).t(), name), {"algorithm": "unfused"}


def scaled_samples(name: str, sizes: list[int], rank: int) -> Iterator[Sample]:
    fp8, one = torch.float8_e4m3fn, torch.ones([])
    x, w = torch.ones(2, 6, 32).to(fp8), torch.ones(5, 32).to(fp8).t()
    stack, counts = w.expand(2, 32, 5), torch.tensor([2, 4])
    grouped_args = (x[0], stack, torch.ones(6, 1), torch.ones(2, 1, 5), counts)
    yield "scaled_grouped_matmul", grouped_args, {"out_dtype": F32}
    uneven, blocks = torch.ones(sizes[rank], 32).to(fp8), torch.float8_e8m0fnu
    by_row, by_column = torch.ones(sizes[rank], 1), torch.ones(1, 5)
    gather = "all_gather_scaled_matmul"
    yield gather, (x, [w, w], one, [one, by_column], name, 1), {"return_gathered": True}
    yield gather, (uneven, [w], by_row, [by_column], name), {"shard_sizes": sizes}
    for algorithm in ("unfused", "ring", "direct", "pipelined"):
        tensor_args = (x[0], w, torch.ones(6, 1).to(blocks), torch.ones(5, 1).to(blocks), name)
        options = {"bias": torch.ones(5), "out_dtype": F32, "algorithm": algorithm}
        yield "scaled_matmul_reduce_scatter", tensor_args, options
        yield "scaled_matmul_all_reduce", tensor_args, {"residual": torch.ones(6, 5), **options}
    yield "scaled_matmul_reduce_scatter", (x, w, one, by_column, name, 1), {"wire_dtype": F32}


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), thorough(2)])
@pytest.mark.parametrize("grads", [False, pytest.param(True, marks=pytest.mark.slow)])
@on_ranks(timeout=250)
def test_opcheck(grads: bool) -> list[str]:
    failures = []
    with fresh_group() as group:
        for op, *call_args in samples(group.group_name, group.rank(), group.size()):
            if grads and ("scaled" in op or op == "all_reduce_"):
                continue  # these ops have no gradient
            args, options = tree_map_only(torch.Tensor, leaf, call_args) if grads else call_args
            try:
                tests = WITHOUT_SCHEMA if "scaled" in op else ALL_TESTS
                overload = getattr(torch.ops.tpkernels, op).default
                torch.library.opcheck(overload, args, options, test_utils=tests)
            except Exception:
                failures.append(f"{op} {options}: {traceback.format_exc(limit=-3)}")
    return failures


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_() if x.numel() else x


@pytest.mark.parametrize("world", [3, thorough(1), pytest.param(2, marks=pytest.mark.slow)])
@on_ranks()
def test_fake_kernels_predict_the_results() -> None:
    """Fake kernels give the shapes, dtypes and strides of the results."""
    with fresh_group() as group:
        for op, args, options in samples(group.group_name, group.rank(), group.size()):
            call = getattr(torch.ops.tpkernels, op).default
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                fake = tree_map_only(torch.Tensor, mode.from_tensor, (args, options))
                predicted = tree_leaves(call(*fake[0], **fake[1]))
            results = tree_leaves(call(*args, **options))
            for prediction, result in zip(predicted, results, strict=True):
                if result is None:
                    continue
                expected = (result.shape, result.dtype, result.stride())
                assert (prediction.shape, prediction.dtype, prediction.stride()) == expected, (
                    op,
                    options,
                    prediction,
                    expected,
                )


# torch.compile. A collective must be one node of the graph that torch cannot drop or reorder.

_Step = Callable[..., torch.Tensor]


def _mlp(algorithm: str, group: GroupLike) -> _Step:
    def step(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        hidden = tpkernels.all_gather_matmul(x, up, group, algorithm=algorithm)
        return tpkernels.matmul_reduce_scatter(hidden.relu(), down, group, algorithm=algorithm) + x

    return step


def _attention(algorithm: str, group: GroupLike) -> _Step:
    def step(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        gathered, (q, k) = tpkernels.all_gather_matmul(
            x, [up, up * 2], group, return_gathered=True, algorithm=algorithm
        )
        y = tpkernels.matmul_all_reduce((q * k).tanh(), down, group, algorithm=algorithm)
        return tpkernels.all_reduce(y + gathered, group)

    return step


def _in_place(algorithm: str, group: GroupLike) -> _Step:
    def step(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        y = (x @ up).relu() @ down
        tpkernels.all_reduce_(y, group)
        gathered = tpkernels.all_gather(y, group, 1)
        return tpkernels.reduce_scatter(gathered, group, 1) + x

    return step


@pytest.mark.parametrize("dynamic", sweep([False, True, None]), ids=["static", "dynamic", "marked"])
@pytest.mark.parametrize("make", sweep([_mlp, _attention, _in_place]))
@on_ranks(2, timeout=200)
def test_compile(make: Callable[[str, GroupLike], _Step], dynamic: bool | None) -> None:
    """The compiled function is bitwise identical to eager for several M. If ``dynamic`` is None, M
    is marked as dynamic."""
    torch._dynamo.reset()
    graphs = 0

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    with fresh_group() as group:
        torch.manual_seed(0)
        up, down = torch.randn(8, 12), torch.randn(12, 8)
        for algorithm in ("unfused", "direct", "auto"):
            torch._dynamo.reset()
            graphs = 0
            step = make(algorithm, group)
            compiled = torch.compile(step, fullgraph=True, backend=count, dynamic=dynamic)
            for m in (4, 6, 9):
                x = torch.randn(m, 8)
                eager = step(x, up, down)
                if dynamic is None:
                    torch._dynamo.mark_dynamic(x, 0)
                assert torch.equal(compiled(x, up, down), eager), (algorithm, m, dynamic)
            expected = 3 if dynamic is False else 1
            assert graphs == expected, (algorithm, dynamic, graphs, expected)


@on_ranks(1)
def test_each_op_has_a_separate_limit_of_graphs() -> None:
    """In total, the ops have more shapes than dynamo allows for one function."""
    torch._dynamo.reset()
    with fresh_group() as group:
        for op in (tpkernels.all_reduce, tpkernels.all_gather, tpkernels.reduce_scatter):
            compiled = torch.compile(op, fullgraph=True, backend="eager", dynamic=False)
            for rows in range(1, 2 + torch._dynamo.config.recompile_limit // 3):
                x = torch.ones(rows, 2)
                assert torch.equal(compiled(x, group.group_name, algorithm="unfused"), x)


# Compiled training.


def sequence_step(group: dist.ProcessGroup, save_gathered: bool) -> _Step:
    def step(x: torch.Tensor, up: torch.Tensor, gate: torch.Tensor, down: torch.Tensor) -> Any:
        a, b = tpkernels.all_gather_matmul(
            x, [up.t(), gate.t()], group, save_gathered=save_gathered
        )
        return tpkernels.matmul_reduce_scatter(a.relu() * b, down.t(), group, residual=x)

    return step


def replicated_step(group: dist.ProcessGroup, save_gathered: bool) -> _Step:
    def step(x: torch.Tensor, up: torch.Tensor, gate: torch.Tensor, down: torch.Tensor) -> Any:
        gathered = tpkernels.all_gather(x, group)
        y = tpkernels.matmul_all_reduce((gathered @ up.t()).relu(), down.t(), group)
        z = tpkernels.all_reduce(y * (gathered @ gate.t()).sum(), group)
        return tpkernels.reduce_scatter(y + z, group)

    return step


def _trained(step: _Step, x: torch.Tensor, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in (x, *weights)]
    y = step(*leaves)
    return [y.detach(), *torch.autograd.grad((y**2).sum(), leaves)]


@pytest.mark.parametrize(
    ("make", "save_gathered", "backend", "autocast"),
    [
        (sequence_step, True, "aot_eager", False),
        (replicated_step, True, "aot_eager", False),
        thorough(sequence_step, False, "aot_eager", True),
        pytest.param(sequence_step, False, "inductor", False, marks=pytest.mark.slow),
    ],
)
@on_ranks(2, timeout=280)
def test_training_in_one_graph_is_bitwise_identical_to_eager(
    make: Callable[[dist.ProcessGroup, bool], _Step],
    save_gathered: bool,
    backend: str,
    autocast: bool,
) -> list[str]:
    """The second M makes the graph dynamic. The third M does not compile again."""
    failures = []
    torch._dynamo.reset()
    counters.clear()
    with fresh_group() as group, torch.autocast("cpu", dtype=BF16, enabled=autocast):
        torch.manual_seed(group.rank())
        weights = [torch.randn(*shape) for shape in ((12, 8), (12, 8), (8, 12))]
        step = make(group, save_gathered)
        compiled = torch.compile(step, fullgraph=True, backend=backend)
        for m in (4, 6, 9):
            x = torch.randn(m, 8)
            expected, results = _trained(step, x, weights), _trained(compiled, x, weights)
            # inductor fuses the code between the ops, and may round differently
            equal = torch.equal if backend == "aot_eager" else torch.allclose
            failures += [
                f"M={m}: result {i}" for i in range(5) if not equal(results[i], expected[i])
            ]
        graphs = counters["stats"]["unique_graphs"]
        breaks = sum(counters["graph_break"].values())
        assert 1 <= graphs <= 2 and not breaks, f"{graphs} graphs, {breaks} breaks"
    return failures
