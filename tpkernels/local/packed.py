"""Weights in the packed form of oneDNN, which multiplies rows without rearranging the weight in
every call.

A packed weight is an opaque tensor on the CPU (layout ``torch._mkldnn``) of shape [N, K], where a
plain one is [K, N]. Its columns cannot be sliced. A FakeTensor of it looks like a strided one.

Where its memory turns out to be panels, as csrc/host/product.h describes them, the extension
multiplies by it; oneDNN takes other layouts.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from tpkernels import _C, dtypes
from tpkernels.local.product import Weight

# The rows that oneDNN lays the weight out for; products of any rows work. In float32, 4 rows of
# K=1024, N=2816 took 569 us with a weight laid out for 1 row, and 234 to 248 us with one for 4 to
# 512 rows. For 1 to 512 rows, hints from 4 on differ by no more than the noise. In bfloat16 the
# hint changes nothing. AMD EPYC Zen 4, 1 thread, torch 2.13, 2026-11-22.
_ROWS = 16

_PLAIN = "use the plain weight"


@functools.cache
def native(dtype: torch.dtype) -> bool:
    """Return whether torch multiplies ``dtype`` at full speed on this processor."""
    if dtype in (torch.float32, torch.float64):
        return True
    probe = {
        torch.bfloat16: "_is_mkldnn_bf16_supported",
        torch.float16: "_is_mkldnn_fp16_supported",
    }.get(dtype)
    if probe is None:
        return False
    try:
        return bool(getattr(torch.ops.mkldnn, probe)())
    except (AttributeError, RuntimeError):  # torch built without oneDNN
        return False


def pack(w: torch.Tensor) -> torch.Tensor:
    """Return a copy of a weight that the ops take in place of it on CPUs, for inference.

    oneDNN has it in a layout of its own. It pays off with any number of rows where the extension
    reads that layout: in float32 on processors with AVX-512, in bfloat16 if these have its dot
    products and no AMX. Elsewhere it pays off in float32 from a few rows on, and in 16 bits from
    some 16. The first weight of a shape takes three times its memory meanwhile: what the layout is
    is tried out.

    Torch and oneDNN keep what they prepare for a shape of a weight and a number of rows, about half
    a MiB each in float32. Each keeps the last 1024, or as many as ``LRU_CACHE_CAPACITY`` and
    ``ONEDNN_PRIMITIVE_CACHE_CAPACITY`` say in the environment.

    Args:
        w: [K, N] of float32, bfloat16 or float16; any strides.

    Returns:
        An opaque tensor of shape [N, K] and ``w``'s dtype, with memory of its own. It has no
        gradient, and an op that gets it raises where one would be needed. ``to_dense().t()`` is
        ``w`` again, to the bit. Its values are fixed: few rows would be multiplied by the old ones
        if ``.data`` was assigned.

    Raises:
        ValueError: ``w`` is no matrix, is empty, or is packed already.
        NotImplementedError: ``w`` is not on a CPU, the processor has no instructions for its dtype,
            or torch was built without oneDNN.
    """
    check_packable(w, "w")
    packed = _reordered(w.detach().t())
    pitch = _panel_pitch(packed)
    if pitch is not None:
        n, k = packed.shape
        address = torch.ops.mkldnn.data_ptr(packed)
        # Read by csrc/calls/product.cpp. Aliases of the tensor lack it, and go to oneDNN.
        packed._tpkernels_panels = _C.calls.Panels(  # type: ignore[attr-defined]
            address, pitch, k, n, dtypes.CODES[w.dtype], owner=packed.detach()
        )
    return packed


def has_panels(packed: torch.Tensor, rows: int) -> bool:
    """Return whether so many rows are multiplied by the extension."""
    return hasattr(packed, "_tpkernels_panels") and _C.calls.multiplies(
        dtypes.CODES[packed.dtype], "packed", rows
    )


def _reordered(w: torch.Tensor) -> torch.Tensor:
    """w [N, K]."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(w, _ROWS)
    return packed


def _panel_pitch(packed: torch.Tensor) -> int | None:
    """Return the bytes from one panel to the next; None: the memory of a packed weight is no
    panels, or no vector unit multiplies by panels of the dtype."""
    if not _C.calls.multiplies(dtypes.CODES[packed.dtype], "packed", 1):
        return None
    n, k = packed.shape
    return _pitch_of(_description(packed), n, k, packed.dtype)


def _description(packed: torch.Tensor) -> bytes:
    """Return what oneDNN says of the layout."""
    return bytes(torch.ops.mkldnn._get_mkldnn_serialized_md(packed).tolist())


@functools.cache
def _pitch_of(description: bytes, n: int, k: int, dtype: torch.dtype) -> int | None:
    """Pack random numbers and compares: oneDNN documents no layout, and a description has none
    that can be read."""
    if n % _C.calls.PANEL_COLUMNS or k * dtype.itemsize % 4:
        return None  # oneDNN pads these
    generator = torch.Generator().manual_seed(0)  # the global one is the user's
    plain = torch.randn(n, k, generator=generator, device="cpu", dtype=dtype)
    packed = _reordered(plain)
    nbytes = torch.ops.mkldnn._nbytes(packed)
    panels = -(-n // _C.calls.PANEL_COLUMNS)
    pitch, rest = divmod(nbytes, panels)
    group = 4 // dtype.itemsize
    elements = pitch // dtype.itemsize // _C.calls.PANEL_COLUMNS  # of a column
    if rest or elements < k or elements % group or _description(packed) != description:
        return None
    memory = (ctypes.c_char * nbytes).from_address(torch.ops.mkldnn.data_ptr(packed))
    found = torch.frombuffer(memory, dtype=torch.uint8).view(panels, pitch)
    for panel, columns in zip(found, plain.split(_C.calls.PANEL_COLUMNS), strict=True):
        padded = plain.new_zeros(_C.calls.PANEL_COLUMNS, elements)
        padded[: len(columns), :k] = columns
        expected = padded.view(-1, elements // group, group).transpose(0, 1).contiguous()
        if not torch.equal(panel, expected.flatten().view(torch.uint8)):
            return None
    return pitch


def better_packed(dtype: torch.dtype) -> bool:
    """Return whether inference with any number of rows is served best by the packed weight, if one
    of both is to be kept: in float32, and where the extension multiplies few rows faster by that
    one, or by neither. Otherwise the plain one takes 0.8 to 1.2 times as long with up to 16 rows
    (benchmarks/results/cpu-2core-few-rows.md), and 1.05 times with hundreds
    (benchmarks/results/cpu-2core-llama.md)."""
    if dtype == torch.float32 or not _C.calls.multiplies(dtypes.CODES[dtype], "columns", 8):
        return True
    probe = torch.empty(256, 256, dtype=dtype, device="cpu")
    return native(dtype) and has_panels(pack(probe), 8)


def check_packable(w: torch.Tensor, what: str) -> None:
    """Raise what `pack` raises for a weight, which the message calls ``what``."""
    if is_packed(w):
        raise ValueError(f"{what} of shape {list(w.shape)} is packed already")
    if w.dim() != 2 or 0 in w.shape:
        raise ValueError(f"{what} has shape {list(w.shape)}; only a matrix [K, N] can be packed")
    if w.device.type != "cpu" or w.layout != torch.strided:
        raise NotImplementedError(
            f"{what} is a {w.layout} tensor on {w.device}; only dense CPU weights can be packed"
        )
    dtypes.check_supported(w.dtype, what)
    if w.dtype == torch.float64:
        raise NotImplementedError(f"{what} is float64, which oneDNN does not multiply; {_PLAIN}")
    if not torch.backends.mkldnn.is_available():
        raise NotImplementedError(f"torch was built without oneDNN; {_PLAIN}")
    if not native(w.dtype):
        raise NotImplementedError(
            f"{what} is {dtypes.name(w.dtype)}, for which this processor has no instructions; "
            f"{_PLAIN}, or pack it in float32"
        )


def is_packed(w: Weight) -> bool:
    """Return whether a weight is packed."""
    return isinstance(w, torch.Tensor) and w.is_mkldnn


def columns_of(w: Weight) -> int:
    """Return N of a weight."""
    return w.shape[0] if is_packed(w) else w.shape[1]


def fake_columns_of(w: torch.Tensor, k: int) -> int:
    """Return N of a weight in a fake kernel, for an x of ``k`` columns."""
    packed = is_packed(w) or (w.shape[0] != k and w.shape[1] == k)
    return w.shape[0] if packed else w.shape[1]


def packed_product(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return oneDNN's ``x @ w + bias``. x [M, K] of any strides, w packed, bias [N] of x's dtype or
    float32: it is added in the accumulator."""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, w, bias, "none", [], "")
    return product
