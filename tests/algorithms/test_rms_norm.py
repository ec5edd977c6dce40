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


def by_torch(launches: list[str]) -> bool:
    """Whether torch normalises: by what, and in how many launches, differs by its version."""
    return bool(launches) and not {A2A, AG, AR, SUM, "rms_norm"} & set(launches)


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
    """Torch's for the vendor's sum; ours where bits are promised."""
    found = queue_of(f"{op}_rms_norm", VENDOR, make).launches
    assert found[: len(vendor)] == vendor and by_torch(found[len(vendor) :])
    assert queue_of(f"{op}_rms_norm", ORDERED, make).launches == [*ordered, "rms_norm"]


def test_torch_normalises_rows_that_are_no_whole_vectors() -> None:
    def make() -> dict[str, Any]:
        return {"x": fake(64, 33), "weight": fake(33)}

    found = queue_of(f"{AR}_rms_norm", ORDERED, make).launches
    assert found[:3] == [A2A, SUM, AG] and by_torch(found[3:])
