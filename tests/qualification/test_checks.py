"""The data by which variants are checked: what the ops must return of them."""

from __future__ import annotations

import pytest
import torch

from tpkernels.qualification.checks import CheckedCall, compared


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_sum_of_integers_fits_the_dtype(op: str, dtype: torch.dtype) -> None:
    """Else a right result, which is rounded, would differ from the exact one."""
    call = CheckedCall(op, (192, 160, 8192), dtype, exact=True, delayed=False, seed=1)
    operands = call.operands(1, 8, torch.device("cpu"))
    wanted = operands.expected()[0].exact
    assert torch.equal(wanted.to(dtype).double(), wanted)
    assert wanted.std() > 8 and (wanted == 0).double().mean() < 0.1  # and yet they say much
    assert all((factor != 0).any() for factor in operands.factors)


def test_operands_of_a_rank_add_up() -> None:
    """What each rank puts in gives, together, what each expects."""
    call = CheckedCall("matmul_reduce_scatter", (13, 16, 24), torch.float32, True, False, seed=2)
    every = [call.operands(rank, 4, torch.device("cpu")) for rank in range(4)]
    total = sum(x.double() @ w.double() for x, w in (one.factors for one in every))
    residual = torch.cat([one.options["residual"] for one in every])
    assert torch.equal(torch.cat([one.expected()[0].exact for one in every]), total + residual)


@pytest.mark.parametrize("op", ["moe_combine", "all_reduce", "matmul_reduce_scatter"])
def test_a_result_that_is_rounded_once_is_right(op: str) -> None:
    """Subnormal float16 numbers, too. Of these there are a few in a million."""
    for seed in range(12):
        call = CheckedCall(op, (256, 1536, 1), torch.float16, False, False, seed)
        operands = call.operands(0, 2, torch.device("cpu"))
        results = [want.exact.to(call.dtype) for want in operands.expected()]
        failure = compared(operands, results, [])
        assert failure is None, failure
