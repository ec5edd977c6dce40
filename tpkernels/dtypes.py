"""The dtypes that the ops take, and their codes in the extension (csrc/host/vector.h)."""

from __future__ import annotations

import torch

CODES: dict[torch.dtype, int] = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.float64: 3,
}


def name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def check_supported(dtype: torch.dtype, what: str) -> None:
    """Check that the ops take a dtype.

    Raises:
        NotImplementedError: they do not.
    """
    if dtype not in CODES:
        allowed = ", ".join(name(d) for d in CODES)
        raise NotImplementedError(f"{what} has dtype {name(dtype)}; supported: {allowed}")


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which matmuls and sums of ``dtype`` are accumulated."""
    return torch.float64 if dtype is torch.float64 else torch.float32
