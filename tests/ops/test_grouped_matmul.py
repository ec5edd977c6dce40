"""The grouped matmul against one matmul per group: exact integers, independence of the groups,
gradients, compiled graphs, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tpkernels
from tests.support.cases import PACKABLE
from tests.support.local_matmul import is_within_rounding
from tpkernels.local.matmul import allocating_matmul
from tpkernels.local.scaled import Packing
from tpkernels.ops.grouped_matmul import add_bias

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
COUNTS = [5, 0, 60, 1]

# Layouts of a weight, made from the [E, N, K] tensor of a module.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "columns": lambda w: w.transpose(1, 2),
    "rows": lambda w: w.transpose(1, 2).contiguous(),
    "packed": lambda w: tpkernels.pack(w.transpose(1, 2)),
    "int8": lambda w: tpkernels.pack(w.transpose(1, 2), torch.int8),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [*PACKABLE, F64], ids=str)
def test_exact_for_integers_and_independent_of_other_groups(
    dtype: torch.dtype, layout: str
) -> None:
    if dtype == F64 and layout in ("packed", "int8"):
        pytest.skip("float64 is not packed")
    torch.manual_seed(0)
    for k, n in ((32, 70), (36, 192), (33, 7)):
        if layout == "int8" and k % 4:
            continue
        weights = torch.randint(-2, 3, (4, n, k)).to(dtype)
        w, real = LAYOUTS[layout](weights), torch.randn(4, n, k).to(dtype)
        x = torch.randint(-2, 3, (66, k)).to(dtype)
        noise = torch.randn(k, 66).to(dtype).t()
        for counts in (torch.tensor(COUNTS), torch.tensor(COUNTS, dtype=torch.int32)):
            chunks = zip(x.split(COUNTS), weights, strict=True)
            exact = torch.cat([rows @ matrix.t() for rows, matrix in chunks])
            if layout != "int8":
                assert torch.equal(tpkernels.grouped_matmul(x, w, counts), exact)
            operand = LAYOUTS[layout](real)
            result = tpkernels.grouped_matmul(noise, operand, counts)
            groups = zip(
                result.split(COUNTS), noise.contiguous().split(COUNTS), operand, real, strict=True
            )
            for group_result, rows, matrix, plain in groups:
                if layout in ("packed", "int8"):
                    assert torch.equal(group_result, allocating_matmul(rows, matrix))
                else:  # MKL fp32 results depend on memory addresses
                    assert is_within_rounding(group_result, rows, plain.t()) or dtype == F64


def test_empty_operands() -> None:
    """Multiply no rows, with 0 or 2 experts. The incoming gradient has strides of 0."""
    for experts in (0, 2):
        x, w = (t.requires_grad_() for t in (torch.ones(0, 3), torch.ones(experts, 3, 4)))
        y = tpkernels.grouped_matmul(x, w, torch.zeros(experts).long())
        y.sum().backward()
        assert y.shape == (0, 4) and w.grad is not None and not w.grad.any()


@pytest.mark.parametrize("transposed", [True, False])
def test_gradients(transposed: bool) -> None:
    torch.manual_seed(0)
    counts = torch.tensor([3, 0, 4])

    def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        w = weight.transpose(1, 2) if transposed else weight
        return tpkernels.grouped_matmul(x, w, counts, bias)

    shape = (3, 5, 4) if transposed else (3, 4, 5)
    inputs = [torch.randn(s, dtype=F64, requires_grad=True) for s in ((7, 4), shape, (3, 5))]
    assert torch.autograd.gradcheck(multiply, inputs)
    # Integers are exact in bfloat16. The gradient of an empty group is zero.
    x, weight, bias = (torch.randint(-2, 3, i.shape).to(BF16).requires_grad_() for i in inputs)
    y = multiply(x, weight, bias)
    y.sum().backward()
    plain = tpkernels.grouped_matmul(x, weight.mT if transposed else weight, counts)
    assert torch.equal(y, plain + bias[[0, 0, 0, 2, 2, 2, 2]])
    assert weight.grad is not None and weight.grad.is_contiguous() and not weight.grad[1].any()
    ones = x.detach()[:3].sum(0).expand(5, 4)
    assert torch.equal(weight.grad[0], ones if transposed else ones.t())


def test_uncounted_rows_do_not_affect_the_bias_gradient() -> None:
    """On GPUs, uncounted rows may exist, with undefined values."""
    bias = torch.ones(2, 3, requires_grad=True)
    y = add_bias(torch.zeros(5, 3), bias, torch.tensor([2, 1]))
    y.backward(torch.tensor([1.0, 1, 1, torch.nan, torch.nan])[:, None].expand(5, 3))
    assert bias.grad is not None and bias.grad[:, 0].tolist() == [2.0, 1.0]


@pytest.mark.thorough
def test_compiled_and_under_autocast() -> None:
    """The number of rows is dynamic in the graph."""

    def step(x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        slots = ids.flatten().argsort(stable=True)[(ids.flatten() >= 0).nonzero()[:, 0]]
        counts = torch.bincount(ids.flatten(), minlength=3)
        torch._check(len(counts) == 3)
        return tpkernels.grouped_matmul(x[slots // 2], w, counts, bias)

    w, bias = torch.randn(3, 4, 5, requires_grad=True), torch.randn(3, 5)
    x, ids = torch.randn(6, 4), torch.tensor([[0, 1], [1, 2], [2, 0], [1, 0], [2, 1], [2, 0]])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        for rows in (6, 4):
            results = []
            for function in (step, compiled):
                w.grad = None
                result = function(x[:rows], w, ids[:rows])
                result.square().sum().backward()
                results.append((result, w.grad))
            assert torch.equal(results[0][0], results[1][0])
            assert results[0][1] is not None and torch.equal(*(grad for _, grad in results))
    with torch.autocast("cpu", BF16):
        assert step(x, w, ids).dtype == BF16
        with torch.no_grad():
            packed = tpkernels.pack(w.detach().bfloat16())
            assert torch.equal(step(x, packed, ids), step(x, w, ids))


def test_refusals() -> None:
    x, w, good = torch.ones(7, 4), torch.ones(3, 4, 5), torch.tensor([3, 0, 4])
    bad: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
        (ValueError, r"counts\[1\] is -1", (x, w, torch.tensor([3, -1, 5]))),
        (ValueError, "counts add up to 8, but x has 7 rows", (x, w, torch.tensor([3, 1, 4]))),
        (ValueError, "x has 7 rows, so it must be 0 to 7", (x, w, torch.tensor([3, 0, 2**62]))),
        (ValueError, r"counts must be int32 or int64 of shape \[3\]", (x, w, good[:2])),
        (ValueError, "counts is torch.float32", (x, w, good.float())),
        (ValueError, r"w\[0\] has shape \[4, 5\], but x of shape \[7, 3\]", (x[:, :3], w, good)),
        (ValueError, r"it must be \[R, K\]", (x[None], w, good)),
        (ValueError, r"must be \[E, K, N\]", (x, w[0], good)),
        (TypeError, r"w\[0\] is float32 but x is float64", (x.double(), w, good)),
        (
            ValueError,
            "or such a stack packed with tpkernels.pack",
            (x, tpkernels.pack(w)[:, 1:], good),
        ),
        (TypeError, "pack it in bfloat16", (x.bfloat16(), tpkernels.pack(w), good)),
    ]
    bad.append((ValueError, r"bias has shape \[5\]; it must be \[3, 5\]", (x, w, good, w[0, 0])))
    for error, pattern, operands in bad:
        with pytest.raises(error, match=pattern):
            tpkernels.grouped_matmul(*operands)
    with pytest.raises(NotImplementedError, match="no gradient with a packed weight"):
        tpkernels.grouped_matmul(x.clone().requires_grad_(), tpkernels.pack(w), good)


@pytest.mark.parametrize("dtype", PACKABLE, ids=str)
def test_stacks_are_packed_matrix_by_matrix(dtype: torch.dtype) -> None:
    w = torch.randn(3, 70, 36).to(dtype).transpose(1, 2)
    packed = tpkernels.pack(w)
    assert packed.dim() == 4 and packed.is_contiguous()
    assert all(torch.equal(a, tpkernels.pack(b)) for a, b in zip(packed, w, strict=True))
    unpacked = tpkernels.unpack(packed)
    assert torch.equal(unpacked, w) and unpacked.stride() == w.stride()
    int8 = tpkernels.unpack(tpkernels.pack(w, torch.int8))
    assert torch.equal(int8[2], tpkernels.unpack(tpkernels.pack(w[2], torch.int8)))
    with pytest.raises(ValueError, match="is already packed"):
        tpkernels.pack(packed)


def scaled_operands(
    blocks: bool, k: int, n: int, integers: bool, dtypes: tuple[torch.dtype, torch.dtype]
) -> tuple[torch.Tensor, ...]:
    """Return x, w and their scales for COUNTS. With integers, scales are powers of two. x is
    unpacked from rows that were packed with their scales."""
    per_row, per_column = (k // 128, -(-n // 128)) if blocks else (1, n)
    operands = []
    for shape, dtype in zip(((66, k), (4, n, k)), dtypes, strict=True):
        values = torch.randint(-2, 3, shape) if integers else torch.randn(shape) * 20
        operands.append(values.to(dtype))
    scales = [torch.randint(-3, 4, shape) for shape in ((66, per_row), (4, per_row, per_column))]
    scale_x, scale_w = (2.0**s if integers else torch.rand(s.shape) for s in scales)
    packing = Packing.for_rows(operands[0], scale_x)
    x, unpacked_scale_x = packing.unpack(packing.pack(operands[0], scale_x))
    assert unpacked_scale_x is not None and torch.equal(unpacked_scale_x, scale_x)
    return x, operands[1].transpose(1, 2), scale_x, scale_w


@pytest.mark.parametrize("blocks", [False, True])
def test_scaled_as_float64(blocks: bool) -> None:
    """Exact for small integers, otherwise within the rounding of fp32 sums and of the result."""
    torch.manual_seed(0)
    counts = torch.tensor(COUNTS)
    for k, n, dtypes in ((256, 300, (E4M3, E4M3)), (128, 64, (E5M2, E4M3)), (384, 1, (E4M3, E5M2))):
        for integers, out_dtype in ((True, F32), (False, F32), (False, None), (False, torch.half)):
            x, w, scale_x, scale_w = scaled_operands(blocks, k, n, integers, dtypes)
            result = tpkernels.scaled_grouped_matmul(
                x, w, scale_x, scale_w, counts, out_dtype=out_dtype
            )
            assert result.dtype == (out_dtype or BF16)
            fp64_x = x.double() * scale_x.double().repeat_interleave(k // scale_x.shape[1], 1)
            factors = scale_w.double()
            if blocks:
                factors = factors.repeat_interleave(128, 1).repeat_interleave(128, 2)[..., :n]
            fp64_w = w.double() * factors
            for group_result, rows, matrix in zip(
                result.split(COUNTS), fp64_x.split(COUNTS), fp64_w, strict=True
            ):
                assert is_within_rounding(group_result, rows, matrix)
                assert not integers or torch.equal(group_result.double(), rows @ matrix)


def test_scaled_refusals() -> None:
    x, w, scale_x, scale_w = scaled_operands(True, 256, 300, True, (E4M3, E4M3))
    by_row, by_column, counts = scale_x[:, :1], torch.ones(4, 1, 300), torch.tensor(COUNTS)
    bad: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
        (ValueError, r"it must be \[66, 1\] or \[66, 2\]", (x, w, scale_x[1:], scale_w, counts)),
        (ValueError, r"scale_w has .* must be \[4, 2, 3\]", (x, w, scale_x, by_column, counts)),
        (ValueError, r"scale_w has .* must be \[4, 1, 300\]", (x, w, by_row, scale_w, counts)),
        (TypeError, "scale_x is float64", (x, w, scale_x.double(), scale_w, counts)),
        (TypeError, "scale_w is float16", (x, w, scale_x, scale_w.half(), counts)),
        (NotImplementedError, "w has dtype float32", (x, w.float(), scale_x, scale_w, counts)),
        (NotImplementedError, "x with .* float32", (x.float(), w, scale_x, scale_w, counts)),
        (ValueError, r"needs \[E, 256, N\]", (x, w[:, 1:], scale_x, scale_w, counts)),
        (ValueError, r"w has 4 groups", (x, w, scale_x, scale_w, counts[1:])),
        (ValueError, r"but x has 66 rows", (x, w, scale_x, scale_w, counts + 1)),
        (
            ValueError,
            r"counts is \[-1, 6",
            (x, w, scale_x, scale_w, counts + torch.tensor([-6, 6, 0, 0])),
        ),
    ]
    for error, pattern, operands in bad:
        with pytest.raises(error, match=pattern):
            tpkernels.scaled_grouped_matmul(*operands)
    with pytest.raises(NotImplementedError, match="out_dtype is float64"):
        tpkernels.scaled_grouped_matmul(x, w, scale_x, scale_w, counts, out_dtype=F64)
    with pytest.raises(NotImplementedError, match="has no gradient"):
        tpkernels.scaled_grouped_matmul(x, w, scale_x.requires_grad_(), scale_w, counts)
