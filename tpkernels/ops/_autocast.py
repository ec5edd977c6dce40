"""Autocast of the ops with a matmul."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tpkernels import groups
from tpkernels.local.packed import is_packed
from tpkernels.ops._library import LIBRARY


def define_autocast(op: str) -> None:
    """Make an op with a matmul cast its operands under autocast, as ``torch.matmul`` does.

    ``torch.library.register_autocast`` supports neither keyword arguments nor more than one dtype.
    """
    overload = getattr(torch.ops.tpkernels, op).default
    names = [argument.name for argument in overload._schema.arguments]

    def cast_and_call(device: str, key: str, *args: Any, **options: Any) -> Any:
        dtype, out_dtype = torch.get_autocast_dtype(device), options.get("out_dtype")
        off = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
        with torch._C._ExcludeDispatchKeyGuard(off):
            given = dict(zip(names, args, strict=False))  # without the defaults at the end
            with groups.told_of_errors(given.get("group")):  # no memory for the copies
                lowered = [_lowered(n, a, dtype, out_dtype) for n, a in given.items()]
            return overload(*lowered, **options)

    for device, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        LIBRARY.impl(op, functools.partial(cast_and_call, device, key), key)


def _lowered(name: str, value: Any, dtype: torch.dtype, out_dtype: torch.dtype | None) -> Any:
    """An argument as autocast passes it: floating-point tensors in ``dtype``. Unchanged are
    float64, a bias or the weight of a norm in float32 and a residual in the output's dtype, which
    the ops take with 16-bit operands, and a packed weight, whose dtype is checked."""
    if isinstance(value, (list, tuple)):
        return [_lowered(name, each, dtype, out_dtype) for each in value]
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    kept: dict[str, torch.dtype | None] = {"residual": out_dtype}
    kept |= dict.fromkeys(("biases", "bias", "norm_weight"), torch.float32)
    if value.dtype in (torch.float64, kept.get(name)) or is_packed(value):
        return value
    return value.to(dtype)
