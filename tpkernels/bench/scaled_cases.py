"""Cases of the ops on scaled operands: float8_e4m3fn with row-wise scales, as inference engines
have them. The dtype of such a spec is that of the result, and of partials on the wire."""

from __future__ import annotations

from collections.abc import Callable

import torch

import tpkernels
from tpkernels.bench.specs import OPERANDS, Spec
from tpkernels.local.scaled import scaled_matmul

# An operand's elements and its scales.
Scaled = tuple[torch.Tensor, torch.Tensor]


def random_operands(
    spec: Spec, rows: int, k: int, n: int, normal: Callable[..., torch.Tensor]
) -> tuple[Scaled, Scaled]:
    """x [rows, k] and w [k, n] of this rank, in the layout of ``linear.weight.t()``. Scales vary by
    row and by rank; products have the order of 1."""
    (x, scale_x), (w, scale_w) = _quantised(normal(rows, k)), _quantised(normal(n, k))
    return (x, scale_x), (w.t(), scale_w.t() / spec.shape[2] ** 0.5)


def _quantised(x: torch.Tensor) -> Scaled:
    """The largest number of a row becomes the largest that there is."""
    x = x.float()
    scale = x.abs().amax(1, keepdim=True).clamp(min=1e-9) / torch.finfo(OPERANDS).max
    return (x / scale).to(OPERANDS), scale


def worth(elements: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What they stand for, exactly."""
    return elements.double() * scale.double()


def run(
    op: str,
    x: Scaled,
    w: Scaled,
    dtype: torch.dtype,
    group: str,
    sizes: tuple[int, ...],
    algorithm: str,
) -> torch.Tensor:
    """The op of this package, with the result in ``dtype``."""
    operands = x[0], w[0], x[1], w[1], group
    if op == "scaled_matmul_all_reduce":
        return tpkernels.scaled_matmul_all_reduce(*operands, out_dtype=dtype, algorithm=algorithm)
    y: torch.Tensor = getattr(tpkernels, op)(
        *operands, out_dtype=dtype, shard_sizes=sizes, algorithm=algorithm
    )
    return y


def product(x: Scaled, w: Scaled, dtype: torch.dtype) -> torch.Tensor:
    """torch's."""
    return torch._scaled_mm(x[0], w[0], x[1], w[1], out_dtype=dtype)


def local_product(x: Scaled, w: Scaled, dtype: torch.dtype) -> torch.Tensor:
    """This package's."""
    out = torch.empty(x[0].shape[0], w[0].shape[1], dtype=dtype, device=x[0].device)
    return scaled_matmul(x[0], w[0], x[1], w[1], out)
