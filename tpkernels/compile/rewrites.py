"""Rewrites of a collective and its neighbours into one op.

A rewrite raises `Unsupported` if one op cannot replace them.

- all-gather -> matmuls: one ``all_gather_matmul`` for all matmuls of one gathered tensor.
- matmuls -> reduce-scatter or all-reduce: ``matmul_reduce_scatter`` or ``matmul_all_reduce``. The
  input of the collective is a matmul or a sum of matmuls, such as the input gradient of several
  column-parallel weights. A sum becomes one matmul of concatenated operands. Views, transpositions,
  and the chunks of a scatter along a dim other than the first may lie between matmul and
  collective.
- all-reduce -> residual -> RMSNorm: ``all_reduce_rms_norm`` or ``matmul_all_reduce_rms_norm``. The
  all-reduce is a functional collective, or an op from the pass or the model. Views may lie between
  the all-reduce and the residual sum.

The norm has the form of the inductor decomposition of the torch RMSNorm, or of ``LlamaRMSNorm`` in
transformers: in fp32, with the weight multiplied before or after rounding to the model dtype.
Roundings differ from the graph:

- The op sums partials and residual in fp32 and rounds once. The graph rounds the all-reduce, then
  the sum.
- The op rounds the normalized rows once. The graph may round them before and after the weight
  multiplication.
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
from tpkernels.common.text import pluralize
from tpkernels.compile import layout as layouts
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
from tpkernels.compile.layout import (
    Axis,
    Layout,
    Size,
    get_shape,
    num_elements,
    shapes_equal,
    sizes_equal,
    value,
)
from tpkernels.planning.op_spec import OPS, GatherOptions, ReduceOptions
from tpkernels.torch_private import OpOverload, get_schema, pattern_matcher
from tpkernels.torch_private import c10d_functional as _c10d

aten = torch.ops.aten

_CAST = torch.ops.prims.convert_element_type.default
_FUNCTIONAL_ALL_REDUCE = _c10d.all_reduce.default

# Maps each op whose result may be normalized to the op that includes the norm.
_OPS_WITH_NORM: dict[object, str] = {
    torch.ops.tpkernels._all_reduce.default: "all_reduce_rms_norm",
    torch.ops.tpkernels._matmul_all_reduce.default: "matmul_all_reduce_rms_norm",
    _FUNCTIONAL_ALL_REDUCE: "all_reduce_rms_norm",
}
# Nodes after the square of the rows, up to the multiplication of the rows by rsqrt(...).
_RMS_CHAIN = (
    {aten.mean.dim},
    {aten.add.Tensor, aten.add.Scalar},
    {aten.rsqrt.default},
    {aten.mul.Tensor},
)


@dataclass(frozen=True)
class Change:
    """Replacement of a collective. The first fields are fields of ``Rewritten``."""

    op: str
    matmuls: int
    detail: str
    node: fx.Node | None = None  #: node of the op, if a norm can be fused into it


class _Gathered:
    """A gathered tensor, and the nodes that only move its elements."""

    def __init__(self, gather: fx.Node, world: int) -> None:
        self.node, self.shard, self.ranks = gather, gather.all_input_nodes[0], Axis(world)
        self.shard_layout = Layout.for_node(self.shard)
        #: Layouts of the nodes that only move the tensor.
        self.moves = layouts.find_moves(gather, self.shard_layout.push_leading(0, self.ranks))

    def leading_dims(self, layout: Layout) -> list[Size]:
        """Return the leading dims of the shard as an operand, for a matrix with this layout.

        The rows of the matrix contain the rank axis. The dims are the rows slower than the rank
        axis, if any, then the rows within a shard.
        """
        rows = layout.dims[0]
        index = rows.index(self.ranks)
        return [*([num_elements(rows[:index])] if index else []), num_elements(rows[index + 1 :])]

    def arrange_shard(self, editor: Editor, layout: Layout, columns: Size) -> fx.Node:
        """Return the shard as a matrix with the leading dims of `leading_dims`."""
        order = [axis for axis in layout.flat if axis is not self.ranks]
        return editor.arrange(
            self.shard, self.shard_layout.flat, order, [*self.leading_dims(layout), columns]
        )

    def find_matmuls(self) -> tuple[list[Matmul], dict[fx.Node, list[fx.Node]]]:
        """Return the matmuls that can be fused, and all other readers.

        The matmuls read the gathered tensor in the same layout. All other readers are grouped by
        the node in `moves` that they read.
        """
        matmuls: list[Matmul] = []
        other_readers: dict[fx.Node, list[fx.Node]] = {}
        reasons, dependent = [], descendants(self.node)
        for node, layout in self.moves.items():
            for reader in layouts.find_readers(node, self.moves):
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
                other_readers.setdefault(node, []).append(reader)
        if not matmuls:
            raise Unsupported("; ".join(dict.fromkeys(reasons)) or "no op reads it")
        return matmuls, other_readers

    def _matmul(self, reader: fx.Node, node: fx.Node, dependent: set[fx.Node]) -> Matmul:
        """Return the matmul of a reader of ``node``.

        Raises `Unsupported` if the matmul cannot start with one shard.
        """
        matmul, name, dtype = Matmul.match(reader), describe(reader), value(node).dtype
        rows, columns = self.moves[node].dims[0], self.moves[node].dims[-1]
        if matmul is None:
            raise Unsupported(f"{name} reads it and is not a plain matmul")
        if matmul.right is node:
            raise Unsupported(f"{name} reads it as its right operand")
        if matmul.left is not node or matmul.depends_on(dependent):
            raise Unsupported(f"the right operand of {name}, or its bias, also depends on it")
        if matmul.scales is None and dtype != value(self.node).dtype:  # fp8 may be sent as bytes
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
    matmuls, other_readers = gathered.find_matmuls()
    gather.check_fusible(matmul.node for matmul in matmuls)
    for reader in itertools.chain(*other_readers.values()):
        if pattern_matcher.is_mutation_op(reader):
            raise Unsupported(f"{describe(reader)} writes into the gathered tensor")
    first = matmuls[0]
    layout, scales, dtype = gathered.moves[first.left], first.scales, value(gather.node).dtype
    if scales is None and dtype not in dtypes.CODES:
        raise Unsupported(f"the ops do not support {dtypes.name(dtype)}")
    op = "all_gather_matmul" if scales is None else "all_gather_scaled_matmul"
    *outer_dims, rows = gathered.leading_dims(layout)
    dim, columns, keep_gathered = len(outer_dims), get_shape(first.left)[1], bool(other_readers)
    total = None if outer_dims else rows * gather.world
    gather.check_worthwhile(op, total, columns, GatherOptions(return_gathered=keep_gathered))
    detail = (
        f"x {[*outer_dims, rows, columns]} along dim {dim}, {pluralize(len(matmuls), 'matmul')}"
    )
    detail += "; the gathered tensor is kept" if keep_gathered else ""
    replaced = layouts.add_chunk_nodes(gathered.moves)
    with Editor(first.node) as editor:
        x = gathered.arrange_shard(editor, layout, columns)
        weights = [editor.pad_if_empty(matmul.right, 1) for matmul in matmuls]
        biases = None
        if any(matmul.bias is not None for matmul in matmuls):  # an empty tensor means no bias
            empty_bias = editor.call(aten.new_empty.default, gathered.shard, [0])
            biases = [empty_bias if matmul.bias is None else matmul.bias for matmul in matmuls]
        operands, options = [x, weights], {"return_gathered": keep_gathered}
        if scales is not None:
            scale_x, gathers = _local_scale(editor, gather, scales.left, [*outer_dims, rows])
            if scale_x is None:
                scale_x = row_scale(editor, scales.left, [*outer_dims, rows * gather.world])
            else:
                replaced += gathers
                detail += "; its scales are gathered with it"
            column_scales = [matmul.scales.right for matmul in matmuls if matmul.scales]
            scale_w = [column_scale(editor, scale) for scale in column_scales]
            operands = [editor.as_dtype(x, value(first.left).dtype), weights, scale_x, scale_w]
            options |= first.options
        fused = editor.op(op, *operands, gather.group, dim, biases, **options)
        # All code that can raise runs before the first change of the graph.
        new_sources, results = {}, []
        if keep_gathered:
            gathered_result = editor.item(fused, 0)
            for node in other_readers:
                order = gathered.moves[node].flat
                new = editor.arrange(gathered_result, layout.flat, order, get_shape(node))
                new = editor.as_dtype(new, value(node).dtype)
                new_sources[node] = editor.match_strides(node, new)
        outs = editor.item(fused, 1)
        for i, matmul in enumerate(matmuls):
            rows, columns = get_shape(matmul.node)
            padded = sizes_equal(columns, 0)  # pad_if_empty added a column
            out = editor.reshape(editor.item(outs, i), [rows, 1 if padded else columns])
            results.append(editor.call(aten.slice.Tensor, out, 1, 0, 0) if padded else out)
    for node, new in new_sources.items():
        for reader in other_readers[node]:
            reader.replace_input_with(node, new)
    for matmul, new in zip(matmuls, results, strict=True):
        matmul.node.replace_all_uses_with(new)
    erase_unread([*(matmul.node for matmul in matmuls), *replaced])
    return Change(op, len(matmuls), detail)


def _local_scale(
    editor: Editor, gather: Collective, scale: fx.Node, leading_dims: Sequence[Size]
) -> tuple[fx.Node | None, list[fx.Node]]:
    """Return the local row-wise scales, and the nodes of their gather.

    The op gathers these scales with the rows. Return None and an empty list unless the graph
    gathers the scales separately over the same ranks, as DTensor does.

    Args:
        scale: scales of the gathered rows.
        leading_dims: leading dims of the local x.
    """
    source, moves = layouts.find_origin(scale)
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
    if (
        layout is None
        or not in_rows
        or not shapes_equal(gathered.leading_dims(layout), leading_dims)
    ):
        return None, []
    gather.check_fusible([source])
    return gathered.arrange_shard(editor, layout, 1), [*layouts.add_chunk_nodes(moves), source]


class _Sum:
    """Input of a collective: the sum ``total`` of ``matmuls``, followed by ``moves``.

    The nodes ``replaced`` have no users outside the fused op.
    """

    def __init__(self, collective: Collective) -> None:
        self.total, self.moves = _find_origin(collective.node.all_input_nodes[0])
        self.replaced = [self.total, *layouts.add_chunk_nodes(self.moves)]
        self.matmuls = self._terms(self.total)
        shapes = [get_shape(matmul.node) for matmul in self.matmuls]
        if not all(shapes_equal(shape, shapes[0]) for shape in shapes):
            raise Unsupported("its input is a sum of matmuls in different layouts")
        replaced_nodes = {collective.node, *self.replaced}
        for node in self.replaced:
            outside_users = [user for user in node.users if user not in replaced_nodes]
            if outside_users:
                names = ", ".join(dict.fromkeys(map(describe, outside_users)))
                raise Unsupported(f"{describe(node)} in its input is also read by {names}")
        collective.check_fusible(matmul.node for matmul in self.matmuls)
        if len(self.matmuls) > 1 and any(matmul.scales for matmul in self.matmuls):
            raise Unsupported("its input is a sum of several scaled matmuls")

    def _terms(self, node: fx.Node) -> list[Matmul]:
        """Return the matmuls that ``node`` sums."""
        matmul = Matmul.match(node)
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
        """Return the matmuls that ``node``, an addend of ``total``, sums.

        Moves in between must preserve the order of the elements.
        """
        if not shapes_equal(get_shape(node), get_shape(total)):
            raise Unsupported("its input is a sum with broadcasting")
        source, moves = _find_origin(node)
        if not layouts.preserves_order(source, moves):
            raise Unsupported("its input is a sum of matmuls in different layouts")
        self.replaced += [source, *layouts.add_chunk_nodes(moves)]
        return self._terms(source)

    def layouts(self) -> tuple[Layout, Layout]:
        """Return the layouts of the matmul result [M, N] and of the collective input."""
        matmul = Layout.for_node(self.matmuls[0].node)
        total = matmul.view(get_shape(self.total))
        layout = total and total.apply_moves(self.moves)
        if layout is None:
            raise Unsupported("the layout of the matmul in its input is unknown")
        return matmul, layout

    def operands(self, editor: Editor) -> tuple[fx.Node, fx.Node]:
        """Return the operands x [M, K] and w [K, N] of the sum as one matmul."""
        if len(self.matmuls) == 1:  # The ops need K >= 1: a rank with K = 0 adds zeros.
            return editor.pad_if_empty(self.matmuls[0].left, 1), editor.pad_if_empty(
                self.matmuls[0].right, 0
            )
        x = editor.call(aten.cat.default, [matmul.left for matmul in self.matmuls], 1)
        w = editor.call(aten.cat.default, [matmul.right for matmul in self.matmuls], 0)
        return x, w


def fuse_reduction(collective: Collective) -> Change:
    """Rewrite a ``reduce_scatter_tensor`` or ``all_reduce``, and the matmuls that it reduces."""
    node, reduce_op = collective.node, collective.node.args[1]
    scatters = node.target is _c10d.reduce_scatter_tensor.default
    if reduce_op not in ("sum", "avg"):
        raise Unsupported(f"its reduction is {reduce_op}; the ops support sum and avg")
    dtype: torch.dtype = value(node).dtype
    # A mean is divided before rounding.
    out_dtype = dtypes.accumulator(dtype) if reduce_op == "avg" else None
    reduced = _Sum(collective)
    first, count = reduced.matmuls[0], len(reduced.matmuls)
    scales = first.scales
    op = "matmul_reduce_scatter" if scatters else "matmul_all_reduce"
    op = op if scales is None else f"scaled_{op}"
    matmul, layout = reduced.layouts()
    shard_axes, outer_dims, dim, splits_rows = (
        list(matmul.flat),
        list[Size](),
        list[int](),
        True,
    )
    if scatters:
        ranks, layout, outer_dims, dim = _split(matmul, layout, collective.world)
        shard_axes = [axis for axis in matmul.flat if axis is not ranks]
        splits_rows = dim == [0]
        if scales is not None and ranks in matmul.dims[1]:
            raise Unsupported("a scaled matmul can be scattered along its rows only")
    rows, width = get_shape(first.node)
    options = ReduceOptions(x_dtype=dtype, out_dtype=out_dtype or dtype)
    collective.check_worthwhile(op, rows if splits_rows else None, width, options)
    with Editor(node) as editor:
        x, w = reduced.operands(editor)
        x = editor.reshape(x, [*outer_dims, get_shape(x)[1]]) if outer_dims else x
        operands, keywords = [x, w], {"out_dtype": out_dtype}
        if scales is not None:
            operands.append(row_scale(editor, scales.left, get_shape(x)[:-1]))
            operands.append(column_scale(editor, scales.right))
            keywords = {**first.options, **({"out_dtype": out_dtype} if out_dtype else {})}
        fused = total = editor.op(op, *operands, collective.group, *dim, **keywords)
        if reduce_op == "avg":
            total = editor.call(aten.div.Tensor, total, collective.world)
            if value(total).dtype != dtype:
                total = editor.call(_CAST, total, dtype)
        result = editor.arrange(total, shard_axes, layout.flat, get_shape(node))
        result = editor.match_strides(node, result)
    waits = [user for user in node.users if user.target is _c10d.wait_tensor.default]
    for old_node in (*waits, node):
        old_node.replace_all_uses_with(result)
    erase_unread([*waits, node, *reduced.replaced])
    detail = f"x {list(get_shape(x))}" + (f" along dim {dim[0]}" if dim else "")
    detail += f", {count} matmuls as one" if count > 1 else ""
    return Change(op, count, detail, None if scatters else fused)


def _split(
    matmul: Layout, source: Layout, world: int
) -> tuple[object, Layout, list[Size], list[int]]:
    """Split a matmul for a scatter.

    Returns:
        The rank axis, the layout of a shard, the leading dims of x, or [] if x is a matrix, and the
        scattered dim.
    """
    popped = source.pop_leading(0, world)
    if popped is None:
        raise Unsupported(f"the shards of {source.shape} are not blocks of rows of the matmul")
    ranks, shard = popped
    rows, columns = matmul.dims
    if ranks in columns:
        if columns[0] is not ranks:
            raise Unsupported("each rank gets several blocks of columns")
        return ranks, shard, [], [1]
    outer_rows = rows[: rows.index(ranks)]
    if not outer_rows:
        return ranks, shard, [], [0]
    return ranks, shard, [num_elements(outer_rows), num_elements(rows[len(outer_rows) :])], [1]


def _find_origin(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """Call `find_origin`, and raise `Unsupported` if a move reinterprets the bytes."""
    source, moves = layouts.find_origin(node)
    for move in moves:
        if value(move).dtype != value(source).dtype:
            raise Unsupported(
                f"its input reinterprets the bytes of {describe(source)} as "
                f"{dtypes.name(value(move).dtype)}"
            )
    return source, moves


def reduction_group(node: fx.Node) -> object:
    """Return the group of an all-reduce that can include a norm, or None for other nodes."""
    if node.target is _FUNCTIONAL_ALL_REDUCE:
        return node.args[-1]
    return _arguments(node)["group"] if node.target in _OPS_WITH_NORM else None


@dataclass(frozen=True)
class _Norm:
    """``round(total / sqrt(mean(total^2) + eps) * weight)`` for each row.

    Attributes:
        nodes: from the square to the result. Only the result has users outside the norm.
    """

    weight: fx.Node
    eps: float
    nodes: list[fx.Node]


def fuse_norm(reduction: Collective) -> Change | None:
    """Rewrite an all-reduce and the norm that follows it. Return None without such a norm."""
    node = reduction.node
    moves = _row_moves(node)
    last_move = moves[-1] if moves else node
    total, residual, norm = last_move, None, _match_norm(last_move)
    if norm is None:
        total, residual = _match_residual_add(last_move)
        norm = None if residual is None else _match_norm(total)
    if norm is None:
        return None
    arguments = _norm_op_arguments(node)
    if arguments["residual"] is not None and residual is not None:
        raise Unsupported("the op before the norm already has a residual")
    if norm.weight in descendants(total):
        raise Unsupported("the weight of the norm is computed from the sum")
    reduction.check_fusible([total, *norm.nodes])
    op, shape, dtype = _OPS_WITH_NORM[node.target], get_shape(node), value(node).dtype
    rows, width = prod(shape[:-1]), shape[-1]
    if not OPS[op].has_matmul:  # measured times are keyed by number of elements
        rows, width = rows * width, 1
    reduction.check_worthwhile(op, rows, width, ReduceOptions(x_dtype=dtype, out_dtype=dtype))
    with Editor(total) as editor:
        if residual is not None:
            arguments["residual"] = editor.reshape(residual, shape)
        operands = [arguments.pop(name) for name in ("x", "w") if name in arguments]
        call = editor.op(op, *operands, norm.weight, reduction.group, **arguments, eps=norm.eps)
        results = []
        for i, old in enumerate((norm.nodes[-1], total)):
            new = editor.reshape(editor.item(call, i), get_shape(old))
            results.append((old, editor.match_strides(old, new)))
    for old, new in results:
        old.replace_all_uses_with(new)
    cast = norm.nodes[0].all_input_nodes[0]
    erase_unread([node, *moves, total, *norm.nodes, *([] if cast is total else [cast])])
    suffix = "" if residual is None else ", with a residual"
    return Change(op, len(operands) - 1, f"sum {list(shape)}{suffix}")


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a tpkernels op, by name."""
    assert isinstance(node.target, OpOverload)  # a key of _OPS_WITH_NORM
    names = [argument.name for argument in get_schema(node.target).arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _norm_op_arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments for the op with a norm: x, w, bias, residual, algorithm."""
    if node.target is _FUNCTIONAL_ALL_REDUCE:
        if node.args[1] != "sum":
            raise Unsupported(f"its reduction is {node.args[1]}; the ops with a norm support sum")
        return {"x": node.args[0], "residual": None}
    arguments = _arguments(node)
    dtype = value(arguments["x"]).dtype
    for name in ("out_dtype", "wire_dtype"):
        requested = arguments.pop(name, None)
        if requested not in (None, dtype):
            raise Unsupported(f"{name} is {dtypes.name(requested)} but x is {dtypes.name(dtype)}")
    del arguments["group"]
    return {"residual": None, **arguments}


def _row_moves(node: fx.Node) -> list[fx.Node]:
    """Return the moves after ``node`` that keep the rows and the order of the elements."""
    moves: list[fx.Node] = []
    last: fx.Node | None = node
    while last is not None and (user := _only_user(last)) is not None:
        if layouts.find_move_source(user) is not last or value(user).dtype != value(node).dtype:
            break
        shape, is_order_kept = get_shape(user), layouts.preserves_order(node, [*moves, user])
        if not (shape and sizes_equal(shape[-1], get_shape(node)[-1]) and is_order_kept):
            break
        moves.append(user)
        last = user
    return moves


def _match_residual_add(node: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """Return (sum, residual) if a residual is added to ``node``, otherwise residual is None."""
    total = _only_user(node)
    if total is None or total.target is not aten.add.Tensor or total.kwargs:
        return node, None
    residual = _other_input(total, node)
    if residual is None or not isinstance(value(residual), torch.Tensor):
        return node, None
    shapes_match = shapes_equal(get_shape(residual), get_shape(node))
    return total, residual if shapes_match and value(residual).dtype == value(node).dtype else None


def _match_norm(total: fx.Node) -> _Norm | None:
    """Return the norm that reads ``total``, if its intermediate nodes have no other users."""
    fp32_casts = [
        user for user in total.users if user.target is _CAST and user.args[1] == torch.float32
    ]
    for source in (total, *fp32_casts):
        if value(source).dtype != torch.float32:
            continue
        for user in source.users:
            norm = _match_norm_from_square(user, source, total)
            if norm is not None:
                return norm
    return None


def _match_norm_from_square(square: fx.Node, source: fx.Node, total: fx.Node) -> _Norm | None:
    """Return the norm that begins with the node ``square``, or None.

    ``source`` is ``total`` in fp32.
    """
    squares = (aten.mul.Tensor, (source, source)), (aten.pow.Tensor_Scalar, (source, 2))
    if (square.target, square.args) not in squares:
        return None
    nodes = [square]
    for targets in _RMS_CHAIN:
        user = _only_user(nodes[-1])
        if user is None or user.target not in targets or user.kwargs:
            return None
        nodes.append(user)
    _, mean, shifted, root, rows = nodes
    dims, eps = mean.args[1:], shifted.args[1]
    last = len(get_shape(total)) - 1
    if dims not in (([-1], True), ([last], True)) or shifted.args[0] is not mean:
        return None
    if not isinstance(eps, float) or set(rows.args) != {source, root}:
        return None
    # Multiplication by the weight and rounding, in either order.
    dtype, weight = value(total).dtype, None
    while weight is None or value(nodes[-1]).dtype != dtype:
        user = _only_user(nodes[-1])
        if user is None:
            return None
        if user.target is aten.mul.Tensor and weight is None:
            weight = _norm_weight(_other_input(user, nodes[-1]), total)
            if weight is None:
                return None
        elif user.target is not _CAST or not value(user).dtype == dtype != value(nodes[-1]).dtype:
            return None
        nodes.append(user)
    return _Norm(weight, eps, nodes)


def _norm_weight(factor: fx.Node | None, total: fx.Node) -> fx.Node | None:
    """Return the weight of a norm, or None if the op does not support it.

    If the graph converts the weight to fp32 from the dtype of the rows, return the unconverted
    weight.
    """
    tensor, dtype = value(factor), value(total).dtype
    if factor is None or not isinstance(tensor, torch.Tensor) or tensor.dim() != 1:
        return None
    if not sizes_equal(tensor.shape[0], get_shape(total)[-1]) or tensor.dtype not in (
        torch.float32,
        dtype,
    ):
        return None
    is_upcast = factor.target is _CAST and value(factor.args[0]).dtype == dtype
    return factor.all_input_nodes[0] if is_upcast else factor


def _other_input(node: fx.Node, argument: fx.Node) -> fx.Node | None:
    """Return an input of ``node`` other than ``argument``, or None."""
    return next(
        (input_node for input_node in node.all_input_nodes if input_node is not argument), None
    )


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None
