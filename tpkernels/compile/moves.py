"""The nodes of an fx graph that only move elements, and what they do to a layout."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from tpkernels.compile.layout import Layout, Size, same

aten = torch.ops.aten

_VIEWS = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
}
_COPIES = {
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    torch.ops._c10d_functional.wait_tensor.default,
}
_SPLITS = {aten.split.Tensor, aten.split_with_sizes.default}
_CARRIERS = {*_SPLITS, operator.getitem, aten.slice.Tensor}


def value(argument: Any) -> Any:
    """Return the value of an argument of a node, such as a fake tensor or a size."""
    return argument.meta.get("val") if isinstance(argument, fx.Node) else argument


def shape_of(node: fx.Node) -> Sequence[Size]:
    shape: Sequence[Size] = node.meta["val"].shape
    return shape


def moved_from(node: fx.Node) -> fx.Node | None:
    """Return the tensor of which ``node`` moves all elements; None if it does something else."""
    target = node.target
    if target in _VIEWS or _copies(node) or _permutation(node) is not None:
        source = node.args[0]
        return source if isinstance(source, fx.Node) else None
    if target is aten.cat.default:
        parts = _parts(node.args[0])
        return None if parts is None else parts[0]
    return None


def through(node: fx.Node, before: Layout) -> Layout | None:
    """Return the layout of ``node``, given that of ``moved_from(node)``."""
    if _copies(node):
        return before
    if node.target in _VIEWS:
        return before.regrouped(shape_of(node))
    order = _permutation(node)
    if order is not None:
        return before.permuted(order)
    parts = _parts(node.args[0])
    assert parts is not None  # the only other node that moved_from knows is a cat
    _, dim, count = parts
    taken = before.without_leading(dim, count)
    return None if taken is None else taken[1].with_leading(_cat_dim(node), taken[0])


def _copies(node: fx.Node) -> bool:
    """Return whether a node has the elements of its argument in the same places, perhaps as another
    dtype of the same size."""
    if node.target is not aten.view.dtype:
        return node.target in _COPIES
    source: torch.Tensor = value(node.args[0])
    return source.dtype.itemsize == value(node).dtype.itemsize


def follow(root: fx.Node, layout: Layout) -> dict[fx.Node, Layout]:
    """Return the layouts of ``root`` and of all nodes that only move its elements."""
    moves, pending = {root: layout}, list(root.users)
    while pending:
        node = pending.pop(0)
        source = moved_from(node)
        if source in moves and node not in moves:
            moved = through(node, moves[source])
            if moved is not None:
                moves[node] = moved
                pending += node.users
        elif node.target in _CARRIERS:
            pending += node.users
    return moves


def readers(node: fx.Node, moves: dict[fx.Node, Layout]) -> list[fx.Node]:
    """Users of ``node`` that are not among the moves."""
    return [user for user in node.users if not _only_moved(user, moves)]


def _only_moved(node: fx.Node, moves: dict[fx.Node, Layout]) -> bool:
    """Return whether ``node`` is one of the moves, or a chunk that only they read."""
    if node in moves or node.target not in _CARRIERS:
        return node in moves
    return all(_only_moved(user, moves) for user in node.users)


def chain_to(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """The node whose elements end up in ``node``, and the moves between the two, in order."""
    moves: list[fx.Node] = []
    source = moved_from(node)
    while source is not None:
        moves.append(node)
        node, source = source, moved_from(source)
    return node, moves[::-1]


def carriers(node: fx.Node) -> list[fx.Node]:
    """The nodes between ``node`` and ``moved_from(node)``: the chunks that a cat concatenates."""
    if node.target is not aten.cat.default:
        return []
    parts: Any = node.args[0]
    splits = [part.args[0] for part in parts if part.target is operator.getitem]
    return list(dict.fromkeys([*parts, *splits]))


def _permutation(node: fx.Node) -> list[int] | None:
    """Return the order in which ``node`` puts dims; None if it is not a permutation."""
    if node.target not in (aten.permute.default, aten.transpose.int, aten.t.default):
        return None
    ndim = len(shape_of(node))
    if node.target is aten.permute.default:
        dims: Any = node.args[1]
        return [dim % ndim for dim in dims]
    order = list(range(ndim))
    if ndim == 2 or node.target is aten.transpose.int:
        first, second = node.args[1:3] if node.target is aten.transpose.int else (0, 1)
        i, j = int(first) % ndim, int(second) % ndim  # type: ignore[arg-type]
        order[i], order[j] = order[j], order[i]
    return order


def _cat_dim(node: fx.Node) -> int:
    dim: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    return dim % len(shape_of(node))


def _parts(nodes: Any) -> tuple[fx.Node, int, int] | None:
    """(source, dim, count) if the nodes are all equal parts of one tensor, in order."""
    parts = list(nodes)
    if not all(isinstance(part, fx.Node) for part in parts):
        return None
    whole = _split_parts(parts) or _slice_parts(parts)
    if whole is None:
        return None
    source, dim = whole
    total = shape_of(source)[dim]
    if not all(same(shape_of(part)[dim] * len(parts), total) for part in parts):
        return None
    return source, dim, len(parts)


def _split_parts(parts: list[fx.Node]) -> tuple[fx.Node, int] | None:
    if any(part.target is not operator.getitem for part in parts):
        return None
    split = parts[0].args[0]
    assert isinstance(split, fx.Node)
    if split.target not in _SPLITS or any(p.args != (split, i) for i, p in enumerate(parts)):
        return None
    source: Any = split.args[0]
    dim: Any = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
    return source, dim % len(shape_of(source))


def _slice_parts(parts: list[fx.Node]) -> tuple[fx.Node, int] | None:
    if any(part.target is not aten.slice.Tensor for part in parts):
        return None
    source: Any = parts[0].args[0]
    dim: Any = parts[0].args[1] if len(parts[0].args) > 1 else 0
    for i, part in enumerate(parts):
        start = value(part.args[2]) if len(part.args) > 2 else None
        step = part.args[4] if len(part.args) > 4 else 1
        begin = 0 if start is None else start
        if part.args[0] is not source or part.args[1:2] not in ((), (dim,)) or step != 1:
            return None
        if not same(begin, i * shape_of(parts[0])[dim]):
            return None
    return source, dim % len(shape_of(source))
