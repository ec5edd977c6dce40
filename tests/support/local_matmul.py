"""Matmuls of the extension, and the bound of their rounding errors."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import tpkernels
from tpkernels import _C
from tpkernels.local.packed import weight_columns
from tpkernels.ops.reference import expect_sum

FILLER = 77  # canary around inputs and outputs, and initial value of outputs
COLUMNS = _C.calls.PANEL_COLUMNS
INT8_GROUPS = (128, 64, 32, 16, 8, 4)  # elements of K per scale


def multiply_checked(
    x: torch.Tensor,
    w: Any,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    columns: int | None = None,
) -> torch.Tensor | None:
    """Compute ``x @ w + bias`` between canaries. None if the extension leaves the matmul to torch.

    ``columns``: columns of the result, if they differ from w.
    """
    n = weight_columns(w) if columns is None else columns
    padded = torch.full((x.shape[0] + 2, n + 9), FILLER, dtype=dtype)
    out = padded[1:-1, 1 : 1 + n]
    handled = _C.calls.multiply(x, w, out, bias, (x.shape[0], 0))
    result = out.clone()
    out.fill_(FILLER)
    assert (padded == FILLER).all(), "wrote beyond the result"
    assert handled or (result == FILLER).all()
    return result if handled else None


def is_within_rounding(
    got: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None
) -> bool:
    """Return True if the error is at most that of fp32 sums that are rounded once."""
    want = expect_sum([(x, w)], [bias], dtype=got.dtype, unfused=False)
    return not want.wrong(got).any()


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    previous = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


def surround_with_nan(packed: torch.Tensor) -> torch.Tensor:
    """Copy an int8 weight into memory with NaN bytes before and after it."""
    buffer = packed.new_full((packed.numel() + 2 * COLUMNS,), -1)
    return buffer[COLUMNS:-COLUMNS].view(packed.shape).copy_(packed)


def assert_matches_plain_unit(unit: str, rows: Sequence[int]) -> None:
    """Assert that a vector unit and the plain unit are bitwise identical.

    Covers int8 weights amid NaN, with all group sizes, several widths, and these row counts.
    """
    torch.manual_seed(2)
    for group, n in itertools.product(INT8_GROUPS, (1, COLUMNS, COLUMNS + 6)):
        packed = surround_with_nan(tpkernels.pack(torch.randn(3 * group, n), torch.int8))
        assert packed.shape[2] == group + 4
        x = torch.full((max(rows) + 2, 3 * group + 9), torch.nan)
        x[1:-1, 4:-5] = torch.randn(max(rows), 3 * group)
        for count in rows:
            results = []
            for vector_unit in ("plain", unit):
                _C.host.use_vector_unit(vector_unit)
                results.append(multiply_checked(x[1 : 1 + count, 4:-5], packed, torch.float32))
            assert results[0] is not None and results[1] is not None
            assert torch.equal(*results), (unit, group, n, count)
