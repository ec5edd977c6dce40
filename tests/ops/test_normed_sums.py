"""What is special to the ops that normalise the rows of their sum; test_results.py has their
results against float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.cases import DTYPES, MATMUL_WAYS
from tests.support.ranked import fresh_group, on_ranks
from tests.support.tiers import sweep

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64


@pytest.mark.parametrize("world", sweep([3, 2, 4]))
@on_ranks()
def test_the_bits_with_a_matmul_are_the_same() -> None:
    """The sum has the bits of `matmul_all_reduce`, and the rows those of `all_reduce_rms_norm`."""
    with fresh_group() as group:
        for dtype in DTYPES:
            own = torch.Generator().manual_seed(dist.get_rank())
            x, w = torch.randn(64, 48, generator=own), torch.randn(576, 48, generator=own)
            x, w = x.to(dtype), w.to(dtype).t()
            weight, residual = torch.linspace(-1, 2, 576).to(dtype), torch.ones(64, 576).to(dtype)
            total = tpkernels.matmul_all_reduce(x, w, group, residual=residual)
            share = total if dist.get_rank() == 0 else torch.zeros_like(total)
            normed, _ = tpkernels.all_reduce_rms_norm(share, weight, group)
            for way in MATMUL_WAYS:
                got = tpkernels.matmul_all_reduce_rms_norm(
                    x, w, weight, group, residual=residual, algorithm=way
                )
                assert torch.equal(got[0], normed) and torch.equal(got[1], total), (dtype, way)


@on_ranks(2)
def test_autocast() -> list[str]:
    """Operands in bf16, and the norm's weight stays in float32."""
    x, w, residual = torch.randn(4, 6), torch.randn(6, 8), torch.randn(4, 8)
    weight = torch.full((8,), 1.001)  # which bf16 does not hold
    group = dist.group.WORLD
    with torch.autocast("cpu", BF16):
        got = tpkernels.matmul_all_reduce_rms_norm(x, w, weight, group, residual=residual)
    low = [each.bfloat16() for each in (x, w, residual)]
    want = tpkernels.matmul_all_reduce_rms_norm(low[0], low[1], weight, group, residual=low[2])
    if not all(torch.equal(one, other) for one, other in zip(got, want, strict=True)):
        return [f"{got}, not {want}"]
    return []


@pytest.mark.parametrize("world", sweep([3, 2, 4]))
@on_ranks()
def test_the_bits_are_the_same() -> None:
    """All algorithms, vector units and ranks give the same bits; the sum's are `all_reduce`'s."""
    units = tpkernels._C.host.vector_units()
    with fresh_group() as group:
        for dtype in (*DTYPES, F64):
            for shape in ((3, 2048), (50, 577), (1, 63), (90, 130)):
                own = torch.Generator().manual_seed(dist.get_rank())
                x = torch.randn(shape, generator=own).to(dtype)
                weight = torch.linspace(-1, 2, shape[-1]).to(dtype)
                total = tpkernels.all_reduce(x, group)
                found = []
                for unit in units:
                    tpkernels._C.host.use_vector_unit(unit)
                    for way in ("direct", "unfused", "ring"):
                        found.append(tpkernels.all_reduce_rms_norm(x, weight, group, algorithm=way))
                first = found[0][0].clone()
                dist.broadcast(first, src=0)
                for normed, new_residual in found:
                    assert torch.equal(normed, first) and torch.equal(new_residual, total), dtype


@on_ranks(2)
def test_special_values() -> None:
    """NaN and infinities as torch has them, in their rows only; a row of zeros."""
    for dtype in DTYPES:
        x = torch.ones(4, 70, dtype=dtype) / dist.get_world_size()
        x[0, 3], x[1, 69], x[2] = torch.nan, torch.inf, 0
        weight = torch.ones(70, dtype=dtype)
        normed, total = tpkernels.all_reduce_rms_norm(x, weight, dist.group.WORLD, eps=1e-5)
        want = torch.nn.functional.rms_norm(total.float(), [70], weight.float(), 1e-5)
        eps = torch.finfo(dtype).eps
        assert torch.allclose(normed.float(), want, rtol=eps, atol=0, equal_nan=True), dtype


@pytest.mark.parametrize("what", sweep(["eps", "residual"], 2))
@on_ranks(2)
def test_ranks_that_disagree(what: str) -> None:
    """Ranks that disagree on what they must have in common."""
    x, weight, rank = torch.ones(4, 6), torch.ones(6), dist.get_rank()
    residual = x if what == "residual" and rank else None
    eps = 1e-5 if what == "eps" and rank else 1e-6
    with fresh_group() as group:
        ending = faults.ending_of(
            lambda: tpkernels.all_reduce_rms_norm(x, weight, group, residual=residual, eps=eps)
        )
        assert ending.error == "CollectiveMismatchError", ending
        assert "all_reduce_rms_norm([4, 6] float32" in ending.text and what in ending.text, ending
