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
    """What torch launches for it is not counted: on fake tensors it is made of several."""
    for numerics, launches in ((VENDOR, vendor), (ORDERED, ordered)):
        found = queue_of(f"{op}_rms_norm", numerics, make).launches
        assert found[: len(launches)] == launches
        assert "mean" in found[len(launches) :] and SUM not in found[len(launches) :]
