"""Ops that normalise the rows of a reduction. test_results.py compares their results with
float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.cases import CONCRETE_MATMUL_ALGORITHMS, DTYPES
from tests.support.ranked import fresh_group, on_ranks
from tests.support.tiers import sweep

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64


@pytest.mark.parametrize("world", sweep([3, 2, 4]))
@on_ranks()
def test_bitwise_identical_to_separate_ops() -> None:
    """The sum equals the result of `matmul_all_reduce`, and the rows equal the result of
    `all_reduce_rms_norm`."""
    with fresh_group() as group:
        for dtype in DTYPES:
            generator = torch.Generator().manual_seed(dist.get_rank())
            x, w = (
                torch.randn(64, 48, generator=generator),
                torch.randn(576, 48, generator=generator),
            )
            x, w = x.to(dtype), w.to(dtype).t()
            weight, residual = torch.linspace(-1, 2, 576).to(dtype), torch.ones(64, 576).to(dtype)
            total = tpkernels.matmul_all_reduce(x, w, group, residual=residual)
            share = total if dist.get_rank() == 0 else torch.zeros_like(total)
            normed, _ = tpkernels.all_reduce_rms_norm(share, weight, group)
            for algorithm in CONCRETE_MATMUL_ALGORITHMS:
                results = tpkernels.matmul_all_reduce_rms_norm(
                    x, w, weight, group, residual=residual, algorithm=algorithm
                )
                assert torch.equal(results[0], normed) and torch.equal(results[1], total), (
                    dtype,
                    algorithm,
                )


@on_ranks(2)
def test_autocast() -> list[str]:
    """Operands are cast to bf16, but the weight of the norm stays in float32."""
    x, w, residual = torch.randn(4, 6), torch.randn(6, 8), torch.randn(4, 8)
    weight = torch.full((8,), 1.001)  # not representable in bf16
    group = dist.group.WORLD
    with torch.autocast("cpu", BF16):
        results = tpkernels.matmul_all_reduce_rms_norm(x, w, weight, group, residual=residual)
    low = [tensor.bfloat16() for tensor in (x, w, residual)]
    expected = tpkernels.matmul_all_reduce_rms_norm(low[0], low[1], weight, group, residual=low[2])
    if not all(torch.equal(a, b) for a, b in zip(results, expected, strict=True)):
        return [f"{results}, not {expected}"]
    return []


@pytest.mark.parametrize("world", sweep([3, 2, 4]))
@on_ranks()
def test_bitwise_identical_results() -> None:
    """All algorithms, vector units and ranks agree bitwise. The sum equals the result of
    `all_reduce`."""
    units = tpkernels._C.host.vector_units()
    with fresh_group() as group:
        for dtype in (*DTYPES, F64):
            for shape in ((3, 2048), (50, 577), (1, 63), (90, 130)):
                generator = torch.Generator().manual_seed(dist.get_rank())
                x = torch.randn(shape, generator=generator).to(dtype)
                weight = torch.linspace(-1, 2, shape[-1]).to(dtype)
                total = tpkernels.all_reduce(x, group)
                results = []
                for unit in units:
                    tpkernels._C.host.use_vector_unit(unit)
                    for algorithm in ("direct", "unfused", "ring"):
                        results.append(
                            tpkernels.all_reduce_rms_norm(x, weight, group, algorithm=algorithm)
                        )
                first = results[0][0].clone()
                dist.broadcast(first, src=0)
                for normed, new_residual in results:
                    assert torch.equal(normed, first) and torch.equal(new_residual, total), dtype


@on_ranks(2)
def test_special_values() -> None:
    """Rows with NaN, infinity or zeros give the results of torch, and do not affect the last
    row."""
    for dtype in DTYPES:
        x = torch.ones(4, 70, dtype=dtype) / dist.get_world_size()
        x[0, 3], x[1, 69], x[2] = torch.nan, torch.inf, 0
        weight = torch.ones(70, dtype=dtype)
        normed, total = tpkernels.all_reduce_rms_norm(x, weight, dist.group.WORLD, eps=1e-5)
        expected = torch.nn.functional.rms_norm(total.float(), [70], weight.float(), 1e-5)
        eps = torch.finfo(dtype).eps
        assert torch.allclose(normed.float(), expected, rtol=eps, atol=0, equal_nan=True), dtype


@pytest.mark.parametrize("argument", sweep(["eps", "residual"], 2))
@on_ranks(2)
def test_ranks_that_disagree(argument: str) -> None:
    """The ranks pass different values of an argument that must be equal."""
    x, weight, rank = torch.ones(4, 6), torch.ones(6), dist.get_rank()
    residual = x if argument == "residual" and rank else None
    eps = 1e-5 if argument == "eps" and rank else 1e-6
    with fresh_group() as group:
        ending = faults.record_ending(
            lambda: tpkernels.all_reduce_rms_norm(x, weight, group, residual=residual, eps=eps)
        )
        assert ending.error == "CollectiveMismatchError", ending
        assert (
            "all_reduce_rms_norm([4, 6] float32" in ending.message and argument in ending.message
        ), ending
