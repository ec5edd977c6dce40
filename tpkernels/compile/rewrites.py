"""The three rewrites, each of a collective and its neighbours into one op; `Unsupported` where they
cannot be one.

- all-gather -> matmuls: one ``all_gather_matmul`` for all matmuls of one gathered tensor.
- matmuls -> reduce-scatter or all-reduce: ``matmul_reduce_scatter`` or ``matmul_all_reduce``. The
  collective's input may be one matmul or a sum of matmuls, such as the gradient of the input of
  several column-parallel weights. A sum becomes one matmul of concatenated factors. Between matmul
  and collective there may be views, transpositions, and the chunks of a scatter along a dim other
  than the first.
- all-reduce -> residual -> RMS norm: ``all_reduce_rms_norm`` or ``matmul_all_reduce_rms_norm``. The
  all-reduce is a functional collective, or one of the ops, which the pass or the model has put
  there. Between it and the sum with the residual there may be views. The norm is as inductor
  decomposes torch's own, or as transformers' ``LlamaRMSNorm`` writes it: in fp32, with the weight
  multiplied before or after the rounding to the model's dtype. The op sums partials and residual in
  fp32 and rounds once, and the rows once, where the graph rounds the all-reduce and the sum, or the
  rows and their product with the weight, one after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from tpkernels.common import dtypes
from tpkernels.common.text import counted
from tpkernels.compile import layout as moving
from tpkernels.compile.graph import (
    Collective,
    Editor,
    Matmul,
    Unsupported,
    column_scale,
    descendants,
    describe,
    erase_unread,
    is_tensor_wise,
    row_scale,
)
from tpkernels.compile.layout import Axis, Layout, Size, same, same_shape, shape_of, size_of, value
from tpkernels.planning.op_spec import OPS, GatherOptions, ReduceOptions
from tpkernels.torch_private import OpOverload, pattern_matcher, schema_of
from tpkernels.torch_private import c10d_functional as _c10d

aten = torch.ops.aten

_CAST = torch.ops.prims.convert_element_type.default
_FUNCTIONAL = _c10d.all_reduce.default

# The ops whose result may be normalised, and the op that does it too.
_NORMED: dict[object, str] = {
    torch.ops.tpkernels._all_reduce.default: "all_reduce_rms_norm",
    torch.ops.tpkernels._matmul_all_reduce.default: "matmul_all_reduce_rms_norm",
    _FUNCTIONAL: "all_reduce_rms_norm",
}
# What follows the square of the rows, up to their product with the factor.
_FACTOR = (
    {aten.mean.dim},
    {aten.add.Tensor, aten.add.Scalar},
    {aten.rsqrt.default},
    {aten.mul.Tensor},
)


@dataclass(frozen=True)
class Change:
    """What replaced a collective. The first fields are those of ``Rewritten``."""

    op: str
    matmuls: int
    detail: str
    node: fx.Node | None = None  #: the op's, where it may become part of another


class _Gathered:
    """A gathered tensor."""

    def __init__(self, gather: fx.Node, world: int) -> None:
        self.node, self.shard, self.ranks = gather, gather.all_input_nodes[0], Axis(world)
        self.inner = Layout.of(self.shard)
        #: The layouts of the nodes that only move it.
        self.moves = moving.follow(gather, self.inner.with_leading(0, self.ranks))

    def lead(self, layout: Layout) -> list[Size]:
        """Return the leading dims of the shard as the op takes it, for a matrix of that layout, in
        whose rows the ranks are: rows slower than the ranks, if there are any; and rows within a
        shard."""
        rows = layout.dims[0]
        at = rows.index(self.ranks)
        return [*([size_of(rows[:at])] if at else []), size_of(rows[at + 1 :])]

    def arranged(self, editor: Editor, layout: Layout, columns: Size) -> fx.Node:
        """Return the shard with the leading dims of `lead`."""
        order = [axis for axis in layout.flat if axis is not self.ranks]
        return editor.arrange(self.shard, self.inner.flat, order, [*self.lead(layout), columns])

    def readers(self) -> tuple[list[Matmul], dict[fx.Node, list[fx.Node]]]:
        """Return the matmuls that can be fused, which read it in one layout, and for each node that
        moves it its other readers."""
        matmuls: list[Matmul] = []
        rest: dict[fx.Node, list[fx.Node]] = {}
        reasons, dependent = [], descendants(self.node)
        for node, layout in self.moves.items():
            for reader in moving.readers(node, self.moves):
                try:
                    matmul = self._matmul(reader, node, dependent)
                except Unsupported as reason:
                    reasons.append(str(reason))
                else:
                    if not matmuls or (
                        layout.dims == self.moves[matmuls[0].left].dims
                        and matmul.shares_input(matmuls[0])
                    ):
                        matmuls.append(matmul)
                        continue
                rest.setdefault(node, []).append(reader)
        if not matmuls:
            raise Unsupported("; ".join(dict.fromkeys(reasons)) or "no op reads it")
        return matmuls, rest

    def _matmul(self, reader: fx.Node, node: fx.Node, dependent: set[fx.Node]) -> Matmul:
        """Return the matmul that a reader of ``node`` is, if it can start with one shard."""
        matmul, name, dtype = Matmul.of(reader), describe(reader), value(node).dtype
        rows, columns = self.moves[node].dims[0], self.moves[node].dims[-1]
        if matmul is None:
            raise Unsupported(f"{name} reads it and is not a plain matmul")
        if matmul.right is node:
            raise Unsupported(f"{name} reads it as its right operand")
        if matmul.left is not node or matmul.depends_on(dependent):
            raise Unsupported(f"the right operand of {name}, or its bias, also depends on it")
        if matmul.scales is None and dtype != value(self.node).dtype:  # fp8 may travel as bytes
            raise Unsupported(f"{name} reinterprets its bytes as {dtypes.name(dtype)}")
        if self.ranks in columns:
            raise Unsupported(
                f"{name} sums over the gathered dim, so it needs all shards before it can start"
            )
        if self.ranks not in rows:
            raise Unsupported(f"{name} reads a view of it that splits the shards")
        return matmul


def fuse_gather(gather: Collective) -> Change:
    """Rewrite an ``all_gather_into_tensor`` and the matmuls of the gathered tensor."""
    gathered = _Gathered(gather.node, gather.world)
    matmuls, rest = gathered.readers()
    gather.check_fusible(matmul.node for matmul in matmuls)
    for reader in itertools.chain(*rest.values()):
        if pattern_matcher.is_mutation_op(reader):
            raise Unsupported(f"{describe(reader)} writes into the gathered tensor")
    first = matmuls[0]
    layout, scales, dtype = gathered.moves[first.left], first.scales, value(gather.node).dtype
    if scales is None and dtype not in dtypes.CODES:
        raise Unsupported(f"the ops do not support {dtypes.name(dtype)}")
    op = "all_gather_matmul" if scales is None else "all_gather_scaled_matmul"
    *before, rows = gathered.lead(layout)
    dim, columns, kept = len(before), shape_of(first.left)[1], bool(rest)
    total = None if before else rows * gather.world
    gather.check_worthwhile(op, total, columns, GatherOptions(return_gathered=kept))
    detail = f"x {[*before, rows, columns]} along dim {dim}, {counted(len(matmuls), 'matmul')}"
    detail += "; the gathered tensor is kept" if kept else ""
    replaced = moving.with_carriers(gathered.moves)
    with Editor(first.node) as editor:
        x = gathered.arranged(editor, layout, columns)
        weights = [editor.padded(matmul.right, 1) for matmul in matmuls]
        biases = None
        if any(matmul.bias is not None for matmul in matmuls):  # no elements: no bias
            none = editor.call(aten.new_empty.default, gathered.shard, [0])
            biases = [none if matmul.bias is None else matmul.bias for matmul in matmuls]
        operands, options = [x, weights], {"return_gathered": kept}
        if scales is not None:
            own, gathers = _own_scale(editor, gather, scales.left, [*before, rows])
            if own is None:
                own = row_scale(editor, scales.left, [*before, rows * gather.world])
            else:
                replaced += gathers
                detail += "; its scales are gathered with it"
            columns_of = [matmul.scales.right for matmul in matmuls if matmul.scales]
            scale_w = [column_scale(editor, scale) for scale in columns_of]
            operands = [editor.as_dtype(x, value(first.left).dtype), weights, own, scale_w]
            options |= first.options
        fused = editor.op(op, *operands, gather.group, dim, biases, **options)
        # What can fail comes before the first change.
        new_readings, results = {}, []
        if kept:
            whole = editor.item(fused, 0)
            for node in rest:
                order = gathered.moves[node].flat
                new = editor.arrange(whole, layout.flat, order, shape_of(node))
                new = editor.as_dtype(new, value(node).dtype)
                new_readings[node] = editor.laid_out_like(node, new)
        outs = editor.item(fused, 1)
        for i, matmul in enumerate(matmuls):
            rows, columns = shape_of(matmul.node)
            padded = same(columns, 0)  # the op gave it a column
            out = editor.reshape(editor.item(outs, i), [rows, 1 if padded else columns])
            results.append(editor.call(aten.slice.Tensor, out, 1, 0, 0) if padded else out)
    for node, new in new_readings.items():
        for reader in rest[node]:
            reader.replace_input_with(node, new)
    for matmul, new in zip(matmuls, results, strict=True):
        matmul.node.replace_all_uses_with(new)
    erase_unread([*(matmul.node for matmul in matmuls), *replaced])
    return Change(op, len(matmuls), detail)


def _own_scale(
    editor: Editor, gather: Collective, scale: fx.Node, lead: Sequence[Size]
) -> tuple[fx.Node | None, list[fx.Node]]:
    """Return this rank's row-wise scales, and the nodes of their gather, if they come from one of
    their own over the same ranks, as DTensor writes it: the op sends a row with its scale.
    ``scale`` is of the gathered rows, ``lead`` the leading dims of this rank's x."""
    source, moves = moving.chain_to(scale)
    if (
        is_tensor_wise(scale)
        or source.target is not gather.node.target
        or source.args[-1] != gather.node.args[-1]
        or any(value(move).dtype != value(source).dtype for move in moves)
    ):
        return None, []
    gathered = _Gathered(source, gather.world)
    layout = gathered.moves.get(scale)
    in_rows = layout is not None and gathered.ranks in layout.dims[0]
    if layout is None or not in_rows or not same_shape(gathered.lead(layout), lead):
        return None, []
    gather.check_fusible([source])
    return gathered.arranged(editor, layout, 1), [*moving.with_carriers(moves), source]


class _Sum:
    """The input of a collective: a ``total`` of ``matmuls``, and the ``moves`` after it. Nothing
    but the op reads the nodes ``replaced``."""

    def __init__(self, collective: Collective) -> None:
        self.total, self.moves = _chain_to(collective.node.all_input_nodes[0])
        self.replaced = [self.total, *moving.with_carriers(self.moves)]
        self.matmuls = self._terms(self.total)
        shapes = [shape_of(matmul.node) for matmul in self.matmuls]
        if not all(same_shape(shape, shapes[0]) for shape in shapes):
            raise Unsupported("its input is a sum of matmuls in different layouts")
        inside = {collective.node, *self.replaced}
        for node in self.replaced:
            others = [user for user in node.users if user not in inside]
            if others:
                names = ", ".join(dict.fromkeys(map(describe, others)))
                raise Unsupported(f"{describe(node)} in its input is also read by {names}")
        collective.check_fusible(matmul.node for matmul in self.matmuls)
        if len(self.matmuls) > 1 and any(matmul.scales for matmul in self.matmuls):
            raise Unsupported("its input is a sum of several scaled matmuls")

    def _terms(self, node: fx.Node) -> list[Matmul]:
        """Return the matmuls of which ``node`` is the sum."""
        matmul = Matmul.of(node)
        if matmul is not None:
            if matmul.bias is not None:
                raise Unsupported(
                    f"{describe(node)} adds a bias before the sum, and biases may differ by rank"
                )
            return [matmul]
        addends = [addend for addend in node.args[:2] if isinstance(addend, fx.Node)]
        if node.target is not aten.add.Tensor or len(addends) < 2:
            raise Unsupported(f"its input comes from {describe(node)}, which is not a plain matmul")
        if node.kwargs.get("alpha", 1) != 1:
            raise Unsupported("its input is a sum with alpha != 1")
        return [term for addend in addends for term in self._addend(addend, node)]

    def _addend(self, node: fx.Node, total: fx.Node) -> list[Matmul]:
        """Return the matmuls of which ``node``, an addend of ``total``, is the sum. Moves in
        between must keep the order of the elements."""
        if not same_shape(shape_of(node), shape_of(total)):
            raise Unsupported("its input is a sum with broadcasting")
        source, moves = _chain_to(node)
        if not moving.keep_order(source, moves):
            raise Unsupported("its input is a sum of matmuls in different layouts")
        self.replaced += [source, *moving.with_carriers(moves)]
        return self._terms(source)

    def layouts(self) -> tuple[Layout, Layout]:
        """Return the layouts of the matmul's result [M, N] and of the collective's input."""
        matmul = Layout.of(self.matmuls[0].node)
        total = matmul.regrouped(shape_of(self.total))
        layout = total and total.after(self.moves)
        if layout is None:
            raise Unsupported("the layout of the matmul in its input is unknown")
        return matmul, layout

    def factors(self, editor: Editor) -> tuple[fx.Node, fx.Node]:
        """Return the factors x [M, K] and w [K, N] of the sum as one matmul."""
        if len(self.matmuls) == 1:  # A rank without K adds zeros: the ops need K >= 1.
            return editor.padded(self.matmuls[0].left, 1), editor.padded(self.matmuls[0].right, 0)
        x = editor.call(aten.cat.default, [matmul.left for matmul in self.matmuls], 1)
        w = editor.call(aten.cat.default, [matmul.right for matmul in self.matmuls], 0)
        return x, w


def fuse_reduction(collective: Collective) -> Change:
    """Rewrite a ``reduce_scatter_tensor`` or ``all_reduce``, and the matmuls that it reduces."""
    node, kind = collective.node, collective.node.args[1]
    scatters = node.target is _c10d.reduce_scatter_tensor.default
    if kind not in ("sum", "avg"):
        raise Unsupported(f"its reduction is {kind}; the ops support sum and avg")
    dtype: torch.dtype = value(node).dtype
    # A mean is divided before it is rounded.
    out_dtype = dtypes.accumulator(dtype) if kind == "avg" else None
    reduced = _Sum(collective)
    first, count = reduced.matmuls[0], len(reduced.matmuls)
    scales = first.scales
    op = "matmul_reduce_scatter" if scatters else "matmul_all_reduce"
    op = op if scales is None else f"scaled_{op}"
    matmul, layout = reduced.layouts()
    mine, lead, dim, by_rows = list(matmul.flat), list[Size](), list[int](), True
    if scatters:
        ranks, layout, lead, dim = _split(matmul, layout, collective.world)
        mine = [axis for axis in matmul.flat if axis is not ranks]
        by_rows = dim == [0]
        if scales is not None and ranks in matmul.dims[1]:
            raise Unsupported("a scaled matmul can be scattered along its rows only")
    rows, width = shape_of(first.node)
    options = ReduceOptions(x_dtype=dtype, out_dtype=out_dtype or dtype)
    collective.check_worthwhile(op, rows if by_rows else None, width, options)
    with Editor(node) as editor:
        x, w = reduced.factors(editor)
        x = editor.reshape(x, [*lead, shape_of(x)[1]]) if lead else x
        operands, keywords = [x, w], {"out_dtype": out_dtype}
        if scales is not None:
            operands.append(row_scale(editor, scales.left, shape_of(x)[:-1]))
            operands.append(column_scale(editor, scales.right))
            keywords = {**first.options, **({"out_dtype": out_dtype} if out_dtype else {})}
        fused = total = editor.op(op, *operands, collective.group, *dim, **keywords)
        if kind == "avg":
            total = editor.call(aten.div.Tensor, total, collective.world)
            if value(total).dtype != dtype:
                total = editor.call(_CAST, total, dtype)
        result = editor.arrange(total, mine, layout.flat, shape_of(node))
        result = editor.laid_out_like(node, result)
    waits = [user for user in node.users if user.target is _c10d.wait_tensor.default]
    for old in (*waits, node):
        old.replace_all_uses_with(result)
    erase_unread([*waits, node, *reduced.replaced])
    detail = f"x {list(shape_of(x))}" + (f" along dim {dim[0]}" if dim else "")
    detail += f", {count} matmuls as one" if count > 1 else ""
    return Change(op, count, detail, None if scatters else fused)


def _split(
    matmul: Layout, source: Layout, world: int
) -> tuple[object, Layout, list[Size], list[int]]:
    """Return how a scatter splits a matmul: the axis of the ranks, the layout of a shard, the
    leading dims of x where they are not the matmul's, and the scattered dim."""
    split = source.without_leading(0, world)
    if split is None:
        raise Unsupported(f"the shards of {source.shape} are not blocks of rows of the matmul")
    ranks, shard = split
    rows, columns = matmul.dims
    if ranks in columns:
        if columns[0] is not ranks:
            raise Unsupported("each rank gets several blocks of columns")
        return ranks, shard, [], [1]
    before = rows[: rows.index(ranks)]
    if not before:
        return ranks, shard, [], [0]
    return ranks, shard, [size_of(before), size_of(rows[len(before) :])], [1]


def _chain_to(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """Do as `chain_to`, where no move makes other numbers of the same bytes."""
    source, moves = moving.chain_to(node)
    for move in moves:
        if value(move).dtype != value(source).dtype:
            raise Unsupported(
                f"its input reinterprets the bytes of {describe(source)} as "
                f"{dtypes.name(value(move).dtype)}"
            )
    return source, moves


def reduction_group(node: fx.Node) -> object:
    """Return the group of a reduction of which a norm may become part; None for other nodes."""
    if node.target is _FUNCTIONAL:
        return node.args[-1]
    return _arguments(node)["group"] if node.target in _NORMED else None


@dataclass(frozen=True)
class _Norm:
    """``round(total / sqrt(mean(total^2) + eps) * weight)`` of each row.

    Attributes:
        nodes: from the square to the result; only the last is read by others.
    """

    weight: fx.Node
    eps: float
    nodes: list[fx.Node]


def fuse_norm(reduction: Collective) -> Change | None:
    """Rewrite an all-reduce with the norm that follows it; None where none does."""
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
        raise Unsupported("the op before the norm already has a residual")
    if norm.weight in descendants(total):
        raise Unsupported("the weight of the norm is computed from the sum")
    reduction.check_fusible([total, *norm.nodes])
    op, shape, dtype = _NORMED[node.target], shape_of(node), value(node).dtype
    rows, width = prod(shape[:-1]), shape[-1]
    if not OPS[op].has_matmul:  # its times are by elements
        rows, width = rows * width, 1
    reduction.check_worthwhile(op, rows, width, ReduceOptions(x_dtype=dtype, out_dtype=dtype))
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
    cast = norm.nodes[0].all_input_nodes[0]
    erase_unread([node, *moves, total, *norm.nodes, *([] if cast is total else [cast])])
    more = "" if residual is None else ", with a residual"
    return Change(op, len(factors) - 1, f"sum {list(shape)}{more}")


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of one of our ops, by name."""
    assert isinstance(node.target, OpOverload)  # of _NORMED
    names = [argument.name for argument in schema_of(node.target).arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _operands(node: fx.Node) -> dict[str, Any]:
    """Return the new op's arguments that the node has: x, w, bias, residual, algorithm."""
    if node.target is _FUNCTIONAL:
        if node.args[1] != "sum":
            raise Unsupported(f"its reduction is {node.args[1]}; the ops with a norm support sum")
        return {"x": node.args[0], "residual": None}
    arguments = _arguments(node)
    dtype = value(arguments["x"]).dtype
    for name in ("out_dtype", "wire_dtype"):
        asked = arguments.pop(name, None)
        if asked not in (None, dtype):
            raise Unsupported(f"{name} is {dtypes.name(asked)} but x is {dtypes.name(dtype)}")
    del arguments["group"]
    return {"residual": None, **arguments}


def _moves_of_rows(node: fx.Node) -> list[fx.Node]:
    """Return the chain of nodes behind ``node`` that only move elements, and keep their order and
    the rows."""
    moves: list[fx.Node] = []
    end: fx.Node | None = node
    while end is not None and (user := _only_user(end)) is not None:
        if moving.moved_from(user) is not end or value(user).dtype != value(node).dtype:
            break
        shape, alike = shape_of(user), moving.keep_order(node, [*moves, user])
        if not (shape and same(shape[-1], shape_of(node)[-1]) and alike):
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
    if residual is None or not isinstance(value(residual), torch.Tensor):
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


def _weight(factor: fx.Node | None, total: fx.Node) -> fx.Node | None:
    """Return the vector by which a norm multiplies its rows, before it was converted to fp32 where
    it was of the rows' dtype; None if the op does not take it."""
    tensor, dtype = value(factor), value(total).dtype
    if factor is None or not isinstance(tensor, torch.Tensor) or tensor.dim() != 1:
        return None
    if not same(tensor.shape[0], shape_of(total)[-1]) or tensor.dtype not in (torch.float32, dtype):
        return None
    narrow = factor.target is _CAST and value(factor.args[0]).dtype == dtype
    return factor.all_input_nodes[0] if narrow else factor


def _other(node: fx.Node, argument: fx.Node) -> fx.Node | None:
    """Return the other node among a node's inputs; None if there is no other."""
    return next((other for other in node.all_input_nodes if other is not argument), None)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None
