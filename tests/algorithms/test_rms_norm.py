"""What `unfused` queues on a GPU to normalise the rows of a sum; the tensors are fake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.algorithms.test_unfused_cuda import (
    A2A,
    AG,
    AR,
    MAR,
    SUM,
    bias,
    factors,
    fake,
    queue_of,
    residual,
)
from tpkernels.planning.problem import ORDERED, VENDOR


@pytest.mark.parametrize(
    ("op", "make", "vendor", "ordered"),
    [
        (AR, lambda: {"x": fake(64, 32), "weight": fake(32)}, ["copy_", AR], [A2A, SUM, AG]),
        (
            AR,
            lambda: {"x": fake(64, 32), "weight": fake(32), "residual": fake(64, 32)},
            ["copy_", AR, SUM],
            [A2A, SUM, AG],
        ),
        (
            MAR,
            factors(norm_weight=bias(), residual=residual(64)),
            ["mm", AR, SUM],
            ["mm", A2A, SUM, AG],
        ),
    ],
)
def test_a_normalisation_follows_the_sum(
    op: str, make: Callable[[], dict[str, Any]], vendor: list[str], ordered: list[str]
) -> None:
    """Torch's for the vendor's sum; ours where bits are promised. What torch launches for it is not
    counted: on fake tensors it is made of several."""
    found = queue_of(f"{op}_rms_norm", VENDOR, make).launches
    assert found[: len(vendor)] == vendor
    assert "mean" in found[len(vendor) :] and SUM not in found[len(vendor) :]
    assert queue_of(f"{op}_rms_norm", ORDERED, make).launches == [*ordered, "rms_norm"]


def test_torch_normalises_rows_that_are_no_whole_vectors() -> None:
    def make() -> dict[str, Any]:
        return {"x": fake(64, 33), "weight": fake(33)}

    found = queue_of(f"{AR}_rms_norm", ORDERED, make).launches
    assert found[:3] == [A2A, SUM, AG] and "mean" in found[3:]
