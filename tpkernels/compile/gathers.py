"""all-gather -> matmuls: one ``all_gather_matmul`` for all matmuls of one gathered tensor."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._inductor.pattern_matcher import is_mutation_op

from tpkernels import dtypes
from tpkernels.compile.graph import (
    Change,
    Collective,
    Editor,
    Unsupported,
    descendants,
    describe,
    erase_unread,
)
from tpkernels.compile.layout import (
    Axis,
    Layout,
    Size,
    chain_to,
    follow,
    readers,
    same,
    same_shape,
    shape_of,
    size_of,
    value,
    with_carriers,
)
from tpkernels.compile.matmuls import Matmul, column_scale, is_tensor_wise, row_scale
from tpkernels.op_spec import Options

aten = torch.ops.aten


@dataclass(frozen=True)
class _Gathered:
    """A gathered tensor: this rank's shard and its layout, and the axis of the ranks."""

    shard: fx.Node
    inner: Layout
    ranks: Axis

    @classmethod
    def by(cls, gather: fx.Node, world: int) -> _Gathered:
        shard: Any = gather.args[0]
        return cls(shard, Layout.of(shard), Axis(world))

    @property
    def layout(self) -> Layout:
        return self.inner.with_leading(0, self.ranks)

    def lead(self, layout: Layout) -> list[Size]:
        """Return the leading dims of the shard as the op takes it, for a matrix of that layout, in
        whose rows the ranks are: rows slower than the ranks, if there are any; and rows within a
        shard."""
        rows = layout.dims[0]
        at = rows.index(self.ranks)
        return [*([size_of(rows[:at])] if at else []), size_of(rows[at + 1 :])]

    def arranged(self, editor: Editor, layout: Layout, columns: Size) -> Any:
        """Return the shard with the leading dims of `lead`."""
        order = [axis for axis in layout.flat if axis is not self.ranks]
        return editor.arrange(self.shard, self.inner.flat, order, [*self.lead(layout), columns])


@dataclass(frozen=True)
class _Use:
    """The readers of a gathered tensor.

    Attributes:
        matmuls: those that can be fused; they read it in one ``layout``.
        moves: the layouts of the nodes that move it.
        rest: for each of these, its other readers.
    """

    matmuls: list[Matmul]
    layout: Layout
    moves: dict[fx.Node, Layout]
    rest: dict[fx.Node, list[fx.Node]]


def fuse(gather: Collective) -> Change:
    """Rewrite an ``all_gather_into_tensor`` and the matmuls of the gathered tensor.

    Raises:
        Unsupported: they cannot be rewritten.
    """
    gathered = _Gathered.by(gather.node, gather.world)
    use = _use(gather.node, gathered)
    gather.check_fusible(matmul.node for matmul in use.matmuls)
    for reader in itertools.chain(*use.rest.values()):
        if is_mutation_op(reader):
            raise Unsupported(f"{describe(reader)} writes into the gathered tensor")
    first = use.matmuls[0]
    scales, dtype = first.scales, value(gather.node).dtype
    if scales is None and dtype not in dtypes.CODES:
        raise Unsupported(f"the ops do not take {dtypes.name(dtype)}")
    op = "all_gather_matmul" if scales is None else "all_gather_scaled_matmul"
    *before, rows = gathered.lead(use.layout)
    dim, columns, kept = len(before), shape_of(first.left)[1], bool(use.rest)
    total = None if before else rows * gather.world
    gather.check_worthwhile(op, total, columns, Options(return_gathered=kept))
    detail = f"x {[*before, rows, columns]} along dim {dim}, {len(use.matmuls)} matmuls"
    detail += "; the gathered tensor is kept" if kept else ""
    replaced = with_carriers(use.moves)
    with Editor(first.node) as editor:
        x = gathered.arranged(editor, use.layout, columns)
        weights = [editor.padded(matmul.right, 1) for matmul in use.matmuls]
        biases = _biases(editor, gathered.shard, use.matmuls)
        operands, options = [x, weights], {"return_gathered": kept}
        if scales is not None:
            own, gathers = _own_scale(editor, gather, scales.left, [*before, rows])
            if own is None:
                own = row_scale(editor, scales.left, [*before, rows * gather.world])
            else:
                replaced += gathers
                detail += "; its scales are gathered with it"
            columns_of = [matmul.scales.right for matmul in use.matmuls if matmul.scales]
            scale_w = [column_scale(editor, scale) for scale in columns_of]
            operands = [editor.as_dtype(x, value(first.left).dtype), weights, own, scale_w]
            options |= first.options
        fused = editor.op(op, *operands, gather.group, dim, biases, **options)
        _replace(editor, fused, use)
    erase_unread(replaced)
    return Change(op, len(use.matmuls), detail)


def _own_scale(
    editor: Editor, gather: Collective, scale: fx.Node, lead: Sequence[Size]
) -> tuple[fx.Node | None, list[fx.Node]]:
    """Return this rank's row-wise scales, if they come from a gather of their own over the same
    ranks, as DTensor writes it, and the nodes of that gather: the op sends a row with its scale.

    Args:
        scale: of the gathered rows, in the order of the matmul.
        lead: the leading dims of this rank's x.
    """
    source, moves = chain_to(scale)
    if (
        is_tensor_wise(scale)
        or source.target is not torch.ops._c10d_functional.all_gather_into_tensor.default
        or source.args[-1] != gather.node.args[-1]
        or any(value(move).dtype != value(source).dtype for move in moves)
    ):
        return None, []
    gathered = _Gathered.by(source, gather.world)
    layout = gathered.layout.after(moves)
    in_rows = layout is not None and gathered.ranks in layout.dims[0]
    if layout is None or not in_rows or not same_shape(gathered.lead(layout), lead):
        return None, []
    gather.check_fusible([source])
    return gathered.arranged(editor, layout, 1), [*with_carriers(moves), source]


def _biases(editor: Editor, like: fx.Node, matmuls: list[Matmul]) -> list[fx.Node] | None:
    """Return the op's biases; a tensor without elements stands for no bias."""
    if all(matmul.bias is None for matmul in matmuls):
        return None
    none = editor.call(aten.new_empty.default, like, [0])
    return [none if matmul.bias is None else matmul.bias for matmul in matmuls]


def _replace(editor: Editor, fused: fx.Node, use: _Use) -> None:
    """Make all readers read the op's results. What can fail comes before the first change."""
    kept, results = {}, []
    if use.rest:
        whole = editor.item(fused, 0)
        for node in use.rest:
            order = use.moves[node].flat
            new = editor.arrange(whole, use.layout.flat, order, shape_of(node))
            kept[node] = editor.laid_out_like(node, editor.as_dtype(new, value(node).dtype))
    outs = editor.item(fused, 1)
    for i, matmul in enumerate(use.matmuls):
        rows, columns = shape_of(matmul.node)
        padded = same(columns, 0)  # the op gave it a column
        out = editor.reshape(editor.item(outs, i), [rows, 1 if padded else columns])
        results.append(editor.call(aten.slice.Tensor, out, 1, 0, 0) if padded else out)
    for node, new in kept.items():
        for reader in use.rest[node]:
            reader.replace_input_with(node, new)
    for matmul, new in zip(use.matmuls, results, strict=True):
        matmul.node.replace_all_uses_with(new)
    erase_unread(matmul.node for matmul in use.matmuls)


def _use(gather: fx.Node, gathered: _Gathered) -> _Use:
    moves, dependent = follow(gather, gathered.layout), descendants(gather)
    matmuls: list[Matmul] = []
    rest: dict[fx.Node, list[fx.Node]] = {}
    reasons = []
    for node, layout in moves.items():
        for reader in readers(node, moves):
            try:
                matmul = _matmul_of(reader, node, gather, layout, gathered.ranks, dependent)
            except Unsupported as reason:
                reasons.append(str(reason))
            else:
                if not matmuls or (
                    layout.dims == moves[matmuls[0].left].dims and matmul.shares_input(matmuls[0])
                ):
                    matmuls.append(matmul)
                    continue
            rest.setdefault(node, []).append(reader)
    if not matmuls:
        raise Unsupported("; ".join(dict.fromkeys(reasons)) or "nothing reads it")
    return _Use(matmuls, moves[matmuls[0].left], moves, rest)


def _matmul_of(
    reader: fx.Node,
    node: fx.Node,
    gather: fx.Node,
    layout: Layout,
    ranks: Axis,
    dependent: set[fx.Node],
) -> Matmul:
    """Return the matmul that a reader of the gathered tensor is, if it can start with one shard.

    Args:
        reader: a reader of ``node``.
        node: the gathered tensor, or one that moves its elements, with that ``layout``.
        dependent: all nodes that are computed from the gathered tensor.

    Raises:
        Unsupported: it is none, or cannot.
    """
    matmul, name, dtype = Matmul.of(reader), describe(reader), value(node).dtype
    if matmul is None:
        raise Unsupported(f"{name} reads it and is not a plain matmul")
    if matmul.right is node:
        raise Unsupported(f"{name} has it as its right factor")
    if matmul.left is not node or matmul.depends_on(dependent):
        raise Unsupported(f"the other factor of {name}, or its bias, depends on it too")
    if matmul.scales is None and dtype != value(gather).dtype:  # fp8 may travel as bytes
        raise Unsupported(f"{name} reads its bytes as {dtypes.name(dtype)}")
    if ranks in layout.dims[-1]:
        raise Unsupported(
            f"{name} sums over the gathered dim, so it needs all shards before it can start"
        )
    if ranks not in layout.dims[0]:
        raise Unsupported(f"{name} reads rows in which a view has cut up the shards")
    return matmul
