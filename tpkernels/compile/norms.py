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

from dataclasses import dataclass
from math import prod
from typing import Any

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
from tpkernels.compile.layout import keep_order, moved_from, same, same_shape, shape_of, value
from tpkernels.op_spec import OPS, Options

aten = torch.ops.aten

_CAST = torch.ops.prims.convert_element_type.default
_FUNCTIONAL = torch.ops._c10d_functional.all_reduce.default
_OPS: dict[Any, str] = {
    torch.ops.tpkernels.all_reduce.default: "all_reduce_rms_norm",
    torch.ops.tpkernels.matmul_all_reduce.default: "matmul_all_reduce_rms_norm",
    _FUNCTIONAL: "all_reduce_rms_norm",
}
# What follows the square of the rows, up to their product with the factor.
_FACTOR = (
    {aten.mean.dim},
    {aten.add.Tensor, aten.add.Scalar},
    {aten.rsqrt.default},
    {aten.mul.Tensor},
)


def is_reduction(node: fx.Node) -> bool:
    """Return whether a norm may become part of what ``node`` calls."""
    return node.target in _OPS


def group_of(node: fx.Node) -> Any:
    """Return the group of such a node."""
    return node.args[-1] if node.target is _FUNCTIONAL else _arguments(node)["group"]


@dataclass(frozen=True)
class _Norm:
    """``round(total / sqrt(mean(total^2) + eps) * weight)`` of each row.

    Attributes:
        nodes: from the square to the result; only the last is read by others.
    """

    weight: fx.Node
    eps: float
    nodes: list[fx.Node]


def fuse(reduction: Collective) -> Change | None:
    """Rewrite an all-reduce with the norm that follows it; None where none does.

    Raises:
        Unsupported: they cannot be rewritten.
    """
    node = reduction.node
    moves = _moves_of_rows(node)
    end = moves[-1] if moves else node
    total, residual, norm = end, None, _norm_of(end)
    if norm is None:
        total, residual = _residual_sum(end)
        norm = None if residual is None else _norm_of(total)
    if norm is None:
        return None
    arguments = _operands(node)
    if arguments["residual"] is not None and residual is not None:
        raise Unsupported("the op in front of the norm has a residual of its own")
    if norm.weight in descendants(total):
        raise Unsupported("the norm's weight is computed from the sum")
    reduction.check_fusible([total, *norm.nodes])
    op, shape, dtype = _OPS[node.target], shape_of(node), value(node).dtype
    rows, width = prod(shape[:-1]), shape[-1]
    if not OPS[op].has_matmul:  # its times are by elements
        rows, width = rows * width, 1
    reduction.check_worthwhile(op, rows, width, Options(x_dtype=dtype, out_dtype=dtype))
    with Editor(total) as editor:
        if residual is not None:
            arguments["residual"] = editor.reshape(residual, shape)
        factors = [arguments.pop(name) for name in ("x", "w") if name in arguments]
        call = editor.op(op, *factors, norm.weight, reduction.group, **arguments, eps=norm.eps)
        results = []
        for i, old in enumerate((norm.nodes[-1], total)):
            new = editor.reshape(editor.item(call, i), shape_of(old))
            results.append((old, editor.laid_out_like(old, new)))
    for old, new in results:
        old.replace_all_uses_with(new)
    cast: Any = norm.nodes[0].args[0]
    erase_unread([node, *moves, total, *norm.nodes, *([] if cast is total else [cast])])
    more = "" if residual is None else ", with a residual"
    return Change(op, len(factors) - 1, f"sum {list(shape)}{more}")


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of one of our ops, by name."""
    assert isinstance(node.target, torch._ops.OpOverload)  # of _OPS
    names = [argument.name for argument in node.target._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _operands(node: fx.Node) -> dict[str, Any]:
    """Return the new op's arguments that the node has: x, w, bias, residual, algorithm."""
    if node.target is _FUNCTIONAL:
        if node.args[1] != "sum":
            raise Unsupported(f"its reduction is {node.args[1]}, and the ops only sum")
        return {"x": node.args[0], "residual": None}
    arguments = _arguments(node)
    dtype = value(arguments["x"]).dtype
    for name in ("out_dtype", "wire_dtype"):
        asked = arguments.pop(name, None)
        if asked not in (None, dtype):
            raise Unsupported(f"{name} is {dtypes.name(asked)}, and x is {dtypes.name(dtype)}")
    del arguments["group"]
    return {"residual": None, **arguments}


def _moves_of_rows(node: fx.Node) -> list[fx.Node]:
    """Return the chain of nodes behind ``node`` that only move elements, and keep their order and
    the rows."""
    moves: list[fx.Node] = []
    end = node
    while (user := _only_user(end)) is not None:
        if moved_from(user) is not end or value(user).dtype != value(node).dtype:
            break
        shape = shape_of(user)
        if not (shape and same(shape[-1], shape_of(node)[-1]) and keep_order(node, [*moves, user])):
            break
        moves.append(user)
        end = user
    return moves


def _residual_sum(end: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """Return the sum of ``end`` and a residual, and the residual; None if there is no such sum."""
    total = _only_user(end)
    if total is None or total.target is not aten.add.Tensor or total.kwargs:
        return end, None
    residual = _other(total, end)
    if not isinstance(value(residual), torch.Tensor):
        return end, None
    alike = same_shape(shape_of(residual), shape_of(end))
    return total, residual if alike and value(residual).dtype == value(end).dtype else None


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
    squares = (aten.mul.Tensor, (source, source)), (aten.pow.Tensor_Scalar, (source, 2))
    if (square.target, square.args) not in squares:
        return None
    nodes = [square]
    for targets in _FACTOR:
        user = _only_user(nodes[-1])
        if user is None or user.target not in targets or user.kwargs:
            return None
        nodes.append(user)
    _, mean, shifted, root, rows = nodes
    dims, eps = mean.args[1:], shifted.args[1]
    last = len(shape_of(total)) - 1
    if dims not in (([-1], True), ([last], True)) or shifted.args[0] is not mean:
        return None
    if not isinstance(eps, float) or set(rows.args) != {source, root}:
        return None
    # The product with a weight and the rounding, in either order.
    dtype, weight = value(total).dtype, None
    while weight is None or value(nodes[-1]).dtype != dtype:
        user = _only_user(nodes[-1])
        if user is None:
            return None
        if user.target is aten.mul.Tensor and weight is None:
            weight = _weight(_other(user, nodes[-1]), total)
            if weight is None:
                return None
        elif user.target is not _CAST or not value(user).dtype == dtype != value(nodes[-1]).dtype:
            return None
        nodes.append(user)
    return _Norm(weight, eps, nodes)


def _weight(factor: Any, total: fx.Node) -> fx.Node | None:
    """Return the vector by which a norm multiplies its rows, before it was converted to fp32 where
    it was of the rows' dtype; None if the op does not take it."""
    tensor, dtype = value(factor), value(total).dtype
    if not isinstance(tensor, torch.Tensor) or tensor.dim() != 1:
        return None
    if not same(tensor.shape[0], shape_of(total)[-1]) or tensor.dtype not in (torch.float32, dtype):
        return None
    narrow = factor.target is _CAST and value(factor.args[0]).dtype == dtype
    return factor.args[0] if narrow else factor


def _other(node: fx.Node, argument: fx.Node) -> Any:
    """Return the other argument of a node; None if there is no other."""
    return next((other for other in node.args if other is not argument), None)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None
