"""The operands of qualification checks, and the results that the ops must return."""

from __future__ import annotations

import pytest
import torch

from tpkernels.qualification.checks import CheckedCall, compare_results


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_sum_of_integers_fits_the_dtype(op: str, dtype: torch.dtype) -> None:
    """Otherwise a right result would be rounded, and differ from the exact result."""
    call = CheckedCall(op, (192, 160, 8192), dtype, exact=True, delayed=False, seed=1)
    operands = call.operands(1, 8, torch.device("cpu"))
    expected = operands.expected()[0].exact
    assert torch.equal(expected.to(dtype).double(), expected)
    assert expected.std() > 8 and (expected == 0).double().mean() < 0.1  # but the values vary
    assert all((factor != 0).any() for factor in operands.tensor_args)


def test_operands_of_a_rank_add_up() -> None:
    """The partials of all ranks add up to the shards that the ranks expect."""
    call = CheckedCall("matmul_reduce_scatter", (13, 16, 24), torch.float32, True, False, seed=2)
    operands = [call.operands(rank, 4, torch.device("cpu")) for rank in range(4)]
    total = sum(x.double() @ w.double() for x, w in (local.tensor_args for local in operands))
    residual = torch.cat([local.options["residual"] for local in operands])
    assert torch.equal(
        torch.cat([local.expected()[0].exact for local in operands]), total + residual
    )


@pytest.mark.parametrize("op", ["moe_combine", "all_reduce", "matmul_reduce_scatter"])
def test_a_result_that_is_rounded_once_is_right(op: str) -> None:
    """Includes subnormal float16 values, which are a few in a million."""
    for seed in range(12):
        call = CheckedCall(op, (256, 1536, 1), torch.float16, False, False, seed)
        operands = call.operands(0, 2, torch.device("cpu"))
        results = [output.exact.to(call.dtype) for output in operands.expected()]
        failure = compare_results(operands, results, [])
        assert failure is None, failure
