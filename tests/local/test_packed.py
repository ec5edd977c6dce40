"""Packed weights: their memory layout, lossless unpacking, exact integer matmuls, and refusals."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
from torch._subclasses import FakeTensorMode

import tpkernels
from tests.support.cases import PACKABLE
from tests.support.local_matmul import (
    assert_matches_plain_unit,
    is_within_rounding,
    multiply_checked,
    surround_with_nan,
    threads,
)
from tests.support.ranked import find_unexpected_messages, fresh_group, on_ranks
from tpkernels import _C
from tpkernels.local.matmul import allocating_matmul, local_matmul
from tpkernels.local.packed import is_packed, pack_integers
from tpkernels.ops import validation

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
COLUMNS = _C.calls.PANEL_COLUMNS
MAX_ROWS = 150
SHAPES = [(1, 3), (2, 1), (3, 64), (17, 65), (32, 63), (33, 130), (40, 192)]


def in_panels(w: torch.Tensor) -> list[float]:
    """Return the elements of a packed weight in memory order."""
    k, n = w.shape
    size = 4 // w.element_size()
    return [
        w[row, column].item()
        for begin in range(0, n, COLUMNS)
        for group in range(0, k, size)
        for column in range(begin, min(begin + COLUMNS, n))
        for row in range(group, min(group + size, k))
    ]


def surround_floats_with_nan(packed: torch.Tensor) -> torch.Tensor:
    """Return a copy that NaN surrounds in memory."""
    padded = packed.new_full((packed.numel() + 2 * COLUMNS,), torch.nan)
    return padded[COLUMNS:-COLUMNS].view(packed.shape).copy_(packed)


@pytest.mark.parametrize("dtype", PACKABLE, ids=str)
def test_the_order_of_the_elements(dtype: torch.dtype) -> None:
    for (k, n), layout in itertools.product(SHAPES, ("rows", "columns", "neither")):
        w = torch.randn(k, 2 * n).to(dtype)[:, ::2]
        w = {"rows": w.contiguous(), "columns": w.t().contiguous().t(), "neither": w}[layout]
        saved = w.clone()
        packed = tpkernels.pack(torch.nn.Parameter(w))
        groups = 1 if k % 2 and dtype != F32 else k * dtype.itemsize // 4
        assert packed.shape == (n, groups, k // groups) and packed.is_contiguous()
        assert not packed.requires_grad
        w.zero_()  # the packed weight has separate memory
        assert packed.flatten().tolist() == in_panels(saved), (k, n, layout)
        unpacked = tpkernels.unpack(copy.deepcopy(packed))
        assert torch.equal(unpacked, saved) and unpacked.t().is_contiguous()


def test_the_bias_is_added_before_rounding() -> None:
    w, out = tpkernels.pack(torch.ones(2, 3).bfloat16()), torch.empty(1, 3).bfloat16()
    # From 256 on, bfloat16 holds only even numbers: 257 would round to 256, but 257 + 1 is 258.
    local_matmul(torch.tensor([[256.0, 1.0]]).bfloat16(), w, out, torch.ones(3).bfloat16())
    assert (out == 258).all()
    # A float32 bias is not rounded to bfloat16 first: 256 + 1 would round to 256.
    local_matmul(torch.tensor([[256.0, 0.0]]).bfloat16(), w, out, torch.full((3,), 1.0001))
    assert (out == 258).all()


def test_weights_that_cannot_be_packed() -> None:
    w = torch.ones(4, 3)
    for weight, error, pattern in (
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
            tpkernels.pack(weight)
        if weight.dtype == torch.float32:
            with pytest.raises(error, match=pattern):
                tpkernels.pack(weight, torch.int8)
    with pytest.raises(
        TypeError, match="w is float32; it can be packed in float32 or int8, not in bfloat16"
    ):
        tpkernels.pack(w, BF16)
    with pytest.raises(NotImplementedError, match="for int8, K must be a multiple of 4"):
        tpkernels.pack(w[:3], torch.int8)
    with pytest.raises(ValueError, match="w has NaN or infinite elements"):
        tpkernels.pack(w / torch.tensor([1.0, 0.0, 1.0]), torch.int8)


def test_unpack_refuses_other_tensors() -> None:
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
        # Leaves NaN in the buffers of the thread, which later calls must not read.
        ones = tpkernels.pack(torch.ones(99, 64).to(dtype))
        multiply_checked(torch.full((MAX_ROWS, 99), torch.nan).to(dtype), ones, F32)
        w, bias = torch.randint(-2, 3, (k, n)).to(dtype), torch.randint(-3, 4, (n,))
        padded = torch.full((MAX_ROWS, k + 5), torch.nan, dtype=dtype)  # NaN surrounds the operands
        padded[:, 2 : 2 + k] = torch.randint(-2, 3, (MAX_ROWS, k))
        weight = surround_floats_with_nan(tpkernels.pack(w))
        for rows, out_dtype, added in itertools.product(
            (1, 2, 5, 6, 7, 13, 17, MAX_ROWS), {dtype, F32}, (None, bias.float())
        ):
            x = padded[:rows, 2 : 2 + k]
            result = multiply_checked(x, weight, out_dtype, added)
            assert result is not None, (unit, dtype, k, n, rows)
            exact = x.float() @ w.float() + (0 if added is None else added)
            assert torch.equal(result.float(), exact), (dtype, k, n, rows, out_dtype)


@pytest.mark.parametrize("dtype", PACKABLE, ids=str)
def test_close_to_float64_and_independent_of_other_rows(dtype: torch.dtype, unit: str) -> None:
    torch.manual_seed(1)
    k, n = 2601, 70  # several chunks of K if rows need several passes
    w = torch.randn(k, n).to(dtype)
    weight = tpkernels.pack(w)
    x = torch.randn(MAX_ROWS, k).to(dtype)
    full = multiply_checked(x, weight, F32)
    assert full is not None
    assert is_within_rounding(full, x, w)
    # 2 threads compute a panel each; 3 threads split both panels by rows.
    for rows, count in [
        ((0, 1), 1),
        ((3, 7), 1),
        ((3, 10), 1),
        ((0, MAX_ROWS), 2),
        ((0, MAX_ROWS), 3),
    ]:
        with threads(count):
            chunk = multiply_checked(x[slice(*rows)], weight, F32)
        assert chunk is not None and torch.equal(chunk, full[slice(*rows)]), (rows, count)


def test_float16_keeps_its_range(unit: str) -> None:
    """Elements range from the smallest subnormal to the largest power of two."""
    powers = torch.tensor([2.0**exponent for exponent in range(-24, 16)]).to(F16)
    w = torch.stack([powers, torch.zeros_like(powers), powers])
    for rows in (1, len(powers)):
        x = powers[:rows, None].expand(rows, 3).contiguous()
        result = multiply_checked(x, tpkernels.pack(w), F32)
        assert result is not None and torch.equal(
            result, 2 * torch.outer(x[:, 0].float(), w[0].float())
        )


def test_refusals() -> None:
    weight, x = tpkernels.pack(torch.randn(40, 12)), torch.randn(3, 40)
    assert multiply_checked(x, weight, F32) is not None
    assert multiply_checked(x[:, :39], weight, F32) is None
    assert multiply_checked(x.bfloat16(), weight, F32) is None
    with pytest.raises(ValueError, match="out and bias do not fit the matmul"):
        multiply_checked(x, weight, F32, columns=13)


def test_packed_weights_on_a_gpu_are_refused() -> None:
    with FakeTensorMode():
        x, w = torch.empty(2, 4, device="cuda"), torch.empty(3, 4, 1, device="cuda")
    with pytest.raises(
        NotImplementedError,
        match=r"w is packed and on .*, but packed weights are supported on CPUs only; pass the ",
    ):
        validation.weight(w, x, 4, "w")


@on_ranks(2)
def test_a_sliced_weight_is_refused_before_a_warm_call() -> list[str]:
    """The slice has the shape of a weight with a cached plan. The group remains usable."""
    with fresh_group() as group:
        x, packed = torch.ones(2, 4), tpkernels.pack(torch.ones(4, 256))
        wrong = tpkernels.pack(torch.ones(4, 512))[::2]
        call = functools.partial(tpkernels.matmul_all_reduce, x, group=group)
        results = [call(packed[:256]) for _ in range(3)]
        message = "ValueError: w of float32, shape [256, 4, 1] and strides [8, 1, 1] is neither"
        failures = find_unexpected_messages({message: lambda: call(wrong)})
        results.append(call(packed))
        assert all((result == 8).all() for result in results)
    return failures


@pytest.mark.parametrize("dtype", PACKABLE, ids=str)
def test_a_slice_of_full_panels_is_packed(dtype: torch.dtype) -> None:
    w, x = torch.randint(-2, 3, (20, 200)).to(dtype), torch.randint(-2, 3, (3, 20)).to(dtype)
    packed = tpkernels.pack(w)
    for begin, end in ((0, 64), (64, 192), (128, 200)):
        assert is_packed(packed[begin:end])
        assert torch.equal(allocating_matmul(x, packed[begin:end]), x @ w[:, begin:end])


@pytest.mark.parametrize("dtype", PACKABLE, ids=str)
def test_strides_do_not_change_the_result(dtype: torch.dtype) -> None:
    """Multiply x with transposed strides, with a bias of zeros, and under a profiler.

    All results are bitwise identical to a plain call.
    """
    torch.manual_seed(4)
    factor, x = tpkernels.pack(torch.randn(2000, 70).to(dtype)), torch.randn(2000, 40).to(dtype).t()
    results = [
        allocating_matmul(x, factor),
        allocating_matmul(x, factor, torch.zeros(70, dtype=dtype)),
    ]
    with torch.profiler.profile():
        results.append(allocating_matmul(x, factor))
    assert all(torch.equal(result, allocating_matmul(x.contiguous(), factor)) for result in results)


# int8 weights.

INT8_SHAPES = [(4, 1), (128, 64), (96, 70), (320, 200), (2304, 130)]
GROUPS = {4: 4, 96: 32, 128: 128, 320: 64, 2304: 128}


def quantised(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the integers of x [M, K] as float64, and their scales. Both are [M, K]."""
    x = x.float().unflatten(1, (-1, group))
    largest = x.abs().amax(2, keepdim=True)
    # A tensor is divided: torch computes number / tensor with the reciprocal of the tensor.
    factors = torch.tensor(127.0) / largest
    integers = (x * factors.where(largest > 0, 0)).round()
    return integers.flatten(1).double(), (largest / 127).expand_as(x).flatten(1).double()


def test_the_order_of_int8_elements() -> None:
    torch.manual_seed(0)
    for k, n in INT8_SHAPES:
        w = torch.randn(k, n).bfloat16()
        packed, group = tpkernels.pack(w, torch.int8), GROUPS[k]
        assert packed.shape == (n, k // group, group + 4) and packed.is_contiguous()
        integers, scales = quantised(w.t(), group)
        assert torch.equal(
            tpkernels.unpack(packed).t().double(), (integers * scales).float().double()
        )
        packed_bytes = iter(packed.flatten().tolist())
        for begin in range(0, n, COLUMNS):
            columns = range(begin, min(begin + COLUMNS, n))
            for offset in range(0, k, group):
                stored = torch.tensor([[next(packed_bytes) for _ in range(4)] for _ in columns])
                expected = scales[begin : columns.stop, offset].float()
                assert torch.equal(stored.to(torch.int8).view(torch.float32).flatten(), expected)
                for row in range(offset, offset + group, 4):
                    stored = torch.tensor([[next(packed_bytes) for _ in range(4)] for _ in columns])
                    assert torch.equal(stored, integers[begin : columns.stop, row : row + 4])


def test_int8_matmul_of_quantised_operands(unit: str) -> None:
    """Results equal the matmul of the quantised operands up to fp32 rounding. They are bitwise
    identical to the plain unit, and within the bound in docs/numerics.md."""
    torch.manual_seed(1)
    for (k, n), dtype in itertools.product(INT8_SHAPES, PACKABLE):
        w, x, bias = torch.randn(k, n), torch.randn(MAX_ROWS, k).to(dtype), torch.randn(n)
        packed, group = tpkernels.pack(w, torch.int8), GROUPS[k]
        w_integers, w_scales = (tensor.t() for tensor in quantised(w.t(), group))
        x_integers, x_scales = quantised(x, group)
        result = multiply_checked(x, packed, F32, bias)
        assert result is not None
        _C.host.use_vector_unit("plain")
        plain = multiply_checked(x, packed, F32, bias)
        _C.host.use_vector_unit(unit)
        assert plain is not None and torch.equal(result, plain)
        expected = (x_integers * x_scales) @ (w_integers * w_scales) + bias
        magnitudes = (x_integers.abs() * x_scales) @ (w_integers.abs() * w_scales) + bias.abs()
        rounding = (k / group + 3) * torch.finfo(F32).eps * magnitudes
        assert ((result - expected).abs() <= rounding).all(), (k, n, dtype)
        exact, half = x.double() @ w.double() + bias, 0.5001
        bound = half * (x.double().abs() @ w_scales + x_scales @ w.double().abs())
        bound += half**2 * x_scales @ w_scales + rounding
        assert ((result - exact).abs() <= bound).all(), (k, n, dtype)
        with threads(2):
            for rows in ((0, 1), (3, 10)):
                chunk = multiply_checked(x[slice(*rows)], packed, F32, bias)
                assert chunk is not None and torch.equal(chunk, result[slice(*rows)])
        rounded = multiply_checked(x, packed, dtype, bias)
        assert rounded is not None and torch.equal(rounded, result.to(dtype))


def test_int8_is_bitwise_identical_to_the_plain_unit(unit: str) -> None:
    assert_matches_plain_unit(unit, range(1, 71))


def test_packed_integers(unit: str) -> None:
    """Groups have several sizes, the integers include -128, and scales have both signs."""
    torch.manual_seed(2)
    for (k, n), group in itertools.product(((96, 70), (320, 200)), (4, 16, 32)):
        integers = torch.randint(-128, 128, (n, k), dtype=torch.int8)
        integers[:, ::5] = -128
        scales = 2.0 ** torch.randint(-3, 1, (n, k // group)) * (torch.randint(2, (n, 1)) * 2 - 1)
        packed = pack_integers(integers.t(), scales.t())
        assert packed.shape == (n, k // group, group + 4)
        w = (integers.unflatten(1, (-1, group)) * scales.unsqueeze(2)).flatten(1).t()
        assert torch.equal(tpkernels.unpack(packed), w)
        x = torch.randint(-127, 128, (MAX_ROWS, k)).float()
        x[:, ::group] = 127  # quantisation keeps these rows exactly
        x[1] = -127
        y = multiply_checked(x, packed, F32)
        assert y is not None and torch.equal(y.double(), x.double() @ w.double())
        x = torch.randn(MAX_ROWS, k)
        (_, x_scales), y = quantised(x, group), multiply_checked(x, packed, F32)
        magnitudes = (x.abs() + x_scales) @ w.abs().double()
        bound = (
            0.5001 * x_scales @ w.abs().double()
            + (k / group + 3) * torch.finfo(F32).eps * magnitudes
        )
        assert y is not None and ((y - x.double() @ w.double()).abs() <= bound).all()


def test_int8_rows_are_independent(unit: str) -> None:
    """A row with NaN or infinity becomes NaN, and a row of tiny values becomes zero. Its neighbours
    do not change."""
    k, n = 256, 70
    packed = surround_with_nan(tpkernels.pack(torch.ones(k, n), torch.int8))
    for value, expected in ((torch.nan, torch.nan), (torch.inf, torch.nan), (1e-35, 0.0)):
        x = torch.zeros(7, k)
        x[3, 200] = value
        x[4] = 1
        y = multiply_checked(x, packed, F32)
        assert y is not None
        torch.testing.assert_close(y[3], torch.full((n,), expected), equal_nan=True)
        assert (y[:3] == 0).all() and (y[4] - k).abs().max() < 1e-3 and (y[5:] == 0).all()
