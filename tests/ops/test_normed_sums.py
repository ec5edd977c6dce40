"""What is special to the ops that normalise the rows of their sum; test_results.py has their
results against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.ops.test_bad_input import refusals_job
from tests.support import faults
from tests.support.cases import DTYPES, MATMUL_WAYS, QUICK_WORLDS, Case, RanksFixture, each
from tests.support.ranked import fresh_group, report, run_cases
from tests.support.refusals import Refusal, no, ones, packable
from tests.support.tiers import sweep

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64


@pytest.mark.parametrize("world", QUICK_WORLDS)
def test_weights_that_are_packed_or_the_callers(ranks: RanksFixture, world: int) -> None:
    op, cases = "matmul_all_reduce_rms_norm", []
    for layout in ("packed", "caller's"):
        case = Case(op=op, shape=(24, 20), k=(33,), weight_layout=layout)
        cases += each(case, replace(case, biases=(F32,)), dtypes=packable())
    run_cases(ranks, world, cases)


def matmul_bits_job() -> list[str]:
    """The sum has the bits of `matmul_all_reduce`, and the rows those of `all_reduce_rms_norm`."""
    failures = []
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
                if not (torch.equal(got[0], normed) and torch.equal(got[1], total)):
                    failures.append(f"{dtype} {way}: other bits")
    return failures


@pytest.mark.parametrize("world", sweep([3, 2, 4]))
def test_the_bits_with_a_matmul_are_the_same(ranks: RanksFixture, world: int) -> None:
    report(failure for rank in ranks(world).run(matmul_bits_job) for failure in rank)


def autocast_job() -> list[str]:
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


def test_autocast(ranks: RanksFixture) -> None:
    report(failure for rank in ranks(2).run(autocast_job) for failure in rank)


def matmul_refusals() -> Iterator[Refusal]:
    op, x, w, weight = tpkernels.matmul_all_reduce_rms_norm, ones(4, 6), ones(6, 8), ones(8)
    yield no(ValueError, r"\[5, 8\].*\[4, 6\].*\[6, N\]", op, x, ones(5, 8), weight)
    yield no(ValueError, r"at least 2 dims.*\[6\]", op, ones(6), w, weight)
    yield no(ValueError, r"norm_weight has shape \[6\], expected \[8\]", op, x, w, ones(6))
    yield no(TypeError, "norm_weight is float16; it must be float32", op, x, w, weight.half())
    yield no(ValueError, "eps is -1.0; it must be finite and at least 0", op, x, w, weight, eps=-1)
    yield no(ValueError, r"bias has shape \[7\], expected \[8\]", op, x, w, weight, bias=ones(7))
    pattern = r"residual has shape \[4, 7\], the output \[4, 8\]"
    yield no(ValueError, pattern, op, x, w, weight, residual=ones(4, 7))
    pattern = "residual is bfloat16; it must be float32"
    yield no(TypeError, pattern, op, x, w, weight, residual=ones(4, 8).bfloat16())
    pattern = "is packed, and the kernels of 'fused' cannot read it"
    packed = tpkernels.pack(w)
    yield no(NotImplementedError, pattern, op, x, packed, weight, algorithm="fused")
    pattern = "has no gradient with a packed weight"
    yield no(NotImplementedError, pattern, op, x.clone().requires_grad_(), packed, weight)
    product = tpkernels.LocalProduct(lambda x: x @ ones(6, 8), (6, 8), F32)
    pattern = "has no gradient with a LocalProduct"
    yield no(NotImplementedError, pattern, op, x.clone().requires_grad_(), product, weight)
    yield no(ValueError, "unknown algorithm 'tree'", op, x, w, weight, algorithm="tree")


def bits_job() -> list[str]:
    """All algorithms, vector units and ranks give the same bits; the sum's are `all_reduce`'s."""
    failures = []
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
                        pair = tpkernels.all_reduce_rms_norm(x, weight, group, algorithm=way)
                        found.append((f"{unit} {way}", *pair))
                first = found[0][1].clone()
                dist.broadcast(first, src=0)
                for what, normed, new_residual in found:
                    if not (torch.equal(normed, first) and torch.equal(new_residual, total)):
                        failures.append(f"{dtype} {shape} {what}: other bits")
    return failures


@pytest.mark.parametrize("world", sweep([3, 2, 4]))
def test_the_bits_are_the_same(ranks: RanksFixture, world: int) -> None:
    report(failure for rank in ranks(world).run(bits_job) for failure in rank)


def special_values_job() -> list[str]:
    """NaN and infinities as torch has them, in their rows only; a row of zeros."""
    failures = []
    for dtype in DTYPES:
        x = torch.ones(4, 70, dtype=dtype) / dist.get_world_size()
        x[0, 3], x[1, 69], x[2] = torch.nan, torch.inf, 0
        weight = torch.ones(70, dtype=dtype)
        normed, total = tpkernels.all_reduce_rms_norm(x, weight, dist.group.WORLD, eps=1e-5)
        want = torch.nn.functional.rms_norm(total.float(), [70], weight.float(), 1e-5)
        eps = torch.finfo(dtype).eps
        if not torch.allclose(normed.float(), want, rtol=eps, atol=0, equal_nan=True):
            failures.append(f"{dtype}: {normed}, not {want}")
    return failures


def test_special_values(ranks: RanksFixture) -> None:
    report(failure for rank in ranks(2).run(special_values_job) for failure in rank)


def refusals() -> Iterator[Refusal]:
    op, x, weight = tpkernels.all_reduce_rms_norm, ones(4, 6), ones(6)
    pattern = r"x has shape \[\]; it must be \[..., N\], N at least 1"
    yield no(ValueError, pattern, op, ones(), weight)
    yield no(ValueError, r"x has shape \[4, 0\]; it must be", op, ones(4, 0), ones(0))
    yield no(ValueError, r"weight has shape \[5\], expected \[6\]", op, x, ones(5))
    yield no(ValueError, r"weight has shape \[1, 6\], expected \[6\]", op, x, ones(1, 6))
    yield no(TypeError, "weight is bfloat16; it must be float32", op, x, weight.bfloat16())
    pattern = "weight is float16; it must be bfloat16 or float32"
    yield no(TypeError, pattern, op, x.bfloat16(), weight.half())
    yield no(ValueError, r"residual has shape \[6\]", op, x, weight, residual=weight)
    yield no(TypeError, "residual is float16", op, x, weight, residual=x.half())
    for eps in (-1e-6, float("nan"), float("inf")):
        pattern = f"eps is {eps}; it must be finite and at least 0"
        yield no(ValueError, pattern, op, x, weight, eps=eps)
    yield no(NotImplementedError, "x has dtype int64; supported", op, x.long(), weight)
    yield no(ValueError, "unknown algorithm 'tree'", op, x, weight, algorithm="tree")
    pattern = "'pipelined' of all_reduce_rms_norm overlaps a matmul, and this op has none"
    yield no(NotImplementedError, pattern, op, x, weight, algorithm="pipelined")


@pytest.mark.parametrize("table", [refusals, matmul_refusals])
def test_refusals(ranks: RanksFixture, table: Callable[[], Iterator[Refusal]]) -> None:
    report(failure for rank in ranks(2).run(refusals_job, table) for failure in rank)


def mismatch_job(what: str) -> faults.Ending:
    """Ranks that disagree on what they must have in common."""
    x, weight, rank = torch.ones(4, 6), torch.ones(6), dist.get_rank()
    residual = x if what == "residual" and rank else None
    eps = 1e-5 if what == "eps" and rank else 1e-6
    with fresh_group() as group:
        return faults.ending_of(
            lambda: tpkernels.all_reduce_rms_norm(x, weight, group, residual=residual, eps=eps)
        )


@pytest.mark.parametrize("what", sweep(["eps", "residual"], 2))
def test_ranks_that_disagree(ranks: RanksFixture, what: str) -> None:
    for ending in ranks(2).run(mismatch_job, what):
        assert ending.error == "CollectiveMismatchError", ending
        assert "all_reduce_rms_norm([4, 6] float32" in ending.text and what in ending.text, ending
