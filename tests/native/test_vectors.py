"""The extension's arithmetic, in every vector unit that this processor has: conversions bit for bit
torch's, sums bit for bit the fp32 sum in order, rounded once."""

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
    """The vector unit in use."""
    before = _C.host.vector_unit()
    _C.host.use_vector_unit(request.param)
    yield request.param
    _C.host.use_vector_unit(before)


def total(
    partials: Sequence[torch.Tensor],
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    begin: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``_C.host.sum_partials`` on flat contiguous tensors."""
    count = partials[0].numel()
    around = torch.full((count + 40,), CANARY, dtype=out_dtype)
    inside = around[1 : 1 + count] if out is None else out  # at an odd element
    epilogue = Reduction(out_dtype, bias, residual).epilogue()
    addresses = [partial.data_ptr() for partial in partials]
    wire = CODES[partials[0].dtype]
    _C.host.sum_partials(inside.data_ptr(), addresses, wire, begin, count, epilogue)
    assert around[0] == CANARY and (around[1 + count :] == CANARY).all(), "wrote beyond the end"
    return inside


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal bits, zeros' signs included; a NaN equals any NaN."""
    assert got.dtype == want.dtype
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    same = (got.view(integer) == want.view(integer)) | (got.isnan() & want.isnan())
    at = (~same).nonzero().flatten()[:5]
    assert same.all(), f"at {at.tolist()}: got {got[at].tolist()}, expected {want[at].tolist()}"


def patterns(dtype: torch.dtype) -> torch.Tensor:
    """All values of a 16-bit dtype."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def hard_to_round(dtype: torch.dtype) -> torch.Tensor:
    """fp32 values at and next to the middle between any two neighbours of a 16-bit dtype, and where
    it overflows; special values; random bits."""
    finite = patterns(dtype)
    finite = finite[finite.isfinite() & (finite >= 0)].double().sort().values
    past = finite[-1] + (finite[-1] - finite[-2])  # where the next one would be
    neighbours = torch.cat([finite, past[None]])
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
def test_every_16_bit_value_is_widened_exactly_and_comes_back(dtype: torch.dtype) -> None:
    values = patterns(dtype)
    assert_same_bits(total([values], F32), values.float())
    assert_same_bits(total([values], dtype), values)
    assert_same_bits(total([values.float()], dtype), values)


@pytest.fixture
def flushing() -> Iterator[None]:
    """This thread's arithmetic takes subnormal numbers for zero."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    yield
    torch.set_flush_denormal(False)


def test_flushing_subnormals_changes_no_fp16_value(flushing: None) -> None:
    values = patterns(F16)
    torch.set_flush_denormal(False)
    want = values.float()
    torch.set_flush_denormal(True)
    for begin in range(17):  # every value in a vector, and in a tail
        few = values[begin : begin + 17]
        assert_same_bits(total([few], F32), want[begin : begin + 17])
    assert_same_bits(total([values], F32), want)
    assert_same_bits(total([values], F16), values)
    assert_same_bits(total([want], F16), values)


@pytest.mark.parametrize("dtype", (F32, *HALVES))
def test_flushing_subnormals_is_the_same_in_vectors_and_tails(
    flushing: None, dtype: torch.dtype
) -> None:
    tiny = torch.finfo(dtype).smallest_normal
    steps = torch.arange(-64, 65, dtype=torch.float64) / 32
    partials = [(steps * tiny).to(dtype), (steps.flip(0) * tiny / 8).to(dtype)]
    whole = total(partials, dtype)
    alone = [total([p[i : i + 1] for p in partials], dtype) for i in range(len(steps))]
    assert_same_bits(whole, torch.cat(alone))


@pytest.mark.parametrize("dtype", HALVES)
def test_fp32_is_rounded_to_nearest_even(dtype: torch.dtype) -> None:
    values = hard_to_round(dtype)
    want = values.to(dtype)
    for at in (0, 1, values.numel() % 16 + 1):  # every value in a vector, and in a tail
        assert_same_bits(total([values[at:]], dtype), want[at:])
    few = values[:: values.numel() // 2000]
    for i in range(len(few)):
        assert_same_bits(total([few[i : i + 1]], dtype), few[i : i + 1].to(dtype))


def random(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Contiguous, at an odd element; sizes so different that the order of a sum matters."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count + 1, generator=generator, dtype=F64)
    size = 10.0 ** torch.randint(-3, 3, (count + 1,), generator=generator)
    return (values * size).to(dtype)[1:]


def in_order(terms: Sequence[torch.Tensor], out_dtype: torch.dtype) -> torch.Tensor:
    wide = F64 if out_dtype == F64 else F32
    return functools.reduce(torch.add, [term.to(wide) for term in terms]).to(out_dtype)


@pytest.mark.parametrize("wire", [F32, F16, BF16, F64])
def test_sums_are_taken_in_order_and_rounded_once(wire: torch.dtype) -> None:
    for count, world in itertools.product((*COUNTS, 5000), range(1, 6)):
        partials = [random(count, wire, rank) for rank in range(world)]
        for out_dtype in (F64,) if wire == F64 else (F32, F16, BF16):
            assert_same_bits(total(partials, out_dtype), in_order(partials, out_dtype))


NARROW = (F32, F16, BF16)


@pytest.mark.parametrize("wire", [*NARROW, F64])
def test_bias_and_residual_at_odd_places(wire: torch.dtype) -> None:
    results, residuals = (NARROW, (None, *NARROW)) if wire != F64 else ((F64,), (None, F64))
    for count, columns, out_dtype, residual_dtype in itertools.product(
        COUNTS, (1, 13, 2049), results, residuals
    ):
        begin = 5 * columns // 2 + 1  # in the midst of a row
        partials = [random(count, wire, rank) for rank in range(2)]
        bias = random(columns, F64 if wire == F64 else F32, 8)
        spread = bias[(begin + torch.arange(count)) % columns]
        residual = None if residual_dtype is None else random(count, residual_dtype, 9)
        extras = [spread] if residual is None else [spread, residual]
        got = total(partials, out_dtype, bias, residual, begin)
        assert_same_bits(got, in_order([*partials, *extras], out_dtype))
        if residual is not None:
            got = total(partials, out_dtype, None, residual, begin)
            assert_same_bits(got, in_order([*partials, residual], out_dtype))


@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64])
def test_the_result_may_replace_a_partial(dtype: torch.dtype) -> None:
    for count, own in itertools.product(COUNTS, range(3)):
        partials = [random(count, dtype, rank) for rank in range(3)]
        want = in_order(partials, dtype)
        assert_same_bits(total(partials, dtype, out=partials[own]), want)
        partials = [random(count, dtype, rank) for rank in range(3)]
        residual = random(count, dtype, 9)
        want = in_order([*partials, residual], dtype)
        assert_same_bits(total(partials, dtype, None, residual, out=partials[own]), want)


def test_infinities_and_nan_pass_through() -> None:
    inf = torch.inf
    left = torch.tensor([inf, inf, -inf, 1.0, torch.nan, 3e38] * 7)
    right = torch.tensor([1.0, -inf, -inf, torch.nan, 1.0, 3e38] * 7)
    for dtype, out_dtype in itertools.product((F32, F16, BF16), repeat=2):
        partials = [left.to(dtype), right.to(dtype)]
        assert_same_bits(total(partials, out_dtype), in_order(partials, out_dtype))


def test_an_unknown_unit_is_refused(unit: str) -> None:
    with pytest.raises(ValueError, match=r"'mmx'.*choose from plain"):
        _C.host.use_vector_unit("mmx")
    assert _C.host.vector_unit() == unit and _C.host.vector_units()[0] == "plain"
