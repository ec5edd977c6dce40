"""products -> reduce-scatter or all-reduce: one ``matmul_reduce_scatter`` or ``matmul_all_reduce``.

What is reduced may be one product or a sum of products, which is one product of concatenated
factors: the gradient of what several column-parallel weights read. Between it and the collective
may be views, transpositions and the chunks of a scatter along another dim than the first.
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
from tpkernels.compile.layout import Layout, same, same_shape, size_of
from tpkernels.compile.matmuls import Matmul
from tpkernels.compile.moves import carriers, chain_to, shape_of, through

aten = torch.ops.aten

_WAIT = torch.ops._c10d_functional.wait_tensor.default


class _Reduced:
    """What a collective reduces: products with the moves behind them.

    ``total`` is their sum, ``made`` the nodes that the op makes needless, which nothing else reads.
    """

    def __init__(self, collective: Collective) -> None:
        given: Any = collective.node.args[0]
        self.total, self.moves = chain_to(given)
        self.made = [self.total, *_with_carriers(self.moves)]
        self.products = self._terms(self.total)
        shapes = [shape_of(product.node) for product in self.products]
        if not all(same_shape(shape, shapes[0]) for shape in shapes):
            raise Unsupported("what it reduces is a sum of products in different layouts")
        for node in self.made:
            others = [user for user in node.users if user not in (collective.node, *self.made)]
            if others:
                names = ", ".join(dict.fromkeys(map(describe, others)))
                raise Unsupported(f"{describe(node)}, which it reduces, is also read by {names}")
        collective.joins(product.node for product in self.products)

    def _terms(self, node: fx.Node) -> list[Matmul]:
        product = Matmul.of(node)
        if product is not None:
            if product.bias is not None:
                raise Unsupported(
                    f"{describe(node)} adds a bias before the sum, and each rank may have another"
                )
            return [product]
        left, right = node.args[:2] if node.target is aten.add.Tensor else (None, None)
        if not (isinstance(left, fx.Node) and isinstance(right, fx.Node)):
            raise Unsupported(f"what it reduces is made by {describe(node)}, and no plain matmul")
        if node.kwargs.get("alpha", 1) != 1:
            raise Unsupported("what it reduces is a sum with a factor")
        return [*self._term(left, node), *self._term(right, node)]

    def _term(self, node: fx.Node, total: fx.Node) -> list[Matmul]:
        """The products that an addend of ``total`` consists of: moved, but in their order."""
        if not same_shape(shape_of(node), shape_of(total)):
            raise Unsupported("what it reduces is a sum that broadcasts")
        source, moves = chain_to(node)
        layout: Layout | None = Layout.of(shape_of(source))
        order = layout.flat if layout is not None else ()
        for move in moves:
            layout = layout and through(move, layout)
        if layout is None or layout.flat != tuple(leaf for axis in order for leaf in axis.leaves):
            raise Unsupported("what it reduces is a sum of products in different layouts")
        self.made += [source, *_with_carriers(moves)]
        return self._terms(source)

    def factors(self, editor: Editor) -> tuple[fx.Node, fx.Node]:
        """(x [M, K], w [K, N]) whose product is the sum."""
        if len(self.products) == 1:
            x, w = self.products[0].left, self.products[0].right
            if same(shape_of(x)[1], 0):  # this rank adds nothing, but takes part
                x = editor.call(aten.constant_pad_nd.default, x, [0, 1])
                w = editor.call(aten.constant_pad_nd.default, w, [0, 0, 0, 1])
            return x, w
        x = editor.call(aten.cat.default, [product.left for product in self.products], 1)
        w = editor.call(aten.cat.default, [product.right for product in self.products], 0)
        return x, w

    def replace(self, collective: fx.Node, result: fx.Node) -> None:
        waits = [user for user in collective.users if user.target is _WAIT]
        for node in (*waits, collective):
            node.replace_all_uses_with(result)
        erase_unread([*waits, collective, *self.made])

    def change(self, op: str, x: str) -> Change:
        count = len(self.products)
        return Change(op, count, f"x {x}" + (f", {count} products in one" if count > 1 else ""))

    def layouts(self) -> tuple[Layout, Layout]:
        """(of the product [M, N], of what the collective is given)."""
        product = Layout.of(shape_of(self.products[0].node))
        layout = product.regrouped(shape_of(self.total))
        for move in self.moves:
            layout = layout and through(move, layout)
        if layout is None:
            raise Unsupported("it is not known how the product is laid out in what it reduces")
        return product, layout


def fuse_scatter(scatter: Collective) -> Change:
    """Rewrites a ``reduce_scatter_tensor`` and the product that it reduces.

    Raises:
        Unsupported: why not.
    """
    node = scatter.node
    dtype = _out_dtype(node)
    reduced = _Reduced(scatter)
    product, given = reduced.layouts()
    taken = given.without_leading(0, scatter.world)
    if taken is None:
        raise Unsupported(f"the shards of {list(given.shape)} are not blocks of the product's rows")
    ranks, shard = taken
    rows, columns = product.dims
    if ranks in columns and columns[0] is not ranks:
        raise Unsupported("each rank gets several blocks of columns")
    before = rows[: rows.index(ranks)] if ranks in rows else ()

    dim = 1 if before or ranks in columns else 0
    with Editor(node) as editor:
        x, w = reduced.factors(editor)
        if before:
            k = shape_of(x)[1]
            x = editor.reshape(x, [size_of(before), size_of(rows[len(before) :]), k])
        fused = editor.call(
            torch.ops.tpkernels.matmul_reduce_scatter.default,
            x,
            w,
            scatter.group,
            dim,
            out_dtype=dtype,
        )
        mine = [axis for axis in product.flat if axis is not ranks]
        mean = _mean(editor, fused, scatter)
        result = editor.arrange(mean, mine, shard.flat, shape_of(node))
        result = editor.laid_out_like(node, result)
    reduced.replace(node, result)
    return reduced.change("matmul_reduce_scatter", f"{list(shape_of(x))} along dim {dim}")


def fuse_all_reduce(reduce: Collective) -> Change:
    """Rewrites an ``all_reduce`` and the product that it reduces.

    Raises:
        Unsupported: why not.
    """
    node = reduce.node
    dtype = _out_dtype(node)
    reduced = _Reduced(reduce)
    product, given = reduced.layouts()
    with Editor(node) as editor:
        x, w = reduced.factors(editor)
        fused = editor.call(
            torch.ops.tpkernels.matmul_all_reduce.default, x, w, reduce.group, out_dtype=dtype
        )
        mean = _mean(editor, fused, reduce)
        result = editor.arrange(mean, product.flat, given.flat, shape_of(node))
        result = editor.laid_out_like(node, result)
    reduced.replace(node, result)
    return reduced.change("matmul_all_reduce", str(list(shape_of(x))))


def _out_dtype(collective: fx.Node) -> torch.dtype | None:
    """The dtype to ask the op for: a mean is divided before it is rounded."""
    op = collective.args[1]
    if op not in ("sum", "avg"):
        raise Unsupported(f"it takes the {op}, and the ops sum")
    dtype: torch.dtype = collective.meta["val"].dtype
    return dtypes.accumulator(dtype) if op == "avg" else None


def _mean(editor: Editor, total: fx.Node, collective: Collective) -> fx.Node:
    """The mean of what ``total`` is the sum of, if that is what the collective takes."""
    if collective.node.args[1] == "sum":
        return total
    mean: fx.Node = editor.call(aten.div.Tensor, total, collective.world)
    dtype = collective.node.meta["val"].dtype
    if mean.meta["val"].dtype != dtype:
        mean = editor.call(torch.ops.prims.convert_element_type.default, mean, dtype)
    return mean


def _with_carriers(moves: list[fx.Node]) -> list[fx.Node]:
    return [node for move in moves for node in (move, *carriers(move))]
