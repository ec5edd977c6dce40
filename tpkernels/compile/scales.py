"""The arguments of the ops on scaled operands, in a graph.

Row-wise scales of a gathered x come from a gather of their own, as DTensor writes it, or are those
of all ranks' rows. The former become part of the op, which sends a row with its scale; the op takes
the latter as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tpkernels.compile.graph import Collective, Editor
from tpkernels.compile.layout import Axis, Layout, Size, same, same_shape, size_of
from tpkernels.compile.matmuls import Matmul, is_tensor_wise
from tpkernels.compile.moves import carriers, chain_to, shape_of, through, value

aten = torch.ops.aten

_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default


@dataclass(frozen=True)
class RowScale:
    """The op's scale of x. ``gathered``: the nodes of a gather that it replaces."""

    node: fx.Node
    gathered: tuple[fx.Node, ...] = ()


def options_of(matmul: Matmul) -> dict[str, Any]:
    """Return the options of the op that makes a scaled matmul."""
    assert matmul.scales is not None  # the caller has asked
    return {
        "out_dtype": value(matmul.node).dtype,
        "use_fast_accum": matmul.scales.fast_accum,
    }


def as_dtype(editor: Editor, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    """x as another dtype of the same size: fp8 numbers may travel as bytes."""
    if value(x).dtype == dtype:
        return x
    viewed: fx.Node = editor.call(aten.view.dtype, x, dtype)
    return viewed


def scalar(editor: Editor, scale: fx.Node) -> fx.Node:
    """A tensor-wise scale as the ops take it."""
    return editor.reshape(scale, [])


def column_scale(editor: Editor, matmul: Matmul) -> fx.Node:
    """The op's scale of a weight, which has a column even on a rank without columns."""
    assert matmul.scales is not None  # the caller has asked
    scale = matmul.scales.right
    if is_tensor_wise(scale):
        return scalar(editor, scale)
    return padded(editor, scale, [0, 1])


def padded(editor: Editor, node: fx.Node, pad: Sequence[int]) -> fx.Node:
    """A matrix with a column, or a row, more if it has none."""
    dim = 1 if len(pad) == 2 else 0
    if not same(shape_of(node)[dim], 0):
        return node
    dtype = value(node).dtype
    plain = node if dtype.itemsize > 1 else as_dtype(editor, node, torch.uint8)
    return as_dtype(editor, editor.call(aten.constant_pad_nd.default, plain, pad), dtype)


def row_scale(
    editor: Editor,
    gather: Collective,
    scale: fx.Node,
    whole: Sequence[Size],
    sizes: tuple[Size, Size],
) -> RowScale:
    """Return the scale of a gathered x.

    Args:
        scale: of the gathered rows, in the order of the matmul.
        whole: the leading dims of the gathered x, as the op has it.
        sizes: rows slower than the ranks, and rows within a shard.
    """
    if is_tensor_wise(scale):
        return RowScale(scalar(editor, scale))
    source, moves = chain_to(scale)
    own = _own_part(editor, gather, source, moves, sizes)
    if own is None:
        return RowScale(editor.reshape(scale, [*whole, 1]))
    gather.check_fusible([source])
    removed = [*moves, *(carrier for move in moves for carrier in carriers(move)), source]
    return RowScale(own, tuple(removed))


def row_scale_of(editor: Editor, scale: fx.Node, rows: Sequence[Size]) -> fx.Node:
    """Return the scale of an x [*rows, K]."""
    if is_tensor_wise(scale):
        return scalar(editor, scale)
    return editor.reshape(scale, [*rows, 1])


def _own_part(
    editor: Editor,
    gather: Collective,
    source: fx.Node,
    moves: Sequence[fx.Node],
    sizes: tuple[Size, Size],
) -> fx.Node | None:
    """Return this rank's scales, if ``source`` gathers them over the same ranks and ``moves`` bring
    them into the order of the rows of x."""
    if source.target is not _GATHER or source.args[-1] != gather.node.args[-1]:
        return None
    if any(value(move).dtype != value(source).dtype for move in moves):
        return None
    shard: Any = source.args[0]
    inner, ranks = Layout.of(shape_of(shard)), Axis(gather.world)
    layout: Layout | None = inner.with_leading(0, ranks)
    for move in moves:
        layout = layout and through(move, layout)
    if layout is None or ranks not in layout.dims[0]:
        return None
    rows = layout.dims[0]
    at = rows.index(ranks)
    before, within = rows[:at], rows[at + 1 :]
    if not same_shape((size_of(before), size_of(within)), sizes):
        return None
    lead = [size_of(before)] if before else []
    order = [axis for axis in layout.flat if axis is not ranks]
    return editor.arrange(shard, inner.flat, order, [*lead, size_of(within), 1])
