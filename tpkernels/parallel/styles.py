"""``FusedColwiseParallel`` and ``FusedRowwiseParallel``: torch's styles for ``nn.Linear``, with the
fused ops in the module's forward.

The parameters are the DTensors that torch's styles make, so state dicts, checkpoints, optimizers
and FSDP2 on another mesh dimension find what they know. What changes is the forward: the module
becomes a subclass of ``nn.Linear`` that calls one op on the local tensors, where DTensor would
redistribute and multiply one after the other. Where a layout leaves nothing to fuse, the style is
torch's own.
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
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tpkernels import dtypes
from tpkernels.integers import ceil_div
from tpkernels.ops.all_gather_matmul import all_gather_matmul
from tpkernels.ops.matmul_all_reduce import matmul_all_reduce
from tpkernels.ops.matmul_reduce_scatter import matmul_reduce_scatter


@dataclass(frozen=True)
class _Way:
    """How a module's tensors are laid out over the mesh, which has one dim. ``name`` is for
    messages."""

    name: str
    mesh: DeviceMesh
    group: str
    input_layout: Placement
    output_layout: Placement
    use_local_output: bool

    def dim(self, layout: Placement, x: torch.Tensor) -> int:
        """The dim of x that a ``Shard`` splits."""
        dim = cast(Shard, layout).dim
        if not -x.dim() <= dim < x.dim():
            raise ValueError(
                f"{self.name}: {layout!r} splits no dim of a tensor of shape {list(x.shape)}"
            )
        return dim % x.dim()


class _FusedLinear(nn.Linear):
    """A Linear whose parameters are DTensors on ``_way.mesh``."""

    _way: _Way

    def _parameters_here(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """This rank's weight [N, K] and bias."""
        bias = cast("DTensor | None", self.bias)
        return cast(DTensor, self.weight).to_local(), None if bias is None else bias.to_local()


class _ColwiseLinear(_FusedLinear):
    """``y[..., N/W] = concat_r(x_r) @ w^T + b``, the input being sharded."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        way = self._way
        dim = way.dim(way.input_layout, input)
        x, sizes = _local(input, dim, way)
        weight, bias = self._parameters_here()
        y = all_gather_matmul(x, weight.t(), way.group, dim, biases=bias, shard_sizes=sizes)
        return _handed_on(y, y.dim() - 1, [*y.shape[:-1], self.out_features], way)


class _RowwiseLinear(_FusedLinear):
    """``y = sum_r(x_r @ w_r^T) + b``, of which each rank gets all or its shard."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        way = self._way
        x, _ = _local(input, input.dim() - 1, way)
        weight, bias = self._parameters_here()
        shape = [*x.shape[:-1], self.out_features]
        if way.output_layout.is_replicate():
            y = matmul_all_reduce(x, weight.t(), way.group, bias=bias)
            return _handed_on(y, None, shape, way)
        dim = way.dim(way.output_layout, x)
        sizes = _uneven(shape[dim], way.mesh.size())
        y = matmul_reduce_scatter(x, weight.t(), way.group, dim, bias=bias, shard_sizes=sizes)
        return _handed_on(y, dim, shape, way)


class FusedColwiseParallel(ColwiseParallel):
    """``ColwiseParallel`` for ``nn.Linear`` that gathers its input while it multiplies.

    Args, all as ``torch.distributed.tensor.parallel.ColwiseParallel`` has them:
        input_layouts: how an input that is no DTensor is laid out, in equal shards. With
            ``Shard(dim)``, sequence parallelism, the forward is one ``all_gather_matmul``, and its
            gradient one ``matmul_reduce_scatter``. Otherwise there is nothing to fuse, and the
            style is torch's.
        output_layouts: how the output is to be laid out; default ``Shard(-1)``.
        use_local_output: hand out this rank's tensor instead of a DTensor.

    Linears that read the same input gather it once each. Where the overlap does not pay for that,
    gather it once for all with ``PrepareModuleInput``, and leave these layouts at the default.

    Raises, when ``parallelize_module`` applies it:
        NotImplementedError: the module is no plain ``nn.Linear``, or its weight is quantised, or of
            a dtype that no op takes.
        ValueError: the mesh has several dims, the module is parallel already, or some ranks would
            have no part of its features.
    """

    def check(self, module: nn.Module, mesh: DeviceMesh) -> tuple[nn.Linear, Placement, Placement]:
        """The module and the layouts of its input and output, if the style can be applied."""
        linear = _checked(self, module, mesh)
        layout = _single(self, module, "input_layouts", self.input_layouts)
        output = _single(self, module, "output_layouts", self.output_layouts)
        if layout.is_shard():
            _enough(self, module, "out_features", linear.out_features, mesh)
        return linear, layout, output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear, layout, output = self.check(module, device_mesh)
        if not layout.is_shard():
            return super()._apply(module, device_mesh)
        _distribute(linear, Shard(0), Shard(0), device_mesh, self.src_data_rank)
        return _become(_ColwiseLinear, linear, device_mesh, layout, output, self.use_local_output)


class FusedRowwiseParallel(RowwiseParallel):
    """``RowwiseParallel`` for ``nn.Linear`` that sums its output while it multiplies.

    Args, all as ``torch.distributed.tensor.parallel.RowwiseParallel`` has them:
        input_layouts: how an input that is no DTensor is laid out; default ``Shard(-1)``, as a
            column-parallel module hands it out.
        output_layouts: with ``Shard(dim)``, sequence parallelism, the forward is one
            ``matmul_reduce_scatter``; with ``Replicate()``, the default, one ``matmul_all_reduce``.
            Otherwise the style is torch's.
        use_local_output: hand out this rank's tensor instead of a DTensor.

    The bias is added once, after the sum. Raises what ``FusedColwiseParallel`` does.
    """

    def check(self, module: nn.Module, mesh: DeviceMesh) -> tuple[nn.Linear, Placement, Placement]:
        """The module and the layouts of its input and output, if the style can be applied."""
        linear = _checked(self, module, mesh)
        layout = _single(self, module, "input_layouts", self.input_layouts)
        output = _single(self, module, "output_layouts", self.output_layouts)
        if output.is_shard() or output.is_replicate():
            _enough(self, module, "in_features", linear.in_features, mesh)
        return linear, layout, output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear, layout, output = self.check(module, device_mesh)
        if not (output.is_shard() or output.is_replicate()):
            return super()._apply(module, device_mesh)
        _distribute(linear, Shard(1), Replicate(), device_mesh, self.src_data_rank)
        return _become(_RowwiseLinear, linear, device_mesh, layout, output, self.use_local_output)


def _distribute(
    linear: nn.Linear, weight: Placement, bias: Placement, mesh: DeviceMesh, source: int | None
) -> None:
    """Makes the parameters DTensors, with the values of the rank ``source``; None: each its own."""
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
    group = mesh.get_group().group_name
    fused._way = _Way(name, mesh, group, input_layout, output_layout, use_local_output)
    return fused


def _checked(style: object, module: nn.Module, mesh: DeviceMesh) -> nn.Linear:
    """The module, if the style can have it on this mesh."""
    name = f"{type(style).__name__} of {module}"
    if mesh.ndim != 1:
        dims = mesh.mesh_dim_names or mesh.shape
        raise ValueError(
            f"{name}: the mesh has {mesh.ndim} dims {dims}; pass the one for tensor parallelism, "
            "such as mesh['tp']"
        )
    for key, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{name}: its {key} is a DTensor {parameter.placements} already; apply one style, "
                "and that before fully_shard"
            )
    if type(module) is not nn.Linear:
        raise NotImplementedError(
            f"{name}: the style is for torch.nn.Linear itself, not {type(module).__qualname__}; "
            "torch's styles take nn.Embedding as well"
        )
    for key, parameter in module.named_parameters():
        dtypes.check_supported(parameter.dtype, f"{name}: its {key}")
        wrapped = is_traceable_wrapper_subclass(parameter)  # as quantised weights are
        if wrapped:
            raise NotImplementedError(
                f"{name}: its {key} is a {type(parameter).__qualname__}, and the ops take plain "
                "tensors"
            )
    return module


def _enough(style: object, module: nn.Module, what: str, size: int, mesh: DeviceMesh) -> None:
    """Every rank must have some of the features: the ops multiply no matrix without elements."""
    sizes = _sizes(size, mesh.size())
    if not all(sizes):
        raise ValueError(
            f"{type(style).__name__} of {module}: {what} {size} over {mesh.size()} ranks is "
            f"{sizes}, and each must have some"
        )


def _single(style: object, module: nn.Module, what: str, layouts: Sequence[Placement]) -> Placement:
    """The layout on a mesh of one dim."""
    if len(layouts) != 1 or not isinstance(layouts[0], Placement):
        raise TypeError(
            f"{type(style).__name__} of {module}: {what} must be one placement, such as Shard(1), "
            f"not {layouts[0] if len(layouts) == 1 else layouts}"
        )
    return layouts[0]


def _local(x: torch.Tensor, dim: int, way: _Way) -> tuple[torch.Tensor, list[int] | None]:
    """(this rank's shard of the input along ``dim``, the sizes of all shards where they differ)."""
    given = way.input_layout
    if not isinstance(x, DTensor):
        if given.is_shard() and way.dim(given, x) == dim:
            return x, None
        x = DTensor.from_local(x, way.mesh, [given], run_check=False)
    if x.placements != (Shard(dim),):
        x = x.redistribute(placements=[Shard(dim)])
    return x.to_local(), _uneven(x.shape[dim], way.mesh.size())


def _uneven(total: int, world: int) -> list[int] | None:
    """``_sizes``; None if they are equal."""
    return None if total % world == 0 else _sizes(total, world)


def _sizes(total: int, world: int) -> list[int]:
    """DTensor's split of ``total`` rows, which is that of ``torch.chunk``."""
    most = ceil_div(total, world)
    return [max(0, min(most, total - rank * most)) for rank in range(world)]


def _handed_on(y: torch.Tensor, dim: int | None, shape: Sequence[int], way: _Way) -> torch.Tensor:
    """The output, of which this rank has y: its shard along ``dim``, or all of it (None)."""
    wanted = way.output_layout
    if wanted.is_shard():
        wanted = Shard(way.dim(wanted, y))
    placement = Replicate() if dim is None else Shard(dim)
    if way.use_local_output and wanted == placement:
        return y
    strides = torch.empty(shape, device="meta").stride()
    out = DTensor.from_local(
        y, way.mesh, [placement], run_check=False, shape=torch.Size(shape), stride=strides
    )
    if wanted != placement:
        out = out.redistribute(placements=[wanted])
    return out.to_local() if way.use_local_output else out
