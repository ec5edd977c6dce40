"""``matmul_all_reduce_rms_norm`` on real ranks against float64: sums of integers are exact,
everything else is within the derived bounds of support/reference.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.ops.test_bad_input import refusals_job
from tests.support.cases import (
    DTYPES,
    MATMUL_WAYS,
    QUICK_WORLDS,
    Case,
    RanksFixture,
    each,
)
from tests.support.ranked import fresh_group, report, run_cases
from tests.support.refusals import Refusal, no, ones, packable
from tests.support.tiers import sweep

OP = "matmul_all_reduce_rms_norm"
F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64


@pytest.mark.parametrize("world", QUICK_WORLDS)
def test_packed_weights(ranks: RanksFixture, world: int) -> None:
    case = Case(op=OP, shape=(24, 20), k=(33,), weight_layout="packed")
    run_cases(ranks, world, each(case, replace(case, biases=(F32,)), dtypes=packable()))


def bits_job() -> list[str]:
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
def test_the_bits_are_the_same(ranks: RanksFixture, world: int) -> None:
    report(failure for rank in ranks(world).run(bits_job) for failure in rank)


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


def refusals() -> Iterator[Refusal]:
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


def test_refusals(ranks: RanksFixture) -> None:
    report(failure for rank in ranks(2).run(refusals_job, refusals) for failure in rank)
