"""Weight types of the ops: plain tensors, and opaque weights that multiply rows themselves.

An opaque weight is a `CustomMatmul`, or a weight with scales (`local.scaled`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from tpkernels.common import dtypes


class OpaqueWeight(ABC):
    """A weight that multiplies rows itself.

    Attributes:
        shape: (K, N) of the weight.
        dtype: dtype of the rows that it multiplies.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @abstractmethod
    def multiply(
        self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Set ``out = x @ weight + bias``. x [M, ...], out [M, N], bias [N]."""


class CustomMatmul(OpaqueWeight):
    """A user function that multiplies by a weight. Ops with a matmul accept it as the weight.

    Use it for an engine GEMM, a quantised layer or a prepared weight. The op overlaps communication
    with the calls of the function, as with its built-in matmuls.

    Args:
        function: ``function(x)`` multiplies rows x [M, K] by the weight. It returns a new or
            reused tensor [M, N] of ``dtype`` on the device of x; on a GPU the current stream
            writes it. An algorithm calls it once, or once for the rows of each rank, and never
            without rows. x may be shared memory: do not modify or keep it. A row of the result
            must not depend on any other row of x.
        shape: (K, N) of the weight.
        dtype: dtype of x and of the result.

    The function runs under ``torch.no_grad()`` within a call, so it cannot call an op on that
    group. If it raises or returns an invalid result, the group is broken, as after any error in
    a call.

    Raises:
        TypeError: ``function`` is not callable.
        ValueError: ``shape`` is not two positive integers.
        NotImplementedError: the ops do not support ``dtype``.
    """

    def __init__(
        self,
        function: Callable[[torch.Tensor], torch.Tensor],
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        if not callable(function):
            raise TypeError(f"function must be callable, not {type(function).__name__}")
        if len(shape) != 2 or min(shape) < 1:
            raise ValueError(f"shape is {shape!r}; it must be (K, N), both at least 1")
        dtypes.check_supported(dtype, "dtype")
        self.function, self.dtype = function, dtype
        self.shape = tuple(shape)

    def __repr__(self) -> str:
        return f"CustomMatmul({self.function!r}, {list(self.shape)}, {dtypes.name(self.dtype)})"

    def multiply(
        self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Set ``out = function(x)`` after a check of the result. x [M, K], out [M, N]."""
        assert bias is None  # rejected by validation.py
        with torch.no_grad():
            result = self.function(x)
            self._check(result, x, out)
            return out.copy_(result)

    def _check(self, result: object, x: torch.Tensor, out: torch.Tensor) -> None:
        if not isinstance(result, torch.Tensor):
            raise TypeError(
                f"{self} returned {type(result).__name__} for {_describe(x)}; it must return a "
                "tensor"
            )
        matches = result.shape == out.shape and result.dtype == out.dtype
        if not matches or result.device != out.device:
            raise ValueError(
                f"{self} returned {_describe(result)} for {_describe(x)}; it must return "
                f"{_describe(out)}"
            )


# Weights that users pass. Algorithms also receive other `OpaqueWeight` types.
Weight: TypeAlias = torch.Tensor | CustomMatmul


def _describe(x: torch.Tensor) -> str:
    return f"{list(x.shape)} {dtypes.name(x.dtype)} on {x.device}"
