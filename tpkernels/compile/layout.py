"""Tracks the order of elements through nodes that only move them.

A layout describes a tensor by axes: each dim is a product of axes, slowest first, like "(w b) s k"
in einops.

- A view regroups axes. If it cuts through an axis, the axis is split in all layouts that contain
  it.
- A permutation reorders dims.
- A chunk along one dim and a cat along another dim move an axis. Graphs write a gather along a dim
  other than the first in this form.

The final layout thus gives the effect of a chain of views, copies, transpositions and chunk-cat
pairs. It does not depend on how the chain is written, and sizes may be symbolic.
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
# Targets of the nodes between a tensor and the cat of its chunks.
_CHUNK_TARGETS = {*_SPLITS, operator.getitem, aten.slice.Tensor}

Size: TypeAlias = "int | torch.SymInt"


def value(argument: object) -> Any:
    """Return the value of a node argument, such as a fake tensor or a size."""
    return argument.meta.get("val") if isinstance(argument, fx.Node) else argument


def get_shape(node: fx.Node) -> Sequence[Size]:
    shape: Sequence[Size] = node.meta["val"].shape
    return shape


def sizes_equal(a: Size, b: Size) -> bool:
    """Return whether two sizes are statically known to be equal. Adds no guard."""
    return statically_known_true(a == b)


def shapes_equal(a: Sequence[Size], b: Sequence[Size]) -> bool:
    """Return whether two shapes are statically known to be equal. Adds no guard."""
    return len(a) == len(b) and all(map(sizes_equal, a, b))


def _divides(divisor: Size, size: Size) -> bool:
    rest: Size = size % divisor  # type: ignore[operator]
    return sizes_equal(rest, 0)


@dataclass(eq=False)
class Axis:
    """An axis, or the axes that a view has split it into. Compared by identity."""

    size: Size
    sub_axes: tuple[Axis, ...] = ()

    def split(self, first: Size) -> tuple[Axis, Axis]:
        """Split the axis permanently into a slower axis of size ``first`` and the remainder."""
        halves = Axis(first), Axis(self.size // first)
        self.sub_axes = halves
        return halves


Axes: TypeAlias = tuple[Axis, ...]


def leaves(axes: Iterable[Axis]) -> Axes:
    """Return the axes after all splits so far."""
    return tuple(leaf for axis in axes for leaf in (leaves(axis.sub_axes) or (axis,)))


def num_elements(axes: Axes) -> Size:
    """Return the number of elements that the axes span."""
    return prod((axis.size for axis in axes), start=1)


class Layout:
    """Axes of each dim of a tensor. Dims of size 1 have no axes."""

    def __init__(self, dims: Iterable[Iterable[Axis]]) -> None:
        self._dims = [tuple(dim) for dim in dims]

    @classmethod
    def for_node(cls, node: fx.Node) -> Layout:
        """Return the layout with one axis per dim, for a tensor of unknown origin."""
        return cls(() if sizes_equal(size, 1) else (Axis(size),) for size in get_shape(node))

    @property
    def dims(self) -> list[Axes]:
        """Return the axes of each dim, slowest first."""
        return [leaves(dim) for dim in self._dims]

    @property
    def flat(self) -> Axes:
        """Return all axes, slowest first."""
        return tuple(axis for dim in self.dims for axis in dim)

    @property
    def shape(self) -> list[Size]:
        return [num_elements(dim) for dim in self.dims]

    def view(self, shape: Sequence[Size]) -> Layout | None:
        """Return the layout after a view as ``shape``, or None if it is unknown."""
        remaining, dims = list(reversed(self.flat)), []
        for size in shape:
            dim: list[Axis] = []
            missing = size
            while not sizes_equal(missing, 1):
                if not remaining:
                    return None
                axis = remaining.pop()
                if _divides(axis.size, missing):
                    dim.append(axis)
                    missing = missing // axis.size
                elif _divides(missing, axis.size):
                    first, rest = axis.split(missing)
                    dim.append(first)
                    remaining.append(rest)
                    missing = 1
                else:
                    return None
            dims.append(dim)
        return None if remaining else Layout(dims)

    def permute(self, order: Sequence[int]) -> Layout:
        return Layout(self._dims[i] for i in order)

    def pop_leading(self, dim: int, size: Size) -> tuple[Axis, Layout] | None:
        """Return the slowest axis of a dim, and the layout without it.

        Return None if the axis does not have ``size`` and cannot be split to have it.
        """
        axes = list(self.dims[dim])
        if not axes:
            return None
        if not sizes_equal(axes[0].size, size):
            if not _divides(size, axes[0].size):
                return None
            axes[:1] = axes[0].split(size)
        return axes[0], self._replace_dim(dim, axes[1:])

    def push_leading(self, dim: int, axis: Axis) -> Layout:
        """Return the layout with ``axis`` as the slowest axis of a dim."""
        return self._replace_dim(dim, [axis, *self._dims[dim]])

    def _replace_dim(self, dim: int, axes: Sequence[Axis]) -> Layout:
        return Layout([*self._dims[:dim], axes, *self._dims[dim + 1 :]])

    def apply_moves(self, moves: Iterable[fx.Node]) -> Layout | None:
        """Return the layout after nodes that move elements, or None if it is unknown."""
        layout: Layout | None = self
        for move in moves:
            layout = layout and _apply_move(move, layout)
        return layout


def preserves_order(source: fx.Node, moves: Iterable[fx.Node]) -> bool:
    """Return whether the moves preserve the order of all elements of ``source``."""
    source_layout = Layout.for_node(source)
    order = source_layout.flat
    final_layout = source_layout.apply_moves(moves)
    return final_layout is not None and final_layout.flat == leaves(order)


def find_move_source(node: fx.Node) -> fx.Node | None:
    """Return the tensor whose elements ``node`` only moves, or None for other nodes."""
    source = node.args[0] if node.args else None
    if node.target is aten.cat.default:
        chunks = _match_chunk_cat(node)
        return None if chunks is None else chunks[0]
    if node.target in _VIEWS or _copies(node) or _permutation(node) is not None:
        return source if isinstance(source, fx.Node) else None
    return None


def _apply_move(node: fx.Node, layout: Layout) -> Layout | None:
    """Return the layout of ``node`` for the layout of ``find_move_source(node)``."""
    if _copies(node):
        return layout
    if node.target in _VIEWS:
        return layout.view(get_shape(node))
    order = _permutation(node)
    if order is not None:
        return layout.permute(order)
    chunks = _match_chunk_cat(node)
    assert chunks is not None  # all other moves are cats
    popped = layout.pop_leading(chunks[1], len(_cat_inputs(node)))
    return None if popped is None else popped[1].push_leading(_dim(node, 1), popped[0])


def _copies(node: fx.Node) -> bool:
    """Return whether a node keeps all elements of its argument in place.

    It may view them as a different dtype of the same size.
    """
    if node.target is not aten.view.dtype:
        return node.target in _COPIES
    return value(node.args[0]).dtype.itemsize == value(node).dtype.itemsize


def _permutation(node: fx.Node) -> list[int] | None:
    """Return the dim order of a permutation, or None for other nodes."""
    if node.target not in (aten.permute.default, aten.transpose.int, aten.t.default):
        return None
    order = list(range(len(get_shape(node))))
    if node.target is aten.permute.default:
        return [order[dim] for dim in cast("list[int]", node.args[1])]
    if node.target is aten.t.default:
        return order[::-1]
    i, j = (order[dim] for dim in cast("tuple[int, int]", node.args[1:]))
    order[i], order[j] = j, i
    return order


def _dim(node: fx.Node, index: int) -> int:
    """Return the argument ``dim`` of a node as a nonnegative index."""
    dim = node.args[index] if len(node.args) > index else node.kwargs.get("dim", 0)
    source = node.args[0]
    return cast(int, dim) % len(get_shape(source if isinstance(source, fx.Node) else node))


def _cat_inputs(cat: fx.Node) -> Sequence[fx.Node]:
    return cast("Sequence[fx.Node]", cat.args[0])


def _match_chunk_cat(cat: fx.Node) -> tuple[fx.Node, int] | None:
    """Return (source, dim) if a cat joins all equal chunks of a source along dim, in order."""
    inputs = _cat_inputs(cat)
    chunks = [_match_chunk(chunk_node) for chunk_node in inputs]
    if chunks[0] is None:
        return None
    source, dim, _ = chunks[0]
    for i, (chunk_node, chunk) in enumerate(zip(inputs, chunks, strict=True)):
        if chunk is None or chunk[0] is not source or chunk[1] != dim:
            return None
        size = get_shape(chunk_node)[dim]
        if not (
            sizes_equal(size * len(inputs), get_shape(source)[dim])
            and sizes_equal(chunk[2], size * i)
        ):
            return None
    return source, dim


def _match_chunk(node: fx.Node) -> tuple[fx.Node, int, Size] | None:
    """Return (source, dim, start) of a chunk of a tensor along a dim, or None for other nodes."""
    args: tuple[Any, ...] = node.args
    if node.target is aten.slice.Tensor:
        start = value(args[2]) if len(args) > 2 and args[2] is not None else 0
        step = args[4] if len(args) > 4 else 1
        return (args[0], _dim(node, 1), start) if step == 1 else None
    if node.target is not operator.getitem or args[0].target not in _SPLITS:
        return None
    split, index = args
    size = split.args[1]
    is_list = isinstance(size, (list, tuple))
    start = sum(map(value, size[:index])) if is_list else index * value(size)
    return split.args[0], _dim(split, 2), start


def find_moves(root: fx.Node, root_layout: Layout) -> dict[fx.Node, Layout]:
    """Return the layouts of ``root`` and of all nodes that only move its elements."""
    moves, pending = {root: root_layout}, list(root.users)
    while pending:
        node = pending.pop(0)
        source = find_move_source(node)
        if source in moves and node not in moves:
            layout_after = _apply_move(node, moves[source])
            if layout_after is not None:
                moves[node] = layout_after
                pending += node.users
        elif node.target in _CHUNK_TARGETS:
            pending += node.users
    return moves


def find_readers(node: fx.Node, moves: dict[fx.Node, Layout]) -> list[fx.Node]:
    """Return the users of ``node`` that are neither moves nor chunks that only moves read."""

    def only_moved(user: fx.Node) -> bool:
        is_chunk = user not in moves and user.target in _CHUNK_TARGETS
        return all(map(only_moved, user.users)) if is_chunk else user in moves

    return [user for user in node.users if not only_moved(user)]


def find_origin(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """Return the node whose elements end up in ``node``, and the moves between the two nodes."""
    moves: list[fx.Node] = []
    source = find_move_source(node)
    while source is not None:
        moves.append(node)
        node, source = source, find_move_source(source)
    return node, moves[::-1]


def add_chunk_nodes(moves: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the moves, and the chunk nodes between each cat and its source."""
    nodes: list[fx.Node] = []
    for move in moves:
        nodes.append(move)
        if move.target is aten.cat.default:
            inputs = _cat_inputs(move)
            nodes += inputs
            nodes += [
                chunk.all_input_nodes[0] for chunk in inputs if chunk.target is operator.getitem
            ]
    return list(dict.fromkeys(nodes))
