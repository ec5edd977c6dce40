"""Arithmetic of the extension with every vector unit of this processor. Conversions match torch
bitwise; sums match the fp32 sum in order, rounded once."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch

from tpkernels import _C
from tpkernels.algorithms.reduction import Reduction
from tpkernels.common.dtypes import CODES

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
HALVES = (F16, BF16)
COUNTS = (0, 1, 7, 8, 9, 15, 16, 17, 31, 33, 65, 2047, 2049)
CANARY = 77


@pytest.fixture(params=_C.host.vector_units(), autouse=True)
def unit(request: pytest.FixtureRequest) -> Iterator[str]:
    """Select a vector unit and return its name."""
    previous_unit = _C.host.vector_unit()
    _C.host.use_vector_unit(request.param)
    yield request.param
    _C.host.use_vector_unit(previous_unit)


def sum_partials(
    partials: Sequence[torch.Tensor],
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    begin: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Call ``_C.host.sum_partials`` on flat contiguous tensors and check the surrounding memory."""
    count = partials[0].numel()
    padded = torch.full((count + 40,), CANARY, dtype=out_dtype)
    result = padded[1 : 1 + count] if out is None else out  # starts at an odd element
    epilogue = Reduction(out_dtype, bias, residual).epilogue()
    addresses = [partial.data_ptr() for partial in partials]
    wire = CODES[partials[0].dtype]
    _C.host.sum_partials(result.data_ptr(), addresses, wire, begin, count, epilogue)
    assert padded[0] == CANARY and (padded[1 + count :] == CANARY).all(), "wrote beyond the end"
    return result


def assert_bitwise_equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare bits, including the sign of zeros; any NaN equals any NaN."""
    assert got.dtype == expected.dtype
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    same = (got.view(integer) == expected.view(integer)) | (got.isnan() & expected.isnan())
    index = (~same).nonzero().flatten()[:5]
    assert same.all(), (
        f"at {index.tolist()}: got {got[index].tolist()}, expected {expected[index].tolist()}"
    )


def all_values(dtype: torch.dtype) -> torch.Tensor:
    """Return all values of a 16-bit dtype."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def rounding_cases(dtype: torch.dtype) -> torch.Tensor:
    """Return fp32 values that are hard to round to a 16-bit dtype.

    They are the midpoints between neighbouring values and the floats next to them, values around
    overflow, special values and random bits.
    """
    finite = all_values(dtype)
    finite = finite[finite.isfinite() & (finite >= 0)].double().sort().values
    overflow = finite[-1] + (finite[-1] - finite[-2])  # the value that would follow
    neighbours = torch.cat([finite, overflow[None]])
    middle = ((neighbours[:-1] + neighbours[1:]) / 2).float()
    up = torch.nextafter(middle, torch.tensor(torch.inf))
    down = torch.nextafter(middle, torch.tensor(-torch.inf))
    tiny, huge = torch.finfo(F32).smallest_normal, torch.finfo(F32).max
    special = torch.tensor(
        [0.0, tiny, tiny / 2, 1e-45, 1.0, 65504, 65519.996, 65520, huge, torch.inf]
    )
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=generator, dtype=torch.int64)
    values = torch.cat([middle, up, down, special, torch.tensor([torch.nan])])
    return torch.cat([values, -values, bits.to(torch.int32).view(F32)])


@pytest.mark.parametrize("dtype", HALVES)
def test_every_16_bit_value_survives_conversion(dtype: torch.dtype) -> None:
    values = all_values(dtype)
    assert_bitwise_equal(sum_partials([values], F32), values.float())
    assert_bitwise_equal(sum_partials([values], dtype), values)
    assert_bitwise_equal(sum_partials([values.float()], dtype), values)


@pytest.fixture
def flush_subnormals() -> Iterator[None]:
    """Flush subnormal numbers to zero in the arithmetic of this thread."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    yield
    torch.set_flush_denormal(False)


def test_flushing_subnormals_changes_no_fp16_value(flush_subnormals: None) -> None:
    values = all_values(F16)
    torch.set_flush_denormal(False)
    expected = values.float()
    torch.set_flush_denormal(True)
    for begin in range(17):  # each value in a full vector and in a tail
        chunk = values[begin : begin + 17]
        assert_bitwise_equal(sum_partials([chunk], F32), expected[begin : begin + 17])
    assert_bitwise_equal(sum_partials([values], F32), expected)
    assert_bitwise_equal(sum_partials([values], F16), values)
    assert_bitwise_equal(sum_partials([expected], F16), values)


@pytest.mark.parametrize("dtype", (F32, *HALVES))
def test_flushing_subnormals_is_the_same_in_vectors_and_tails(
    flush_subnormals: None, dtype: torch.dtype
) -> None:
    tiny = torch.finfo(dtype).smallest_normal
    steps = torch.arange(-64, 65, dtype=torch.float64) / 32
    partials = [(steps * tiny).to(dtype), (steps.flip(0) * tiny / 8).to(dtype)]
    together = sum_partials(partials, dtype)
    single = [sum_partials([p[i : i + 1] for p in partials], dtype) for i in range(len(steps))]
    assert_bitwise_equal(together, torch.cat(single))


@pytest.mark.parametrize("dtype", HALVES)
def test_fp32_is_rounded_to_nearest_even(dtype: torch.dtype) -> None:
    values = rounding_cases(dtype)
    expected = values.to(dtype)
    for start in (0, 1, values.numel() % 16 + 1):  # each value in a full vector and in a tail
        assert_bitwise_equal(sum_partials([values[start:]], dtype), expected[start:])
    subset = values[:: values.numel() // 2000]
    for i in range(len(subset)):
        assert_bitwise_equal(sum_partials([subset[i : i + 1]], dtype), subset[i : i + 1].to(dtype))


def random_values(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return contiguous values at an odd element. The magnitudes make the order of a sum matter."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count + 1, generator=generator, dtype=F64)
    size = 10.0 ** torch.randint(-3, 3, (count + 1,), generator=generator)
    return (values * size).to(dtype)[1:]


def sum_in_order(terms: Sequence[torch.Tensor], out_dtype: torch.dtype) -> torch.Tensor:
    acc_dtype = F64 if out_dtype == F64 else F32
    return functools.reduce(torch.add, [term.to(acc_dtype) for term in terms]).to(out_dtype)


@pytest.mark.parametrize("wire", [F32, F16, BF16, F64])
def test_sums_are_taken_in_order_and_rounded_once(wire: torch.dtype) -> None:
    for count, world in itertools.product((*COUNTS, 5000), range(1, 6)):
        partials = [random_values(count, wire, rank) for rank in range(world)]
        for out_dtype in (F64,) if wire == F64 else (F32, F16, BF16):
            assert_bitwise_equal(
                sum_partials(partials, out_dtype), sum_in_order(partials, out_dtype)
            )


NARROW = (F32, F16, BF16)


@pytest.mark.parametrize("wire", [*NARROW, F64])
def test_bias_and_residual_at_odd_offsets(wire: torch.dtype) -> None:
    results, residuals = (NARROW, (None, *NARROW)) if wire != F64 else ((F64,), (None, F64))
    for count, columns, out_dtype, residual_dtype in itertools.product(
        COUNTS, (1, 13, 2049), results, residuals
    ):
        begin = 5 * columns // 2 + 1  # in the middle of a row
        partials = [random_values(count, wire, rank) for rank in range(2)]
        bias = random_values(columns, F64 if wire == F64 else F32, 8)
        expanded_bias = bias[(begin + torch.arange(count)) % columns]
        residual = None if residual_dtype is None else random_values(count, residual_dtype, 9)
        extras = [expanded_bias] if residual is None else [expanded_bias, residual]
        got = sum_partials(partials, out_dtype, bias, residual, begin)
        assert_bitwise_equal(got, sum_in_order([*partials, *extras], out_dtype))
        if residual is not None:
            got = sum_partials(partials, out_dtype, None, residual, begin)
            assert_bitwise_equal(got, sum_in_order([*partials, residual], out_dtype))


@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64])
def test_the_result_may_replace_a_partial(dtype: torch.dtype) -> None:
    for count, index in itertools.product(COUNTS, range(3)):
        partials = [random_values(count, dtype, rank) for rank in range(3)]
        expected = sum_in_order(partials, dtype)
        assert_bitwise_equal(sum_partials(partials, dtype, out=partials[index]), expected)
        partials = [random_values(count, dtype, rank) for rank in range(3)]
        residual = random_values(count, dtype, 9)
        expected = sum_in_order([*partials, residual], dtype)
        assert_bitwise_equal(
            sum_partials(partials, dtype, None, residual, out=partials[index]), expected
        )


def test_infinities_and_nan_pass_through() -> None:
    inf = torch.inf
    left = torch.tensor([inf, inf, -inf, 1.0, torch.nan, 3e38] * 7)
    right = torch.tensor([1.0, -inf, -inf, torch.nan, 1.0, 3e38] * 7)
    for dtype, out_dtype in itertools.product((F32, F16, BF16), repeat=2):
        partials = [left.to(dtype), right.to(dtype)]
        assert_bitwise_equal(sum_partials(partials, out_dtype), sum_in_order(partials, out_dtype))


def test_an_unknown_unit_is_refused(unit: str) -> None:
    with pytest.raises(ValueError, match=r"'mmx'.*choose from plain"):
        _C.host.use_vector_unit("mmx")
    assert _C.host.vector_unit() == unit and _C.host.vector_units()[0] == "plain"
