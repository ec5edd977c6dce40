"""Products of DTensors with a collective along one mesh dim before or after them, as one op.

``x [..., K] @ w [K, N] + bias [N]`` is column-parallel along a mesh dim that splits N, and
row-parallel along one that splits K. Along the other mesh dims ``w`` is replicated, and ``x`` may
be split in dims other than K.

Groups are those of the weight's mesh: DTensor keeps meshes in caches by value, so the result of an
operator may be on an equal mesh whose groups have ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from tpkernels.groups import name_of
from tpkernels.mesh.deferred import Deferred, become
from tpkernels.mesh.layout import Placements
from tpkernels.mesh.patterns import (
    can_split,
    column_dim,
    contiguous_stride,
    replaced,
    row_dim,
    version_of,
    weight_grads,
)
from tpkernels.ops.all_gather_matmul import all_gather_matmul
from tpkernels.ops.matmul_all_reduce import matmul_all_reduce
from tpkernels.ops.matmul_reduce_scatter import matmul_reduce_scatter
from tpkernels.shards import chunk_sizes


@dataclass(frozen=True, kw_only=True, eq=False)
class Gather:
    """``x`` gathered along one mesh dim.

    Attributes:
        gathered: placements of the result.
        redistribute: DTensor's own way from a DTensor to given placements.
    """

    x: DTensor
    mesh_dim: int
    gathered: Placements
    redistribute: Callable[[DTensor, Placements], DTensor]

    @property
    def inputs(self) -> tuple[DTensor, ...]:
        return (self.x,)

    @property
    def tensor_dim(self) -> int:
        """The dim of x that it gathers."""
        split = self.x.placements[self.mesh_dim]
        assert isinstance(split, Shard)
        return split.dim

    @property
    def spec(self) -> DTensorSpec:
        return DTensorSpec(self.x.device_mesh, self.gathered, tensor_meta=self.x._spec.tensor_meta)

    def value(self) -> DTensor:
        with torch.no_grad():
            return self.redistribute(self.x, self.gathered)

    def gradients(self, grad: DTensor) -> tuple[DTensor]:
        return (self.redistribute(grad, self.x.placements),)


@dataclass(kw_only=True, eq=False)
class Product:
    """``x @ w + bias``.

    Attributes:
        transposed: ``w`` is [N, K], as that of a linear layer.
        own: DTensor's own way, of x, w and bias.
        grad_enabled: whether there will be gradients.
    """

    x: DTensor
    w: DTensor
    bias: DTensor | None
    transposed: bool
    own: Callable[[Any, Any, Any], DTensor]
    grad_enabled: bool = field(default_factory=torch.is_grad_enabled)
    _versions: list[int] = field(init=False, default_factory=list)
    _leaves: list[Any] = field(init=False, default_factory=list)
    _result: DTensor | None = field(init=False, default=None)

    def note_versions(self) -> None:
        """`value` is to be that of the operands now."""
        self._versions = self._current_versions()

    @property
    def inputs(self) -> tuple[DTensor | None, ...]:
        return self.x, self.w, self.bias

    @property
    def n_dim(self) -> int:
        """The dim of ``w`` that has N."""
        return 0 if self.transposed else 1

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.x.shape[:-1], self.w.shape[self.n_dim]))

    def row_dim(self) -> int | None:
        """The mesh dim along which it is row-parallel, or None."""
        bias = None if self.bias is None else self.bias.placements
        return row_dim(self.x.placements, self.w.placements, bias, self.x.ndim, self.n_dim)

    def follows(self, gather: Gather) -> bool:
        """Whether it is column-parallel along the mesh dim of the gather."""
        bias = None if self.bias is None else self.bias.placements
        mesh_dim = column_dim(self.x.placements, self.w.placements, bias, self.x.ndim, self.n_dim)
        ranks = self.x.device_mesh.size(gather.mesh_dim)
        return mesh_dim == gather.mesh_dim and can_split(self.shape[-1], ranks)

    def partial_spec(self, mesh_dim: int) -> DTensorSpec:
        """That of the row-parallel product, before its sum."""
        placements = replaced(self.x.placements, mesh_dim, Partial())
        meta = TensorMeta(self.shape, contiguous_stride(self.shape), self.x.dtype)
        return DTensorSpec(self.x.device_mesh, placements, tensor_meta=meta)

    def value(self) -> DTensor:
        if self._versions != self._current_versions():
            raise RuntimeError(
                "the operands of a product were changed in place after its result was "
                "redistributed, and the result is used once more; redistribute it last, or compute "
                "it outside of tpkernels.fused_dtensor()"
            )
        self._leaves = [
            None if one is None else one.detach().requires_grad_(one.requires_grad)
            for one in self.inputs
        ]
        with torch.set_grad_enabled(self.grad_enabled):
            self._result = self.own(*self._leaves)
        result: Any = self._result.detach()
        return result

    def gradients(self, grad: DTensor) -> list[DTensor | None]:
        if self._result is None:  # a product that was redistributed is not computed
            self.value()
        assert self._result is not None
        wanted = [i for i, one in enumerate(self._leaves) if one is not None and one.requires_grad]
        grads = torch.autograd.grad(
            self._result, [self._leaves[i] for i in wanted], grad, retain_graph=True
        )
        result: list[Any] = [None] * len(self._leaves)
        for i, one in zip(wanted, grads, strict=True):
            result[i] = one
        return result

    def local_weight(self, mesh_dim: int) -> torch.Tensor:
        """[K, N], this rank's."""
        grads = weight_grads(self.w.placements, self.x.placements, mesh_dim)
        w = self.w.to_local(grad_placements=grads)
        return w.t() if self.transposed else w

    def local_bias(self, mesh_dim: int) -> torch.Tensor | None:
        if self.bias is None:
            return None
        grads = weight_grads(self.bias.placements, self.x.placements, mesh_dim)
        return self.bias.to_local(grad_placements=grads)

    def _current_versions(self) -> list[int]:
        given = [one for one in self.inputs if one is not None]
        tensors = [*given, *(one._local_tensor for one in given)]
        return [version_of(one) for one in tensors]


def gathered_product(deferred: Deferred, gather: Gather, product: Product) -> tuple[DTensor, Any]:
    """The product of a deferred gather, which becomes a plain DTensor; and that once more, as a
    result of this op: gradients that reach it there share the op's reduce-scatter."""
    x, mesh = gather.x, product.w.device_mesh
    gathered, y = all_gather_matmul(
        x.to_local(grad_placements=x.placements),
        product.local_weight(gather.mesh_dim),
        name_of((mesh, gather.mesh_dim)),
        gather.tensor_dim,
        biases=product.local_bias(gather.mesh_dim),
        return_gathered=True,
        shard_sizes=chunk_sizes(x.shape[gather.tensor_dim], mesh.size(gather.mesh_dim)),
    )
    spec = deferred._spec
    become(deferred, gathered.detach(), spec)
    partial = replaced(gather.gathered, gather.mesh_dim, Partial())
    connected = DTensor.from_local(
        gathered,
        mesh,
        gather.gathered,
        shape=x.shape,
        stride=x.stride(),
        grad_placements=partial,
    )
    placements = replaced(x.placements, gather.mesh_dim, Shard(x.ndim - 1))
    return _wrapped(y, mesh, placements, product.shape), connected


def summed_product(product: Product, mesh_dim: int, target: Placement) -> DTensor:
    """The row-parallel product with its sum, replicated or scattered along the mesh dim."""
    x, mesh = product.x, product.w.device_mesh
    operands = (
        x.to_local(grad_placements=x.placements),
        product.local_weight(mesh_dim),
        name_of((mesh, mesh_dim)),
    )
    bias = product.local_bias(mesh_dim)
    if isinstance(target, Shard):
        sizes = chunk_sizes(product.shape[target.dim], mesh.size(mesh_dim))
        y = matmul_reduce_scatter(*operands, target.dim, bias=bias, shard_sizes=sizes)
    else:
        y = matmul_all_reduce(*operands, bias=bias)
    return _wrapped(y, mesh, replaced(x.placements, mesh_dim, target), product.shape)


def _wrapped(y: torch.Tensor, mesh: Any, placements: Placements, shape: torch.Size) -> DTensor:
    return DTensor.from_local(y, mesh, placements, shape=shape, stride=contiguous_stride(shape))
