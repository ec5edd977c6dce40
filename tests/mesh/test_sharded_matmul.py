"""Every placement of x, w and the result on small meshes, with uneven and empty shards: results and
gradients are those of the unsharded product."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate

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
)
from tests.support.ranked import report
from tests.support.tiers import sweep, thorough
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


def run(ranks: RanksFixture, mesh_shape: tuple[int, ...], products: list[Product]) -> None:
    assert products
    results = ranks(math.prod(mesh_shape)).run(products_job, mesh_shape, products, timeout=280)
    report(failure for rank in results for failure in rank)


def every(dims: int, **options: object) -> list[Product]:
    """Every placement of x, w and the result."""
    return [
        Product(x=x, w=w, out=out, **options)  # type: ignore[arg-type]
        for x in placements_of(dims)
        for w in placements_of(dims)
        for out in (*placements_of(dims), None)
    ]


@pytest.mark.parametrize("world", [2, thorough(3)])
def test_every_placement_on_one_dim(ranks: RanksFixture, world: int) -> None:
    run(ranks, (world,), every(1))


def spread(products: list[Product]) -> list[Product]:
    """For each x and w one result, each result as often as the others."""
    outs = list(dict.fromkeys(product.out for product in products))
    pairs = list(dict.fromkeys((product.x, product.w) for product in products))
    wanted = {(*pair, outs[i % len(outs)]) for i, pair in enumerate(pairs)}
    return [product for product in products if (product.x, product.w, product.out) in wanted]


FOUR_RANKS = [(2, 2), (1, 4), (4, 1)]


def slow(mesh_shape: tuple[int, ...]) -> Any:
    return pytest.param(mesh_shape, marks=pytest.mark.slow)


@pytest.mark.parametrize("mesh_shape", [(2, 2), slow((3, 2))], ids=str)
def test_two_dims(ranks: RanksFixture, mesh_shape: tuple[int, ...]) -> None:
    """K is split by different mesh dims, the same dim by both, sums over both, and all at once."""
    run(
        ranks,
        mesh_shape,
        [
            Product(x=x, w=w, out=out)
            for x, w, out in [
                ((S1, R), (R, S0), None),
                ((S0, S0), (S1, S1), (R, R)),
                ((S1, S1), (S0, S0), (P, S0)),
                ((P, S0), (S1, P), (S1, S0)),
                ((P, P), (R, S1), None),
                ((S0, S1), (S1, S0), (P, P)),
            ]
        ],
    )


@pytest.mark.thorough
@pytest.mark.parametrize("mesh_shape", [(2, 2), slow((3, 2))], ids=str)
def test_some_pairs_of_operands(ranks: RanksFixture, mesh_shape: tuple[int, ...]) -> None:
    run(ranks, mesh_shape, spread(every(2))[::4])


@pytest.mark.slow
@pytest.mark.parametrize("x", list(placements_of(2)), ids=str)
@pytest.mark.parametrize("mesh_shape", [*FOUR_RANKS, (3, 2)], ids=str)
def test_every_placement_on_two_dims(
    ranks: RanksFixture, mesh_shape: tuple[int, ...], x: Placements
) -> None:
    run(ranks, mesh_shape, [product for product in every(2) if product.x == x])


def every_strategy(products: list[Product], mesh_shape: tuple[int, ...]) -> list[Product]:
    """Each of the products by each of its strategies."""
    result = []
    for product in products:
        m, k, n = product.shape
        problem = MatmulProblem(
            m=m,
            k=k,
            n=n,
            mesh_shape=mesh_shape,
            x=product.x,
            w=product.w,
            out=product.out,
            itemsize=4,
        )
        result += [replace(product, strategy=plan.strategy) for plan in plans_for(problem)]
    return result


@pytest.mark.parametrize("world", sweep((2, 3)))
def test_every_strategy(ranks: RanksFixture, world: int) -> None:
    run(ranks, (world,), every_strategy(spread(every(1)), (world,)))


@pytest.mark.parametrize("algorithm", sweep(("pipelined", "ring", "direct", "unfused")))
def test_every_algorithm(ranks: RanksFixture, algorithm: str) -> None:
    """Also those that cannot do a collective alone, or split the product along the summed dim."""
    run(ranks, (2,), every_strategy(spread(every(1, algorithm=algorithm)), (2,)))


@pytest.mark.slow
@pytest.mark.parametrize("mesh_shape", [(2, 2), slow((3, 2))], ids=str)
def test_every_strategy_on_two_dims(ranks: RanksFixture, mesh_shape: tuple[int, ...]) -> None:
    products = spread(every(2))[::48]
    run(ranks, mesh_shape, every_strategy(products, mesh_shape))


@pytest.mark.parametrize(
    ("dtype", "wire_dtype"),
    [
        (torch.bfloat16, torch.float32),
        thorough(torch.float32, None),
    ],
)
def test_random_numbers(
    ranks: RanksFixture, dtype: torch.dtype, wire_dtype: torch.dtype | None
) -> None:
    products = every(1, dtype=dtype, wire_dtype=wire_dtype, integers=False, shape=(33, 70, 20))
    run(ranks, (2,), spread(products))


EMPTY = [(0, 5, 6), (1, 1, 1)]


@pytest.mark.parametrize("shape", [EMPTY[0], thorough(EMPTY[1])])
def test_few_rows_or_none(ranks: RanksFixture, shape: tuple[int, int, int]) -> None:
    """Most ranks have none of the rows, columns or summands."""
    run(ranks, (2, 2), spread(every(2, shape=shape))[::48])
