"""Products that the algorithms make in place of those with a plain weight: a caller's own, with a
weight that only the caller knows, and scaled ones (`local.scaled`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from tpkernels.common import dtypes


class Product(ABC):
    """A weight that multiplies rows itself.

    Attributes:
        shape: (K, N) of the weight.
        dtype: of the rows that it multiplies.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @abstractmethod
    def multiply(
        self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Set ``out = x @ weight + bias``. x [M, ...], out [M, N], bias [N]."""


class CustomMatmul(Product):
    """A function that multiplies by a weight, which the ops with a matmul take in place of the
    weight: an engine's own GEMM, a quantised layer or a prepared one. The op does everything else,
    and overlaps the exchange with the products as it does with its own.

    Args:
        function: ``function(x)`` is the product of rows x [M, K] with the weight: a new or reused
            tensor [M, N] of ``dtype`` on x's device; on a GPU the current stream writes it. An
            algorithm calls it once, or once for the rows of each rank, and never for no rows.
            x may lie in memory that ranks share: it must be neither changed nor kept. A row's
            result must not depend on the other rows.
        shape: (K, N) of the weight.
        dtype: of x and of the product.

    The function runs under ``torch.no_grad()``, within a call: it cannot call an op on the same
    group. If it raises, or returns something else, that breaks the group as any error in a call.

    Raises:
        TypeError: ``function`` is not callable.
        ValueError: ``shape`` is not two positive integers.
        NotImplementedError: the ops do not take ``dtype``.
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
        """Set ``out = function(x)``, checked. x [M, K], out [M, N]."""
        assert bias is None  # validation.py
        with torch.no_grad():
            product = self.function(x)
            self._check(product, x, out)
            return out.copy_(product)

    def _check(self, product: object, x: torch.Tensor, out: torch.Tensor) -> None:
        if not isinstance(product, torch.Tensor):
            raise TypeError(
                f"{self} returned {type(product).__name__} for {_text(x)}; it must return a tensor"
            )
        same = product.shape == out.shape and product.dtype == out.dtype
        if not same or product.device != out.device:
            raise ValueError(
                f"{self} returned {_text(product)} for {_text(x)}; it must return {_text(out)}"
            )


# What users pass. Algorithms also get any other `Product`.
Weight: TypeAlias = torch.Tensor | CustomMatmul


def _text(x: torch.Tensor) -> str:
    return f"{list(x.shape)} {dtypes.name(x.dtype)} on {x.device}"
