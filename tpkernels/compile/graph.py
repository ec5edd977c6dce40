"""Collectives and matmuls of a graph, and an editor for graphs.

The editor adds nodes with their fake values, also for symbolic sizes.
"""

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
from tpkernels.compile.layout import Axis, Size, get_shape, shapes_equal, sizes_equal, value
from tpkernels.ops.replacement import reason_against_replacement
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
_COPIED_META = ("stack_trace", "nn_module_stack", "fwd_nn_module_stack", "custom")


class Unsupported(Exception):
    """The reason against rewriting a collective. Raised before any node is replaced."""


@dataclass(frozen=True)
class Collective:
    """A functional collective of a graph, its group, and the nodes that write in place."""

    node: fx.Node
    group: str
    world: int
    writes: Sequence[fx.Node]

    def check_fusible(self, nodes: Iterable[fx.Node]) -> None:
        """Raise `Unsupported` if an in-place write lies between the collective and ``nodes``.

        The fused op reads the inputs of all these nodes at one position in the graph.
        """
        all_nodes = [self.node, *nodes]
        between = [write for write in self.writes if min(all_nodes) < write < max(all_nodes)]
        if between:
            names = ", ".join(dict.fromkeys(map(describe, between)))
            raise Unsupported(f"{names} writes in place between it and the matmuls")

    def check_worthwhile(
        self, op: str, rows: Size | None, width: Size, options: Options = NO_OPTIONS
    ) -> None:
        """Raise `Unsupported` to keep the torch calls, unless measured times favor the op.

        Applies only to CUDA tensors, and not while `tpkernels.autotune` measures their group.

        Args:
            op: name of the fused op.
            rows: number of rows of the full communicated tensor, or None if it is not split along
                its rows.
            width: last dim of the communicated tensor.
            options: options of the op.
        """
        tensor = value(self.node)
        reason = reason_against_replacement(
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
    """Adds nodes before the node ``anchor``, with its metadata: ``with Editor(anchor) as editor:``.

    If the block raises `Unsupported`, the new nodes are removed. New nodes may depend on nodes
    after ``anchor``; the caller sorts the graph afterwards.
    """

    def __init__(self, anchor: fx.Node) -> None:
        self._anchor, self._new_nodes = anchor, list[fx.Node]()
        self._meta = {key: anchor.meta[key] for key in _COPIED_META if key in anchor.meta}

    def __enter__(self) -> Editor:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Unsupported):
            for node in reversed(self._new_nodes):
                node.graph.erase_node(node)

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Add a node, and compute its fake value from the fake values of its arguments."""
        with self._anchor.graph.inserting_before(self._anchor):
            node = self._anchor.graph.call_function(target, args, kwargs)
        self._new_nodes.append(node)
        fake_args, fake_kwargs = map_arg((args, kwargs), value)
        mode = detect_fake_mode([value(input_node) for input_node in node.all_input_nodes])
        with mode or contextlib.nullcontext():
            node.meta = {**self._meta, "val": target(*fake_args, **fake_kwargs)}
        return node

    def op(self, name: str, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call of a tpkernels op, as graphs contain it."""
        return self.call(getattr(torch.ops.tpkernels, f"_{name}").default, *args, **kwargs)

    def item(self, node: fx.Node, index: int) -> fx.Node:
        """Add a getitem node for one result of ``node``."""
        return self.call(operator.getitem, node, index)

    def reshape(self, node: fx.Node, shape: Sequence[Size]) -> fx.Node:
        """Reshape ``node`` if its shape differs.

        The first symbolic size becomes -1. All further symbolic sizes are computed from the inputs.
        """
        if shapes_equal(get_shape(node), shape):
            return node
        symbolic = [i for i, size in enumerate(shape) if not isinstance(size, int)]
        sizes = [-1 if i in symbolic[:1] else self.size(s) for i, s in enumerate(shape)]
        return self.call(aten.reshape.default, node, sizes)

    def arrange(
        self, node: fx.Node, source: Sequence[Axis], target: Sequence[Axis], shape: Sequence[Size]
    ) -> fx.Node:
        """Permute ``node`` from axes ``source`` to axes ``target``, and reshape it to ``shape``."""
        if list(source) != list(target):
            node = self.reshape(node, [axis.size for axis in source])
            node = self.call(aten.permute.default, node, [source.index(axis) for axis in target])
        return self.reshape(node, shape)

    def match_strides(self, reference: fx.Node, new: fx.Node) -> fx.Node:
        """Return ``new`` with the strides of ``reference``.

        Views of ``reference`` may rely on them.
        """
        actual, expected = value(new), value(reference)
        contiguous = is_contiguous_or_false(expected)
        if shapes_equal(actual.stride(), expected.stride()) or (
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
        """View ``node`` as a dtype of the same size. fp8 values may be communicated as bytes."""
        return node if value(node).dtype == dtype else self.call(aten.view.dtype, node, dtype)

    def pad_if_empty(self, node: fx.Node, dim: int) -> fx.Node:
        """Add a row or a column, along ``dim``, to a matrix without rows or columns."""
        if not sizes_equal(get_shape(node)[dim], 0):
            return node
        dtype = value(node).dtype
        plain = node if dtype.itemsize > 1 else self.as_dtype(node, torch.uint8)
        pad = [0, 1] if dim else [0, 0, 0, 1]
        return self.as_dtype(self.call(aten.constant_pad_nd.default, plain, pad), dtype)

    def size(self, size: Size) -> int | fx.Node:
        """Return a size as an argument for nodes.

        A symbolic size is computed from sizes of the graph inputs. Raises `Unsupported` if that is
        not possible.
        """
        return size if isinstance(size, int) else self._compute(size.node.expr)

    def _compute(self, expression: sympy.Expr) -> int | fx.Node:
        if expression.is_Integer:
            return int(expression)
        for node in self._anchor.graph.find_nodes(op="placeholder"):
            input_value = value(node)
            if isinstance(input_value, torch.SymInt) and input_value.node.expr == expression:
                return node
            sizes: Sequence[Size] = (
                input_value.shape if isinstance(input_value, torch.Tensor) else ()
            )
            for dim, size in enumerate(sizes):
                if isinstance(size, torch.SymInt) and size.node.expr == expression:
                    return self.call(aten.sym_size.int, node, dim)
        for expression_type, operation in _OPERATIONS.items():
            if isinstance(expression, expression_type):
                operands = [self._compute(operand) for operand in expression.args]
                return functools.reduce(functools.partial(self.call, operation), operands)
        raise Unsupported(
            f"the size {expression} cannot be computed from the sizes of the graph's inputs"
        )


FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Arguments of aten._scaled_mm after the operands and their scales, with their defaults.
_OPTIONS = {"bias": None, "scale_result": None, "out_dtype": None, "use_fast_accum": False}


@dataclass(frozen=True)
class Scales:
    """float32 scales of the operands, each tensor-wise or row-wise."""

    left: fx.Node  #: one element, or [M, 1]
    right: fx.Node  #: one element, or [1, N]
    fast_accum: bool


@dataclass(frozen=True)
class Matmul:
    """``left @ right (+ bias)``: left [M, K], right [K, N], bias [N].

    With ``scales`` the operands are fp8. The bias and the result have the dtype of ``node``.
    """

    node: fx.Node
    left: fx.Node
    right: fx.Node
    bias: fx.Node | None = None
    scales: Scales | None = None

    @classmethod
    def match(cls, node: fx.Node) -> Matmul | None:
        """Return the matmul that a node computes, or None if it is not a supported matmul."""
        args = cast("tuple[fx.Node, ...]", node.args)
        if node.target is aten.mm.default or (node.target is aten.mul.Tensor and _is_outer(*args)):
            return cls(node, args[0], args[1])
        if node.target is aten_scaled_mm:
            return cls._match_scaled(node)
        scaled = any(node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta"))
        if node.target is not aten.addmm.default or scaled:
            return None
        bias_shape, columns = get_shape(args[0]), get_shape(args[2])[1]
        is_supported = len(bias_shape) == 1 and sizes_equal(bias_shape[0], columns)
        return cls(node, args[1], args[2], args[0]) if is_supported else None

    @classmethod
    def _match_scaled(cls, node: fx.Node) -> Matmul | None:
        operands = [arg for arg in node.args[:4] if isinstance(arg, fx.Node)]
        if len(operands) < 4:
            return None
        left, right, *scales = operands
        positional = dict(zip(_OPTIONS, node.args[4:], strict=False))
        options: dict[str, Any] = {**_OPTIONS, **positional, **node.kwargs}
        shapes = (get_shape(left)[0], 1), (1, get_shape(right)[1])
        dtype, bias = value(node).dtype, options["bias"]
        is_supported = (
            all(value(operand).dtype in FP8 for operand in (left, right))
            and all(
                value(scale).dtype == torch.float32
                and (is_tensor_wise(scale) or shapes_equal(get_shape(scale), shape))
                for scale, shape in zip(scales, shapes, strict=True)
            )
            and (bias is None or value(bias).dtype == dtype)
            and dtype in _OUT_DTYPES
            and not options["scale_result"]
        )
        matmul_scales = Scales(scales[0], scales[1], options["use_fast_accum"])
        return cls(node, left, right, bias, matmul_scales) if is_supported else None

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of the scaled op."""
        assert self.scales is not None  # the caller checks
        return {"out_dtype": value(self.node).dtype, "use_fast_accum": self.scales.fast_accum}

    def depends_on(self, nodes: Container[fx.Node]) -> bool:
        """Return whether an operand other than the left operand is in ``nodes``."""
        scales = (self.scales.left, self.scales.right) if self.scales else ()
        return any(node in nodes for node in (self.right, self.bias, *scales) if node is not None)

    def shares_input(self, other: Matmul) -> bool:
        """Return whether one op can compute both matmuls, whose left operands have equal bytes."""
        if self.scales is None or other.scales is None:
            return self.scales is other.scales
        return (
            value(self.left).dtype == value(other.left).dtype
            and self.scales.left is other.scales.left
            and self.options == other.options
        )


def is_tensor_wise(scale: fx.Node) -> bool:
    """Return whether one scale applies to the full tensor."""
    return all(sizes_equal(size, 1) for size in get_shape(scale))


def row_scale(editor: Editor, scale: fx.Node, rows: Sequence[Size]) -> fx.Node:
    """Reshape the scale of ``x`` [*rows, K] to the shape that the ops expect."""
    return editor.reshape(scale, [] if is_tensor_wise(scale) else [*rows, 1])


def column_scale(editor: Editor, scale: fx.Node) -> fx.Node:
    """Return the scale of a weight for the op, padded to one column on a rank without columns."""
    return editor.reshape(scale, []) if is_tensor_wise(scale) else editor.pad_if_empty(scale, 1)


def _is_outer(left: object, right: object) -> bool:
    """Return whether an elementwise product multiplies a column by a row.

    Inductor converts some matmuls with K = 1 to this form, possibly only on the rank with the
    smallest shard.
    """
    if not (isinstance(left, fx.Node) and isinstance(right, fx.Node)):
        return False
    columns, rows = get_shape(left), get_shape(right)
    same_dtype = value(left).dtype == value(right).dtype
    return (
        same_dtype
        and len(columns) == len(rows) == 2
        and sizes_equal(columns[1], 1)
        and sizes_equal(rows[0], 1)
    )


def descendants(node: fx.Node) -> set[fx.Node]:
    """Return all nodes that are computed from ``node``."""
    users: set[fx.Node] = set()
    pending = [node]
    while pending:
        new = pending.pop().users.keys() - users
        users |= new
        pending += new
    return users


def compute_sizes_from_inputs(graph: fx.Graph) -> None:
    """Compute sizes of intermediate tensors from sizes of the graph inputs where possible.

    After that, a node that reads only the size of a tensor no longer counts as its reader.
    """
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
    """Erase those of ``nodes`` that have no users, until each remaining node has users."""
    candidates = dict.fromkeys(nodes)
    while unread := [node for node in candidates if not node.users]:
        for node in unread:
            del candidates[node]
            node.graph.erase_node(node)


def get_op(node: fx.Node) -> OpOverload | None:
    """Return the op that a node calls, or None if it is not an op call.

    The compiler wraps ops that write into an argument. For a wrapper, return the wrapped op.
    """
    target = node.args[0] if node.target in _WRAPPERS else node.target
    return target if isinstance(target, OpOverload) else None


def describe(node: fx.Node) -> str:
    """Return a node description for messages, such as "aten.mul.Tensor"."""
    if node.op == "output":
        return "the output of the graph"
    if node.op != "call_function":
        return "an input of the graph"
    op = get_op(node)
    if op is not None:
        return str(op).removesuffix(".default")
    return getattr(node.target, "__name__", str(node.target))
