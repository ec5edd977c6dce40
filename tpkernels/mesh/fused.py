"""The fused ops within existing DTensor code.

Problem: DTensor computes a product and a redistribution one after the other, and neither knows of
the other when it is called.

Algorithm: within the context, a redistribution that gathers and a product that leaves a sum return
`Deferred` DTensors. If the next operation is the product of the gathered tensor, or the
redistribution of the sum, both run as one op. Before any other operation, and when the context
ends, DTensor computes what is deferred in its own way. So nothing can change the operands in
between, and all ranks communicate in the order of the program.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from tpkernels.mesh.deferred import Deferred, Work, compute, defer
from tpkernels.mesh.layout import Placements
from tpkernels.mesh.linear import Gather, Product, gathered_product, summed_product
from tpkernels.mesh.patterns import can_split, fusable, single_change, version_of

_Operands = tuple[Any, Any, Any]  # x, w, bias


def _of_linear(input: Any, weight: Any, bias: Any = None) -> _Operands:
    return input, weight, bias


def _of_matmul(input: Any, other: Any) -> _Operands:
    return input, other, None


def _of_mm(input: Any, mat2: Any) -> _Operands:
    return input, mat2, None


def _of_addmm(input: Any, mat1: Any, mat2: Any) -> _Operands:
    return mat1, mat2, input


# With other options than these there is nothing to fuse.
_PRODUCTS: Mapping[Any, Callable[..., _Operands]] = MappingProxyType(
    {
        F.linear: _of_linear,
        torch.matmul: _of_matmul,
        torch.Tensor.matmul: _of_matmul,
        torch.Tensor.__matmul__: _of_matmul,
        torch.mm: _of_mm,
        torch.Tensor.mm: _of_mm,
        torch.addmm: _of_addmm,
        torch.Tensor.addmm: _of_addmm,
    }
)
_METADATA = frozenset({torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel})


@contextlib.contextmanager
def fused_dtensor() -> Iterator[None]:
    """Within the context, DTensor code of this thread runs the fused ops.

    - ``redistribute`` from Shard to Replicate, then a product with a weight whose columns are split
      along the same mesh dim: ``all_gather_matmul``.
    - A product that DTensor leaves as Partial, then ``redistribute`` to Shard or Replicate:
      ``matmul_reduce_scatter``, ``matmul_all_reduce``.

    Their backward passes are fused too, within the context and after it. Products are
    ``torch.nn.functional.linear``, ``torch.matmul``, ``@``, ``torch.mm`` and ``torch.addmm``;
    torch's ColwiseParallel and RowwiseParallel consist of them. There may be no other operation in
    between. Everything else is left to DTensor, also products under autocast and `torch.compile`.

    Placements are DTensor's own; results differ in rounding. The gathered tensor and the addends
    are not in the graph of a fused result, so hooks on them see no gradient. Results that were
    deferred but not fused have no second derivatives. What activation checkpointing computes again
    must be in a context too:
    ``checkpoint(..., context_fn=lambda: (nullcontext(), fused_dtensor()))``.
    """
    outer = _threads.fusion
    fusion = _Fusion()
    with _patch, contextlib.nullcontext() if outer is None else outer.suspended():
        _threads.fusion = fusion
        try:
            with fusion:
                yield
            fusion.compute_all()
        finally:
            _threads.fusion = outer


class _Fusion(TorchFunctionMode):
    """Attributes:
    waiting: deferred results; strong references, because all ranks must compute the same ones.
    connected: for a tensor that was gathered with a product, itself as that op's result, and its
        version; it is the input of other products, so that all share one reduce-scatter.
    outside: how many functions and inner contexts run, of which it sees no calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Deferred] = []
        self.connected = WeakTensorKeyDictionary()
        self.outside = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or self.outside:
            return func(*args, **kwargs)
        if func in _PRODUCTS:
            return self._product(func, args, kwargs)
        if func in _METADATA or getattr(func, "__name__", None) == "__get__":
            return func(*args, **kwargs)
        with self.suspended():
            return func(*args, **kwargs)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        self.compute_all()
        self.outside += 1
        try:
            yield
        finally:
            self.outside -= 1

    def compute_all(self) -> None:
        while self.waiting:
            compute(self.waiting.pop(0))

    def add(self, work: Work, spec: Any) -> Deferred:
        deferred = defer(work, spec)
        self.waiting.append(deferred)
        return deferred

    def take(self, tensor: DTensor, kind: type) -> Any:
        """The work of a tensor that is waiting, if it is of that kind; all others are computed."""
        work = tensor.work if isinstance(tensor, Deferred) else None
        mine = [one for one in self.waiting if one is tensor and isinstance(work, kind)]
        self.waiting = [one for one in self.waiting if one is not tensor or not mine]
        self.compute_all()
        return work if mine else None

    def _product(self, func: Any, args: Any, kwargs: Any) -> Any:
        operands = _operands(func, args, kwargs)
        if operands is None:
            self.compute_all()
            return func(*args, **kwargs)
        x, w, bias = operands
        gather = self.take(x, Gather)
        own = functools.partial(_own, func)
        transposed = func is F.linear
        if gather is not None:
            product = Product(x=x, w=w, bias=bias, transposed=transposed, own=own)
            if fusable(gather.x, w, bias) and product.follows(gather):
                y, connected = gathered_product(x, gather, product)
                self.connected[x] = connected, version_of(x)
                return y
            compute(x)
        x = self._connected(x)
        if fusable(x, w, bias):
            product = Product(x=x, w=w, bias=bias, transposed=transposed, own=own)
            mesh_dim = product.row_dim()
            if mesh_dim is not None and can_split(x.shape[-1], x.device_mesh.size(mesh_dim)):
                product.note_versions()
                return self.add(product, product.partial_spec(mesh_dim))
        return own(x, w, bias)

    def _connected(self, x: DTensor) -> DTensor:
        """x, connected to the op that gathered it if there is one."""
        connected, version = self.connected.get(x, (x, None))
        return connected if version_of(x) == version else x


class _Threads(threading.local):
    fusion: _Fusion | None = None


_threads = _Threads()


def _operands(func: Any, args: Any, kwargs: Any) -> _Operands | None:
    """Those of a product of DTensors with a matrix; None for any other."""
    try:
        x, w, bias = _PRODUCTS[func](*args, **kwargs)
    except TypeError:  # other arguments
        return None
    if not isinstance(x, DTensor) or not isinstance(w, DTensor) or x.ndim < 2 or w.ndim != 2:
        return None
    if x.ndim > 2 and _PRODUCTS[func] in (_of_mm, _of_addmm):
        return None
    k, n = reversed(w.shape) if func is F.linear else w.shape
    if x.shape[-1] != k:
        return None
    if bias is not None and not (isinstance(bias, DTensor) and bias.shape == (n,)):
        return None
    return x, w, bias


def _own(func: Any, x: DTensor, w: DTensor, bias: DTensor | None) -> DTensor:
    result: Any
    if func is F.linear:
        result = F.linear(x, w, bias)
    else:
        result = func(x, w) if bias is None else torch.addmm(bias, x, w)
    own: DTensor = result
    return own


_redistribute = DTensor.redistribute


@functools.wraps(_redistribute)
def _fused_redistribute(
    self: DTensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    **options: Any,
) -> DTensor:
    fusion = None if torch.compiler.is_compiling() else _threads.fusion
    if fusion is not None and not fusion.outside:
        result = _without_own(fusion, self, device_mesh, placements, options)
        if result is not None:
            return result
    return _redistribute(self, device_mesh, placements, **options)


def _without_own(
    fusion: _Fusion,
    x: DTensor,
    mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    options: dict[str, Any],
) -> DTensor | None:
    """The redistribution deferred, or with the product before it; None: DTensor has to do it."""
    product: Product | None = fusion.take(x, Product)
    casts = any(value is not None for name, value in options.items() if name != "async_op")
    if placements is None or mesh not in (None, x.device_mesh) or casts:
        return None
    change = single_change(x, placements)
    if change is None:
        return None
    mesh_dim, target = change
    if product is not None:
        with torch._C.DisableTorchFunction():
            return summed_product(product, mesh_dim, target[mesh_dim])
    if not isinstance(x.placements[mesh_dim], Shard) or not fusable(x) or not x.is_contiguous():
        return None
    gather = Gather(
        x=x,
        mesh_dim=mesh_dim,
        gathered=target,
        redistribute=functools.partial(_own_redistribute, options),
    )
    return fusion.add(gather, gather.spec)


def _own_redistribute(options: dict[str, Any], x: DTensor, placements: Placements) -> DTensor:
    return _redistribute(x, placements=placements, **options)


class _Patch:
    """DTensor.redistribute asks the context of its thread, as long as any thread has one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            DTensor.redistribute = _fused_redistribute  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                DTensor.redistribute = _redistribute  # type: ignore[method-assign]


_patch = _Patch()
