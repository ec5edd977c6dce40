"""all-gather -> products: one ``all_gather_matmul`` for all products of one gathered tensor."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx
from torch._inductor.pattern_matcher import is_mutation_op

from tpkernels.compile.graph import (
    Change,
    Collective,
    Editor,
    Unsupported,
    descendants,
    describe,
    erase_unread,
)
from tpkernels.compile.layout import Axes, Axis, Layout, same, size_of
from tpkernels.compile.matmuls import Matmul
from tpkernels.compile.moves import carriers, follow, readers, shape_of

aten = torch.ops.aten


@dataclass(frozen=True)
class _Rows:
    """The rows of a gathered matrix: those ``before`` the ranks, each slower than the next, the
    ranks, and those ``within`` a shard."""

    before: Axes
    ranks: Axis
    within: Axes

    @classmethod
    def of(cls, layout: Layout, ranks: Axis) -> _Rows | None:
        """None where the ranks are not among the rows."""
        rows = layout.dims[0]
        if ranks not in rows:
            return None
        at = rows.index(ranks)
        return cls(rows[:at], ranks, rows[at + 1 :])


@dataclass(frozen=True)
class _Use:
    """Who reads a gathered tensor: the products that share one layout of it, and the rest."""

    products: list[Matmul]
    layout: Layout
    rows: _Rows
    rest: dict[fx.Node, list[fx.Node]]


def fuse(gather: Collective) -> Change:
    """Rewrites an ``all_gather_into_tensor`` and the products of what it gathers.

    Raises:
        Unsupported: why not.
    """
    shard: Any = gather.node.args[0]
    inner, ranks = Layout.of(shape_of(shard)), Axis(gather.world)
    moves = follow(gather.node, inner.with_leading(0, ranks))
    use = _use(gather.node, moves, ranks)
    gather.joins(product.node for product in use.products)
    for reader in itertools.chain(*use.rest.values()):
        if is_mutation_op(reader):
            raise Unsupported(f"{describe(reader)} writes into what it gathers")

    lead = [size_of(use.rows.before)] if use.rows.before else []
    shape = [*lead, size_of(use.rows.within), shape_of(use.products[0].left)[1]]
    with Editor(use.products[0].node) as editor:
        order = [axis for axis in use.layout.flat if axis is not ranks]
        x = editor.arrange(shard, inner.flat, order, shape)
        fused = editor.call(
            torch.ops.tpkernels.all_gather_matmul.default,
            x,
            [_weight(editor, product.right) for product in use.products],
            gather.group,
            len(lead),
            _biases(editor, shard, use.products),
            return_gathered=bool(use.rest),
        )
        _put_in(editor, fused, moves, use)
    erase_unread([*moves, *(carrier for move in moves for carrier in carriers(move))])
    kept = "; the gathered tensor is kept" if use.rest else ""
    detail = f"x {shape} along dim {len(lead)}, {len(use.products)} products{kept}"
    return Change("all_gather_matmul", len(use.products), detail)


def _weight(editor: Editor, weight: fx.Node) -> fx.Node:
    """The op's argument: a rank that has no columns sends its shard all the same."""
    if not same(shape_of(weight)[1], 0):
        return weight
    padded: fx.Node = editor.call(aten.constant_pad_nd.default, weight, [0, 1])
    return padded


def _result(editor: Editor, out: fx.Node, product: Matmul) -> fx.Node:
    rows, columns = shape_of(product.node)
    if not same(columns, 0):
        return editor.reshape(out, [rows, columns])
    none: fx.Node = editor.call(aten.slice.Tensor, editor.reshape(out, [rows, 1]), 1, 0, 0)
    return none


def _biases(editor: Editor, like: fx.Node, products: list[Matmul]) -> list[fx.Node] | None:
    """The op's argument: a tensor with no elements stands for no bias."""
    if all(product.bias is None for product in products):
        return None
    none = editor.call(aten.new_empty.default, like, [0])
    return [none if product.bias is None else product.bias for product in products]


def _put_in(editor: Editor, fused: fx.Node, moves: dict[fx.Node, Layout], use: _Use) -> None:
    """Has all readers read the op's results. All that can fail comes before the first change."""
    kept = {}
    if use.rest:
        whole = editor.item(fused, 0)
        for node in use.rest:
            order = moves[node].flat
            new = editor.arrange(whole, use.layout.flat, order, shape_of(node))
            kept[node] = editor.laid_out_like(node, new)
    outs = editor.item(fused, 1)
    results = [_result(editor, editor.item(outs, i), p) for i, p in enumerate(use.products)]
    for node, new in kept.items():
        for reader in use.rest[node]:
            reader.replace_input_with(node, new)
    for product, new in zip(use.products, results, strict=True):
        product.node.replace_all_uses_with(new)
    erase_unread(product.node for product in use.products)


def _use(gather: fx.Node, moves: dict[fx.Node, Layout], ranks: Axis) -> _Use:
    behind = descendants(gather)
    products: list[Matmul] = []
    rest: dict[fx.Node, list[fx.Node]] = {}
    for node, layout in moves.items():
        for reader in readers(node, moves):
            product = Matmul.of(reader)
            fits = (
                product is not None
                and product.left is node
                and ranks in layout.dims[0]
                and not {product.right, product.bias} & behind
                and (not products or layout.dims == moves[products[0].left].dims)
            )
            if fits:
                products.append(cast(Matmul, product))
            else:
                rest.setdefault(node, []).append(reader)
    if not products:
        told = dict.fromkeys(
            _why(reader, node, ranks in moves[node].dims[-1], behind)
            for node, all_ in rest.items()
            for reader in all_
        )
        raise Unsupported("; ".join(told) or "nothing reads it")
    layout = moves[products[0].left]
    rows = _Rows.of(layout, ranks)
    assert rows is not None  # the products' rows have the ranks among them
    return _Use(products, layout, rows, rest)


def _why(reader: fx.Node, node: fx.Node, in_columns: bool, behind: set[fx.Node]) -> str:
    """Why a reader of the gathered tensor ``node`` is no product that can begin with one shard.
    ``in_columns``: that tensor's columns are what was gathered."""
    product, name = Matmul.of(reader), describe(reader)
    if product is None:
        return f"{name} reads it, and is no plain matmul"
    if product.right is node:
        return f"{name} has it as its right factor"
    if {product.right, product.bias} & behind:
        return f"what {name} multiplies it with, or adds, is made of it too"
    if in_columns:
        return f"{name} sums over the gathered dim, and needs all shards before it can begin"
    return f"{name} reads rows whose shards a view has cut up"
