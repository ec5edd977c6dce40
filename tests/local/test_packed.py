"""Packed weights: their memory is as documented, the weight comes back to the bit, products are
exact for integers, and what cannot be packed, or was not, is refused."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
from torch._subclasses import FakeTensorMode

import tpkernels
from tests.support.cases import PACKABLE
from tests.support.products import (
    amid_nan_bytes,
    assert_plain_bits,
    product,
    threads,
    within_rounding,
)
from tests.support.ranked import fresh_group, on_ranks, unlike
from tpkernels import _C
from tpkernels.local.matmul import local_matmul, new_product
from tpkernels.local.packed import is_packed, pack_integers
from tpkernels.ops import validation

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
COLUMNS = _C.calls.PANEL_COLUMNS
MOST = 150
SHAPES = [(1, 3), (2, 1), (3, 64), (17, 65), (32, 63), (33, 130), (40, 192)]


def in_panels(w: torch.Tensor) -> list[float]:
    """The elements of a packed weight in the order of its memory, element by element."""
    k, n = w.shape
    size = 4 // w.element_size()
    return [
        w[row, column].item()
        for begin in range(0, n, COLUMNS)
        for group in range(0, k, size)
        for column in range(begin, min(begin + COLUMNS, n))
        for row in range(group, min(group + size, k))
    ]


def amid_nan(packed: torch.Tensor) -> torch.Tensor:
    """A copy with NaN before and behind it in memory."""
    room = packed.new_full((packed.numel() + 2 * COLUMNS,), torch.nan)
    return room[COLUMNS:-COLUMNS].view(packed.shape).copy_(packed)


@pytest.mark.parametrize("dtype", PACKABLE, ids=str)
def test_the_order_of_the_elements(dtype: torch.dtype) -> None:
    for (k, n), layout in itertools.product(SHAPES, ("rows", "columns", "neither")):
        w = torch.randn(k, 2 * n).to(dtype)[:, ::2]
        w = {"rows": w.contiguous(), "columns": w.t().contiguous().t(), "neither": w}[layout]
        kept = w.clone()
        packed = tpkernels.pack(torch.nn.Parameter(w))
        groups = 1 if k % 2 and dtype != F32 else k * dtype.itemsize // 4
        assert packed.shape == (n, groups, k // groups) and packed.is_contiguous()
        assert not packed.requires_grad
        w.zero_()  # it has memory of its own
        assert packed.flatten().tolist() == in_panels(kept), (k, n, layout)
        back = tpkernels.unpack(copy.deepcopy(packed))
        assert torch.equal(back, kept) and back.t().is_contiguous()


def test_the_bias_is_added_before_rounding() -> None:
    w, out = tpkernels.pack(torch.ones(2, 3).bfloat16()), torch.empty(1, 3).bfloat16()
    # Even numbers are next to 256: 257 alone would be 256, and 257 + 1 is 258.
    local_matmul(torch.tensor([[256.0, 1.0]]).bfloat16(), w, out, torch.ones(3).bfloat16())
    assert (out == 258).all()
    # A float32 bias is not rounded to bfloat16 either, which would be 256 + 1, and so 256.
    local_matmul(torch.tensor([[256.0, 0.0]]).bfloat16(), w, out, torch.full((3,), 1.0001))
    assert (out == 258).all()


def test_what_cannot_be_packed() -> None:
    w = torch.ones(4, 3)
    for given, error, pattern in (
        (torch.ones(3), ValueError, r"w has shape \[3\]; it must be a matrix \[K, N\]"),
        (torch.ones(3, 0), ValueError, r"w has shape \[3, 0\]"),
        (tpkernels.pack(w), ValueError, r"shape \[3, 4, 1\] is already packed"),
        (w.to("meta"), NotImplementedError, "w is a torch.strided tensor on meta; only dense CPU"),
        (w.to_sparse(), NotImplementedError, "torch.sparse_coo tensor on cpu"),
        (
            w.double(),
            NotImplementedError,
            "w is float64, which cannot be packed; use the unpacked weight",
        ),
        (w.int(), NotImplementedError, "w has dtype int32; supported"),
    ):
        with pytest.raises(error, match=pattern):
            tpkernels.pack(given)
        if given.dtype == torch.float32:
            with pytest.raises(error, match=pattern):
                tpkernels.pack(given, torch.int8)
    with pytest.raises(
        TypeError, match="w is float32; it can be packed in float32 or int8, not in bfloat16"
    ):
        tpkernels.pack(w, BF16)
    with pytest.raises(NotImplementedError, match="for int8, K must be a multiple of 4"):
        tpkernels.pack(w[:3], torch.int8)
    with pytest.raises(ValueError, match="w has NaN or infinite elements"):
        tpkernels.pack(w / torch.tensor([1.0, 0.0, 1.0]), torch.int8)


def test_what_is_not_packed() -> None:
    even, odd = torch.ones(4, 128), torch.ones(3, 128)
    pattern = r"packed of \w+, shape \[.*\] and strides \[.*\] is neither a matrix nor a result of"
    for wrong in (
        torch.ones(4, 3, 4),
        even,
        torch.ones(()),
        tpkernels.pack(even).bfloat16(),
        tpkernels.pack(even.bfloat16()).float(),
        tpkernels.pack(odd).bfloat16(),
        tpkernels.pack(odd.bfloat16()).float(),
        tpkernels.pack(even)[:, 1:],
        tpkernels.pack(even)[::2],
        tpkernels.pack(even, torch.int8)[::2],
        tpkernels.pack(even, torch.int8)[:, :, 1:],
        tpkernels.pack(even, torch.int8)[:, :, :4].contiguous(),
    ):
        with pytest.raises(ValueError, match=pattern):
            tpkernels.unpack(wrong)


def test_exact_for_integers(unit: str) -> None:
    torch.manual_seed(0)
    for dtype, (k, n) in itertools.product(PACKABLE, SHAPES):
        # What this leaves in the memory of a thread is multiplied by nothing.
        ones = tpkernels.pack(torch.ones(99, 64).to(dtype))
        product(torch.full((MOST, 99), torch.nan).to(dtype), ones, F32)
        w, bias = torch.randint(-2, 3, (k, n)).to(dtype), torch.randint(-3, 4, (n,))
        wide = torch.full((MOST, k + 5), torch.nan, dtype=dtype)  # as memory around the operands
        wide[:, 2 : 2 + k] = torch.randint(-2, 3, (MOST, k))
        weight = amid_nan(tpkernels.pack(w))
        for rows, out_dtype, added in itertools.product(
            (1, 2, 5, 6, 7, 13, 17, MOST), {dtype, F32}, (None, bias.float())
        ):
            x = wide[:rows, 2 : 2 + k]
            got = product(x, weight, out_dtype, added)
            assert got is not None, (unit, dtype, k, n, rows)
            exact = x.float() @ w.float() + (0 if added is None else added)
            assert torch.equal(got.float(), exact), (dtype, k, n, rows, out_dtype)


@pytest.mark.parametrize("dtype", PACKABLE, ids=str)
def test_close_to_float64_and_the_same_beside_other_rows(dtype: torch.dtype, unit: str) -> None:
    torch.manual_seed(1)
    k, n = 2601, 70  # several chunks of K where rows take several passes
    w = torch.randn(k, n).to(dtype)
    weight = tpkernels.pack(w)
    x = torch.randn(MOST, k).to(dtype)
    whole = product(x, weight, F32)
    assert whole is not None
    assert within_rounding(whole, x, w)
    # With 2 threads, one of the 2 panels for each; with 3, each panel in parts of the rows.
    for rows, count in [((0, 1), 1), ((3, 7), 1), ((3, 10), 1), ((0, MOST), 2), ((0, MOST), 3)]:
        with threads(count):
            part = product(x[slice(*rows)], weight, F32)
        assert part is not None and torch.equal(part, whole[slice(*rows)]), (rows, count)


def test_float16_keeps_its_range(unit: str) -> None:
    """From the least subnormal to the largest power of two."""
    powers = torch.tensor([2.0**exponent for exponent in range(-24, 16)]).to(F16)
    w = torch.stack([powers, torch.zeros_like(powers), powers])
    for rows in (1, len(powers)):
        x = powers[:rows, None].expand(rows, 3).contiguous()
        got = product(x, tpkernels.pack(w), F32)
        assert got is not None and torch.equal(got, 2 * torch.outer(x[:, 0].float(), w[0].float()))


def test_what_is_refused() -> None:
    weight, x = tpkernels.pack(torch.randn(40, 12)), torch.randn(3, 40)
    assert product(x, weight, F32) is not None
    assert product(x[:, :39], weight, F32) is None
    assert product(x.bfloat16(), weight, F32) is None
    with pytest.raises(ValueError, match="out and bias do not fit the matmul"):
        product(x, weight, F32, columns=13)


def test_on_a_gpu_the_plain_weight_is_needed() -> None:
    with FakeTensorMode():
        x, w = torch.empty(2, 4, device="cuda"), torch.empty(3, 4, 1, device="cuda")
    with pytest.raises(
        NotImplementedError,
        match=r"w is packed and on .*, but packed weights are supported on CPUs only; pass the ",
    ):
        validation.weight(w, x, 4, "w")


@on_ranks(2)
def test_a_sliced_weight_is_refused_before_a_warm_call() -> list[str]:
    """One with the shape of a weight that the call has had; the group works afterwards."""
    with fresh_group() as group:
        x, packed = torch.ones(2, 4), tpkernels.pack(torch.ones(4, 256))
        wrong = tpkernels.pack(torch.ones(4, 512))[::2]
        call = functools.partial(tpkernels.matmul_all_reduce, x, group=group)
        results = [call(packed[:256]) for _ in range(3)]
        text = "ValueError: w of float32, shape [256, 4, 1] and strides [8, 1, 1] is neither"
        failures = unlike({text: lambda: call(wrong)})
        results.append(call(packed))
        assert all((result == 8).all() for result in results)
    return failures


@pytest.mark.parametrize("dtype", PACKABLE, ids=str)
def test_whole_panels_can_be_taken_apart(dtype: torch.dtype) -> None:
    w, x = torch.randint(-2, 3, (20, 200)).to(dtype), torch.randint(-2, 3, (3, 20)).to(dtype)
    packed = tpkernels.pack(w)
    for begin, end in ((0, 64), (64, 192), (128, 200)):
        assert is_packed(packed[begin:end])
        assert torch.equal(new_product(x, packed[begin:end]), x @ w[:, begin:end])


@pytest.mark.parametrize("dtype", PACKABLE, ids=str)
def test_strides_do_not_change_the_bits(dtype: torch.dtype) -> None:
    """Nor does a bias of zeros, or a profiler."""
    torch.manual_seed(4)
    factor, x = tpkernels.pack(torch.randn(2000, 70).to(dtype)), torch.randn(2000, 40).to(dtype).t()
    results = [new_product(x, factor), new_product(x, factor, torch.zeros(70, dtype=dtype))]
    with torch.profiler.profile():
        results.append(new_product(x, factor))
    assert all(torch.equal(each, new_product(x.contiguous(), factor)) for each in results)


# Weights of 8 bits.

INT8_SHAPES = [(4, 1), (128, 64), (96, 70), (320, 200), (2304, 130)]
GROUPS = {4: 4, 96: 32, 128: 128, 320: 64, 2304: 128}


def quantised(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The integers of x [M, K] as float64, and their scales, both [M, K]."""
    x = x.float().unflatten(1, (-1, group))
    largest = x.abs().amax(2, keepdim=True)
    # Divided: a number over a tensor is that times the tensor's reciprocal.
    factors = torch.tensor(127.0) / largest
    numbers = (x * factors.where(largest > 0, 0)).round()
    return numbers.flatten(1).double(), (largest / 127).expand_as(x).flatten(1).double()


def test_the_order_of_the_elements_of_8_bits() -> None:
    torch.manual_seed(0)
    for k, n in INT8_SHAPES:
        w = torch.randn(k, n).bfloat16()
        packed, group = tpkernels.pack(w, torch.int8), GROUPS[k]
        assert packed.shape == (n, k // group, group + 4) and packed.is_contiguous()
        numbers, scales = quantised(w.t(), group)
        assert torch.equal(
            tpkernels.unpack(packed).t().double(), (numbers * scales).float().double()
        )
        bytes_of = iter(packed.flatten().tolist())
        for begin in range(0, n, COLUMNS):
            columns = range(begin, min(begin + COLUMNS, n))
            for at in range(0, k, group):
                stored = torch.tensor([[next(bytes_of) for _ in range(4)] for _ in columns])
                want = scales[begin : columns.stop, at].float()
                assert torch.equal(stored.to(torch.int8).view(torch.float32).flatten(), want)
                for row in range(at, at + group, 4):
                    stored = torch.tensor([[next(bytes_of) for _ in range(4)] for _ in columns])
                    assert torch.equal(stored, numbers[begin : columns.stop, row : row + 4])


def test_products_of_8_bits_are_those_of_the_quantised_operands(unit: str) -> None:
    """Up to the rounding of sums in fp32; with the bits of the plain unit; and within the bound
    that docs/numerics.md gives."""
    torch.manual_seed(1)
    for (k, n), dtype in itertools.product(INT8_SHAPES, PACKABLE):
        w, x, bias = torch.randn(k, n), torch.randn(MOST, k).to(dtype), torch.randn(n)
        packed, group = tpkernels.pack(w, torch.int8), GROUPS[k]
        of_w, scales = (each.t() for each in quantised(w.t(), group))
        of_x, own_scales = quantised(x, group)
        whole = product(x, packed, F32, bias)
        assert whole is not None
        _C.host.use_vector_unit("plain")
        plain = product(x, packed, F32, bias)
        _C.host.use_vector_unit(unit)
        assert plain is not None and torch.equal(whole, plain)
        wanted = (of_x * own_scales) @ (of_w * scales) + bias
        sizes = (of_x.abs() * own_scales) @ (of_w.abs() * scales) + bias.abs()
        rounding = (k / group + 3) * torch.finfo(F32).eps * sizes
        assert ((whole - wanted).abs() <= rounding).all(), (k, n, dtype)
        true, half = x.double() @ w.double() + bias, 0.5001
        bound = half * (x.double().abs() @ scales + own_scales @ w.double().abs())
        bound += half**2 * own_scales @ scales + rounding
        assert ((whole - true).abs() <= bound).all(), (k, n, dtype)
        with threads(2):
            for rows in ((0, 1), (3, 10)):
                part = product(x[slice(*rows)], packed, F32, bias)
                assert part is not None and torch.equal(part, whole[slice(*rows)])
        got = product(x, packed, dtype, bias)
        assert got is not None and torch.equal(got, whole.to(dtype))


def test_products_of_8_bits_have_the_bits_of_the_plain_unit(unit: str) -> None:
    assert_plain_bits(unit, range(1, 71))


def test_integers_as_they_are(unit: str) -> None:
    """In groups of any size, -128 among them, with scales of either sign."""
    torch.manual_seed(2)
    for (k, n), group in itertools.product(((96, 70), (320, 200)), (4, 16, 32)):
        integers = torch.randint(-128, 128, (n, k), dtype=torch.int8)
        integers[:, ::5] = -128
        scales = 2.0 ** torch.randint(-3, 1, (n, k // group)) * (torch.randint(2, (n, 1)) * 2 - 1)
        packed = pack_integers(integers.t(), scales.t())
        assert packed.shape == (n, k // group, group + 4)
        w = (integers.unflatten(1, (-1, group)) * scales.unsqueeze(2)).flatten(1).t()
        assert torch.equal(tpkernels.unpack(packed), w)
        x = torch.randint(-127, 128, (MOST, k)).float()
        x[:, ::group] = 127  # so rows are quantised to what they are
        x[1] = -127
        y = product(x, packed, F32)
        assert y is not None and torch.equal(y.double(), x.double() @ w.double())
        x = torch.randn(MOST, k)
        (_, of_x), y = quantised(x, group), product(x, packed, F32)
        sizes = (x.abs() + of_x) @ w.abs().double()
        bound = 0.5001 * of_x @ w.abs().double() + (k / group + 3) * torch.finfo(F32).eps * sizes
        assert y is not None and ((y - x.double() @ w.double()).abs() <= bound).all()


def test_rows_of_8_bits_stay_apart(unit: str) -> None:
    """Those with NaN or infinity are NaN, or nothing, without changing others; and tiny ones are
    zero."""
    k, n = 256, 70
    packed = amid_nan_bytes(tpkernels.pack(torch.ones(k, n), torch.int8))
    for value, want in ((torch.nan, torch.nan), (torch.inf, torch.nan), (1e-35, 0.0)):
        x = torch.zeros(7, k)
        x[3, 200] = value
        x[4] = 1
        y = product(x, packed, F32)
        assert y is not None
        torch.testing.assert_close(y[3], torch.full((n,), want), equal_nan=True)
        assert (y[:3] == 0).all() and (y[4] - k).abs().max() < 1e-3 and (y[5:] == 0).all()
