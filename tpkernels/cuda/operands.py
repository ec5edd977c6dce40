"""Check the tensors of a call, and convert arguments for the extension."""

from __future__ import annotations

import torch

from tpkernels import _C
from tpkernels.common.dtypes import CODES, name
from tpkernels.symm.device import DeviceWorkspace

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_contiguous(device: torch.device, **tensors: torch.Tensor | None) -> None:
    """Raise ``ValueError`` if a tensor is on a different device or not contiguous."""
    for label, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{label} is on {tensor.device}; it must be on {device}")
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(
                f"{label} has strides {list(tensor.stride())}; it must be contiguous: pass "
                "a .contiguous() copy"
            )


def check_summable(device: torch.device, **tensors: torch.Tensor | None) -> None:
    """Check that tensors are contiguous. Raise ``NotImplementedError`` if the kernels cannot sum
    their dtype."""
    check_contiguous(device, **tensors)
    for label, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in DTYPES:
            allowed = ", ".join(map(name, DTYPES))
            raise NotImplementedError(f"{label} is {name(tensor.dtype)}; supported: {allowed}")


def check_matching(dtype: bool, **tensors: torch.Tensor | None) -> None:
    """Raise ``ValueError`` unless all tensors have equal shapes and, if ``dtype``, equal dtypes."""
    present = [(label, tensor) for label, tensor in tensors.items() if tensor is not None]
    first, reference = present[0]
    for label, tensor in present:
        if tensor.shape != reference.shape or (dtype and tensor.dtype != reference.dtype):
            raise ValueError(
                f"{label} is {list(tensor.shape)} {name(tensor.dtype)} but {first} is "
                f"{list(reference.shape)} {name(reference.dtype)}; they must match"
            )


def check_bias(bias: torch.Tensor | None, cols: int | None = None) -> None:
    """Raise ``ValueError`` unless bias is [cols]. By default, any length is accepted."""
    if bias is not None and (bias.dim() != 1 or cols not in (None, bias.shape[0])):
        needed = "cols" if cols is None else cols
        raise ValueError(f"bias has shape {list(bias.shape)}; it must be [{needed}]")


def check_capacity(
    workspace: DeviceWorkspace, device: torch.device, world: int, signals: int, buffer_bytes: int
) -> None:
    """Raise ``ValueError`` unless a call with these requirements fits the workspace.

    Args:
        device, world: device and number of ranks that the call was prepared for.
        signals: required signals per source rank.
        buffer_bytes: required bytes per buffer.
    """
    if (device, world) != (workspace.regions.device, workspace.world):
        raise ValueError(
            f"rank {workspace.rank}: the call was prepared for {world} ranks on {device}, but the "
            f"workspace has {workspace.world} ranks on {workspace.regions.device}; prepare the "
            "call for these"
        )
    if not workspace.holds(signals, buffer_bytes):
        raise ValueError(
            f"the workspace has {workspace.signals} signals per source rank and buffers of "
            f"{workspace.buffer_bytes} bytes, but this call needs {signals} signals and "
            f"{buffer_bytes} bytes"
        )


def epilogue(
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> _C.cuda.Epilogue:
    """Return the epilogue argument of a kernel."""
    bias_args = (0, 1, 0)
    if bias is not None:
        bias_args = bias.data_ptr(), max(bias.numel(), 1), CODES[bias.dtype]
    residual_args = (0, 0)
    if residual is not None:
        residual_args = residual.data_ptr(), CODES[residual.dtype]
    return _C.cuda.Epilogue(CODES[out_dtype], *bias_args, *residual_args)


def kernel_workspace(workspace: DeviceWorkspace, signature: int) -> _C.cuda.Workspace:
    """Return the workspace argument of a kernel, including the call signature."""
    return _C.cuda.Workspace(
        workspace.regions.data_ptr(),
        workspace.state.data_ptr(),
        workspace.control.data_ptr(),
        workspace.rank,
        workspace.world,
        signature,
        workspace.timeout_ns,
        workspace.signals,
        workspace.buffers_offset,
        workspace.buffer_stride,
        workspace.seed,
        workspace.chaos,
    )
