"""Editing an fx graph: new nodes with their fake values, also with symbolic sizes."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import sympy
import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._inductor.pattern_matcher import is_mutation_op
from torch._prims_common import is_contiguous_or_false
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import FloorDiv

from tpkernels.compile.layout import Axis, Size, same_shape
from tpkernels.compile.moves import shape_of, value

aten = torch.ops.aten

_OPERATIONS = (
    (sympy.Add, operator.add),
    (sympy.Mul, operator.mul),
    (FloorDiv, operator.floordiv),
)
_WRAPPERS = {
    torch.ops.higher_order.auto_functionalized,
    torch.ops.higher_order.auto_functionalized_v2,
}
_KEPT_META = ("stack_trace", "nn_module_stack", "fwd_nn_module_stack", "custom")


class Unsupported(Exception):
    """The reason for which a collective is left alone. Raised before any node is replaced."""


@dataclass(frozen=True)
class Writes:
    """The ops of a graph that write in place."""

    ops: list[fx.Node]
    before: dict[fx.Node, int]  #: for each node, how many of the ops come before it

    @classmethod
    def of(cls, graph: fx.Graph) -> Writes:
        ops: list[fx.Node] = []
        before = {}
        for node in graph.nodes:
            before[node] = len(ops)
            if is_mutation_op(node):
                ops.append(node)
        return cls(ops, before)

    def among(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """The ops between the first and the last of the nodes."""
        places = [self.before[node] for node in nodes]
        return self.ops[min(places) : max(places)]


@dataclass(frozen=True)
class Collective:
    """A functional collective of a graph, and its group."""

    node: fx.Node
    group: str
    world: int
    writes: Writes

    def check_fusible(self, matmuls: Iterable[fx.Node]) -> None:
        """Check that the collective and the matmuls can become one op, which reads all their
        inputs at one place in the graph.

        Raises:
            Unsupported: an op writes in place between them.
        """
        between = self.writes.among([self.node, *matmuls])
        if between:
            names = ", ".join(dict.fromkeys(map(describe, between)))
            raise Unsupported(f"{names} writes in place between it and the matmuls")


@dataclass(frozen=True)
class Change:
    """What replaced a collective. The first fields are those of ``Rewritten``."""

    op: str
    matmuls: int
    detail: str
    node: fx.Node | None = None  #: the op's, where it may become part of another


class Editor:
    """``with Editor(at) as editor:`` adds nodes before the node ``at``, with that node's metadata.
    If the block raises `Unsupported`, they are removed again.

    The new nodes may depend on nodes after ``at``; the caller sorts the graph afterwards.
    """

    def __init__(self, at: fx.Node) -> None:
        self._at, self._made = at, list[fx.Node]()
        self._meta = {key: at.meta[key] for key in _KEPT_META if key in at.meta}

    def __enter__(self) -> Editor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Unsupported):
            for node in reversed(self._made):
                node.graph.erase_node(node)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Add a node, and compute its fake value from those of its arguments."""
        with self._at.graph.inserting_before(self._at):
            node = self._at.graph.call_function(target, args, kwargs)
        self._made.append(node)
        fake_args, fake_kwargs = pytree.tree_map_only(fx.Node, value, (args, kwargs))
        mode = detect_fake_mode([*pytree.tree_leaves(fake_args), *fake_kwargs.values()])
        with mode or contextlib.nullcontext():
            node.meta = {**self._meta, "val": target(*fake_args, **fake_kwargs)}
        return node

    def reshape(self, node: fx.Node, shape: Sequence[Size]) -> fx.Node:
        """``node`` in ``shape``; ``node`` itself if it has that shape."""
        if same_shape(shape_of(node), shape):
            return node
        result: fx.Node = self.call(aten.reshape.default, node, self._arguments(shape))
        return result

    def arrange(
        self, node: fx.Node, source: Sequence[Axis], target: Sequence[Axis], shape: Sequence[Size]
    ) -> fx.Node:
        """Reorders the elements of ``node`` from the axes ``source`` to the axes ``target``, and
        reshapes the result to ``shape``."""
        if list(source) != list(target):
            node = self.reshape(node, [axis.size for axis in source])
            node = self.call(aten.permute.default, node, [source.index(axis) for axis in target])
        return self.reshape(node, shape)

    def laid_out_like(self, old: fx.Node, new: fx.Node) -> fx.Node:
        """``new`` with the strides of ``old``, on which views of ``old`` may rely."""
        actual, expected = value(new), value(old)
        contiguous = is_contiguous_or_false(expected)
        if same_shape(actual.stride(), expected.stride()) or (
            contiguous and is_contiguous_or_false(actual)
        ):
            return new
        if contiguous:
            layout = torch.contiguous_format
            copied: fx.Node = self.call(aten.clone.default, new, memory_format=layout)
            return copied
        size = [self.size(length) for length in expected.shape]
        stride = [self.size(step) for step in expected.stride()]
        laid_out = self.call(aten.new_empty_strided.default, new, size, stride)
        result: fx.Node = self.call(aten.copy.default, laid_out, new)
        return result

    def item(self, node: fx.Node, index: int) -> fx.Node:
        """One of the results of ``node``."""
        result: fx.Node = self.call(operator.getitem, node, index)
        return result

    def _arguments(self, shape: Sequence[Size]) -> list[int | fx.Node]:
        """A shape as a view's argument: the first symbolic size is -1, others are computed."""
        symbolic = [i for i, size in enumerate(shape) if not isinstance(size, int)]
        return [-1 if i in symbolic[:1] else self.size(s) for i, s in enumerate(shape)]

    def size(self, size: Size) -> int | fx.Node:
        """A size as a node's argument; a symbolic one is computed from sizes of the inputs.

        Raises:
            Unsupported: the size cannot be computed from them.
        """
        return size if isinstance(size, int) else self._computed(size.node.expr)

    def _computed(self, expression: Any) -> int | fx.Node:
        if expression.is_Integer:
            return int(expression)
        for node in self._at.graph.find_nodes(op="placeholder"):
            known = value(node)
            if isinstance(known, torch.SymInt) and known.node.expr == expression:
                return node
            sizes: Sequence[Any] = known.shape if isinstance(known, torch.Tensor) else ()
            for dim, size in enumerate(sizes):
                if isinstance(size, torch.SymInt) and size.node.expr == expression:
                    read: fx.Node = self.call(aten.sym_size.int, node, dim)
                    return read
        for kind, operation in _OPERATIONS:
            if isinstance(expression, kind):
                parts = [self._computed(part) for part in expression.args]
                return functools.reduce(functools.partial(self.call, operation), parts)
        raise Unsupported(
            f"the size {expression} cannot be computed from the sizes of the graph's inputs"
        )


def descendants(node: fx.Node) -> set[fx.Node]:
    """All nodes that are computed from ``node``."""
    users: set[fx.Node] = set()
    pending = [node]
    while pending:
        for user in pending.pop().users:
            if user not in users:
                users.add(user)
                pending.append(user)
    return users


def read_sizes_of_inputs(graph: fx.Graph) -> None:
    """Compute the sizes of intermediate tensors from those of the inputs where possible. A node
    that reads only the size of a tensor then no longer counts as its reader."""
    for node in graph.find_nodes(op="call_function", target=aten.sym_size.int):
        source: Any = node.args[0]
        if source.op == "placeholder":
            continue
        try:
            with Editor(node) as editor:
                size = editor.size(value(node))
        except Unsupported:
            continue
        for user in list(node.users):
            _substitute(user, node, size)
        erase_unread([node])


def _substitute(user: fx.Node, old: fx.Node, new: int | fx.Node) -> None:
    def swap(node: fx.Node) -> Any:
        return new if node is old else node

    user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), swap)


def erase_unread(nodes: Iterable[fx.Node]) -> None:
    """Erases those of the nodes that no node reads any more."""
    remaining = dict.fromkeys(nodes)
    while unread := [node for node in remaining if not node.users]:
        for node in unread:
            del remaining[node]
            node.graph.erase_node(node)


def is_wrapped(node: fx.Node) -> bool:
    """Return whether a node wraps an op that writes into an argument (see in_place.py)."""
    return node.target in _WRAPPERS


def op_of(node: fx.Node) -> torch._ops.OpOverload | None:
    """The op that a node calls, wrapped or not; None if it calls something else."""
    target = node.args[0] if is_wrapped(node) else node.target
    return target if isinstance(target, torch._ops.OpOverload) else None


def describe(node: fx.Node) -> str:
    """Return the name of a node for messages, such as "aten.mul.Tensor"."""
    if node.op == "output":
        return "the graph's output"
    if node.op != "call_function":
        return "an input of the graph"
    op = op_of(node)
    if op is not None:
        return str(op).removesuffix(".default")
    return getattr(node.target, "__name__", str(node.target))
