"""Every placement of x, w and the result on small meshes, with uneven and empty shards: results and
gradients are those of the unsharded product."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

import tpkernels
from tests.support.cases import RanksFixture
from tests.support.meshes import (
    S0,
    S1,
    Drawn,
    P,
    Placements,
    R,
    draw,
    error_of,
    make_mesh,
    placements_of,
    take,
)
from tests.support.ranked import check_job, report
from tests.support.tiers import thorough
from tpkernels import mesh as tpmesh
from tpkernels.mesh.planner import MatmulProblem, plans_for


@dataclass(frozen=True, kw_only=True)
class Product:
    """One sharded product; ``out`` None: any."""

    x: Placements
    w: Placements
    out: Placements | None
    shape: tuple[int, int, int] = (7, 5, 6)
    strategy: str = "auto"
    algorithm: str = "auto"
    dtype: torch.dtype = torch.float32
    integers: bool = True
    wire_dtype: torch.dtype | None = None


def _of_gradient(placements: Sequence[Placement]) -> Placements:
    return tuple(Replicate() if isinstance(one, Partial) else one for one in placements)


def _bound(product: Product, terms: torch.Tensor, k: int) -> torch.Tensor:
    """The contract's ``sqrt(K) * eps * (|A| @ |B|)``, and one rounding of the result for what the
    reference makes of it. Integers are exact."""
    if product.integers:
        return torch.zeros_like(terms)
    return (math.sqrt(k) + 1) * torch.finfo(product.dtype).eps * terms


def check(product: Product, mesh: DeviceMesh) -> list[str]:
    """What is wrong with one product and its gradients, as text."""
    (m, k, n), dtype, integers = product.shape, product.dtype, product.integers

    def drawn(name: str, shape: tuple[int, int], placements: Placements) -> Drawn:
        return draw(name, shape, mesh, placements, dtype, integers)

    x, w = drawn("x", (m, k), product.x), drawn("w", (k, n), product.w)
    y = tpkernels.sharded_matmul(
        x.sharded,
        w.sharded,
        product.out,
        product.strategy,
        wire_dtype=product.wire_dtype,
        algorithm=product.algorithm,
    )
    if y.dtype != dtype:
        return [f"{product}: has dtype {y.dtype}"]
    out = product.out or tuple(y.placements)
    wrong = []
    if Partial() in out and product.out is None:
        wrong.append("is Partial")
    pairs = {"y": (y, x.value @ w.value, x.size @ w.size, k, out)}
    grad = drawn("grad", (m, n), _of_gradient(out))
    grads = torch.autograd.grad(y, [x.sharded, w.sharded], grad.sharded.detach())
    pairs["grad x"] = (
        grads[0], grad.value @ w.value.t(), grad.size @ w.size.t(), n, _of_gradient(product.x)
    )  # fmt: skip
    pairs["grad w"] = (
        grads[1], x.value.t() @ grad.value, x.size.t() @ grad.size, m, _of_gradient(product.w)
    )  # fmt: skip
    for name, (got, exact, terms, summands, placements) in pairs.items():
        error = error_of(got, exact, _bound(product, terms, summands), placements)
        if error is not None:
            wrong.append(f"{name} {error}")
    return [f"{product} on {mesh.shape} at {mesh.get_coordinate()}: {one}" for one in wrong]


def products_job(mesh_shape: tuple[int, ...], products: Iterable[Product]) -> list[str]:
    mesh = make_mesh(mesh_shape)
    failures: list[str] = []
    for product in products:
        failures += check(product, mesh)
    return failures


def every(dims: int, **options: object) -> list[Product]:
    """Every placement of x, w and the result."""
    return [
        Product(x=x, w=w, out=out, **options)  # type: ignore[arg-type]
        for x in placements_of(dims)
        for w in placements_of(dims)
        for out in (*placements_of(dims), None)
    ]


def spread(products: list[Product]) -> list[Product]:
    """For each x and w one result, each result as often as the others."""
    outs = list(dict.fromkeys(product.out for product in products))
    pairs = list(dict.fromkeys((product.x, product.w) for product in products))
    wanted = {(*pair, outs[i % len(outs)]) for i, pair in enumerate(pairs)}
    return [product for product in products if (product.x, product.w, product.out) in wanted]


def every_strategy(products: list[Product], mesh_shape: tuple[int, ...]) -> list[Product]:
    """Each of the products by each of its strategies."""
    result = []
    for product in products:
        m, k, n = product.shape
        placements = {"x": product.x, "w": product.w, "out": product.out}
        problem = MatmulProblem(m=m, k=k, n=n, mesh_shape=mesh_shape, itemsize=4, **placements)
        result += [replace(product, strategy=plan.strategy) for plan in plans_for(problem)]
    return result


# K is split by different mesh dims, the same dim by both, sums over both, and all at once.
TWO_DIMS = [
    Product(x=x, w=w, out=out)
    for x, w, out in [
        ((S1, R), (R, S0), None),
        ((S0, S0), (S1, S1), (R, R)),
        ((S1, S1), (S0, S0), (P, S0)),
        ((P, S0), (S1, P), (S1, S0)),
        ((P, P), (R, S1), None),
        ((S0, S1), (S1, S0), (P, P)),
    ]
]


# Half of the ranks have none of the rows that the others reduce.
NO_ROWS = [
    Product(x=(S0, S1), w=(R, S0), out=out, shape=(1, 5, 6), strategy="M,K")
    for out in ((S0, R), (S0, S1))
]


def few_rows(shape: tuple[int, int, int]) -> list[Product]:
    """Most ranks have none of the rows, columns or summands."""
    return spread(every(2, shape=shape))[::48]


def algorithms(*names: str) -> list[Product]:
    """Also those that cannot do a collective alone, or split the product along the summed dim."""
    named = [product for name in names for product in spread(every(1, algorithm=name))]
    return every_strategy(named, (2,))


def random_numbers(dtype: torch.dtype, wire_dtype: torch.dtype | None) -> list[Product]:
    options = {"dtype": dtype, "wire_dtype": wire_dtype, "integers": False}
    return spread(every(1, shape=(33, 70, 20), **options))


@pytest.mark.parametrize(
    ("mesh_shape", "products"),
    [
        ((2,), every(1)),
        ((2, 2), TWO_DIMS),
        ((2,), algorithms("pipelined", "auto")),
        ((2,), random_numbers(torch.bfloat16, torch.float32)),
        *(
            pytest.param(mesh_shape, products, marks=pytest.mark.thorough)
            for mesh_shape, products in [
                ((2, 2), [*NO_ROWS, *few_rows((0, 5, 6))]),
            ]
        ),
        *(
            pytest.param(mesh_shape, products, marks=pytest.mark.slow)
            for mesh_shape, products in [
                ((2,), algorithms("ring", "direct", "unfused")),
                ((3,), every_strategy(spread(every(1)), (3,))),
                ((3, 2), TWO_DIMS),
                ((2,), random_numbers(torch.float32, None)),
                ((3,), every(1)),
                ((3, 2), spread(every(2))[::4]),
                ((2, 2), [*spread(every(2))[::4], *few_rows((1, 1, 1))]),
                ((2, 2), every_strategy(spread(every(2))[::48], (2, 2))),
                ((3, 2), every_strategy(spread(every(2))[::48], (3, 2))),
            ]
        ),
        *(
            pytest.param(mesh_shape, [p for p in every(2) if p.x == x], marks=pytest.mark.slow)
            for mesh_shape in [(2, 2), (1, 4), (4, 1), (3, 2)]
            for x in placements_of(2)
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, tuple) else str(len(value)),
)
def test_products(
    ranks: RanksFixture, mesh_shape: tuple[int, ...], products: list[Product]
) -> None:
    assert products
    check_job(ranks(math.prod(mesh_shape)), products_job, mesh_shape, products, timeout=280)


# Partial results of bf16 that travel in fp32.


BF16, F32 = torch.bfloat16, torch.float32
M, K, N = 6, 8, 4


def summed_job(mesh_shape: tuple[int, ...]) -> tuple[list[str], int]:
    """What is wrong with sums of 256, 1, -256 and zeros, and how many are if partials travel in
    bf16, in which 257 is 256. The result is partial on all mesh dims."""
    mesh, wrong, narrow = make_mesh(mesh_shape), [], 0
    rows = torch.zeros(M, K, dtype=BF16)
    rows[:, 0], rows[:, 1], rows[:, K // 2] = 256, 1, -256
    split = (S1,) * mesh.ndim, (S0,) * mesh.ndim

    def sharded(whole: torch.Tensor, placements: Placements) -> DTensor:
        return DTensor.from_local(take(whole, placements, mesh), mesh, placements, run_check=False)

    a, b = sharded(rows, split[0]), sharded(torch.ones(K, N, dtype=BF16), split[1])
    for out in itertools.product((R, S0, S1), repeat=mesh.ndim):
        for plan in tpmesh.plans(a, b, out, wire_dtype=F32):
            y = tpkernels.sharded_matmul(a, b, out, plan.strategy, wire_dtype=F32)
            if y.dtype != BF16 or not (y.to_local() == 1).all():
                wrong.append(f"{out}: {plan} gives {y.to_local()}")
            z = tpkernels.sharded_matmul(a, b, out, plan.strategy)
            narrow += not (z.to_local() == 1).all()
    if mesh.ndim == 2:  # one stays Partial along one of two mesh dims
        rows[:, 2], rows[:, K // 2] = -256, 0
        a = sharded(rows, split[0])
        y = tpkernels.sharded_matmul(a, b, [P, R], "K,K", wire_dtype=F32)
        total = y.to_local().clone()
        dist.all_reduce(total, group=mesh.get_group(0))
        if y.dtype != BF16 or not (total == 1).all():
            wrong.append(f"left Partial: {y}")
    return wrong, narrow


@pytest.mark.parametrize("mesh_shape", [(2,), thorough((2, 2))], ids=str)
def test_sums_that_are_exact_in_fp32_only(ranks: RanksFixture, mesh_shape: tuple[int, ...]) -> None:
    wrong, narrow = zip(*ranks(math.prod(mesh_shape)).run(summed_job, mesh_shape), strict=True)
    report(failure for rank in wrong for failure in rank)
    assert max(narrow) > 0
