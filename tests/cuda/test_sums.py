"""Sums of partial sums in csrc/cuda, run on the CPU.

Covers dtypes, tails, alignments, and the errors of the Python interface.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.emulated import (
    BF16,
    DTYPES,
    F16,
    F32,
    all_reduce,
    host_sum,
    make_workspace,
    on_ranks,
    random,
    same_bits,
)
from tpkernels import cuda
from tpkernels.cuda import image
from tpkernels.errors import CaptureError
from tpkernels.symm.device import DeviceWorkspace

COUNTS = (0, 1, 7, 8, 9, 17, 2055, 20_011)


@pytest.mark.parametrize("partial_count", [1, 3])
@on_ranks(1)
def test_sums_match_the_host_bitwise(partial_count: int) -> None:
    alignments = itertools.product((0, 1, 8), (0, 1))
    residuals = (None, *DTYPES)
    for wire, out_dtype, residual_dtype in itertools.product(DTYPES, DTYPES, residuals):
        for count, (offset, has_bias) in itertools.product(COUNTS, alignments):
            partials = [random(count, wire, r, offset) for r in range(partial_count)]
            columns, bias_dtype = 13 if count % 13 == 0 else count, DTYPES[count % 3]
            bias = random(columns, bias_dtype, 8) if has_bias else None
            residual = random(count, residual_dtype, 9, count % 2) if residual_dtype else None
            padded = torch.full((count + 17,), 77, dtype=out_dtype)
            begin = 1 - offset if offset < 2 else offset  # aligned if the partial sums are not
            out = padded[begin : begin + count]
            cuda.sum_partials(out, partials, bias, residual)
            is_equal = same_bits(out, host_sum(partials, out_dtype, bias, residual))
            is_intact = (padded[:begin] == 77).all() and (padded[begin + count :] == 77).all()
            assert is_equal and is_intact, f"{count} {offset} {wire} {out_dtype} {residual_dtype}"


@on_ranks(1)
def test_slices_in_place_sums_and_special_values() -> None:
    """Reduce slices of a larger output with its bias.

    Also reduce into one of the inputs, reduce 72 inputs, and reduce special values.
    """
    full, bias = [random(1300, BF16, r) for r in range(3)], random(13, F32, 8)
    want = host_sum(full, BF16, bias)
    for begin, end in ((0, 40), (40, 477), (477, 1300)):
        out = torch.empty(end - begin, dtype=BF16)
        cuda.sum_partials(out, [x[begin:end].clone() for x in full], bias, begin=begin)
        assert same_bits(out, want[begin:end]), f"from {begin}"
    for target in range(3):
        copies = [x.clone() for x in full]
        cuda.sum_partials(copies[target], copies)
        assert same_bits(copies[target], host_sum(full, BF16)), f"in place of {target}"
    many = [random(100, F16, r) for r in range(72)]
    cuda.sum_partials(out := torch.empty(100), many)
    assert torch.equal(out, host_sum(many, F32)), "72 partials"
    special = torch.tensor([math.inf, -math.inf, math.nan, -0.0, 1e-45, 65520.0, 3e38] * 3)
    for dtype, out_dtype in itertools.product(DTYPES, DTYPES):
        partials = [special.to(dtype), special.roll(1).to(dtype)]
        got, want = torch.empty(21, dtype=out_dtype), host_sum(partials, out_dtype)
        cuda.sum_partials(got, partials)
        assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0)), (
            f"special {dtype} {out_dtype}"
        )


def reduce(**overrides: Any) -> None:
    region = torch.zeros(1 << 14, dtype=torch.uint8)
    workspace = DeviceWorkspace([region.data_ptr()] * 2, region, 0, 8, 1 << 10, 1.0)
    args = {"x": torch.ones(4, 6), "out": torch.ones(4, 6)} | overrides
    all_reduce(workspace, 1, **args)


def add(**overrides: Any) -> None:
    args = {"out": torch.ones(6), "partials": [torch.ones(6)] * 2} | overrides
    cuda.sum_partials(**args)


REFUSALS: list[tuple[Callable[..., None], dict[str, Any], type[Exception], str]] = [
    (reduce, {"x": torch.ones(4, 12)[:, ::2]}, ValueError, r"x has strides \[12, 2\]"),
    (reduce, {"x": torch.ones(4, 6).double()}, NotImplementedError, "x is float64"),
    (reduce, {"out": torch.ones(4, 5)}, ValueError, r"out is \[4, 5\] float32 but x is \[4, 6\]"),
    (reduce, {"residual": torch.ones(3, 6)}, ValueError, r"residual is \[3, 6\]"),
    (reduce, {"bias": torch.ones(5)}, ValueError, r"bias has shape \[5\]; it must be \[6\]"),
    (reduce, {"bias": torch.ones(6).double()}, NotImplementedError, "bias is float64"),
    (
        reduce,
        {"x": torch.ones(4, 6, device="meta")},
        ValueError,
        "out is on cpu; it must be on meta",
    ),
    (
        reduce,
        dict.fromkeys(("x", "out"), torch.ones(6, device="meta")),
        ValueError,
        "2 ranks on meta, but the workspace has 2 ranks on cpu",
    ),
    (
        reduce,
        dict.fromkeys(("x", "out"), torch.ones(4096)),
        ValueError,
        "the workspace has 16 signals",
    ),
    (
        reduce,
        {"variant": "ring"},
        ValueError,
        "variant is 'ring'; it must be auto or one of two_shot",
    ),
    (add, {"partials": []}, ValueError, "partials has 0 tensors; it must have 1 to 72"),
    (add, {"partials": [torch.ones(6)] * 73}, ValueError, "partials has 73 tensors"),
    (add, {"partials": [torch.ones(6), torch.ones(6).half()]}, ValueError, r"partials\[1\] is"),
    (add, {"out": torch.ones(5)}, ValueError, r"out is \[5\] float32 but partials is \[6\]"),
    (add, {"bias": torch.ones(2, 3)}, ValueError, r"bias has shape \[2, 3\]; it must be \[cols\]"),
    (add, {"begin": -1}, ValueError, "begin is -1"),
]


@pytest.mark.parametrize(("call", "overrides", "error", "match"), REFUSALS)
def test_refusals(
    call: Callable[..., None], overrides: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        call(**overrides)


def test_kernel_availability(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture cannot load kernels, and its result is not cached. A missing driver is cached."""
    problems: list[Exception] = [
        RuntimeError("broken"),
        CaptureError("capturing"),
        NotImplementedError("no driver"),
    ]

    def kernels(device: int) -> None:
        if problems:
            raise problems[0]

    monkeypatch.setattr(image, "kernels", kernels)
    image._loads.cache_clear()
    device, results = torch.device("cpu"), []
    try:
        with pytest.raises(RuntimeError, match="broken"):
            cuda.available(device)
        problems.pop(0)
        results.append(cuda.available(device))
        problems.pop(0)
        results.append(cuda.available(device))
        problems.clear()
        results.append(cuda.available(device))
        image._loads.cache_clear()
        results.append(cuda.available(device))
    finally:
        image._loads.cache_clear()
    assert results == [False, False, False, True]


@on_ranks(2)
def test_refusals_of_copies() -> None:
    workspace = make_workspace(signals=16, buffer_bytes=1 << 10)
    x = torch.ones(8)
    with cuda.CopyCall(workspace, 1) as copies:
        for call, match in (
            (
                lambda: copies.put(x, 2048 - 31),
                r"bytes \[2017, \+32\) are out of range; each rank has 2048 bytes",
            ),
            (lambda: copies.put(torch.ones(4, 4).t()[1:], 0), "tensor has strides"),
            (lambda: copies.publish(0), "signal index is 0; it must be 1 to 14"),
            (lambda: copies.publish(15), "signal index is 15; it must be 1 to 14"),
            (
                lambda: copies.publish(1, peer=workspace.rank),
                f"rank {workspace.rank} is not a peer of rank",
            ),
            (
                lambda: copies.fetch(2, 1, x, 0),
                f"rank 2 is not a peer of rank {workspace.rank}; world_size is 2",
            ),
        ):
            with pytest.raises(ValueError, match=match):
                call()
