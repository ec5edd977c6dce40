"""The local product of scaled operands, by torch and by panels, against float64; its forms of
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
    NUMBERS_OF_FP4,
    operand,
    scale_of_w,
    scaled_case,
    scaled_weight,
    swizzled,
)
from tpkernels.local import scaled
from tpkernels.local.scaled import ScaledMatrix
from tpkernels.ops.reference import summed

M, K, N = 33, 160, 300
PRODUCTS = {"panels": scaled.by_panels, "torch": scaled.by_torch}


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["tensor", "rows", "rows of x"])
@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_torch_and_panels(
    product: Callable[..., torch.Tensor], kind: str, out_dtype: torch.dtype
) -> None:
    for layout in (lambda w: w.t(), lambda w: w.t().contiguous()):
        case = scaled_case("all_gather_scaled_matmul", (M,), K, (N,), scales=kind)
        x, w = operand(case, (M, K), E4M3, "x"), scaled_weight(case, N, K)
        bias = torch.randn(N).to(out_dtype)
        scale_w = scale_of_w(case, w)
        if product is scaled.by_torch and not (x.scale.dim() or w.scale.dim()):
            try:
                torch._scaled_mm(x.elements, w.elements.t(), x.scale, w.scale)
            except RuntimeError as error:
                pytest.skip(f"torch: {error}")
        factors = ScaledMatrix(x.elements, x.scale), ScaledMatrix(layout(w.elements), scale_w)
        got = product(*factors, torch.empty(M, N, dtype=out_dtype), bias)
        terms = [(x.worth, w.worth.t())]
        options: Any = {"dtype": E4M3, "out": out_dtype, "unfused": False, "roundings": 4}
        assert not summed(terms, [bias], **options).wrong(got).any()


def test_cpus_do_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the processor has: torch may refuse, or take 140 times as long."""
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
    """A scale that is expanded to one element is contiguous, but its strides are 0."""
    x, w, one = torch.ones(rows, 32).to(E4M3), torch.ones(columns, 32).to(E4M3), torch.ones([])
    for scale_x, scale_w in ((torch.ones(rows, 1), one), (one, torch.ones(1, columns))):
        out = torch.empty(rows, columns)
        scaled.by_torch(ScaledMatrix(x, scale_x), ScaledMatrix(w.t(), scale_w), out, None)
        assert (out == 32).all()


class OnGpu(torch.Tensor):
    is_cuda = True


def test_which_sizes_gpus_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiples of 16 elements: for fp4, of 32 numbers."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    for dtype, scale_dtype, block in ((E4M3, E8M0, 32), (FP4, E4M3, 8)):
        for k, n, taken in ((32, 16, True), (48, 16, True), (40, 16, False), (32, 8, False)):
            x, w = (torch.zeros(m, k, dtype=torch.uint8).view(dtype) for m in (4, n))
            blocks = [torch.ones(m, max(1, k // block)).to(scale_dtype) for m in (4, n)]
            factors = ScaledMatrix(x.as_subclass(OnGpu), blocks[0]), ScaledMatrix(w.t(), blocks[1])
            assert scaled.torch_takes(*factors, torch.bfloat16) == taken, (dtype, k, n)


def test_panels_bound_the_copy_of_the_weight_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    widths, mm = [], torch.mm

    def counted(left: torch.Tensor, right: torch.Tensor, **options: Any) -> torch.Tensor:
        widths.append(right.shape[1])
        return mm(left, right, **options)

    monkeypatch.setattr(torch, "mm", counted)
    monkeypatch.setattr(scaled, "_GPU_PANEL_COLUMNS", 128)
    x, w, one = torch.ones(4, 32).to(E4M3), torch.ones(N, 32).to(E4M3), torch.ones([])
    factors = ScaledMatrix(x.as_subclass(OnGpu), one), ScaledMatrix(w.t(), one)
    out = scaled.by_panels(*factors, torch.empty(4, N), None)
    assert widths == [128, 128, N - 256] and (out == 32).all()


def test_a_bias_with_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gets it contiguous."""
    given, own = [], torch._scaled_mm

    def scaled_mm(*args: Any, **kwargs: Any) -> torch.Tensor:
        given.append(kwargs["bias"])
        return own(*args, **kwargs)

    monkeypatch.setattr(scaled, "scaled_mm", scaled_mm)
    x, w, one = torch.ones(4, 32).to(E4M3), torch.ones(16, 32).to(E4M3), torch.ones([])
    bias = torch.arange(32.0, dtype=torch.bfloat16)[::2]
    out = torch.empty(4, 16, dtype=torch.bfloat16)
    scaled.by_torch(ScaledMatrix(x, one), ScaledMatrix(w.t(), torch.ones(1, 16)), out, bias)
    assert torch.equal(out, (32 + bias).expand(4, 16))
    assert given[0].is_contiguous()


@pytest.mark.parametrize("offset", [0, 1, 4, 16])
def test_packed_bytes_begin_with_a_unit(offset: int) -> None:
    """A view where memory allows one, else a copy."""
    data = torch.arange(offset + 2 * 66, dtype=torch.uint8)[offset:].view(2, 66)
    for given in (data[:1, :64], data[:, :64], data.flatten()[:128].view(2, 64)):
        x = given.view(E4M3)
        packing = scaled.Packing.of(x, torch.ones([]))
        packed = packing.pack(x, torch.ones([]))
        assert torch.equal(packed.view(torch.uint8), x.view(torch.uint8))
        assert packed.data_ptr() % 16 == 0
        shares = packed.data_ptr() == x.data_ptr()
        assert shares == (offset % 16 == 0 and x.stride(0) == 64)


@pytest.mark.parametrize("kind", [torch.Tensor, OnGpu])
def test_the_numbers_of_fp4(kind: type[torch.Tensor]) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128)
    numbers = scaled.unscaled(codes.view(FP4).as_subclass(kind))
    want = torch.stack((NUMBERS_OF_FP4[(codes & 15).int()], NUMBERS_OF_FP4[(codes >> 4).int()]), -1)
    want[want == 0] *= 1 - 2 * ((torch.stack((codes, codes >> 4), -1) >> 3) & 1)[want == 0].float()
    assert torch.equal(numbers.view(torch.int32), want.view(2, 256).view(torch.int32))


def test_fp4_copies_nothing_from_the_host() -> None:
    """On a GPU, where a capture of a graph allows no such copy."""
    made = []

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            made.append(func)
            return func(*args, **(kwargs or {}))

    codes = torch.zeros(2, 4, dtype=torch.uint8).view(FP4)
    with Recorded():
        numbers = scaled.unscaled(codes.as_subclass(OnGpu))
    assert (numbers == 0).all() and made and torch.ops.aten.lift_fresh.default not in made


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (130, 5), (300, 12)])
def test_swizzled_scales(shape: tuple[int, int]) -> None:
    plain = torch.randint(0, 255, shape, dtype=torch.uint8).view(E8M0)
    wanted = swizzled(plain)
    assert torch.equal(scaled.swizzled(plain).view(torch.uint8), wanted.view(torch.uint8))
    assert scaled.swizzled(wanted) is wanted
    assert wanted.numel() == scaled.swizzled_numel(*shape)
    back = scaled.plain(wanted, *shape)
    assert torch.equal(back.view(torch.uint8), plain.view(torch.uint8))


def test_swizzled_scales_are_those_of_torch() -> None:
    common = pytest.importorskip("torch.testing._internal.common_quantized")
    plain = torch.randint(0, 255, (200, 9), dtype=torch.uint8).view(E8M0)
    theirs = common.to_blocked(plain).view(torch.uint8)
    assert torch.equal(scaled.swizzled(plain).view(torch.uint8), theirs)
