"""The dtypes that the ops take, and their codes in the extension (csrc/host/vector.h)."""

from __future__ import annotations

from collections.abc import Collection

import torch

CODES: dict[torch.dtype, int] = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.float64: 3,
}
#: Integers, which the ops that only move elements take as well, on CPUs.
MOVED = (torch.int64, torch.int32)


def name(dtype: torch.dtype) -> str:
    """Return ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def check_supported(
    dtype: torch.dtype,
    what: str,
    allowed: Collection[torch.dtype] = tuple(CODES),
    *,
    verb: str = "has dtype",
) -> None:
    """Check that a dtype is among ``allowed``; by default those that the ops compute with.

    Raises:
        NotImplementedError: it is not.
    """
    if dtype not in allowed:
        names = ", ".join(dict.fromkeys(map(name, allowed)))
        raise NotImplementedError(f"{what} {verb} {name(dtype)}; supported: {names}")


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which matmuls and sums of ``dtype`` are accumulated."""
    return torch.float64 if dtype is torch.float64 else torch.float32
