"""The matmuls of a graph, and the arguments with which the ops on scaled operands make them."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tpkernels.compile.graph import Editor
from tpkernels.compile.layout import Size, same, same_shape, shape_of, value

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
        if node.target is aten.mm.default or (node.target is aten.mul.Tensor and _is_outer(*args)):
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
        args: Any = node.args
        if not all(isinstance(arg, fx.Node) for arg in args[:4]):
            return None
        left, right, *scales = args[:4]
        options: Any = {**_OPTIONS, **dict(zip(_OPTIONS, args[4:], strict=False)), **node.kwargs}
        shapes = (shape_of(left)[0], 1), (1, shape_of(right)[1])
        dtype, bias = value(node).dtype, options["bias"]
        fits = (
            all(value(factor).dtype in FP8 for factor in (left, right))
            and all(
                value(scale).dtype == torch.float32
                and (is_tensor_wise(scale) or same_shape(shape_of(scale), shape))
                for scale, shape in zip(scales, shapes, strict=True)
            )
            and (bias is None or value(bias).dtype == dtype)
            and dtype in _OUT_DTYPES
            and not options["scale_result"]
        )
        found = Scales(scales[0], scales[1], options["use_fast_accum"])
        return cls(node, left, right, bias, found) if fits else None

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of the op on scaled operands that makes it."""
        assert self.scales is not None  # the caller has asked
        return {"out_dtype": value(self.node).dtype, "use_fast_accum": self.scales.fast_accum}

    def depends_on(self, nodes: Container[fx.Node]) -> bool:
        """Return whether something besides the left factor is among the nodes."""
        scales = (self.scales.left, self.scales.right) if self.scales else ()
        return any(node in nodes for node in (self.right, self.bias, *scales) if node is not None)

    def shares_input(self, other: Matmul) -> bool:
        """Return whether one op can make both, given that the left factors have the same bytes."""
        if self.scales is None or other.scales is None:
            return self.scales is other.scales
        return (
            value(self.left).dtype == value(other.left).dtype
            and self.scales.left is other.scales.left
            and self.options == other.options
        )


def is_tensor_wise(scale: fx.Node) -> bool:
    """Return whether there is one scale for all."""
    return all(same(size, 1) for size in shape_of(scale))


def row_scale(editor: Editor, scale: fx.Node, rows: Sequence[Size]) -> Any:
    """Reshape the scale of an x [*rows, K] as the ops take it."""
    return editor.reshape(scale, [] if is_tensor_wise(scale) else [*rows, 1])


def column_scale(editor: Editor, scale: fx.Node) -> Any:
    """Return the op's scale of a weight, which has a column even on a rank without columns."""
    return editor.reshape(scale, []) if is_tensor_wise(scale) else editor.padded(scale, 1)


def _is_outer(left: Any, right: Any) -> bool:
    """Return whether an elementwise product is that of a column and a row. Inductor turns some
    matmuls with K = 1 into this form, perhaps only on the rank with the smallest shard."""
    if not (isinstance(left, fx.Node) and isinstance(right, fx.Node)):
        return False
    columns, rows = shape_of(left), shape_of(right)
    alike = value(left).dtype == value(right).dtype
    return alike and len(columns) == len(rows) == 2 and same(columns[1], 1) and same(rows[0], 1)
