"""The local matmul of scaled operands, by torch and by panels, against float64, and the formats of
scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.reference import (
    E4M3,
    E8M0,
    FP4,
    FP4_VALUES,
    format_w_scale,
    operand,
    scaled_case,
    scaled_weight,
    swizzled,
)
from tpkernels.local import scaled
from tpkernels.local.scaled import ScaledMatrix
from tpkernels.ops.reference import expect_sum

M, K, N = 33, 160, 300
MATMULS = {"panels": scaled.scaled_matmul_by_panels, "torch": scaled.scaled_matmul_by_torch}


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["tensor", "rows", "rows of x"])
@pytest.mark.parametrize("matmul", MATMULS.values(), ids=MATMULS)
def test_torch_and_panels(
    matmul: Callable[..., torch.Tensor], kind: str, out_dtype: torch.dtype
) -> None:
    for layout in (lambda w: w.t(), lambda w: w.t().contiguous()):
        case = scaled_case("all_gather_scaled_matmul", (M,), K, (N,), scales=kind)
        x, w = operand(case, (M, K), E4M3, "x"), scaled_weight(case, N, K)
        bias = torch.randn(N).to(out_dtype)
        scale_w = format_w_scale(case, w)
        if matmul is scaled.scaled_matmul_by_torch and not (x.scale.dim() or w.scale.dim()):
            try:
                torch._scaled_mm(x.elements, w.elements.t(), x.scale, w.scale)
            except RuntimeError as error:
                pytest.skip(f"torch: {error}")
        factors = ScaledMatrix(x.elements, x.scale), ScaledMatrix(layout(w.elements), scale_w)
        result = matmul(*factors, torch.empty(M, N, dtype=out_dtype), bias)
        terms = [(x.dequantized, w.dequantized.t())]
        options: Any = {"dtype": E4M3, "out": out_dtype, "unfused": False, "roundings": 4}
        assert not expect_sum(terms, [bias], **options).wrong(result).any()


def test_cpus_do_not_call_the_torch_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the processor has AMX: the torch op may refuse, or be 140 times as slow."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(scaled, "scaled_mm", None)
    x, w, one = torch.ones(4, 32).to(E4M3), torch.ones(32, 8).to(E4M3), torch.ones([])
    blocks = torch.ones(4, 1).to(E8M0), torch.ones(8, 1).to(E8M0)
    for scale_x, scale_w in ((one, one), blocks):
        out = scaled.scaled_matmul(
            ScaledMatrix(x, scale_x), ScaledMatrix(w, scale_w), torch.empty(4, 8)
        )
        assert (out == 32).all()


@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (16, 1)])
def test_one_row_or_column_for_torch(rows: int, columns: int) -> None:
    """A scale expanded to one element is contiguous, but its strides are 0."""
    x, w, one = torch.ones(rows, 32).to(E4M3), torch.ones(columns, 32).to(E4M3), torch.ones([])
    for scale_x, scale_w in ((torch.ones(rows, 1), one), (one, torch.ones(1, columns))):
        out = torch.empty(rows, columns)
        scaled.scaled_matmul_by_torch(
            ScaledMatrix(x, scale_x), ScaledMatrix(w.t(), scale_w), out, None
        )
        assert (out == 32).all()


class OnGpu(torch.Tensor):
    is_cuda = True


def test_sizes_supported_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes must be multiples of 16 elements. For fp4, K must be a multiple of 32 numbers."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    for dtype, scale_dtype, block in ((E4M3, E8M0, 32), (FP4, E4M3, 8)):
        for k, n, supported in ((32, 16, True), (48, 16, True), (40, 16, False), (32, 8, False)):
            x, w = (torch.zeros(m, k, dtype=torch.uint8).view(dtype) for m in (4, n))
            blocks = [torch.ones(m, max(1, k // block)).to(scale_dtype) for m in (4, n)]
            factors = ScaledMatrix(x.as_subclass(OnGpu), blocks[0]), ScaledMatrix(w.t(), blocks[1])
            assert scaled.torch_supports(*factors, torch.bfloat16) == supported, (dtype, k, n)


def test_panels_bound_the_copy_of_the_weight_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    widths, mm = [], torch.mm

    def record_width(left: torch.Tensor, right: torch.Tensor, **options: Any) -> torch.Tensor:
        widths.append(right.shape[1])
        return mm(left, right, **options)

    monkeypatch.setattr(torch, "mm", record_width)
    monkeypatch.setattr(scaled, "_GPU_PANEL_COLUMNS", 128)
    x, w, one = torch.ones(4, 32).to(E4M3), torch.ones(N, 32).to(E4M3), torch.ones([])
    factors = ScaledMatrix(x.as_subclass(OnGpu), one), ScaledMatrix(w.t(), one)
    out = scaled.scaled_matmul_by_panels(*factors, torch.empty(4, N), None)
    assert widths == [128, 128, N - 256] and (out == 32).all()


def test_a_bias_with_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch receives a contiguous bias."""
    biases, original = [], torch._scaled_mm

    def scaled_mm(*args: Any, **kwargs: Any) -> torch.Tensor:
        biases.append(kwargs["bias"])
        return original(*args, **kwargs)

    monkeypatch.setattr(scaled, "scaled_mm", scaled_mm)
    x, w, one = torch.ones(4, 32).to(E4M3), torch.ones(16, 32).to(E4M3), torch.ones([])
    bias = torch.arange(32.0, dtype=torch.bfloat16)[::2]
    out = torch.empty(4, 16, dtype=torch.bfloat16)
    scaled.scaled_matmul_by_torch(
        ScaledMatrix(x, one), ScaledMatrix(w.t(), torch.ones(1, 16)), out, bias
    )
    assert torch.equal(out, (32 + bias).expand(4, 16))
    assert biases[0].is_contiguous()


@pytest.mark.parametrize("offset", [0, 1, 4, 16])
def test_packed_bytes_are_aligned(offset: int) -> None:
    """The packed bytes are a view if the memory is aligned, and otherwise a copy."""
    data = torch.arange(offset + 2 * 66, dtype=torch.uint8)[offset:].view(2, 66)
    for source in (data[:1, :64], data[:, :64], data.flatten()[:128].view(2, 64)):
        x = source.view(E4M3)
        packing = scaled.Packing.for_rows(x, torch.ones([]))
        packed = packing.pack(x, torch.ones([]))
        assert torch.equal(packed.view(torch.uint8), x.view(torch.uint8))
        assert packed.data_ptr() % 16 == 0
        shares = packed.data_ptr() == x.data_ptr()
        assert shares == (offset % 16 == 0 and x.stride(0) == 64)


@pytest.mark.parametrize("kind", [torch.Tensor, OnGpu])
def test_values_of_fp4(kind: type[torch.Tensor]) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128)
    values = scaled.to_float32(codes.view(FP4).as_subclass(kind))
    expected = torch.stack((FP4_VALUES[(codes & 15).int()], FP4_VALUES[(codes >> 4).int()]), -1)
    expected[expected == 0] *= (
        1 - 2 * ((torch.stack((codes, codes >> 4), -1) >> 3) & 1)[expected == 0].float()
    )
    assert torch.equal(values.view(torch.int32), expected.view(2, 256).view(torch.int32))


def test_fp4_needs_no_host_copy() -> None:
    """The capture of a CUDA graph does not allow copies from the host."""
    ops = []

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            ops.append(func)
            return func(*args, **(kwargs or {}))

    codes = torch.zeros(2, 4, dtype=torch.uint8).view(FP4)
    with Recorded():
        numbers = scaled.to_float32(codes.as_subclass(OnGpu))
    assert (numbers == 0).all() and ops and torch.ops.aten.lift_fresh.default not in ops


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (130, 5), (300, 12)])
def test_swizzled_scales(shape: tuple[int, int]) -> None:
    plain = torch.randint(0, 255, shape, dtype=torch.uint8).view(E8M0)
    expected = swizzled(plain)
    assert torch.equal(scaled.swizzle(plain).view(torch.uint8), expected.view(torch.uint8))
    assert scaled.swizzle(expected) is expected
    assert expected.numel() == scaled.swizzled_numel(*shape)
    unswizzled = scaled.unswizzle(expected, *shape)
    assert torch.equal(unswizzled.view(torch.uint8), plain.view(torch.uint8))


def test_swizzled_scales_equal_torch() -> None:
    common = pytest.importorskip("torch.testing._internal.common_quantized")
    plain = torch.randint(0, 255, (200, 9), dtype=torch.uint8).view(E8M0)
    expected = common.to_blocked(plain).view(torch.uint8)
    assert torch.equal(scaled.swizzle(plain).view(torch.uint8), expected)
