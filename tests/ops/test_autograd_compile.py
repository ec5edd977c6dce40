"""Gradients under ``torch.compile`` and ``torch.library.opcheck``: one graph, the eager bits, and
no new graph for another M."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

import tpkernels
from tests.ops.test_opcheck import opcheck_failures
from tests.support.cases import RanksFixture
from tests.support.ranked import fresh_group, report
from tests.support.tiers import sweep

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64

Sample = tuple[str, tuple[Any, ...], dict[str, Any]]
Step = Callable[..., torch.Tensor]


def samples(name: str, rank: int, world: int) -> Iterator[Sample]:
    """(op, arguments, options) of calls with gradients on the group ``name``."""
    torch.manual_seed(rank)

    def leaf(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype).requires_grad_()

    sizes = [3 + r for r in range(world)]
    w = leaf(8, 5)
    yield "all_gather", (leaf(6, 8), name), {}
    yield "all_gather", (leaf(4, sizes[rank]), name, 1), {"shard_sizes": sizes}
    yield "reduce_scatter", (leaf(2, 3 * world), name, 1), {"out_dtype": F32}
    yield "all_reduce", (leaf(4, 3), name), {}
    yield "all_gather_matmul", (leaf(6, 8), [w], name), {}
    yield "all_gather_matmul", (leaf(6, 8), [leaf(5, 8).t()], name), {"return_gathered": True}
    biases = [torch.empty(0), leaf(3)]
    several = (leaf(2, sizes[rank], 8), [w, leaf(8, 3)], name, 1, biases)
    yield "all_gather_matmul", several, {"shard_sizes": sizes, "return_gathered": True}
    yield "all_gather_matmul", several, {"shard_sizes": sizes, "algorithm": "pipelined"}
    rows = (leaf(sum(sizes), 8), w, name, 0, leaf(5), leaf(sizes[rank], 5))
    yield "matmul_reduce_scatter", rows, {"shard_sizes": sizes}
    yield "matmul_reduce_scatter", (leaf(2, world, 8), w, name, 1), {"algorithm": "direct"}
    yield "matmul_all_reduce", (leaf(6, 8), w, name, leaf(5), leaf(6, 5)), {}
    yield "all_reduce_rms_norm", (leaf(4, 3), leaf(3), name, leaf(4, 3)), {}
    yield "matmul_all_reduce_rms_norm", (leaf(6, 8), w, leaf(5), name, leaf(5), leaf(6, 5)), {}
    yield "_column_matmul", (leaf(2, 6, 8), [w, leaf(8, 3)], name, biases), {}
    yield "_column_matmul", (leaf(6, 8), [leaf(5, 8).t()], name), {}
    low = (leaf(6, 8, dtype=BF16), leaf(8, 5, dtype=BF16), name)
    yield "matmul_all_reduce", low, {"out_dtype": F32, "wire_dtype": F32}


def opcheck_job() -> list[str]:
    return opcheck_failures(samples)


def sequence_step(group: dist.ProcessGroup, save_gathered: bool) -> Step:
    def step(x: torch.Tensor, up: torch.Tensor, gate: torch.Tensor, down: torch.Tensor) -> Any:
        a, b = tpkernels.all_gather_matmul(
            x, [up.t(), gate.t()], group, save_gathered=save_gathered
        )
        return tpkernels.matmul_reduce_scatter(a.relu() * b, down.t(), group, residual=x)

    return step


def replicated_step(group: dist.ProcessGroup, save_gathered: bool) -> Step:
    def step(x: torch.Tensor, up: torch.Tensor, gate: torch.Tensor, down: torch.Tensor) -> Any:
        whole = tpkernels.all_gather(x, group)
        y = tpkernels.matmul_all_reduce((whole @ up.t()).relu(), down.t(), group)
        z = tpkernels.all_reduce(y * (whole @ gate.t()).sum(), group)
        return tpkernels.reduce_scatter(y + z, group)

    return step


def _trained(step: Step, x: torch.Tensor, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [one.clone().requires_grad_() for one in (x, *weights)]
    y = step(*leaves)
    return [y.detach(), *torch.autograd.grad((y**2).sum(), leaves)]


def compile_job(
    make: Callable[[dist.ProcessGroup, bool], Step],
    save_gathered: bool,
    backend: str,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    autocast: bool,
) -> list[str]:
    failures = []
    torch._dynamo.reset()
    counters.clear()
    with fresh_group() as group, torch.autocast("cpu", dtype=BF16, enabled=autocast):
        torch.manual_seed(group.rank())
        weights = [torch.randn(*shape).to(dtype) for shape in ((12, 8), (12, 8), (8, 12))]
        step = make(group, save_gathered)
        compiled = torch.compile(step, fullgraph=True, backend=backend)
        for m in sizes:
            x = torch.randn(m, 8).to(dtype)
            want, got = _trained(step, x, weights), _trained(compiled, x, weights)
            # inductor fuses what lies between the ops, and may round differently there
            near = torch.equal if backend == "aot_eager" else torch.allclose
            failures += [f"M={m}: result {i}" for i in range(5) if not near(got[i], want[i])]
        graphs = counters["stats"]["unique_graphs"]
        breaks = sum(counters["graph_break"].values())
        if not 1 <= graphs <= 2 or breaks:
            failures.append(f"{graphs} graphs, {breaks} breaks")
    return failures


@pytest.mark.slow
def test_opcheck(ranks: RanksFixture) -> None:
    report(f for rank in ranks(2).run(opcheck_job, timeout=250) for f in rank)


@pytest.mark.parametrize("save_gathered", sweep([True, False]))
@pytest.mark.parametrize("make", [sequence_step, replicated_step])
def test_one_graph_and_the_eager_bits(
    ranks: RanksFixture,
    make: Callable[[dist.ProcessGroup, bool], Step],
    save_gathered: bool,
) -> None:
    """The second M makes it dynamic; none after it compiles again."""
    job = (compile_job, make, save_gathered, "aot_eager", F32, (4, 6, 9, 14), False)
    report(f for rank in ranks(2).run(*job, timeout=250) for f in rank)


@pytest.mark.thorough
def test_compiled_under_autocast(ranks: RanksFixture) -> None:
    job = (compile_job, sequence_step, False, "aot_eager", F32, (4, 6), True)
    report(f for rank in ranks(2).run(*job, timeout=250) for f in rank)


@pytest.mark.slow
def test_inductor(ranks: RanksFixture) -> None:
    job = (compile_job, sequence_step, False, "inductor", F32, (4, 6, 9), False)
    report(f for rank in ranks(2).run(*job, timeout=280) for f in rank)
