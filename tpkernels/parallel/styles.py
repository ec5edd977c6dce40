"""``FusedColwiseParallel`` and ``FusedRowwiseParallel``: torch styles for ``nn.Linear`` with fused
ops in the forward.

The parameters are the same DTensors as with the torch styles. State dicts, checkpoints, optimizers
and FSDP2 over a second mesh dim therefore work unchanged. Only the forward differs: the module
becomes a subclass of ``nn.Linear`` that calls one op on the local tensors. DTensor would
redistribute first and then multiply. A style behaves like its torch base style if the layouts leave
no collective to fuse. On a mesh of GPUs it also does so unless measured times favor the op.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from tpkernels import groups
from tpkernels.common.shards import chunk_sizes
from tpkernels.nn.linear import row_parallel
from tpkernels.nn.sharding import check_parameter
from tpkernels.ops.all_gather_matmul import all_gather_matmul
from tpkernels.ops.replacement import read_times, reason_against_replacement
from tpkernels.planning.op_spec import NO_OPTIONS, OPS, ReduceOptions


class _FusedLinear(nn.Linear):
    """A Linear whose parameters are DTensors on a mesh of one dim."""

    _style: _FusedStyle
    _mesh: DeviceMesh
    _group: str

    def _local_parameters(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the local weight [K, N] and bias."""
        bias = cast("DTensor | None", self.bias)
        return cast(DTensor, self.weight).to_local().t(), None if bias is None else bias.to_local()

    def _sharded_dim(self, layout: Placement, x: torch.Tensor) -> int:
        """Return the dim of ``x`` that ``layout``, a ``Shard``, splits."""
        dim = cast(Shard, layout).dim
        if not -x.dim() <= dim < x.dim():
            raise ValueError(
                f"Linear({self.extra_repr()}): {layout!r} is out of range for a tensor of shape "
                f"{list(x.shape)}"
            )
        return dim % x.dim()

    def _local_shard(self, x: torch.Tensor, dim: int) -> tuple[torch.Tensor, list[int] | None]:
        """Return the local shard of the input along ``dim``, and the sizes of all shards if they
        differ."""
        layout = self._style.input_layouts[0]
        if not isinstance(x, DTensor):
            if layout.is_shard() and self._sharded_dim(layout, x) == dim:
                return x, None
            x = DTensor.from_local(x, self._mesh, [layout], run_check=False)
        if x.placements != (Shard(dim),):
            x = x.redistribute(placements=[Shard(dim)])
        return x.to_local(), self._uneven_sizes(x.shape[dim])

    def _uneven_sizes(self, total: int) -> list[int] | None:
        """Return the sizes of the shards, or None if all are equal."""
        world = self._mesh.size()
        return None if total % world == 0 else chunk_sizes(total, world)

    def _to_output_layout(
        self, y: torch.Tensor, dim: int | None, shape: Sequence[int]
    ) -> torch.Tensor:
        """Convert a local shard along ``dim``, or a replicated tensor if ``dim`` is None, to the
        output layout. ``shape`` is the global shape."""
        target, use_local = self._style.output_layouts[0], self._style.use_local_output
        if target.is_shard():
            target = Shard(self._sharded_dim(target, y))
        placement = Replicate() if dim is None else Shard(dim)
        if use_local and target == placement:
            return y
        strides = torch.empty(shape, device="meta").stride()
        out = DTensor.from_local(
            y, self._mesh, [placement], run_check=False, shape=torch.Size(shape), stride=strides
        )
        if target != placement:
            out = out.redistribute(placements=[target])
        return out.to_local() if use_local else out


class _ColwiseLinear(_FusedLinear):
    """``y[..., N/W] = concat_r(x_r) @ w^T + b`` for a sharded input."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        dim = self._sharded_dim(self._style.input_layouts[0], input)
        x, sizes = self._local_shard(input, dim)
        w, bias = self._local_parameters()
        y = all_gather_matmul(x, w, self._group, dim, biases=bias, shard_sizes=sizes)
        return self._to_output_layout(y, y.dim() - 1, [*y.shape[:-1], self.out_features])


class _RowwiseLinear(_FusedLinear):
    """``y = sum_r(x_r @ w_r^T) + b``; each rank gets the full result or its shard."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x, _ = self._local_shard(input, input.dim() - 1)
        w, bias = self._local_parameters()
        shape = [*x.shape[:-1], self.out_features]
        dim, sizes = None, None
        if not self._style.output_layouts[0].is_replicate():
            dim = self._sharded_dim(self._style.output_layouts[0], x)
            sizes = self._uneven_sizes(shape[dim])
        y = row_parallel(x, w, self._group, dim, bias, shard_sizes=sizes)
        return self._to_output_layout(y, dim, shape)


class _FusedStyle(ParallelStyle):
    """Base class of the two styles."""

    input_layouts: tuple[Placement]
    output_layouts: tuple[Placement]
    use_local_output: bool
    _linear: ClassVar[type[_FusedLinear]]
    # Attribute of the Linear: the features that are split. The op sends rows of the other features.
    _split_features: ClassVar[str]
    _placements: ClassVar[dict[str, Placement]]  # parameter placements

    def _op(self) -> str | None:
        """Return the op for the layouts, or None if they leave no collective to fuse."""
        raise NotImplementedError

    def check(self, module: nn.Module, mesh: DeviceMesh) -> nn.Linear:
        """Return the module, or raise if the style does not support it."""
        name = f"{type(self).__name__} of {module}"
        if mesh.ndim != 1:
            dims = mesh.mesh_dim_names or mesh.shape
            raise ValueError(
                f"{name}: the mesh has {mesh.ndim} dims {dims}; pass its tensor-parallel dim, such "
                "as mesh['tp']"
            )
        for key, parameter in module.named_parameters():
            if isinstance(parameter, DTensor):
                raise ValueError(
                    f"{name}: its {key} is already a DTensor with placements "
                    f"{parameter.placements}; apply only one style, before fully_shard"
                )
        if type(module) is not nn.Linear:
            raise NotImplementedError(
                f"{name}: the style supports torch.nn.Linear without subclasses, not "
                f"{type(module).__qualname__}; use the torch styles for nn.Embedding"
            )
        for key, parameter in module.named_parameters():
            check_parameter(parameter, f"{name}: its {key}")
        if "forward" in vars(module):
            raise NotImplementedError(
                f"{name}: its forward is overridden, which the style does not support; remove the "
                "override"
            )
        for attribute in ("input_layouts", "output_layouts"):
            layouts = getattr(self, attribute)
            if len(layouts) != 1 or not isinstance(layouts[0], Placement):
                raise TypeError(
                    f"{name}: {attribute} must be one placement, such as Shard(1), not "
                    f"{layouts[0] if len(layouts) == 1 else layouts}"
                )
        size = getattr(module, self._split_features)
        sizes = chunk_sizes(size, mesh.size())
        if self._op() is None:
            return module
        if not all(sizes):  # the ops reject empty matrices
            raise ValueError(
                f"{name}: {self._split_features} {size} over {mesh.size()} ranks is {sizes}; each "
                "rank must have at least one"
            )
        groups.group_name(mesh)  # raises if DTensors order the ranks differently from the ops
        return module

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear, op = self.check(module, device_mesh), self._op()
        if op is None or self._falls_back_to_torch(linear, device_mesh, op):
            return super()._apply(module, device_mesh)  # type: ignore[safe-super]
        for key, placement in self._placements.items():
            old = getattr(linear, key)
            if old is not None:
                new = distribute_tensor(
                    old, device_mesh, [placement], src_data_rank=self.src_data_rank
                )
                linear.register_parameter(key, nn.Parameter(new, requires_grad=old.requires_grad))
        linear.__class__ = self._linear
        fused = cast(_FusedLinear, linear)
        fused._style, fused._mesh, fused._group = self, device_mesh, groups.group_name(device_mesh)
        return linear

    def _falls_back_to_torch(self, linear: nn.Linear, mesh: DeviceMesh, op: str) -> bool:
        """Return whether the style behaves like its torch base style instead of calling the op
        (`ops.replacement`). Collective on a mesh of GPUs."""
        if not _has_gpus(mesh):
            return False
        name, dtype = groups.group_name(mesh), linear.weight.dtype
        read_times(name)
        width, options = linear.in_features, NO_OPTIONS
        if OPS[op].reduces:
            width, options = linear.out_features, ReduceOptions(x_dtype=dtype, out_dtype=dtype)
        reason = reason_against_replacement(
            groups.get(name), op, "cuda", rows=None, width=width, dtype=dtype, options=options
        )
        return reason is not None


def _has_gpus(mesh: DeviceMesh) -> bool:
    return mesh.device_type == "cuda"


class FusedColwiseParallel(_FusedStyle, ColwiseParallel):
    """``ColwiseParallel`` for ``nn.Linear`` that overlaps the all-gather of its input with the
    matmul.

    The forward equals, for an input sharded along ``dim``::

        x = all_gather(x, dim)  # all ranks' shards
        y = x @ weight.t() + bias  # local shards of weight and bias

    On a mesh of GPUs the style behaves like ``ColwiseParallel``, unless times measured by
    `tpkernels tune` on rank 0 favor the op for this width and dtype, or `tpkernels.autotune` is on
    for the mesh when the style is applied. ``parallelize_module`` sends the times to all ranks.

    The arguments are those of ``torch.distributed.tensor.parallel.ColwiseParallel``. Several
    linears with the same input each gather it. If the overlap does not compensate for that, gather
    the input once with ``PrepareModuleInput`` and leave ``input_layouts`` at the default.

    ``parallelize_module`` raises errors when it applies the style.

    Args:
        input_layouts: layout of an input that is not a DTensor, in equal shards. With
            ``Shard(dim)``, i.e. sequence parallelism, the forward is one ``all_gather_matmul`` and
            its gradient one ``matmul_reduce_scatter``. Any other layout leaves no collective to
            fuse, and the style behaves like ``ColwiseParallel``.
        output_layouts: layout of the output; by default ``Shard(-1)``.
        use_local_output: return the local tensor instead of a DTensor.

    Raises:
        NotImplementedError: the module is not a plain ``nn.Linear``, its weight is quantized, or no
            op supports its dtype.
        ValueError: the mesh has several dims, the module is already parallel, or some ranks would
            get no features.
    """

    _linear = _ColwiseLinear
    _split_features = "out_features"
    _placements: ClassVar[dict[str, Placement]] = {"weight": Shard(0), "bias": Shard(0)}

    def _op(self) -> str | None:
        return "all_gather_matmul" if self.input_layouts[0].is_shard() else None


class FusedRowwiseParallel(_FusedStyle, RowwiseParallel):
    """``RowwiseParallel`` for ``nn.Linear`` that overlaps the reduction of its output with the
    matmul.

    The forward equals::

        y = x @ weight.t()  # local shards; a partial sum
        y = all_reduce(y) + bias  # or reduce_scatter(y, dim) + bias

    The arguments are those of ``torch.distributed.tensor.parallel.RowwiseParallel``. The bias is
    added once, after the reduction. See ``FusedColwiseParallel`` for errors and for the behavior on
    a mesh of GPUs.

    Args:
        input_layouts: layout of an input that is not a DTensor; by default ``Shard(-1)``, the
            output of a column-parallel module.
        output_layouts: with ``Shard(dim)``, i.e. sequence parallelism, the forward is one
            ``matmul_reduce_scatter``. With ``Replicate()``, the default, it is one
            ``matmul_all_reduce``. With any other layout the style behaves like ``RowwiseParallel``.
        use_local_output: return the local tensor instead of a DTensor.
    """

    _linear = _RowwiseLinear
    _split_features = "in_features"
    _placements: ClassVar[dict[str, Placement]] = {"weight": Shard(1), "bias": Replicate()}

    def _op(self) -> str | None:
        if self.output_layouts[0].is_shard():
            return "matmul_reduce_scatter"
        return "matmul_all_reduce" if self.output_layouts[0].is_replicate() else None
