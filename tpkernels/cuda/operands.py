"""Check the tensors of a call, and give the extension its form of arguments."""

from __future__ import annotations

import torch

from tpkernels import _C
from tpkernels.common.dtypes import CODES, name
from tpkernels.symm.device import DeviceWorkspace

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_contiguous(device: torch.device, **tensors: torch.Tensor | None) -> None:
    """Raise ``ValueError`` for a tensor that is on another device or not contiguous."""
    for label, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{label} is on {tensor.device}; it must be on {device}")
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(
                f"{label} has strides {list(tensor.stride())}; it must be contiguous: pass "
                "a .contiguous() copy"
            )


def check_summed(device: torch.device, **tensors: torch.Tensor | None) -> None:
    """Check that tensors are contiguous, and raise ``NotImplementedError`` for a dtype that the
    kernels cannot sum."""
    check_contiguous(device, **tensors)
    for label, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in DTYPES:
            allowed = ", ".join(map(name, DTYPES))
            raise NotImplementedError(f"{label} is {name(tensor.dtype)}; supported: {allowed}")


def check_alike(dtype: bool, **tensors: torch.Tensor | None) -> None:
    """Raise ``ValueError`` unless all tensors have the first one's shape and, if ``dtype``, its
    dtype."""
    present = [(label, tensor) for label, tensor in tensors.items() if tensor is not None]
    first, model = present[0]
    for label, tensor in present:
        if tensor.shape != model.shape or (dtype and tensor.dtype != model.dtype):
            raise ValueError(
                f"{label} is {list(tensor.shape)} {name(tensor.dtype)} but {first} is "
                f"{list(model.shape)} {name(model.dtype)}; they must match"
            )


def check_bias(bias: torch.Tensor | None, cols: int | None = None) -> None:
    """Raise ``ValueError`` unless bias is [cols], of any length by default."""
    if bias is not None and (bias.dim() != 1 or cols not in (None, bias.shape[0])):
        needed = "cols" if cols is None else cols
        raise ValueError(f"bias has shape {list(bias.shape)}; it must be [{needed}]")


def check_room(
    space: DeviceWorkspace, device: torch.device, world: int, words: int, buffer_bytes: int
) -> None:
    """Raise ``ValueError`` unless a call that was prepared on a device for ``world`` ranks, and
    needs that much, fits the workspace."""
    if (device, world) != (space.regions.device, space.world):
        raise ValueError(
            f"rank {space.rank}: the call was prepared for {world} ranks on {device}, but the "
            f"workspace has {space.world} ranks on {space.regions.device}; prepare the call for "
            "these"
        )
    if not space.holds(words, buffer_bytes):
        raise ValueError(
            f"the workspace has {space.words} signals per source rank and buffers of "
            f"{space.buffer_bytes} bytes, but this call needs {words} signals and {buffer_bytes} "
            "bytes"
        )


def epilogue(
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> _C.cuda.Epilogue:
    """Return the extension's form of an epilogue."""
    of_bias = (0, 1, 0)
    if bias is not None:
        of_bias = bias.data_ptr(), max(bias.numel(), 1), CODES[bias.dtype]
    of_residual = (0, 0)
    if residual is not None:
        of_residual = residual.data_ptr(), CODES[residual.dtype]
    return _C.cuda.Epilogue(CODES[out_dtype], *of_bias, *of_residual)


def space_of(space: DeviceWorkspace, signature: int) -> _C.cuda.Space:
    """Return what every kernel needs of a call, in the extension's form."""
    return _C.cuda.Space(
        space.regions.data_ptr(),
        space.state.data_ptr(),
        space.control.data_ptr(),
        space.rank,
        space.world,
        signature,
        space.timeout_ns,
        space.words,
        space.buffers_at,
        space.buffer_stride,
        space.seed,
        space.chaos,
    )
