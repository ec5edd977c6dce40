"""matmuls -> reduce-scatter or all-reduce: one ``matmul_reduce_scatter`` or ``matmul_all_reduce``.

The collective's input may be one matmul or a sum of matmuls, such as the gradient of the input of
several column-parallel weights. A sum becomes one matmul of concatenated factors. Between matmul
and collective there may be views, transpositions, and the chunks of a scatter along a dim other
than the first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tpkernels import dtypes
from tpkernels.compile.graph import (
    Change,
    Collective,
    Editor,
    Unsupported,
    describe,
    erase_unread,
)
from tpkernels.compile.layout import (
    Layout,
    Size,
    chain_to,
    keep_order,
    same_shape,
    shape_of,
    size_of,
    value,
    with_carriers,
)
from tpkernels.compile.matmuls import Matmul, column_scale, row_scale
from tpkernels.op_spec import Options

aten = torch.ops.aten

_c10d = torch.ops._c10d_functional


class _Sum:
    """The input of a collective: a sum of matmuls, and the moves after it.

    Attributes:
        total: the sum.
        moves: the nodes between the sum and the collective that only move elements.
        replaced: the nodes that the op replaces; nothing else reads them.
        matmuls: the terms of the sum.
    """

    def __init__(self, collective: Collective) -> None:
        source: Any = collective.node.args[0]
        self.total, self.moves = _chain_to(source)
        self.replaced = [self.total, *with_carriers(self.moves)]
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
            raise Unsupported("its input is a sum of scaled matmuls")

    def _terms(self, node: fx.Node) -> list[Matmul]:
        """Return the matmuls of which ``node`` is the sum."""
        matmul = Matmul.of(node)
        if matmul is not None:
            if matmul.bias is not None:
                raise Unsupported(
                    f"{describe(node)} adds a bias before the sum, and biases may differ by rank"
                )
            return [matmul]
        addends = node.args[:2] if node.target is aten.add.Tensor else [None]
        if not all(isinstance(addend, fx.Node) for addend in addends):
            raise Unsupported(f"its input is made by {describe(node)}, which is not a plain matmul")
        if node.kwargs.get("alpha", 1) != 1:
            raise Unsupported("its input is a sum with a factor")
        return [term for addend in addends for term in self._addend(addend, node)]

    def _addend(self, node: Any, total: fx.Node) -> list[Matmul]:
        """Return the matmuls of which ``node``, an addend of ``total``, is the sum. Moves in
        between must keep the order of the elements."""
        if not same_shape(shape_of(node), shape_of(total)):
            raise Unsupported("its input is a sum that broadcasts")
        source, moves = _chain_to(node)
        if not keep_order(source, moves):
            raise Unsupported("its input is a sum of matmuls in different layouts")
        self.replaced += [source, *with_carriers(moves)]
        return self._terms(source)

    def layouts(self) -> tuple[Layout, Layout]:
        """Return the layouts of the matmul's result [M, N] and of the collective's input."""
        matmul = Layout.of(self.matmuls[0].node)
        total = matmul.regrouped(shape_of(self.total))
        layout = total and total.after(self.moves)
        if layout is None:
            raise Unsupported("how the matmul is laid out in its input is unknown")
        return matmul, layout

    def factors(self, editor: Editor) -> tuple[fx.Node, fx.Node]:
        """Return the factors x [M, K] and w [K, N] of the sum as one matmul."""
        if len(self.matmuls) == 1:  # A rank without K adds zeros: the ops need K >= 1.
            return editor.padded(self.matmuls[0].left, 1), editor.padded(self.matmuls[0].right, 0)
        x = editor.call(aten.cat.default, [matmul.left for matmul in self.matmuls], 1)
        w = editor.call(aten.cat.default, [matmul.right for matmul in self.matmuls], 0)
        return x, w


def fuse(collective: Collective) -> Change:
    """Rewrite a ``reduce_scatter_tensor`` or ``all_reduce``, and the matmuls that it reduces.

    Raises:
        Unsupported: they cannot be rewritten.
    """
    node, kind = collective.node, collective.node.args[1]
    scatters = node.target is _c10d.reduce_scatter_tensor.default
    if kind not in ("sum", "avg"):
        raise Unsupported(f"its reduction is {kind}, and the ops only sum")
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
            raise Unsupported("scaled products are scattered along their rows only")
    rows, width = shape_of(first.node)
    options = Options(x_dtype=dtype, out_dtype=out_dtype or dtype)
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
                total = editor.call(torch.ops.prims.convert_element_type.default, total, dtype)
        result = editor.arrange(total, mine, layout.flat, shape_of(node))
        result = editor.laid_out_like(node, result)
    waits = [user for user in node.users if user.target is _c10d.wait_tensor.default]
    for old in (*waits, node):
        old.replace_all_uses_with(result)
    erase_unread([*waits, node, *reduced.replaced])
    detail = f"x {list(shape_of(x))}" + (f" along dim {dim[0]}" if dim else "")
    detail += f", {count} matmuls in one" if count > 1 else ""
    return Change(op, count, detail, None if scatters else fused)


def _split(
    matmul: Layout, source: Layout, world: int
) -> tuple[object, Layout, list[Size], list[int]]:
    """Return how a scatter splits a matmul.

    Returns:
        The axis of the ranks, the layout of a shard, the leading dims of x where they are not the
        matmul's, and the scattered dim.
    """
    split = source.without_leading(0, world)
    if split is None:
        raise Unsupported(f"the shards of {source.shape} are not blocks of the matmul's rows")
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
    source, moves = chain_to(node)
    for move in moves:
        if value(move).dtype != value(source).dtype:
            raise Unsupported(
                f"its input has the bytes of {describe(source)} as {dtypes.name(value(move).dtype)}"
            )
    return source, moves
