"""The dtypes that the ops support, and their codes in the extension (csrc/host/vector.h)."""

from __future__ import annotations

from collections.abc import Collection

import torch

CODES: dict[torch.dtype, int] = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.float64: 3,
}
#: Of the elements that the collectives on CPUs move and reduce.
ELEMENT_CODES = CODES | {
    torch.uint8: 4,
    torch.int8: 5,
    torch.int16: 6,
    torch.int32: 7,
    torch.int64: 8,
}
#: Additional dtypes, on CPUs, of the ops that only move elements.
MOVED = (torch.int64, torch.int32)


def name(dtype: torch.dtype) -> str:
    """Return ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def check_supported(
    dtype: torch.dtype,
    subject: str,
    allowed: Collection[torch.dtype] = tuple(CODES),
    *,
    verb: str = "has dtype",
) -> None:
    """Check that a dtype is supported.

    Args:
        subject: the checked object, for the message.
        allowed: supported dtypes. Default: the dtypes that the ops compute with.

    Raises:
        NotImplementedError: the dtype is not supported.
    """
    if dtype not in allowed:
        names = ", ".join(dict.fromkeys(map(name, allowed)))
        raise NotImplementedError(f"{subject} {verb} {name(dtype)}; supported: {names}")


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the accumulator dtype of matmuls and reductions of ``dtype``."""
    return torch.float64 if dtype is torch.float64 else torch.float32
