"""The reference of the tests: its bound holds, is tight, and rejects NaN."""

from __future__ import annotations

import pytest
import torch

from tpkernels.ops.reference import assignments, expect_sum, moe_combine, rms_norm

K, WORLD = 2048, 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_bound_of_a_sum_holds_and_is_tight(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, w = torch.randn(WORLD, 16, K).to(dtype), torch.randn(WORLD, K, 24).to(dtype)
    bias = torch.randn(24).to(dtype)
    expected = expect_sum(zip(x, w, strict=True), [bias, None], dtype=dtype, wire=dtype)
    partials = (x.float() @ w.float()).to(dtype)
    right = (partials.float().sum(0) + bias.float()).to(dtype)
    assert not expected.wrong(right).any() and 0 < expected.worst(right) <= 1
    # K roundings of the accumulator would give 0.03.
    assert expected.bound.median() < 0.02 * expected.exact.std()
    for change in (right - x[0, :, :1] * w[0, :1], right - bias, right + torch.nan):
        assert expected.wrong(change).float().mean() > 0.1 and expected.worst(change) > 1
    assert expected.worst(right[1:]) == expected.worst(right.double()) == float("inf")


def test_integers_must_fit_the_dtype() -> None:
    x, w = torch.ones(2, 257), torch.ones(257, 3)
    assert expect_sum([(x, w)], dtype=torch.float32, integers=True).bound.max() == 0
    with pytest.raises(ValueError, match=r"torch\.bfloat16 cannot represent the exact sums"):
        expect_sum([(x, w)], dtype=torch.bfloat16, integers=True)


def test_rows_are_normalised_and_combined() -> None:
    torch.manual_seed(2)
    total, weight = torch.randn(5, 64), torch.randn(64)
    normed = torch.nn.functional.rms_norm(total, [64], weight, 1e-3)
    expected = rms_norm(total, weight, 1e-3)
    assert not expected.wrong(normed).any() and expected.wrong(normed * (1 + 1e-5)).any()
    topk_ids = torch.tensor([[4, 0], [1, 4], [0, 2]])
    order, counts = assignments(topk_ids, 5, WORLD)
    assert [per_rank.tolist() for per_rank in order] == [[1, 4, 2, 5], [0, 3]]  # 3 and 2 experts
    assert [per_rank.tolist() for per_rank in counts] == [[2, 1, 1], [0, 2]]
    rows, weights = torch.randn(3, 2, 64), torch.randn(3, 2)
    combined = moe_combine(rows, weights, dtype=torch.float32)
    assert not combined.wrong((rows * weights[..., None]).sum(1)).any()
    assert combined.wrong(rows.sum(1)).all(1).any()
