"""The collectives and matmuls of a graph, and editing the graph: new nodes with their fake values,
also with symbolic sizes."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import sympy
import torch
from torch import fx
from torch.fx.node import map_arg

from tpkernels import groups
from tpkernels.compile.layout import Axis, Size, same, same_shape, shape_of, value
from tpkernels.ops.replacement import why_left_to_torch
from tpkernels.planning.op_spec import NO_OPTIONS, Options
from tpkernels.torch_private import (
    OpOverload,
    aten_scaled_mm,
    detect_fake_mode,
    is_contiguous_or_false,
    sympy_functions,
)

aten = torch.ops.aten

_OPERATIONS = {
    sympy.Add: operator.add,
    sympy.Mul: operator.mul,
    sympy_functions.FloorDiv: operator.floordiv,
}
_WRAPPERS = {
    torch.ops.higher_order.auto_functionalized,
    torch.ops.higher_order.auto_functionalized_v2,
}
_KEPT_META = ("stack_trace", "nn_module_stack", "fwd_nn_module_stack", "custom")


class Unsupported(Exception):
    """The reason for which a collective is left alone. Raised before any node is replaced."""


@dataclass(frozen=True)
class Collective:
    """A functional collective of a graph, its group, and the graph's ops that write in place."""

    node: fx.Node
    group: str
    world: int
    writes: Sequence[fx.Node]

    def check_fusible(self, others: Iterable[fx.Node]) -> None:
        """Raise `Unsupported` if an op writes in place between the collective and others, with
        which it is to become one op that reads all their inputs at one place in the graph."""
        nodes = [self.node, *others]
        between = [write for write in self.writes if min(nodes) < write < max(nodes)]
        if between:
            names = ", ".join(dict.fromkeys(map(describe, between)))
            raise Unsupported(f"{names} writes in place between it and the matmuls")

    def check_worthwhile(
        self, op: str, rows: Size | None, width: Size, options: Options = NO_OPTIONS
    ) -> None:
        """Raise `Unsupported` if torch's calls are to stay: on CUDA tensors by measured times. The
        tensor that travels has ``rows`` on all ranks, None if it is not split along them, and the
        last dim ``width``."""
        tensor = value(self.node)
        reason = why_left_to_torch(
            groups.get(self.group),
            op,
            tensor.device.type,
            rows=rows if isinstance(rows, int) else None,
            width=width if rows is not None and isinstance(width, int) else None,
            dtype=tensor.dtype,
            options=options,
        )
        if reason is not None:
            raise Unsupported(reason)


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

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Unsupported):
            for node in reversed(self._made):
                node.graph.erase_node(node)

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Add a node, and compute its fake value from those of its arguments."""
        with self._at.graph.inserting_before(self._at):
            node = self._at.graph.call_function(target, args, kwargs)
        self._made.append(node)
        fake_args, fake_kwargs = map_arg((args, kwargs), value)
        mode = detect_fake_mode([value(one) for one in node.all_input_nodes])
        with mode or contextlib.nullcontext():
            node.meta = {**self._meta, "val": target(*fake_args, **fake_kwargs)}
        return node

    def op(self, name: str, *args: Any, **kwargs: Any) -> fx.Node:
        """Call one of our ops, as graphs contain it."""
        return self.call(getattr(torch.ops.tpkernels, f"_{name}").default, *args, **kwargs)

    def item(self, node: fx.Node, index: int) -> fx.Node:
        """Take one of the results of ``node``."""
        return self.call(operator.getitem, node, index)

    def reshape(self, node: fx.Node, shape: Sequence[Size]) -> fx.Node:
        """Reshape ``node``, unless it has that shape. The first symbolic size becomes -1, others
        are computed."""
        if same_shape(shape_of(node), shape):
            return node
        symbolic = [i for i, size in enumerate(shape) if not isinstance(size, int)]
        sizes = [-1 if i in symbolic[:1] else self.size(s) for i, s in enumerate(shape)]
        return self.call(aten.reshape.default, node, sizes)

    def arrange(
        self, node: fx.Node, source: Sequence[Axis], target: Sequence[Axis], shape: Sequence[Size]
    ) -> fx.Node:
        """Reorder the elements of ``node`` from the axes ``source`` to the axes ``target``, and
        reshape the result to ``shape``."""
        if list(source) != list(target):
            node = self.reshape(node, [axis.size for axis in source])
            node = self.call(aten.permute.default, node, [source.index(axis) for axis in target])
        return self.reshape(node, shape)

    def laid_out_like(self, old: fx.Node, new: fx.Node) -> fx.Node:
        """Give ``new`` the strides of ``old``, on which views of ``old`` may rely."""
        actual, expected = value(new), value(old)
        contiguous = is_contiguous_or_false(expected)
        if same_shape(actual.stride(), expected.stride()) or (
            contiguous and is_contiguous_or_false(actual)
        ):
            return new
        if contiguous:
            return self.call(aten.clone.default, new, memory_format=torch.contiguous_format)
        size, stride = ([*map(self.size, sizes)] for sizes in (expected.shape, expected.stride()))
        return self.call(
            aten.copy.default, self.call(aten.new_empty_strided.default, new, size, stride), new
        )

    def as_dtype(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """View ``node`` as another dtype of the same size: fp8 numbers may travel as bytes."""
        return node if value(node).dtype == dtype else self.call(aten.view.dtype, node, dtype)

    def padded(self, node: fx.Node, dim: int) -> fx.Node:
        """Add a row or a column, along ``dim``, to a matrix that has none."""
        if not same(shape_of(node)[dim], 0):
            return node
        dtype = value(node).dtype
        plain = node if dtype.itemsize > 1 else self.as_dtype(node, torch.uint8)
        pad = [0, 1] if dim else [0, 0, 0, 1]
        return self.as_dtype(self.call(aten.constant_pad_nd.default, plain, pad), dtype)

    def size(self, size: Size) -> int | fx.Node:
        """Return a size as a node's argument; compute a symbolic one from sizes of the inputs, or
        raise `Unsupported`."""
        return size if isinstance(size, int) else self._computed(size.node.expr)

    def _computed(self, expression: sympy.Expr) -> int | fx.Node:
        if expression.is_Integer:
            return int(expression)
        for node in self._at.graph.find_nodes(op="placeholder"):
            known = value(node)
            if isinstance(known, torch.SymInt) and known.node.expr == expression:
                return node
            sizes: Sequence[Size] = known.shape if isinstance(known, torch.Tensor) else ()
            for dim, size in enumerate(sizes):
                if isinstance(size, torch.SymInt) and size.node.expr == expression:
                    return self.call(aten.sym_size.int, node, dim)
        for kind, operation in _OPERATIONS.items():
            if isinstance(expression, kind):
                parts = [self._computed(part) for part in expression.args]
                return functools.reduce(functools.partial(self.call, operation), parts)
        raise Unsupported(
            f"the size {expression} cannot be computed from the sizes of the graph's inputs"
        )


FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# The arguments of aten._scaled_mm behind its factors and their scales, and their defaults.
_OPTIONS = {"bias": None, "scale_result": None, "out_dtype": None, "use_fast_accum": False}


@dataclass(frozen=True)
class Scales:
    """Scales of the factors in float32, each tensor-wise or row-wise."""

    left: fx.Node  #: of one element, or [M, 1]
    right: fx.Node  #: of one element, or [1, N]
    fast_accum: bool


@dataclass(frozen=True)
class Matmul:
    """``left @ right (+ bias)``: left [M, K], right [K, N], bias [N]. With ``scales`` the factors
    are fp8, and bias and product have ``node``'s dtype."""

    node: fx.Node
    left: fx.Node
    right: fx.Node
    bias: fx.Node | None = None
    scales: Scales | None = None

    @classmethod
    def of(cls, node: fx.Node) -> Matmul | None:
        """Return the matmul that a node computes; None if it is not one, or none that the ops
        support."""
        args = cast("tuple[fx.Node, ...]", node.args)
        if node.target is aten.mm.default or (node.target is aten.mul.Tensor and _is_outer(*args)):
            return cls(node, args[0], args[1])
        if node.target is aten_scaled_mm:
            return cls._of_scaled(node)
        scaled = any(node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta"))
        if node.target is not aten.addmm.default or scaled:
            return None
        bias, columns = shape_of(args[0]), shape_of(args[2])[1]
        fits = len(bias) == 1 and same(bias[0], columns)
        return cls(node, args[1], args[2], args[0]) if fits else None

    @classmethod
    def _of_scaled(cls, node: fx.Node) -> Matmul | None:
        factors = [arg for arg in node.args[:4] if isinstance(arg, fx.Node)]
        if len(factors) < 4:
            return None
        left, right, *scales = factors
        given = dict(zip(_OPTIONS, node.args[4:], strict=False))
        options: dict[str, Any] = {**_OPTIONS, **given, **node.kwargs}
        shapes = (shape_of(left)[0], 1), (1, shape_of(right)[1])
        dtype, bias = value(node).dtype, options["bias"]
        fits = (
            all(value(factor).dtype in FP8 for factor in (left, right))
            and all(
                value(scale).dtype == torch.float32
                and (is_tensor_wise(scale) or same_shape(shape_of(scale), shape))
                for scale, shape in zip(scales, shapes, strict=True)
            )
            and (bias is None or value(bias).dtype == dtype)
            and dtype in _OUT_DTYPES
            and not options["scale_result"]
        )
        found = Scales(scales[0], scales[1], options["use_fast_accum"])
        return cls(node, left, right, bias, found) if fits else None

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of the op on scaled operands that makes it."""
        assert self.scales is not None  # the caller has asked
        return {"out_dtype": value(self.node).dtype, "use_fast_accum": self.scales.fast_accum}

    def depends_on(self, nodes: Container[fx.Node]) -> bool:
        """Return whether something besides the left factor is among the nodes."""
        scales = (self.scales.left, self.scales.right) if self.scales else ()
        return any(node in nodes for node in (self.right, self.bias, *scales) if node is not None)

    def shares_input(self, other: Matmul) -> bool:
        """Return whether one op can make both, given that the left factors have the same bytes."""
        if self.scales is None or other.scales is None:
            return self.scales is other.scales
        return (
            value(self.left).dtype == value(other.left).dtype
            and self.scales.left is other.scales.left
            and self.options == other.options
        )


def is_tensor_wise(scale: fx.Node) -> bool:
    """Return whether there is one scale for all."""
    return all(same(size, 1) for size in shape_of(scale))


def row_scale(editor: Editor, scale: fx.Node, rows: Sequence[Size]) -> fx.Node:
    """Reshape the scale of an x [*rows, K] as the ops take it."""
    return editor.reshape(scale, [] if is_tensor_wise(scale) else [*rows, 1])


def column_scale(editor: Editor, scale: fx.Node) -> fx.Node:
    """Return the op's scale of a weight, which has a column even on a rank without columns."""
    return editor.reshape(scale, []) if is_tensor_wise(scale) else editor.padded(scale, 1)


def _is_outer(left: object, right: object) -> bool:
    """Return whether an elementwise product is that of a column and a row. Inductor turns some
    matmuls with K = 1 into this form, perhaps only on the rank with the smallest shard."""
    if not (isinstance(left, fx.Node) and isinstance(right, fx.Node)):
        return False
    columns, rows = shape_of(left), shape_of(right)
    alike = value(left).dtype == value(right).dtype
    return alike and len(columns) == len(rows) == 2 and same(columns[1], 1) and same(rows[0], 1)


def descendants(node: fx.Node) -> set[fx.Node]:
    """Return all nodes that are computed from ``node``."""
    users: set[fx.Node] = set()
    pending = [node]
    while pending:
        new = pending.pop().users.keys() - users
        users |= new
        pending += new
    return users


def read_sizes_of_inputs(graph: fx.Graph) -> None:
    """Compute the sizes of intermediate tensors from those of the inputs where possible. A node
    that reads only the size of a tensor then no longer counts as its reader."""
    for node in graph.find_nodes(op="call_function", target=aten.sym_size.int):
        if node.all_input_nodes[0].op == "placeholder":
            continue
        try:
            with Editor(node) as editor:
                size = editor.size(value(node))
        except Unsupported:
            continue
        for user in list(node.users):
            replace = functools.partial(
                lambda new, old, arg: new if arg is old else arg, size, node
            )
            user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), replace)
        erase_unread([node])


def erase_unread(nodes: Iterable[fx.Node]) -> None:
    """Erase those of the nodes that no node reads any more."""
    remaining = dict.fromkeys(nodes)
    while unread := [node for node in remaining if not node.users]:
        for node in unread:
            del remaining[node]
            node.graph.erase_node(node)


def op_of(node: fx.Node) -> OpOverload | None:
    """Return the op that a node calls; None if it calls something else. The compiler wraps ops that
    write into an argument; then it is the wrapped one."""
    target = node.args[0] if node.target in _WRAPPERS else node.target
    return target if isinstance(target, OpOverload) else None


def describe(node: fx.Node) -> str:
    """Return the name of a node for messages, such as "aten.mul.Tensor"."""
    if node.op == "output":
        return "the output of the graph"
    if node.op != "call_function":
        return "an input of the graph"
    op = op_of(node)
    if op is not None:
        return str(op).removesuffix(".default")
    return getattr(node.target, "__name__", str(node.target))
