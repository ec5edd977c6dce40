"""matmuls -> reduce-scatter or all-reduce: one ``matmul_reduce_scatter`` or ``matmul_all_reduce``.

The collective's input may be one matmul or a sum of matmuls, such as the gradient of the input of
several column-parallel weights. A sum becomes one matmul of concatenated factors. Between matmul
and collective there may be views, transpositions, and the chunks of a scatter along a dim other
than the first.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from tpkernels.compile.layout import Layout, Size, same_shape, size_of
from tpkernels.compile.matmuls import Matmul, Scales
from tpkernels.compile.measured import check_worthwhile
from tpkernels.compile.moves import carriers, chain_to, shape_of, through, value
from tpkernels.compile.scales import column_scale, options_of, padded, row_scale_of
from tpkernels.op_spec import Options

aten = torch.ops.aten

_WAIT = torch.ops._c10d_functional.wait_tensor.default


class _Reduced:
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
        self.replaced = [self.total, *_with_carriers(self.moves)]
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

    @property
    def scales(self) -> Scales | None:
        return self.matmuls[0].scales

    def call(
        self,
        editor: Editor,
        op: str,
        collective: Collective,
        lead: Sequence[Size],
        dim: Sequence[int] = (),
    ) -> tuple[fx.Node, fx.Node]:
        """(the op's x, its result).

        Args:
            op: its name; that of the op on scaled operands is taken where they are.
            lead: the leading dims of x, where they are not the matmul's.
            dim: the scattered dim, of a reduce-scatter.
        """
        x, w = self.factors(editor)
        if lead:
            x = editor.reshape(x, [*lead, shape_of(x)[1]])
        operands, options = [x, w], {"out_dtype": _out_dtype(collective.node)}
        if self.scales is not None:
            rows = shape_of(x)[:-1]
            operands += [row_scale_of(editor, self.scales.left, rows)]
            operands += [column_scale(editor, self.matmuls[0])]
            wanted = options["out_dtype"]
            options = options_of(self.matmuls[0])
            options["out_dtype"] = wanted or options["out_dtype"]
        target = getattr(torch.ops.tpkernels, op).default
        return x, editor.call(target, *operands, collective.group, *dim, **options)

    def op(self, name: str) -> str:
        """The op of a name without ``scaled_``."""
        return name if self.scales is None else f"scaled_{name}"

    def _terms(self, node: fx.Node) -> list[Matmul]:
        """Return the matmuls of which ``node`` is the sum."""
        matmul = Matmul.of(node)
        if matmul is not None:
            if matmul.bias is not None:
                raise Unsupported(
                    f"{describe(node)} adds a bias before the sum, and biases may differ by rank"
                )
            return [matmul]
        left, right = node.args[:2] if node.target is aten.add.Tensor else (None, None)
        if not (isinstance(left, fx.Node) and isinstance(right, fx.Node)):
            raise Unsupported(f"its input is made by {describe(node)}, which is not a plain matmul")
        if node.kwargs.get("alpha", 1) != 1:
            raise Unsupported("its input is a sum with a factor")
        return [*self._term(left, node), *self._term(right, node)]

    def _term(self, node: fx.Node, total: fx.Node) -> list[Matmul]:
        """Return the matmuls of which ``node``, an addend of ``total``, is the sum. Moves in
        between must keep the order of the elements."""
        if not same_shape(shape_of(node), shape_of(total)):
            raise Unsupported("its input is a sum that broadcasts")
        source, moves = _chain_to(node)
        layout: Layout | None = Layout.of(shape_of(source))
        order = layout.flat if layout is not None else ()
        for move in moves:
            layout = layout and through(move, layout)
        if layout is None or layout.flat != tuple(leaf for axis in order for leaf in axis.leaves):
            raise Unsupported("its input is a sum of matmuls in different layouts")
        self.replaced += [source, *_with_carriers(moves)]
        return self._terms(source)

    def factors(self, editor: Editor) -> tuple[fx.Node, fx.Node]:
        """The factors x [M, K] and w [K, N] of the sum as one matmul."""
        if len(self.matmuls) == 1:  # A rank without K adds zeros: the ops need K >= 1.
            x, w = self.matmuls[0].left, self.matmuls[0].right
            return padded(editor, x, [0, 1]), padded(editor, w, [0, 0, 0, 1])
        x = editor.call(aten.cat.default, [matmul.left for matmul in self.matmuls], 1)
        w = editor.call(aten.cat.default, [matmul.right for matmul in self.matmuls], 0)
        return x, w

    def replace(self, collective: fx.Node, result: fx.Node) -> None:
        """Make the collective's readers read ``result``, and erase the nodes it replaces."""
        waits = [user for user in collective.users if user.target is _WAIT]
        for node in (*waits, collective):
            node.replace_all_uses_with(result)
        erase_unread([*waits, collective, *self.replaced])

    def change(self, op: str, x: str, node: fx.Node | None = None) -> Change:
        """Return what is reported; ``x``: shape and dim of the op's input."""
        count = len(self.matmuls)
        more = f", {count} matmuls in one" if count > 1 else ""
        return Change(op, count, f"x {x}{more}", node)

    def layouts(self) -> tuple[Layout, Layout]:
        """Return the layouts of the matmul's result [M, N] and of the collective's input."""
        matmul = Layout.of(shape_of(self.matmuls[0].node))
        layout = matmul.regrouped(shape_of(self.total))
        for move in self.moves:
            layout = layout and through(move, layout)
        if layout is None:
            raise Unsupported("how the matmul is laid out in its input is unknown")
        return matmul, layout


def fuse_scatter(scatter: Collective) -> Change:
    """Rewrite a ``reduce_scatter_tensor`` and the matmul that it reduces.

    Raises:
        Unsupported: they cannot be rewritten.
    """
    node = scatter.node
    dtype = _out_dtype(node)
    reduced = _Reduced(scatter)
    matmul, source = reduced.layouts()
    split = source.without_leading(0, scatter.world)
    if split is None:
        raise Unsupported(f"the shards of {list(source.shape)} are not blocks of the matmul's rows")
    ranks, shard = split
    rows, columns = matmul.dims
    if ranks in columns and columns[0] is not ranks:
        raise Unsupported("each rank gets several blocks of columns")
    before = rows[: rows.index(ranks)] if ranks in rows else ()
    by_rows = ranks in rows and not before
    if ranks in columns and reduced.scales is not None:
        raise Unsupported("scaled products are scattered along their rows only")
    op = reduced.op("matmul_reduce_scatter")
    _check_worthwhile(scatter, op, reduced, dtype, by_rows=by_rows)

    dim = 1 if before or ranks in columns else 0
    lead = [size_of(before), size_of(rows[len(before) :])] if before else []
    with Editor(node) as editor:
        x, fused = reduced.call(editor, op, scatter, lead, [dim])
        mine = [axis for axis in matmul.flat if axis is not ranks]
        mean = _mean(editor, fused, scatter)
        result = editor.arrange(mean, mine, shard.flat, shape_of(node))
        result = editor.laid_out_like(node, result)
    reduced.replace(node, result)
    return reduced.change(op, f"{list(shape_of(x))} along dim {dim}")


def fuse_all_reduce(reduce: Collective) -> Change:
    """Rewrite an ``all_reduce`` and the matmul that it reduces.

    Raises:
        Unsupported: they cannot be rewritten.
    """
    node = reduce.node
    dtype = _out_dtype(node)
    reduced = _Reduced(reduce)
    matmul, source = reduced.layouts()
    op = reduced.op("matmul_all_reduce")
    _check_worthwhile(reduce, op, reduced, dtype)
    with Editor(node) as editor:
        x, fused = reduced.call(editor, op, reduce, [])
        mean = _mean(editor, fused, reduce)
        result = editor.arrange(mean, matmul.flat, source.flat, shape_of(node))
        result = editor.laid_out_like(node, result)
    reduced.replace(node, result)
    return reduced.change(op, str(list(shape_of(x))), fused)


def _check_worthwhile(
    collective: Collective,
    op: str,
    reduced: _Reduced,
    out_dtype: torch.dtype | None,
    *,
    by_rows: bool = True,
) -> None:
    rows, width = shape_of(reduced.matmuls[0].node)
    dtype = collective.node.meta["val"].dtype
    options = Options(x_dtype=dtype, out_dtype=out_dtype or dtype)
    check_worthwhile(collective, op, rows if by_rows else None, width, options)


def _out_dtype(collective: fx.Node) -> torch.dtype | None:
    """The op's ``out_dtype``: fp32 or fp64 for a mean, which is divided before it is rounded."""
    op = collective.args[1]
    if op not in ("sum", "avg"):
        raise Unsupported(f"its reduction is {op}, and the ops only sum")
    dtype: torch.dtype = collective.meta["val"].dtype
    return dtypes.accumulator(dtype) if op == "avg" else None


def _mean(editor: Editor, total: fx.Node, collective: Collective) -> fx.Node:
    """The collective's result, given the sum: the sum itself, or the mean."""
    if collective.node.args[1] == "sum":
        return total
    mean: fx.Node = editor.call(aten.div.Tensor, total, collective.world)
    dtype = collective.node.meta["val"].dtype
    if mean.meta["val"].dtype != dtype:
        mean = editor.call(torch.ops.prims.convert_element_type.default, mean, dtype)
    return mean


def _chain_to(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """`chain_to`, where no move makes other numbers of the same bytes."""
    source, moves = chain_to(node)
    for move in moves:
        if value(move).dtype != value(source).dtype:
            raise Unsupported(
                f"its input has the bytes of {describe(source)} as {dtypes.name(value(move).dtype)}"
            )
    return source, moves


def _with_carriers(moves: list[fx.Node]) -> list[fx.Node]:
    """The moves, and the nodes between each and its source."""
    return [node for move in moves for node in (move, *carriers(move))]
