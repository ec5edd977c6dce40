"""all-reduce -> residual -> RMS norm: one op.

The op is ``all_reduce_rms_norm`` or ``matmul_all_reduce_rms_norm``. The all-reduce is a functional
collective, or one of the ops, which the pass or the model has put there. Between it and the sum
with the residual there may be views. The norm is as inductor decomposes torch's own, or as
transformers' ``LlamaRMSNorm`` writes it: in fp32, with the weight multiplied before or after the
rounding to the model's dtype.

Numerics are the op's: partials and residual are summed in fp32 and rounded once, and the normalised
rows are rounded once, where the graph rounds the all-reduce and the sum, or the rows and their
product with the weight, one after the other. So the results are nearer to the exact ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeGuard

import torch
from torch import fx

from tpkernels import dtypes
from tpkernels.compile.graph import (
    Change,
    Collective,
    Editor,
    Unsupported,
    descendants,
    erase_unread,
)
from tpkernels.compile.layout import Layout, same, same_shape
from tpkernels.compile.measured import check_worthwhile
from tpkernels.compile.moves import moved_from, shape_of, through, value
from tpkernels.op_spec import Options

aten = torch.ops.aten

_CAST = torch.ops.prims.convert_element_type.default
_FUNCTIONAL = torch.ops._c10d_functional.all_reduce.default
_OPS: dict[Any, str] = {
    torch.ops.tpkernels.all_reduce.default: "all_reduce_rms_norm",
    torch.ops.tpkernels.matmul_all_reduce.default: "matmul_all_reduce_rms_norm",
    _FUNCTIONAL: "all_reduce_rms_norm",
}


def is_reduction(node: fx.Node) -> bool:
    """Return whether a norm may become part of what ``node`` calls."""
    return node.target in _OPS


def group_of(node: fx.Node) -> Any:
    """Return the group of such a node."""
    return node.args[-1] if node.target is _FUNCTIONAL else _given(node)["group"]


@dataclass(frozen=True)
class _Norm:
    """``round(total / sqrt(mean(total^2) + eps) * weight)`` of each row.

    Attributes:
        nodes: from the square to the result; only the last is read by others.
    """

    weight: fx.Node
    eps: float
    nodes: list[fx.Node]

    @property
    def result(self) -> fx.Node:
        return self.nodes[-1]


def fuse(reduction: Collective) -> Change | None:
    """Rewrite an all-reduce with the norm that follows it; None where none does.

    Raises:
        Unsupported: they cannot be rewritten.
    """
    node = reduction.node
    end = _last_move(node)
    found = _with_residual(end)
    if found is None:
        return None
    total, residual, norm = found
    given = _operands(node)
    if given["residual"] is not None and residual is not None:
        raise Unsupported("the op in front of the norm has a residual of its own")
    if norm.weight in descendants(total):
        raise Unsupported("the norm's weight is computed from the sum")
    reduction.check_fusible([total, *norm.nodes])
    op, shape, dtype = _OPS[node.target], shape_of(node), value(node).dtype
    _check_worthwhile(reduction, op, shape, dtype)
    with Editor(total) as editor:
        if residual is not None:
            given["residual"] = editor.reshape(residual, shape)
        target = getattr(torch.ops.tpkernels, op).default
        weight = given.pop("w", None)
        factors = [] if weight is None else [weight]
        call = editor.call(
            target, given.pop("x"), *factors, norm.weight, reduction.group, **given, eps=norm.eps
        )
        normed, new_total = (
            editor.laid_out_like(old, editor.reshape(editor.item(call, i), shape_of(old)))
            for i, old in enumerate((norm.result, total))
        )
    replaced = [node, *_moves_between(node, end), total, *norm.nodes, *_casts(norm, total)]
    norm.result.replace_all_uses_with(normed)
    total.replace_all_uses_with(new_total)
    erase_unread(replaced)
    more = "" if residual is None else ", with a residual"
    return Change(op, len(factors), f"sum {list(shape)}{more}")


def _given(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of one of our ops, by name."""
    assert isinstance(node.target, torch._ops.OpOverload)  # of _OPS
    names = [argument.name for argument in node.target._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _operands(node: fx.Node) -> dict[str, Any]:
    """The new op's arguments that the node has: x, w, bias, residual, algorithm."""
    if node.target is _FUNCTIONAL:
        if node.args[1] != "sum":
            raise Unsupported(f"its reduction is {node.args[1]}, and the ops only sum")
        return {"x": node.args[0], "residual": None}
    given = _given(node)
    dtype = value(given["x"]).dtype
    for name in ("out_dtype", "wire_dtype"):
        asked = given.pop(name, None)
        if asked not in (None, dtype):
            raise Unsupported(f"{name} is {dtypes.name(asked)}, and x is {dtypes.name(dtype)}")
    del given["group"]
    return {"residual": None, **given}


def _last_move(node: fx.Node) -> fx.Node:
    """Return the end of a chain of nodes that only move elements, and keep their order and the
    rows."""
    layout = Layout.of(shape_of(node))
    while len(node.users) == 1:
        (user,) = node.users
        if moved_from(user) is not node or value(user).dtype != value(node).dtype:
            break
        rows, order = shape_of(user), layout.flat
        moved = through(user, layout) if rows and same(rows[-1], shape_of(node)[-1]) else None
        if moved is None or moved.flat != tuple(leaf for axis in order for leaf in axis.leaves):
            break
        node, layout = user, moved
    return node


def _moves_between(node: fx.Node, end: fx.Node) -> list[fx.Node]:
    """The nodes behind ``node`` up to ``end``."""
    moves = []
    while end is not node:
        moves.append(end)
        source = moved_from(end)
        assert source is not None  # `_last_move` came that way
        end = source
    return moves


def _with_residual(end: fx.Node) -> tuple[fx.Node, fx.Node | None, _Norm] | None:
    """(the total whose rows are normalised, the residual in it, the norm)."""
    norm = _norm_of(end)
    if norm is not None:
        return end, None, norm
    if len(end.users) != 1:
        return None
    (total,) = end.users
    if total.target is not aten.add.Tensor or total.kwargs:
        return None
    (residual,) = [arg for arg in total.args if arg is not end] or [None]
    if not isinstance(residual, fx.Node) or not isinstance(value(residual), torch.Tensor):
        return None
    alike = same_shape(shape_of(residual), shape_of(end))
    if not alike or value(residual).dtype != value(end).dtype:
        return None
    norm = _norm_of(total)
    return None if norm is None else (total, residual, norm)


def _norm_of(total: fx.Node) -> _Norm | None:
    """Return the norm that reads ``total``, if nothing else reads what it computes in between."""
    wide = [user for user in total.users if user.target is _CAST and user.args[1] == torch.float32]
    for source in (total, *wide):
        if value(source).dtype != torch.float32:
            continue
        for user in source.users:
            norm = _behind_square(user, source, total)
            if norm is not None:
                return norm
    return None


def _behind_square(square: fx.Node, source: fx.Node, total: fx.Node) -> _Norm | None:
    """Return the norm of ``source``, which is ``total`` in fp32, that begins with ``square``."""
    by_itself = square.target is aten.mul.Tensor and square.args == (source, source)
    if not by_itself and (square.target, square.args) != (aten.pow.Tensor_Scalar, (source, 2)):
        return None
    mean = _only_user(square)
    last = len(shape_of(total)) - 1
    rows = ((square, [-1], True), (square, [last], True))
    if mean is None or mean.target is not aten.mean.dim or mean.args not in rows or mean.kwargs:
        return None
    shifted = _only_user(mean)
    if shifted is None or shifted.target not in (aten.add.Tensor, aten.add.Scalar):
        return None
    eps = shifted.args[1]
    if shifted.args[0] is not mean or not isinstance(eps, float) or shifted.kwargs:
        return None
    root = _only_user(shifted)
    if root is None or root.target is not aten.rsqrt.default:
        return None
    rows_of = _only_user(root)
    if rows_of is None or rows_of.target is not aten.mul.Tensor:
        return None
    if set(rows_of.args) != {source, root}:
        return None
    return _weighted([square, mean, shifted, root, rows_of], eps, total)


def _weighted(nodes: list[fx.Node], eps: float, total: fx.Node) -> _Norm | None:
    """Return the norm with its product with a weight and its rounding, in either order."""
    dtype, weight = value(total).dtype, None
    factor: Any
    while weight is None or value(nodes[-1]).dtype != dtype:
        node = nodes[-1]
        user = _only_user(node)
        if user is None:
            return None
        if user.target is _CAST and value(user).dtype == dtype != value(node).dtype:
            nodes.append(user)
            continue
        if user.target is not aten.mul.Tensor or weight is not None:
            return None
        (factor,) = [arg for arg in user.args if arg is not node] or [None]
        if not _is_weight(factor, total):
            return None
        weight = factor
        nodes.append(user)
    return _Norm(_narrow(weight, dtype), eps, nodes)


def _is_weight(weight: Any, total: fx.Node) -> TypeGuard[fx.Node]:
    if not isinstance(weight, fx.Node) or not isinstance(value(weight), torch.Tensor):
        return False
    shape, allowed = shape_of(weight), (torch.float32, value(total).dtype)
    return (
        len(shape) == 1 and same(shape[0], shape_of(total)[-1]) and value(weight).dtype in allowed
    )


def _narrow(weight: fx.Node, dtype: torch.dtype) -> fx.Node:
    """The weight before it was converted to fp32, where it was of the rows' dtype."""
    source = weight.args[0] if weight.target is _CAST else None
    return source if isinstance(source, fx.Node) and value(source).dtype == dtype else weight


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _casts(norm: _Norm, total: fx.Node) -> list[fx.Node]:
    """Return the conversion in front of the norm."""
    source = norm.nodes[0].args[0]
    return [source] if isinstance(source, fx.Node) and source is not total else []


def _check_worthwhile(
    reduction: Collective, op: str, shape: Sequence[Any], dtype: torch.dtype
) -> None:
    rows, width = prod(shape[:-1]), shape[-1]
    if op == "all_reduce_rms_norm":  # whose times are by elements
        rows, width = rows * width, 1
    check_worthwhile(reduction, op, rows, width, Options(x_dtype=dtype, out_dtype=dtype))
