"""The matmuls of a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tpkernels.compile.layout import same
from tpkernels.compile.moves import shape_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Matmul:
    """``left @ right (+ bias)``: left [M, K], right [K, N], bias [N]."""

    node: fx.Node
    left: fx.Node
    right: fx.Node
    bias: fx.Node | None = None

    @classmethod
    def of(cls, node: fx.Node) -> Matmul | None:
        """The matmul that a node computes; None if it is not one, or none that the ops support."""
        args: Any = node.args
        if node.target is aten.mm.default:
            return cls(node, args[0], args[1])
        if node.target is aten.mul.Tensor and _is_outer(*args):
            return cls(node, args[0], args[1])
        scaled = any(node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta"))
        if node.target is not aten.addmm.default or scaled:
            return None
        bias, columns = shape_of(args[0]), shape_of(args[2])[1]
        fits = len(bias) == 1 and same(bias[0], columns)
        return cls(node, args[1], args[2], args[0]) if fits else None


def _is_outer(left: Any, right: Any) -> bool:
    """Whether an elementwise product is that of a column and a row. Inductor turns some matmuls
    with K = 1 into this form, perhaps only on the rank with the smallest shard."""
    if not (isinstance(left, fx.Node) and isinstance(right, fx.Node)):
        return False
    columns, rows = shape_of(left), shape_of(right)
    alike = left.meta["val"].dtype == right.meta["val"].dtype
    return alike and len(columns) == len(rows) == 2 and same(columns[1], 1) and same(rows[0], 1)
