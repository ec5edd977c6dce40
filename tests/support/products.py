"""Products by the extension, and what their rounding may amount to."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import tpkernels
from tpkernels import _C
from tpkernels.local.packed import columns_of
from tpkernels.ops.reference import summed

FILLER = 77  # around what is read and written, and in what is neither
COLUMNS = _C.calls.PANEL_COLUMNS
INT8_GROUPS = (128, 64, 32, 16, 8, 4)  # of K


def product(
    x: torch.Tensor,
    w: Any,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    columns: int | None = None,
) -> torch.Tensor | None:
    """``x @ w + bias`` with canaries around it; None where the extension leaves it to torch.
    ``columns``: of the result, if not those of w."""
    n = columns_of(w) if columns is None else columns
    around = torch.full((x.shape[0] + 2, n + 9), FILLER, dtype=dtype)
    inside = around[1:-1, 1 : 1 + n]
    took = _C.calls.multiply(x, w, inside, bias, (x.shape[0], 0))
    result = inside.clone()
    inside.fill_(FILLER)
    assert (around == FILLER).all(), "wrote beyond the result"
    assert took or (result == FILLER).all()
    return result if took else None


def within_rounding(
    got: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None
) -> bool:
    """Whether a product is as close to the exact one as sums in fp32, rounded once, must be."""
    want = summed([(x, w)], [bias], dtype=got.dtype, unfused=False)
    return not want.wrong(got).any()


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def amid_nan_bytes(packed: torch.Tensor) -> torch.Tensor:
    """A copy of a weight of 8 bits with bytes of NaN before and behind it in memory."""
    room = packed.new_full((packed.numel() + 2 * COLUMNS,), -1)
    return room[COLUMNS:-COLUMNS].view(packed.shape).copy_(packed)


def assert_plain_bits(unit: str, rows: Sequence[int]) -> None:
    """Assert that products of so many rows with weights of 8 bits, amid NaN, have the bits of the
    plain unit's, whatever the groups and columns."""
    torch.manual_seed(2)
    for group, n in itertools.product(INT8_GROUPS, (1, COLUMNS, COLUMNS + 6)):
        packed = amid_nan_bytes(tpkernels.pack(torch.randn(3 * group, n), torch.int8))
        assert packed.shape[2] == group + 4
        x = torch.full((max(rows) + 2, 3 * group + 9), torch.nan)
        x[1:-1, 4:-5] = torch.randn(max(rows), 3 * group)
        for count in rows:
            results = []
            for each in ("plain", unit):
                _C.host.use_vector_unit(each)
                results.append(product(x[1 : 1 + count, 4:-5], packed, torch.float32))
            assert results[0] is not None and results[1] is not None
            assert torch.equal(*results), (unit, group, n, count)
