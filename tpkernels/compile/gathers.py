"""all-gather -> matmuls: one ``all_gather_matmul`` for all matmuls of one gathered tensor."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, cast

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
from tpkernels.compile.layout import Axes, Axis, Layout, Size, same, size_of
from tpkernels.compile.matmuls import Matmul
from tpkernels.compile.measured import check_worthwhile
from tpkernels.compile.moves import carriers, follow, readers, shape_of, value
from tpkernels.compile.scales import as_dtype, column_scale, options_of, padded, row_scale
from tpkernels.op_spec import Options

aten = torch.ops.aten


@dataclass(frozen=True)
class _Rows:
    """The axes of the rows of a gathered matrix, the slowest first."""

    before: Axes  #: slower than the ranks
    ranks: Axis
    within: Axes  #: within a shard

    @classmethod
    def of(cls, layout: Layout, ranks: Axis) -> _Rows | None:
        """Return the rows of a matrix with this layout; None if the ranks are not among them."""
        rows = layout.dims[0]
        if ranks not in rows:
            return None
        at = rows.index(ranks)
        return cls(rows[:at], ranks, rows[at + 1 :])

    @property
    def sizes(self) -> tuple[Size, Size]:
        """Return how many rows are slower than the ranks, and how many are within a shard."""
        return size_of(self.before), size_of(self.within)


@dataclass(frozen=True)
class _Use:
    """The readers of a gathered tensor."""

    matmuls: list[Matmul]  #: those that can be fused; they read it in one layout
    layout: Layout
    rows: _Rows
    rest: dict[fx.Node, list[fx.Node]]  #: for each node that moves the tensor, its other readers


def fuse(gather: Collective) -> Change:
    """Rewrite an ``all_gather_into_tensor`` and the matmuls of the gathered tensor.

    Raises:
        Unsupported: they cannot be rewritten.
    """
    shard: Any = gather.node.args[0]
    inner, ranks = Layout.of(shape_of(shard)), Axis(gather.world)
    moves = follow(gather.node, inner.with_leading(0, ranks))
    use = _use(gather.node, moves, ranks)
    gather.check_fusible(matmul.node for matmul in use.matmuls)
    for reader in itertools.chain(*use.rest.values()):
        if is_mutation_op(reader):
            raise Unsupported(f"{describe(reader)} writes into the gathered tensor")

    lead = [size_of(use.rows.before)] if use.rows.before else []
    rows = None if lead else size_of(use.rows.within) * gather.world
    kept = Options(return_gathered=bool(use.rest))
    scales, dtype = use.matmuls[0].scales, value(gather.node).dtype
    if scales is None and dtype not in dtypes.CODES:
        raise Unsupported(f"the ops do not take {dtypes.name(dtype)}")
    op = "all_gather_matmul" if scales is None else "all_gather_scaled_matmul"
    check_worthwhile(gather, op, rows, shape_of(use.matmuls[0].left)[1], kept)
    shape = [*lead, size_of(use.rows.within), shape_of(use.matmuls[0].left)[1]]
    with Editor(use.matmuls[0].node) as editor:
        order = [axis for axis in use.layout.flat if axis is not ranks]
        x = editor.arrange(shard, inner.flat, order, shape)
        weights = [padded(editor, matmul.right, [0, 1]) for matmul in use.matmuls]
        biases = _biases(editor, shard, use.matmuls)
        operands = [x, weights]
        options: dict[str, Any] = {}
        if scales is not None:
            whole = [*lead, size_of(use.rows.within) * gather.world]
            scale = row_scale(editor, gather, scales.left, whole, use.rows.sizes)
            fp8 = value(use.matmuls[0].left).dtype
            operands = [as_dtype(editor, x, fp8), weights, scale.node]
            operands.append([column_scale(editor, matmul) for matmul in use.matmuls])
            options = options_of(use.matmuls[0])
        fused = editor.call(
            getattr(torch.ops.tpkernels, op).default,
            *operands,
            gather.group,
            len(lead),
            biases,
            return_gathered=bool(use.rest),
            **options,
        )
        _replace(editor, fused, moves, use)
    erase_unread([*moves, *(carrier for move in moves for carrier in carriers(move))])
    more = "; the gathered tensor is kept" if use.rest else ""
    if scales is not None and scale.gathered:
        erase_unread(scale.gathered)
        more += "; its scales are gathered with it"
    detail = f"x {shape} along dim {len(lead)}, {len(use.matmuls)} matmuls{more}"
    return Change(op, len(use.matmuls), detail)


def _result(editor: Editor, out: fx.Node, matmul: Matmul) -> fx.Node:
    """Return what replaces a matmul, given the op's output."""
    rows, columns = shape_of(matmul.node)
    if not same(columns, 0):
        return editor.reshape(out, [rows, columns])
    none: fx.Node = editor.call(aten.slice.Tensor, editor.reshape(out, [rows, 1]), 1, 0, 0)
    return none


def _biases(editor: Editor, like: fx.Node, matmuls: list[Matmul]) -> list[fx.Node] | None:
    """The op's biases; a tensor without elements stands for no bias."""
    if all(matmul.bias is None for matmul in matmuls):
        return None
    none = editor.call(aten.new_empty.default, like, [0])
    return [none if matmul.bias is None else matmul.bias for matmul in matmuls]


def _replace(editor: Editor, fused: fx.Node, moves: dict[fx.Node, Layout], use: _Use) -> None:
    """Make all readers read the op's results. What can fail comes before the first change."""
    kept = {}
    if use.rest:
        whole = editor.item(fused, 0)
        for node in use.rest:
            order = moves[node].flat
            new = editor.arrange(whole, use.layout.flat, order, shape_of(node))
            new = as_dtype(editor, new, value(node).dtype)
            kept[node] = editor.laid_out_like(node, new)
    outs = editor.item(fused, 1)
    results = [
        _result(editor, editor.item(outs, i), matmul) for i, matmul in enumerate(use.matmuls)
    ]
    for node, new in kept.items():
        for reader in use.rest[node]:
            reader.replace_input_with(node, new)
    for matmul, new in zip(use.matmuls, results, strict=True):
        matmul.node.replace_all_uses_with(new)
    erase_unread(matmul.node for matmul in use.matmuls)


def _use(gather: fx.Node, moves: dict[fx.Node, Layout], ranks: Axis) -> _Use:
    dependent = descendants(gather)
    matmuls: list[Matmul] = []
    rest: dict[fx.Node, list[fx.Node]] = {}
    for node, layout in moves.items():
        for reader in readers(node, moves):
            matmul = Matmul.of(reader)
            fits = (
                matmul is not None
                and matmul.left is node
                and ranks in layout.dims[0]
                and not matmul.depends_on(dependent)
                and _fits_dtype(matmul, gather)
                and (not matmuls or layout.dims == moves[matmuls[0].left].dims)
                and (not matmuls or matmul.shares_input(matmuls[0]))
            )
            if fits:
                matmuls.append(cast(Matmul, matmul))
            else:
                rest.setdefault(node, []).append(reader)
    if not matmuls:
        reasons = dict.fromkeys(
            _reason(reader, node, gather, ranks in moves[node].dims[-1], dependent)
            for node, node_readers in rest.items()
            for reader in node_readers
        )
        raise Unsupported("; ".join(reasons) or "nothing reads it")
    layout = moves[matmuls[0].left]
    rows = _Rows.of(layout, ranks)
    assert rows is not None  # the ranks are among the rows of every matmul here
    return _Use(matmuls, layout, rows, rest)


def _fits_dtype(matmul: Matmul, gather: fx.Node) -> bool:
    """Return whether a matmul reads the gathered numbers; those with scales may travel as bytes."""
    return matmul.scales is not None or value(matmul.left).dtype == value(gather).dtype


def _reason(
    reader: fx.Node, node: fx.Node, gather: fx.Node, in_columns: bool, dependent: set[fx.Node]
) -> str:
    """Return why a reader is not a matmul that can start with one shard.

    Args:
        reader: a reader of ``node``.
        node: the gathered tensor, or one that moves its elements.
        gather: the gathered tensor.
        in_columns: whether the gathered dim is among the columns of ``node``.
        dependent: all nodes that are computed from the gathered tensor.
    """
    matmul, name = Matmul.of(reader), describe(reader)
    if matmul is None:
        return f"{name} reads it and is not a plain matmul"
    if matmul.right is node:
        return f"{name} has it as its right factor"
    if matmul.depends_on(dependent):
        return f"the other factor of {name}, or its bias, depends on it too"
    if not _fits_dtype(matmul, gather):
        return f"{name} reads its bytes as {dtypes.name(value(node).dtype)}"
    if in_columns:
        return f"{name} sums over the gathered dim, so it needs all shards before it can start"
    return f"{name} reads rows in which a view has cut up the shards"
