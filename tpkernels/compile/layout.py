"""Where the elements of a tensor come from, through nodes that only move them.

A tensor is described by axes: each dim is a product of axes, the slowest first, as einops writes
"(w b) s k". A view regroups axes and a permutation reorders dims. A gather along a dim other than
the first, which is written as a chunk along one dim and a cat along another, moves an axis. A view
that cuts through an axis splits it, in all layouts that contain it.

So the effect of a chain of views, copies, transpositions and chunk-cat pairs can be read off its
final layout, however the chain is written and also with symbolic sizes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias, cast

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from tpkernels.torch_private import aten_unsafe_view, c10d_functional

aten = torch.ops.aten

_VIEWS = {
    aten.view.default,
    aten.reshape.default,
    aten_unsafe_view,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
}
_COPIES = {
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    c10d_functional.wait_tensor.default,
}
_SPLITS = {aten.split.Tensor, aten.split_with_sizes.default}
_CARRIERS = {*_SPLITS, operator.getitem, aten.slice.Tensor}

Size: TypeAlias = "int | torch.SymInt"


def value(argument: object) -> Any:
    """Return the value of an argument of a node, such as a fake tensor or a size."""
    return argument.meta.get("val") if isinstance(argument, fx.Node) else argument


def shape_of(node: fx.Node) -> Sequence[Size]:
    shape: Sequence[Size] = node.meta["val"].shape
    return shape


def same(a: Size, b: Size) -> bool:
    """Return whether two sizes are known to be equal, without a new guard."""
    return statically_known_true(a == b)


def same_shape(a: Sequence[Size], b: Sequence[Size]) -> bool:
    """Return whether two shapes are known to be equal, without a new guard."""
    return len(a) == len(b) and all(map(same, a, b))


def _divides(divisor: Size, size: Size) -> bool:
    rest: Size = size % divisor  # type: ignore[operator]
    return same(rest, 0)


@dataclass(eq=False)
class Axis:
    """An axis, or the axes into which a view has split it. Compared by identity."""

    size: Size
    parts: tuple[Axis, ...] = ()

    def split(self, first: Size) -> tuple[Axis, Axis]:
        """Split the axis permanently, into a slower axis of size ``first`` and the rest."""
        halves = Axis(first), Axis(self.size // first)
        self.parts = halves
        return halves


Axes: TypeAlias = tuple[Axis, ...]


def leaves(axes: Iterable[Axis]) -> Axes:
    """Return the axes that these consist of now."""
    return tuple(leaf for axis in axes for leaf in (leaves(axis.parts) or (axis,)))


def size_of(axes: Axes) -> Size:
    """Return the product of the sizes of the axes."""
    return prod((axis.size for axis in axes), start=1)


class Layout:
    """The axes of each dim of a tensor. Dims of one element have none."""

    def __init__(self, dims: Iterable[Iterable[Axis]]) -> None:
        self._dims = [tuple(dim) for dim in dims]

    @classmethod
    def of(cls, node: fx.Node) -> Layout:
        """Return the layout of a tensor of which only the shape is known."""
        return cls(() if same(size, 1) else (Axis(size),) for size in shape_of(node))

    @property
    def dims(self) -> list[Axes]:
        """Return the axes of each dim, the slowest first."""
        return [leaves(dim) for dim in self._dims]

    @property
    def flat(self) -> Axes:
        """Return all axes, the slowest first."""
        return tuple(axis for dim in self.dims for axis in dim)

    @property
    def shape(self) -> list[Size]:
        return [size_of(dim) for dim in self.dims]

    def regrouped(self, shape: Sequence[Size]) -> Layout | None:
        """Return the layout after a view as ``shape``; None if it is unknown."""
        left, dims = list(reversed(self.flat)), []
        for size in shape:
            dim: list[Axis] = []
            missing = size
            while not same(missing, 1):
                if not left:
                    return None
                axis = left.pop()
                if _divides(axis.size, missing):
                    dim.append(axis)
                    missing = missing // axis.size
                elif _divides(missing, axis.size):
                    first, rest = axis.split(missing)
                    dim.append(first)
                    left.append(rest)
                    missing = 1
                else:
                    return None
            dims.append(dim)
        return None if left else Layout(dims)

    def permuted(self, order: Sequence[int]) -> Layout:
        return Layout(self._dims[i] for i in order)

    def without_leading(self, dim: int, size: Size) -> tuple[Axis, Layout] | None:
        """Return the slowest axis of a dim, and the layout without it; None unless that axis has
        ``size``, or can be split so that it has."""
        axes = list(self.dims[dim])
        if not axes:
            return None
        if not same(axes[0].size, size):
            if not _divides(size, axes[0].size):
                return None
            axes[:1] = axes[0].split(size)
        return axes[0], self._with(dim, axes[1:])

    def with_leading(self, dim: int, axis: Axis) -> Layout:
        """Return the layout with ``axis`` as the slowest axis of a dim."""
        return self._with(dim, [axis, *self._dims[dim]])

    def _with(self, dim: int, axes: Sequence[Axis]) -> Layout:
        return Layout([*self._dims[:dim], axes, *self._dims[dim + 1 :]])

    def after(self, moves: Iterable[fx.Node]) -> Layout | None:
        """Return the layout after nodes that move elements; None if it is unknown."""
        layout: Layout | None = self
        for move in moves:
            layout = layout and _through(move, layout)
        return layout


def keep_order(source: fx.Node, moves: Iterable[fx.Node]) -> bool:
    """Return whether all elements of ``source`` are in the same order after the moves."""
    before = Layout.of(source)
    order = before.flat
    after = before.after(moves)
    return after is not None and after.flat == leaves(order)


def moved_from(node: fx.Node) -> fx.Node | None:
    """Return the tensor of which ``node`` moves all elements; None if it does something else."""
    source = node.args[0] if node.args else None
    if node.target is aten.cat.default:
        chunks = _chunks_of(node)
        return None if chunks is None else chunks[0]
    if node.target in _VIEWS or _copies(node) or _permutation(node) is not None:
        return source if isinstance(source, fx.Node) else None
    return None


def _through(node: fx.Node, before: Layout) -> Layout | None:
    """Return the layout of ``node``, given that of ``moved_from(node)``."""
    if _copies(node):
        return before
    if node.target in _VIEWS:
        return before.regrouped(shape_of(node))
    order = _permutation(node)
    if order is not None:
        return before.permuted(order)
    chunks = _chunks_of(node)
    assert chunks is not None  # the only other node that moved_from knows is a cat
    taken = before.without_leading(chunks[1], len(_parts_of(node)))
    return None if taken is None else taken[1].with_leading(_dim(node, 1), taken[0])


def _copies(node: fx.Node) -> bool:
    """Return whether a node has the elements of its argument in the same places, perhaps as another
    dtype of the same size."""
    if node.target is not aten.view.dtype:
        return node.target in _COPIES
    return value(node.args[0]).dtype.itemsize == value(node).dtype.itemsize


def _permutation(node: fx.Node) -> list[int] | None:
    """Return the order in which ``node`` puts dims; None if it is not a permutation."""
    if node.target not in (aten.permute.default, aten.transpose.int, aten.t.default):
        return None
    order = list(range(len(shape_of(node))))
    if node.target is aten.permute.default:
        return [order[dim] for dim in cast("list[int]", node.args[1])]
    if node.target is aten.t.default:
        return order[::-1]
    i, j = (order[dim] for dim in cast("tuple[int, int]", node.args[1:]))
    order[i], order[j] = j, i
    return order


def _dim(node: fx.Node, place: int) -> int:
    """Return the argument ``dim`` of a node, counted from 0."""
    dim = node.args[place] if len(node.args) > place else node.kwargs.get("dim", 0)
    source = node.args[0]
    return cast(int, dim) % len(shape_of(source if isinstance(source, fx.Node) else node))


def _parts_of(cat: fx.Node) -> Sequence[fx.Node]:
    return cast("Sequence[fx.Node]", cat.args[0])


def _chunks_of(cat: fx.Node) -> tuple[fx.Node, int] | None:
    """Return (source, dim) if a cat's arguments are all equal parts of one tensor along a dim, in
    order."""
    parts = _parts_of(cat)
    chunks = [_chunk(part) for part in parts]
    if chunks[0] is None:
        return None
    source, dim, _ = chunks[0]
    for i, (part, chunk) in enumerate(zip(parts, chunks, strict=True)):
        if chunk is None or chunk[0] is not source or chunk[1] != dim:
            return None
        size = shape_of(part)[dim]
        if not (same(size * len(parts), shape_of(source)[dim]) and same(chunk[2], size * i)):
            return None
    return source, dim


def _chunk(part: fx.Node) -> tuple[fx.Node, int, Size] | None:
    """Return (source, dim, start) of a part of a tensor along a dim."""
    args: tuple[Any, ...] = part.args
    if part.target is aten.slice.Tensor:
        start = value(args[2]) if len(args) > 2 and args[2] is not None else 0
        step = args[4] if len(args) > 4 else 1
        return (args[0], _dim(part, 1), start) if step == 1 else None
    if part.target is not operator.getitem or args[0].target not in _SPLITS:
        return None
    split, index = args
    size = split.args[1]
    several = isinstance(size, (list, tuple))
    start = sum(map(value, size[:index])) if several else index * value(size)
    return split.args[0], _dim(split, 2), start


def follow(root: fx.Node, layout: Layout) -> dict[fx.Node, Layout]:
    """Return the layouts of ``root`` and of all nodes that only move its elements."""
    moves, pending = {root: layout}, list(root.users)
    while pending:
        node = pending.pop(0)
        source = moved_from(node)
        if source in moves and node not in moves:
            moved = _through(node, moves[source])
            if moved is not None:
                moves[node] = moved
                pending += node.users
        elif node.target in _CARRIERS:
            pending += node.users
    return moves


def readers(node: fx.Node, moves: dict[fx.Node, Layout]) -> list[fx.Node]:
    """Return the users of ``node`` that are neither moves, nor chunks that only moves read."""

    def only_moved(user: fx.Node) -> bool:
        carries = user not in moves and user.target in _CARRIERS
        return all(map(only_moved, user.users)) if carries else user in moves

    return [user for user in node.users if not only_moved(user)]


def chain_to(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """Return the node whose elements end up in ``node``, and the moves between the two."""
    moves: list[fx.Node] = []
    source = moved_from(node)
    while source is not None:
        moves.append(node)
        node, source = source, moved_from(source)
    return node, moves[::-1]


def with_carriers(moves: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the moves, and what lies between each and its source: the chunks that a cat takes."""
    nodes: list[fx.Node] = []
    for move in moves:
        nodes.append(move)
        if move.target is aten.cat.default:
            parts = _parts_of(move)
            nodes += parts
            nodes += [p.all_input_nodes[0] for p in parts if p.target is operator.getitem]
    return list(dict.fromkeys(nodes))
