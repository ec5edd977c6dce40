"""``FusedColwiseParallel`` and ``FusedRowwiseParallel``: torch's styles for ``nn.Linear``, with the
fused ops in the module's forward.

The parameters are the same DTensors as with torch's styles, so state dicts, checkpoints, optimizers
and FSDP2 on another mesh dimension work unchanged. Only the forward differs: the module becomes a
subclass of ``nn.Linear`` that calls one op on the local tensors, where DTensor would first
redistribute and then multiply. If a layout leaves nothing to fuse, the style does what torch's
does; and so it does on a mesh of GPUs, unless measured times favour the op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from tpkernels import groups
from tpkernels.nn import check
from tpkernels.nn.row import row_parallel
from tpkernels.op_spec import NO_OPTIONS, OPS
from tpkernels.ops.all_gather_matmul import all_gather_matmul
from tpkernels.ops.reduction import reduction_options
from tpkernels.shards import chunk_sizes
from tpkernels.tuning.replacement import read_times, why_left_to_torch


@dataclass(frozen=True)
class _Layouts:
    """How a module's input and output are laid out over a mesh of one dim."""

    name: str  #: of the module, for messages
    mesh: DeviceMesh
    group: str
    input_layout: Placement
    output_layout: Placement
    use_local_output: bool

    def dim(self, layout: Placement, x: torch.Tensor) -> int:
        """Return the dim of ``x`` that ``layout``, a ``Shard``, splits."""
        dim = cast(Shard, layout).dim
        if not -x.dim() <= dim < x.dim():
            raise ValueError(
                f"{self.name}: {layout!r} is out of range for a tensor of shape {list(x.shape)}"
            )
        return dim % x.dim()


class _FusedLinear(nn.Linear):
    """A Linear whose parameters are DTensors on ``_layouts.mesh``."""

    _layouts: _Layouts

    def _local_parameters(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return this rank's weight [N, K] and bias."""
        bias = cast("DTensor | None", self.bias)
        return cast(DTensor, self.weight).to_local(), None if bias is None else bias.to_local()


class _ColwiseLinear(_FusedLinear):
    """``y[..., N/W] = concat_r(x_r) @ w^T + b`` for a sharded input."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        layouts = self._layouts
        dim = layouts.dim(layouts.input_layout, input)
        x, sizes = _local(input, dim, layouts)
        weight, bias = self._local_parameters()
        y = all_gather_matmul(x, weight.t(), layouts.group, dim, biases=bias, shard_sizes=sizes)
        return _output(y, y.dim() - 1, [*y.shape[:-1], self.out_features], layouts)


class _RowwiseLinear(_FusedLinear):
    """``y = sum_r(x_r @ w_r^T) + b``; each rank gets all of it or its shard."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        layouts = self._layouts
        x, _ = _local(input, input.dim() - 1, layouts)
        weight, bias = self._local_parameters()
        shape = [*x.shape[:-1], self.out_features]
        dim, sizes = None, None
        if not layouts.output_layout.is_replicate():
            dim = layouts.dim(layouts.output_layout, x)
            sizes = _uneven(shape[dim], layouts.mesh.size())
        y = row_parallel(x, weight.t(), layouts.group, dim, bias, shard_sizes=sizes)
        return _output(y, dim, shape, layouts)


class FusedColwiseParallel(ColwiseParallel):
    """``ColwiseParallel`` for ``nn.Linear`` that gathers its input while it multiplies.

    On a mesh of GPUs the style does what torch's does, unless times measured by `tpkernels tune`
    on rank 0 favour the op for this width and dtype, or it is applied while `tpkernels.autotune`
    is on for the mesh. The ranks learn the times when ``parallelize_module`` applies the style.

    The arguments are those of ``torch.distributed.tensor.parallel.ColwiseParallel``. Several
    linears of one input gather it once each. If the overlap does not make up for that, gather the
    input once with ``PrepareModuleInput`` and leave ``input_layouts`` at the default.

    Errors are raised when ``parallelize_module`` applies the style.

    Args:
        input_layouts: how an input that is not a DTensor is laid out, in equal shards. With
            ``Shard(dim)``, that is with sequence parallelism, the forward is one
            ``all_gather_matmul`` and its gradient one ``matmul_reduce_scatter``. Otherwise there is
            nothing to fuse, and the style does what torch's does.
        output_layouts: the layout of the output; by default ``Shard(-1)``.
        use_local_output: return this rank's tensor instead of a DTensor.

    Raises:
        NotImplementedError: the module is not a plain ``nn.Linear``, its weight is quantised, or no
            op takes its dtype.
        ValueError: the mesh has several dims, the module is parallel already, or some ranks would
            have no features.
    """

    def check(self, module: nn.Module, mesh: DeviceMesh) -> tuple[nn.Linear, Placement, Placement]:
        """Return the module and the layouts of its input and output, or raise if the style does not
        fit."""
        linear = _checked(self, module, mesh)
        layout = _single(self, module, "input_layouts", self.input_layouts)
        output = _single(self, module, "output_layouts", self.output_layouts)
        if layout.is_shard():
            _enough(self, module, "out_features", linear.out_features, mesh)
        return linear, layout, output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear, layout, output = self.check(module, device_mesh)
        op, width = "all_gather_matmul", linear.in_features
        if not layout.is_shard() or _left_to_torch(linear, device_mesh, op, width):
            return super()._apply(module, device_mesh)
        _distribute(linear, Shard(0), Shard(0), device_mesh, self.src_data_rank)
        return _become(_ColwiseLinear, linear, device_mesh, layout, output, self.use_local_output)


class FusedRowwiseParallel(RowwiseParallel):
    """``RowwiseParallel`` for ``nn.Linear`` that sums its output while it multiplies.

    The arguments are those of ``torch.distributed.tensor.parallel.RowwiseParallel``. The bias is
    added once, after the sum. Errors, and what happens on a mesh of GPUs, are those of
    ``FusedColwiseParallel``.

    Args:
        input_layouts: how an input that is not a DTensor is laid out; by default ``Shard(-1)``, the
            output of a column-parallel module.
        output_layouts: with ``Shard(dim)``, that is with sequence parallelism, the forward is one
            ``matmul_reduce_scatter``; with ``Replicate()``, the default, one ``matmul_all_reduce``.
            With any other layout the style does what torch's does.
        use_local_output: return this rank's tensor instead of a DTensor.
    """

    def check(self, module: nn.Module, mesh: DeviceMesh) -> tuple[nn.Linear, Placement, Placement]:
        """Return the module and the layouts of its input and output, or raise if the style does not
        fit."""
        linear = _checked(self, module, mesh)
        layout = _single(self, module, "input_layouts", self.input_layouts)
        output = _single(self, module, "output_layouts", self.output_layouts)
        if output.is_shard() or output.is_replicate():
            _enough(self, module, "in_features", linear.in_features, mesh)
        return linear, layout, output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear, layout, output = self.check(module, device_mesh)
        op = "matmul_reduce_scatter" if output.is_shard() else "matmul_all_reduce"
        fuses = output.is_shard() or output.is_replicate()
        if not fuses or _left_to_torch(linear, device_mesh, op, linear.out_features):
            return super()._apply(module, device_mesh)
        _distribute(linear, Shard(1), Replicate(), device_mesh, self.src_data_rank)
        return _become(_RowwiseLinear, linear, device_mesh, layout, output, self.use_local_output)


def _left_to_torch(linear: nn.Linear, mesh: DeviceMesh, op: str, width: int) -> bool:
    """Return whether a style does what torch's does instead of calling the op (`ops._measured`).
    Collective on a mesh of GPUs.

    Args:
        width: of the rows that travel.
    """
    if not _has_gpus(mesh):
        return False
    name, dtype = groups.name_of(mesh), linear.weight.dtype
    read_times(name)
    options = reduction_options(dtype, dtype) if OPS[op].reduces else NO_OPTIONS
    reason = why_left_to_torch(
        groups.get(name), op, "cuda", rows=None, width=width, dtype=dtype, options=options
    )
    return reason is not None


def _has_gpus(mesh: DeviceMesh) -> bool:
    return mesh.device_type == "cuda"


def _distribute(
    linear: nn.Linear, weight: Placement, bias: Placement, mesh: DeviceMesh, source: int | None
) -> None:
    """Make the parameters DTensors with the values of rank ``source``, or with each rank's own if
    that is None."""
    for name, placement in (("weight", weight), ("bias", bias)):
        old = getattr(linear, name)
        if old is not None:
            new = distribute_tensor(old, mesh, [placement], src_data_rank=source)
            linear.register_parameter(name, nn.Parameter(new, requires_grad=old.requires_grad))


def _become(
    cls: type[_FusedLinear],
    linear: nn.Linear,
    mesh: DeviceMesh,
    input_layout: Placement,
    output_layout: Placement,
    use_local_output: bool,
) -> nn.Module:
    name = str(linear)
    linear.__class__ = cls
    fused = cast(_FusedLinear, linear)
    group = groups.name_of(mesh)
    fused._layouts = _Layouts(name, mesh, group, input_layout, output_layout, use_local_output)
    return fused


def _checked(style: object, module: nn.Module, mesh: DeviceMesh) -> nn.Linear:
    """Return the module, or raise if the style cannot be applied to it on this mesh."""
    name = f"{type(style).__name__} of {module}"
    if mesh.ndim != 1:
        dims = mesh.mesh_dim_names or mesh.shape
        raise ValueError(
            f"{name}: the mesh has {mesh.ndim} dims {dims}; pass its tensor-parallel dim, such as "
            "mesh['tp']"
        )
    for key, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{name}: its {key} is a DTensor {parameter.placements} already; apply only one "
                "style, before fully_shard"
            )
    if type(module) is not nn.Linear:
        raise NotImplementedError(
            f"{name}: the style takes torch.nn.Linear itself, not {type(module).__qualname__}; for "
            "nn.Embedding use torch's styles"
        )
    for key, parameter in module.named_parameters():
        check.plain_parameter(parameter, f"{name}: its {key}")
    return module


def _enough(style: object, module: nn.Module, what: str, size: int, mesh: DeviceMesh) -> None:
    """Check that every rank has some of the features: the ops take no empty matrices."""
    sizes = chunk_sizes(size, mesh.size())
    if not all(sizes):
        raise ValueError(
            f"{type(style).__name__} of {module}: {what} {size} over {mesh.size()} ranks is "
            f"{sizes}; each rank must have at least one"
        )


def _single(style: object, module: nn.Module, what: str, layouts: Sequence[Placement]) -> Placement:
    """Return the layout on a mesh of one dim."""
    if len(layouts) != 1 or not isinstance(layouts[0], Placement):
        raise TypeError(
            f"{type(style).__name__} of {module}: {what} must be one placement, such as Shard(1), "
            f"not {layouts[0] if len(layouts) == 1 else layouts}"
        )
    return layouts[0]


def _local(x: torch.Tensor, dim: int, layouts: _Layouts) -> tuple[torch.Tensor, list[int] | None]:
    """Return this rank's shard of the input along ``dim``, and all shards' sizes if they differ."""
    layout = layouts.input_layout
    if not isinstance(x, DTensor):
        if layout.is_shard() and layouts.dim(layout, x) == dim:
            return x, None
        x = DTensor.from_local(x, layouts.mesh, [layout], run_check=False)
    if x.placements != (Shard(dim),):
        x = x.redistribute(placements=[Shard(dim)])
    return x.to_local(), _uneven(x.shape[dim], layouts.mesh.size())


def _uneven(total: int, world: int) -> list[int] | None:
    """Return the sizes of the shards, or None if they are all equal."""
    return None if total % world == 0 else chunk_sizes(total, world)


def _output(
    y: torch.Tensor, dim: int | None, shape: Sequence[int], layouts: _Layouts
) -> torch.Tensor:
    """Return the module's output in the requested layout.

    Args:
        y: this rank's shard of the output, or all of it.
        dim: the dim along which ``y`` is a shard; None: ``y`` is all of it.
        shape: of the whole output.
        layouts: of the module.
    """
    target = layouts.output_layout
    if target.is_shard():
        target = Shard(layouts.dim(target, y))
    placement = Replicate() if dim is None else Shard(dim)
    if layouts.use_local_output and target == placement:
        return y
    strides = torch.empty(shape, device="meta").stride()
    out = DTensor.from_local(
        y, layouts.mesh, [placement], run_check=False, shape=torch.Size(shape), stride=strides
    )
    if target != placement:
        out = out.redistribute(placements=[target])
    return out.to_local() if layouts.use_local_output else out
