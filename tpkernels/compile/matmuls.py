"""The matmuls of a graph."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tpkernels.compile.layout import same, same_shape
from tpkernels.compile.moves import shape_of, value

aten = torch.ops.aten


FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# The arguments of aten._scaled_mm behind its factors and their scales, and their defaults.
_OPTIONS = {"bias": None, "scale_result": None, "out_dtype": None, "use_fast_accum": False}


@dataclass(frozen=True)
class Scales:
    """Scales of the factors in float32, each tensor-wise or row-wise."""

    left: fx.Node  #: of one element, or [M, 1]
    right: fx.Node  #: of one element, or [1, N]
    fast_accum: bool


@dataclass(frozen=True)
class Matmul:
    """``left @ right (+ bias)``: left [M, K], right [K, N], bias [N]. With ``scales`` the factors
    are fp8, and bias and product have ``node``'s dtype."""

    node: fx.Node
    left: fx.Node
    right: fx.Node
    bias: fx.Node | None = None
    scales: Scales | None = None

    @classmethod
    def of(cls, node: fx.Node) -> Matmul | None:
        """Return the matmul that a node computes; None if it is not one, or none that the ops
        support."""
        args: Any = node.args
        if node.target is aten.mm.default:
            return cls(node, args[0], args[1])
        if node.target is aten.mul.Tensor and _is_outer(*args):
            return cls(node, args[0], args[1])
        if node.target is aten._scaled_mm.default:
            return cls._of_scaled(node)
        scaled = any(node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta"))
        if node.target is not aten.addmm.default or scaled:
            return None
        bias, columns = shape_of(args[0]), shape_of(args[2])[1]
        fits = len(bias) == 1 and same(bias[0], columns)
        return cls(node, args[1], args[2], args[0]) if fits else None

    @classmethod
    def _of_scaled(cls, node: fx.Node) -> Matmul | None:
        args: Any = node.args[:4]
        left, right, *scales = args
        if not all(isinstance(arg, fx.Node) for arg in args):
            return None
        given: Any = {**_OPTIONS, **dict(zip(_OPTIONS, node.args[4:], strict=False)), **node.kwargs}
        (m, _), (_, n) = shape_of(left), shape_of(right)
        fits = all(value(factor).dtype in FP8 for factor in (left, right))
        fits = fits and all(value(scale).dtype == torch.float32 for scale in scales)
        fits = fits and all(
            is_tensor_wise(scale) or same_shape(shape_of(scale), shape)
            for scale, shape in zip(scales, ((m, 1), (1, n)), strict=True)
        )
        dtype = value(node).dtype
        bias_fits = given["bias"] is None or value(given["bias"]).dtype == dtype
        if not fits or not bias_fits or dtype not in _OUT_DTYPES or given["scale_result"]:
            return None
        found = Scales(scales[0], scales[1], given["use_fast_accum"])
        return cls(node, left, right, given["bias"], found)

    def depends_on(self, nodes: Container[fx.Node]) -> bool:
        """Return whether something besides the left factor is among the nodes."""
        scales = (self.scales.left, self.scales.right) if self.scales else ()
        return any(node in nodes for node in (self.right, self.bias, *scales) if node is not None)

    def shares_input(self, other: Matmul) -> bool:
        """Return whether one op can make both, given that the left factors have the same bytes."""
        if self.scales is None or other.scales is None:
            return self.scales is other.scales
        if value(self.left).dtype != value(other.left).dtype:
            return False
        own, others = self.scales, other.scales
        same_dtype = value(self.node).dtype == value(other.node).dtype
        return own.left is others.left and own.fast_accum == others.fast_accum and same_dtype


def is_tensor_wise(scale: fx.Node) -> bool:
    """Return whether there is one scale for all."""
    return all(same(size, 1) for size in shape_of(scale))


def _is_outer(left: Any, right: Any) -> bool:
    """Return whether an elementwise product is that of a column and a row. Inductor turns some
    matmuls with K = 1 into this form, perhaps only on the rank with the smallest shard."""
    if not (isinstance(left, fx.Node) and isinstance(right, fx.Node)):
        return False
    columns, rows = shape_of(left), shape_of(right)
    alike = left.meta["val"].dtype == right.meta["val"].dtype
    return alike and len(columns) == len(rows) == 2 and same(columns[1], 1) and same(rows[0], 1)
